"""A ladder from a run file to its prediction, with real runs: killed, continued, and planned by."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.command import trainyard
from tests.faults.small_run import small_overrides, write_tokens
from tests.waiting import wait_until

from trainyard.report.run_view import find_state
from trainyard.sweeps.prediction import open_ladder

N_STEPS = 400


def words(folder: Path) -> list[str]:
    own = small_overrides(folder / "corpus_text_document", N_STEPS)
    shape = ["model.n_layers=4", "model.d_model=80", "model.d_ff=320", "model.n_heads=10"]
    return ["ladder", "tiny", *own, *shape, "model.dropout=0", "--share", "1", "--ratio", "1.5"]


@pytest.mark.exhaustive
def test_a_ladder_is_killed_continued_and_planned_by(tmp_path: Path) -> None:
    write_tokens(tmp_path, n_documents=600)
    command = [sys.executable, "-m", "trainyard.cli", *words(tmp_path), "--at-once", "2"]
    first = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
    done = tmp_path / "runs" / "tiny-ladder-02"
    wait_until(lambda: done.exists() and find_state(done)[0] == "done", "the second run")
    first.send_signal(signal.SIGKILL)
    first.wait()
    before = (done / "metrics.jsonl").read_bytes()
    again = trainyard("ladder", "tiny-ladder", "--at-once", "2", folder=tmp_path)
    assert again.returncode == 0, again.stderr
    assert (done / "metrics.jsonl").read_bytes() == before  # not repeated
    for line in ("learning rate", "batch", "reach: "):
        assert f"\n{line}" in again.stdout
    ladder = open_ladder(tmp_path / "runs" / "tiny-ladder")
    assert ladder.sizes.n_sizes == 5 and ladder.target.model.d_model == 80
    planned = trainyard("plan", *words(tmp_path)[1:-4], "--json", folder=tmp_path)
    expected = json.loads(planned.stdout)["expected"]
    assert expected["ladder"] == "runs/tiny-ladder"
    assert expected["reach"]["flop"] > 1
    assert expected["problems"] or expected["loss"][0] > 0
    other = trainyard("plan", *words(tmp_path)[1:-4], "model.mlp=swiglu", "--json", folder=tmp_path)
    assert json.loads(other.stdout)["expected"] is None
    status = trainyard("status", "tiny-ladder", folder=tmp_path)
    assert "\nlearning rate " in status.stdout
    report = trainyard("report", "tiny-ladder", folder=tmp_path)
    assert report.returncode == 0
    page = (tmp_path / "runs" / "tiny-ladder" / "report.html").read_text()
    assert "Loss over compute" in page
    assert (tmp_path / "runs" / "tiny-ladder" / "law.svg").exists()
