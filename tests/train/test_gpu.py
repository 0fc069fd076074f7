"""The same training on a GPU: the losses of the CPU, and an exact resume."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from trainyard.config.run import Run
from trainyard.train.run_folder import write_run_folder
from trainyard.train.worker import run_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]


def losses(folder: Path, run: Run) -> list[float]:
    write_run_folder(folder, run, "auto")
    run_worker(folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [line["loss"] for line in map(json.loads, lines) if line["kind"] == "train"]


def changed(run: Run, **sections: dict[str, object]) -> Run:
    values = run.model_dump(mode="json", exclude_none=True)
    for name, fields in sections.items():
        values[name] |= fields
    return Run.model_validate(values)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("fp16", 4e-3), ("bf16", 3e-2)])
def test_losses_equal_the_cpus(
    tiny_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    bound: float,
) -> None:
    fields = {"kind": precision, "loss_scale": {"initial": 4096.0}}
    run = changed(tiny_run, model={"dropout": 0.0}, precision=fields)
    on_gpu = losses(tmp_path / "gpu", changed(run, train={"compile": "never"}))
    compiled = losses(tmp_path / "compiled", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cpu = losses(tmp_path / "cpu", changed(run, precision={"kind": "fp32"}))
    assert on_gpu == pytest.approx(on_cpu, abs=bound)
    assert compiled == pytest.approx(on_cpu, abs=bound)
