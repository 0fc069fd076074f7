"""Ranks as processes of this machine: started, signalled and ended together, whatever happens."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.processes import is_running, process_ids
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.errors import MachineError
from trainyard.launch.local import run_ranks

# Says that it is there and waits; what happens on SIGTERM is the test's.
RANK = """
import os, pathlib, signal, sys, time
from trainyard.launch.environment import read_process
from trainyard.launch.heartbeat import end_with_parent
process = read_process()
folder = pathlib.Path({folder!r})
def arrive():
    (folder / f"{{process.rank}}.new").write_text(str(os.getpid()))
    (folder / f"{{process.rank}}.new").rename(folder / f"{{process.rank}}.pid")
def wait_for_all():
    while len(list(folder.glob("*.pid"))) < process.n_ranks:
        time.sleep(0.02)
{body}
"""


def rank_program(folder: Path, body: str) -> list[str]:
    path = folder / "rank.py"
    path.write_text(RANK.format(folder=str(folder), body=body))
    return [sys.executable, str(path)]


def start_run_ranks(folder: Path, n_ranks: int, body: str) -> subprocess.Popen[str]:
    code = (
        "import sys; from pathlib import Path; from trainyard.launch.local import run_ranks\n"
        f"run_ranks({n_ranks}, {rank_program(folder, body)!r}, Path({str(folder / 'logs')!r}))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(folder)},  # what a killed one leaves is pytest's to remove
    )


def death(folder: Path, n_ranks: int, body: str) -> MachineError:
    """Runs ranks of which one fails."""
    with pytest.raises(MachineError) as caught:
        run_ranks(n_ranks, rank_program(folder, body), folder / "logs")
    assert not any(map(is_running, process_ids(folder)))
    return caught.value


def test_all_end_well(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = "print(process.rank, process.n_ranks, process.local_rank, process.store_file.parent)"
    command = rank_program(tmp_path, body)
    run_ranks(3, command, tmp_path / "logs")
    run_ranks(3, command, tmp_path / "logs")
    shown = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [line[:3] for line in shown] == [["0", "3", "0"]] * 2
    logs = {path.name: path.read_text().split() for path in (tmp_path / "logs").iterdir()}
    assert logs.keys() == {"rank-00001.log", "rank-00002.log"}
    folders = [line[3] for line in shown]
    assert logs["rank-00002.log"] == ["2", "3", "2", folders[0], "2", "3", "2", folders[1]]
    assert folders[0] != folders[1]
    assert not any(Path(folder).exists() for folder in folders)


def test_threads_are_shared_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    n_cores = len(os.sched_getaffinity(0))
    command = rank_program(tmp_path, "print(os.environ['OMP_NUM_THREADS'])")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_ranks(2, command, tmp_path / "logs")
    run_ranks(n_cores + 1, command, tmp_path / "logs")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    run_ranks(2, command, tmp_path / "logs")
    said = (tmp_path / "logs" / "rank-00001.log").read_text().split()
    assert said == [str(max(1, n_cores // 2)), "1", "5"]


def test_one_ends_with_a_code(tmp_path: Path) -> None:
    body = """
arrive()
wait_for_all()
if process.rank == 1:
    print(*range(30), sep="\\n")
    sys.exit("error: no such file")
time.sleep(600)
"""
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "rank-00001.log").write_text("what an earlier run said\n")
    error = death(tmp_path, 3, body)
    lines = "".join(f"\n    {number}" for number in range(11, 30))
    assert str(error) == (
        f"rank 1 of 3 ended with code 1; the end of {logs}/rank-00001.log:"
        f"{lines}\n    error: no such file\nhint: the message above is from that rank"
    )
    assert error.exit_code == 1
    assert (logs / "rank-00001.log").read_text().startswith("what an earlier run said\n0\n1\n")


def test_logs_that_somebody_removed_hide_no_failure(tmp_path: Path) -> None:
    body = f"import shutil\nif process.rank: shutil.rmtree({str(tmp_path / 'logs')!r}); sys.exit(7)"
    problem = death(tmp_path, 2, body).problem
    assert re.search(r"rank 1 of 2 ended with code 7; .*:\n    \(No such file", problem)


def test_the_end_of_a_log_is_of_this_run(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank-00001.log").write_text("what an earlier run said\n")
    error = death(tmp_path, 2, "sys.exit(2 * process.rank)")
    assert error.problem.endswith("rank-00001.log:\n    (nothing)")
    assert error.exit_code == 2


def test_rank_0_has_said_it_already(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = (
        "sys.stderr.write('error: bad\\n'); sys.exit(2) if process.rank == 0 else time.sleep(600)"
    )
    error = death(tmp_path, 2, body)
    assert str(error) == "rank 0 of 2 ended with code 2\nhint: see its output above"
    assert capfd.readouterr().err == "error: bad\n"
    assert error.exit_code == 2


def test_all_end_for_the_same_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.launch.local.OWN_END_SECONDS", WATCHDOG_SECONDS)
    body = "time.sleep(0.3 * (process.rank == 0)); print('error: bad'); sys.exit(2)"
    assert death(tmp_path, 3, body).problem == "rank 0 of 3 ended with code 2"
    assert capfd.readouterr().out == "error: bad\n"


def test_one_is_killed_and_the_others_do_not_mind_sigterm(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
arrive()
wait_for_all()
if process.rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""
    error = death(tmp_path, 3, body)
    assert error.problem.startswith("rank 2 of 3 was ended by SIGKILL; the end of ")
    assert "out of memory" in error.hint
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("number", "code", "hint"),
    [
        (signal.SIGABRT, 1, ""),
        (signal.SIGBUS, 1, "SIGBUS is most often a file that was cut short while it was read"),
        (signal.SIGTERM, 2, "while training the first of these signals saves"),
    ],
)
def test_one_is_ended_by_a_signal(
    tmp_path: Path, number: signal.Signals, code: int, hint: str
) -> None:
    body = f"os.kill(os.getpid(), {number:d}) if process.rank == 1 else time.sleep(600)"
    error = death(tmp_path, 2, body)
    assert error.problem.startswith(f"rank 1 of 2 was ended by {number.name}")
    assert error.hint.startswith(hint)
    assert error.exit_code == code


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"rank 0 cannot start no-such-program: .*No such file"):
        run_ranks(2, ["no-such-program"], tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_all_once(tmp_path: Path, number: signal.Signals) -> None:
    body = """
received = []
for each in (signal.SIGINT, signal.SIGTERM):
    signal.signal(each, lambda number, frame: received.append(signal.Signals(number).name))
arrive()
while not received:
    time.sleep(0.02)
time.sleep(0.3)
(folder / f"{process.rank}.said").write_text(" ".join(received))
"""
    running = start_run_ranks(tmp_path, 3, body)
    wait_until(lambda: len(process_ids(tmp_path)) == 3)
    running.send_signal(number)
    assert running.wait(WATCHDOG_SECONDS) == 0
    assert [path.read_text() for path in sorted(tmp_path.glob("*.said"))] == [number.name] * 3
    running.communicate()


def test_ctrl_c_ends_all_without_a_traceback(tmp_path: Path) -> None:
    rank_program(tmp_path, "arrive(); time.sleep(600)")
    watched = [sys.executable, "-m", "trainyard.launch.watched", "rank"]
    code = (
        "import sys; from pathlib import Path; from trainyard.launch.local import run_ranks\n"
        f"try: run_ranks(2, {watched!r}, Path({str(tmp_path / 'logs')!r}))\n"
        "except KeyboardInterrupt: print('interrupted')"
    )
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)},
    )
    wait_until(lambda: len(process_ids(tmp_path)) == 2)
    running.send_signal(signal.SIGINT)
    assert running.communicate(timeout=WATCHDOG_SECONDS) == ("interrupted\n", None)
    assert (tmp_path / "logs" / "rank-00001.log").read_text() == ""


def test_nothing_is_left_when_the_starting_process_is_killed(tmp_path: Path) -> None:
    body = """
end_with_parent(process.parent_pipe)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
arrive()
time.sleep(600)
"""
    running = start_run_ranks(tmp_path, 3, body)
    wait_until(lambda: len(process_ids(tmp_path)) == 3)
    ranks = process_ids(tmp_path)
    assert all(map(is_running, ranks))
    running.kill()
    running.communicate()
    wait_until(lambda: not any(map(is_running, ranks)))
    log = (tmp_path / "logs" / "rank-00001.log").read_text()
    assert log == "the parent process of this rank has ended, so this rank ends too\n"
