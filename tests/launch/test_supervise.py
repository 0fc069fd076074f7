"""Deaths, hangs, restarts and signals of real processes of one parent; nothing stays behind."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from tests.circles import everyday
from tests.launch.processes import Done, finish, process_ids, start, starts, wanted
from tests.waiting import wait_until

HOST = socket.gethostname()


def supervise(folder: Path, what: str, n_ranks: int = 3) -> Done:
    return finish(start(folder, n_ranks, what), folder)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_all_is_well(folder: Path) -> None:
    done = supervise(folder, wanted(), 4)
    assert (done.code, done.said) == (0, "")
    logs = [path.name for path in sorted((folder / "logs").iterdir())]
    assert logs == ["rank-00001.log", "rank-00002.log", "rank-00003.log"]
    assert saved(folder)[-1] == "step-00000010"


DEATHS = [("SIGKILL", "was ended by SIGKILL", 0), ("exception", "ended with code 1", 2)]


# Other faults, in every phase of real training: tests/faults/fault_table.py.
@pytest.mark.parametrize(
    ("fault", "how", "rank"),
    everyday(DEATHS, DEATHS[:1]),
)
def test_a_death_is_named_and_the_run_starts_again(
    folder: Path, fault: str, how: str, rank: int
) -> None:
    done = supervise(folder, wanted([rank, 5, fault, 1]))
    assert done.code == 0, done.said
    named = f"rank {rank} of 3 on {HOST} {how} at step 5, in forward and backward"
    assert done.said.count(named) == 1
    assert done.said.count(" of 3 on ") == 1  # nobody else
    assert "restart 1 of 3: from step-00000004" in done.said
    assert ("pulsing_rank.py" in done.said) == (fault == "exception")  # where it was
    assert starts(folder) == [0, 4]


@pytest.mark.exhaustive
def test_a_crash_leaves_the_native_stacks_of_all_threads(folder: Path) -> None:
    done = supervise(folder, wanted([1, 5, "segfault", 1], gloo=True), 2)
    assert done.code == 0, done.said
    log = (folder / "logs" / "rank-00001.log").read_text()
    assert "frame #0: c10::FatalSignalHandler" in log
    assert "Fatal Python error: Segmentation fault" in log


def test_who_is_aborted_for_the_death_of_another_is_not_named(folder: Path) -> None:
    """NCCL ends with SIGABRT who loses another rank, before that one has ended."""
    done = supervise(folder, wanted([0, 5, "abort", 1], [2, 5, "late exception", 1]))
    assert done.code == 0, done.said
    named = re.findall(r"rank \d of 3 on .* at step", done.said)
    assert named == [f"rank 2 of 3 on {HOST} ended with code 1 at step"]


@pytest.mark.exhaustive
def test_three_restarts_without_progress(folder: Path) -> None:
    done = supervise(folder, wanted([1, 1, "SIGKILL", 1], [1, 5, "SIGKILL", 99]))
    assert done.code == 93
    restarts = [line for line in done.said.splitlines() if line.startswith("restart ")]
    assert restarts == [
        "restart 1 of 3: from the beginning",
        *[f"restart {n} of 3: from step-00000004" for n in (1, 2, 3)],
    ]
    assert "error: 3 restarts from step-00000004 brought no newer checkpoint" in done.said
    assert starts(folder) == [0, 0, 4, 4, 4]


ENDS = [
    ("refuse", 2, "error: token 7 is damaged\n", 1),
    ("refuse", 2, "error: token 7 is damaged\n", 0),
    ("give up", 93, "error: the loss is not finite\n", 1),
]


@pytest.mark.parametrize(
    ("fault", "code", "shown", "rank"),
    everyday(ENDS, ENDS[:1]),
)
def test_some_ends_are_for_good(folder: Path, fault: str, code: int, shown: str, rank: int) -> None:
    done = supervise(folder, wanted([rank, 3, fault, 99]))
    assert done.code == code, done.said
    assert shown in done.said
    assert "restart" not in done.said
    assert starts(folder) == [0]


def seconds_of(line: str, said: str) -> float:
    """The number in a line of which the rest is given, with a # in its place."""
    found = re.search(re.escape(line).replace("\\#", r"(\d+)"), said)
    assert found, said
    return float(found[1])


def test_a_hang_is_named_with_all_stacks(folder: Path) -> None:
    done = supervise(folder, wanted([2, 5, "SIGSTOP", 1], limit=2.0))
    assert done.code == 0, done.said
    place = "at step 5, in forward and backward"
    named = f"rank 2 of 3 on {HOST} has not moved for # s (stopped) {place}\n"
    assert seconds_of(named, done.said) >= 2
    for rank in (0, 1):
        seconds_of(f"    rank {rank} on {HOST}: step 5, forward and backward for # s, ", done.said)
    assert done.said.count(" in meet\n") == 2
    assert "rank 2 is stopped: no stack available" in done.said
    assert "restart 1 of 3: from step-00000004" in done.said
    told = json.loads((folder / "logs/attempt-0/rank-00002.hang.json").read_text())
    assert (told["rank"], told["step"], told["state"]) == (2, 5, "stopped")


def running_ranks(folder: Path, what: str, n_ranks: int = 3) -> subprocess.Popen[str]:
    process = start(folder, n_ranks, what)
    wait_until(lambda: (folder / "checkpoints/step-00000002/manifest.json").exists())
    return process


LONG = json.dumps({"n_steps": 10**6, "step_seconds": 0.02})
HANGS = json.dumps({"n_steps": 10**6, "faults": [[r, 2, "sleep", 1] for r in range(3)]})


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 93)]
)
def test_a_signal_stops_all_at_one_step(folder: Path, number: signal.Signals, code: int) -> None:
    process = running_ranks(folder, LONG)
    process.send_signal(number)
    done = finish(process, folder)
    assert (done.code, done.said) == (code, "")
    assert starts(folder) == [0]


@pytest.mark.exhaustive
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(folder: Path, second: signal.Signals) -> None:
    process = running_ranks(folder, HANGS)
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: len(list(folder.glob("*.told"))) == 3)
    assert process.poll() is None
    process.send_signal(second)
    done = finish(process, folder)
    assert done.code == (93 if second == signal.SIGINT else 75)
    assert done.said == ""


@pytest.mark.exhaustive
def test_a_signal_before_a_worker_can_hear_it(folder: Path) -> None:
    process = start(folder, 3, json.dumps({"n_steps": 10**6, "gloo": True}))
    wait_until(lambda: len(children(process.pid)) == 3)
    process.send_signal(signal.SIGTERM)
    done = finish(process, folder)
    assert done.code == 75, done.said
    assert "restart" not in done.said


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


@pytest.mark.exhaustive
def test_a_signal_to_one_worker_is_not_a_death(folder: Path) -> None:
    process = running_ranks(folder, LONG)
    os.kill(process_ids(folder)[1], signal.SIGTERM)
    done = finish(process, folder)
    assert (done.code, done.said) == (0, "") or done.code == 75


@pytest.mark.exhaustive
def test_real_ranks_fail_one_way_after_the_other(folder: Path) -> None:
    """Of those that hang none uses the processor: one sleeps, the others wait for it."""
    faults = [[1, 3, "SIGKILL", 1], [0, 5, "exception", 2], [2, 7, "lock", 3]]
    done = supervise(folder, wanted(*faults, gloo=True, limit=2.0))
    assert done.code == 0, done.said
    assert starts(folder) == [0, 2, 4, 6]
    failures = [line for line in done.said.splitlines() if line.startswith("rank ")]
    assert failures[0].startswith(f"rank 1 of 3 on {HOST} was ended by SIGKILL at step 3, in ")
    # Not the others, which lost their connection to it.
    assert failures[1].startswith(f"rank 0 of 3 on {HOST} ended with code 1 at step 5, in ")
    seconds_of(f"rank 2 of 3 on {HOST} has not moved for # s (waiting) at step 7", failures[-1])
    assert failures[2:-1] == [f"rank {rank} is in (innermost call first):" for rank in range(3)]
    assert "in hold_the_lock_of_python" in done.said
    log = (folder / "logs/rank-00002.log").read_text()
    assert log.startswith("error: rank 2 lost the connection to another rank at step 3\n")
    assert f"error: rank 0 on {HOST} failed: ValueError: a bug\n" in log
    assert "Traceback" not in log
