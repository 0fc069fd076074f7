"""A run folder as training leaves it, made up."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.report.metrics import RunMetrics
from trainyard.report.run_view import RunView

EVIL = '</script><script>alert(1)</script><img src="http://evil.example/x" onerror=alert(2)>'


PLAN = {
    "n_parameters": 137000,
    "n_steps": 50,
    "n_tokens": 25600,
    "n_ranks": 1,
    "model_flops_per_token": 8e5,
    "topology": {"pipeline": 1, "replicate": 1, "shard": 1, "context": 1, "tensor": 1},
}


def train_line(step: int, loss: float | None, **values: Any) -> dict[str, Any]:
    line = {
        "kind": "train",
        "time": 1000.0 + step,
        "step": step,
        "sequences": 8 * step,
        "tokens": 512 * step,
        "learning_rate": 1e-3,
        "loss": loss,
        "gradient_norm": 0.5,
        "loss_scale": 1.0,
        "sequences_per_second": 8.0,
        "tokens_per_second_per_device": 512.0,
        "tflops_per_second_per_device": 0.02,
        "model_flops_utilization": None,
        "memory_bytes": 3 * 2**30,
        "skipped_steps": 2 if step > 4 else 0,
        "seconds_left": 50.0 - step,
    }
    return line | values


def run_lines(n_steps: int = 20) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"kind": "start", "time": 1000.0, "step": 0, "resumed": False, "device": "a <b>GPU</b>"}
    ]
    lines += [train_line(step, 6.0 - step / 10) for step in range(1, n_steps + 1)]
    held_out = {"loss": 4.5, "perplexity": math.exp(4.5), "bits_per_byte": None, "split": "valid"}
    lines.append(
        {"kind": "evaluate", "time": 1020.0, "step": n_steps, "tokens": 512 * n_steps, **held_out}
    )
    lines.append({"kind": "sample", "time": 1020.0, "step": n_steps, "prompt": "The", "text": EVIL})
    lines.append({"kind": "end", "time": 1021.0, "step": n_steps, "reason": "done"})
    return lines


def dump(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def write_run_folder(folder: Path, lines: list[dict[str, Any]]) -> Path:
    folder.mkdir()
    overrides = [f"name={folder.name}", f"description='{EVIL}'", "train.seed=7"]
    (folder / "run.toml").write_text(render_run(load_run("tiny", overrides).run))
    (folder / "plan.json").write_text(json.dumps(PLAN))
    (folder / "versions.json").write_text('{"torch": "9.9.9", "command": "<script>"}')
    (folder / "metrics.jsonl").write_text(dump(lines))
    return folder


def make_view(metrics: RunMetrics, **values: Any) -> RunView:
    """Makes the view of a run that trains on four ranks."""
    state = ("training", "training: process 7")
    view = RunView(Path("runs/tiny"), "tiny", Run(), *state, metrics, {}, {}, {}, [], [], {})
    return replace(view, plan={"n_steps": 50, "n_ranks": 4}, **values)


@pytest.fixture(scope="session")
def make_run_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def make(name: str = "tiny", lines: list[dict[str, Any]] | None = None) -> Path:
        folder = tmp_path_factory.mktemp("runs") / name
        return write_run_folder(folder, run_lines() if lines is None else lines)

    return make
