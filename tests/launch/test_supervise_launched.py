"""Parents of one rank each, below real launchers: each knows its own worker, all name the same."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from tests.launch.processes import TORCHRUN, finish, process_ids, start, starts, wanted
from tests.waiting import wait_until

pytestmark = pytest.mark.exhaustive

HOST = socket.gethostname()
LAUNCHER = [*TORCHRUN, "--nproc-per-node=3", "--max-restarts=9"]
HANG = rf"rank 1 of 3 on {HOST} has not moved for \d+ s \(stopped\) at step 7, in forward and back"


def test_torchrun_starts_again_what_died_or_hung(tmp_path: Path) -> None:
    """A death that the others see, one that they do not, and a hang."""
    folder = tmp_path / "run"
    faults = [[2, 3, "SIGKILL", 1], [1, 5, "unseen death", 2], [1, 7, "SIGSTOP", 3]]
    done = finish(start(folder, 3, wanted(*faults, limit=2.0, gloo=True), *LAUNCHER), folder)
    assert done.code == 0, done.said
    assert starts(folder) == [0, 2, 4, 6]
    said = [line for line in done.said.splitlines() if re.match("rank |restart ", line)]
    dead = [line for line in said if " was ended by " in line]
    place = "in forward and backward"
    assert dead == [
        f"rank 2 of 3 on {HOST} was ended by SIGKILL at step 3, {place}",
        f"rank 1 of 3 on {HOST} was ended by SIGKILL at step 5, {place}",
    ]
    assert len(re.findall(HANG, done.said)) == 3  # each parent, the same
    for rank in (0, 2):
        assert f"rank {rank} is in (innermost call first):" in said
    assert "rank 1 is stopped: no stack available" in said
    restarts = [line for line in said if line.startswith("restart ")]
    assert restarts == [f"restart 1 of 3: from step-{step:08d}" for step in (2, 4, 6)]
    assert "Signal 9 (SIGKILL)" not in done.said  # torchrun had to kill nobody


@pytest.mark.parametrize(("fault", "code", "rank"), [("refuse", 2, 0), ("give up", 93, 1)])
def test_an_end_for_good_is_not_started_again(
    tmp_path: Path, fault: str, code: int, rank: int
) -> None:
    folder = tmp_path / "run"
    launcher = [*LAUNCHER[:-1], "--max-restarts=1"]  # it does not know better
    done = finish(start(folder, 3, wanted([rank, 1, fault, 99], gloo=True), *launcher), folder)
    assert done.code != 0
    assert starts(folder) == [0]
    assert f"error: the run ended with code {code} and is not restarted" in done.said


def test_torchrun_takes_an_intended_stop_for_the_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    long = json.dumps({"n_steps": 10**6, "gloo": True, "step_seconds": 0.02})
    process = start(folder, 3, long, *LAUNCHER)
    wait_until(lambda: (folder / "checkpoints/step-00000002/manifest.json").exists())
    os.kill(process_ids(folder)[1], signal.SIGHUP)
    done = finish(process, folder)
    assert (done.code, starts(folder)) == (0, [0]), done.said


def test_mpiexec(tmp_path: Path, mpiexec: list[str]) -> None:
    folder = tmp_path / "run"
    hydra = [*mpiexec, "3", sys.executable]
    done = finish(
        start(folder, 3, wanted([1, 7, "SIGSTOP", 1], limit=2.0, gloo=True), *hydra), folder
    )
    assert done.code != 0
    assert re.search(HANG, done.said), done.said
    assert starts(folder) == [0]
