"""The product on a GPU: `doctor`; `train`, killed after a save and started again; `generate`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.item import Row, Session
from benchmarks.gpu.runs import SUFFIX, TOKENS

TRAINYARD = [sys.executable, "-P", "-m", "trainyard.cli"]
N_STEPS, SAVED = 20, 10


def examine(_: Session) -> Iterator[Row]:
    """Runs `doctor`."""
    with TemporaryDirectory() as folder:
        words = ["doctor", "--seconds", "0.2", "--gigabytes", "0.5", "--folder", folder]
        done = subprocess.run([*TRAINYARD, *words], capture_output=True, text=True)
    row: Row = {"row": "exit code of doctor", "found": done.returncode, "estimate": 0}
    yield row | {"wrong": done.returncode not in (0, 2)}
    text = done.stdout or done.stderr
    for line in text.splitlines():
        if any(word in line for word in ("replace", "warn", "rror")):
            yield {"row": "said", "found": line.strip()[:300]}


def train(session: Session) -> Iterator[Row]:
    """Trains 350M on real text, kills the run after a save, starts it again, and generates."""
    assert session.packed is not None, "no tokens: --packed FOLDER"
    tokens = session.packed / (TOKENS + SUFFIX)
    words = [
        *("gpt3-350m", "name=day", f"data.blend.prefixes=['{tokens}']"),
        *("data.split=95,5,0", "tokenizer.path=gpt2"),
        *("model.dropout=0", "train.micro_batch_size=16", "train.global_batch_size=32"),
        *("train.batch_ramp=none", f"train.length={N_STEPS} steps", "schedule.warmup=5 steps"),
        *(f"checkpoint.interval={SAVED}", "evaluate.batches=1", "log.interval=1"),
        *(["model.n_layers=3"] if session.fake else []),
    ]
    with TemporaryDirectory() as name:
        folder = Path(name)
        saved = folder / f"runs/day/checkpoints/step-{SAVED:08d}/manifest.json"
        began = time.monotonic()
        first = _start(folder, "train", *words, "--ranks", "1")
        while first.poll() is None and not saved.exists():
            time.sleep(0.05)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
        yield {"row": "seconds to a save", "found": time.monotonic() - began, "unit": "s"}
        again = _start(folder, "train", *words, "--ranks", "1")
        _, said = again.communicate()
        row: Row = {"row": "exit code of the run, resumed", "found": again.returncode}
        resumed = f"resumes at step {SAVED}" in said
        yield row | {"wrong": again.returncode != 0 or not resumed, "said": said[-400:]}
        lines = (folder / "runs/day/metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [row for row in map(json.loads, lines) if "loss" in row and "step" in row]
        for each in (steps[0], steps[-1]):
            row = {"row": f"loss at step {each['step']}", "found": each["loss"], "estimate": ""}
            yield session.judge(row, is_right=0 < each["loss"] < 12)
        text = ("generate", "runs/day", "--prompt", "The ", "--tokens", "30")
        written = _start(folder, *text)
        output, said = written.communicate()
        row = {"row": "generated", "found": output.strip()[:200] or said[-300:]}
        yield row | {"wrong": written.returncode != 0}


def _start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*TRAINYARD, *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
