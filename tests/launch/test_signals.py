"""Every signal that warns of an end is a request to save; ignored ones stay so; verbs clean up."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command import Fork
from tests.launch.processes import is_running
from tests.waiting import wait_for, wait_until

from trainyard.errors import EXIT_REQUEUE
from trainyard.launch.signals import REQUEUE, STOP, note_signals
from trainyard.training.stop import Stop, leave_when_told

WARNINGS = [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]


def default_handlers() -> None:
    """Not as inherited: these tests may run under nohup themselves."""
    for number in WARNINGS:
        signal.signal(number, signal.SIG_DFL)


def wait_for_signals(folder: Path) -> None:
    default_handlers()
    with leave_when_told():
        (folder / "waits").touch()
        while True:
            time.sleep(0.01)


def take_requests(folder: Path) -> None:
    default_handlers()
    stop = Stop(None)
    with stop.catch_signals():
        (folder / "waits").touch()
        while stop.stop_request() is None:
            time.sleep(0.01)
    raise SystemExit(int(str(stop.stop_request()).partition(" ")[0]))


@pytest.mark.parametrize("number", WARNINGS)
@pytest.mark.parametrize("waits", [wait_for_signals, take_requests])
def test_a_warning_asks_to_start_again(
    tmp_path: Path, waits: Callable[[Path], None], number: signal.Signals
) -> None:
    process = Fork(lambda: waits(tmp_path))
    wait_until((tmp_path / "waits").exists)
    os.kill(process.pid, number)
    assert process.wait().returncode == EXIT_REQUEUE


def test_what_is_ignored_stays_ignored_except_ctrl_c() -> None:
    def ignore_all() -> None:
        for number in STOP:
            signal.signal(number, signal.SIG_IGN)
        with note_signals(STOP) as received, leave_when_told():
            for number in STOP:
                signal.raise_signal(number)
        assert received == [signal.SIGINT]
        assert all(signal.getsignal(number) is signal.SIG_IGN for number in STOP)

    done = Fork(ignore_all).wait()
    assert done.returncode == 0, done.stderr


def test_the_kernel_repeats_one_warning() -> None:
    def exceed() -> None:
        default_handlers()
        with note_signals(REQUEUE) as received:
            for _ in range(3):
                signal.raise_signal(signal.SIGXCPU)
        assert received == [signal.SIGXCPU]

    done = Fork(exceed).wait()
    assert done.returncode == 0, done.stderr


ON_A_TERMINAL = """
import signal, sys, time
from pathlib import Path
from trainyard.log import show_progress
from trainyard.training.stop import Stop

signal.signal(signal.SIGHUP, signal.SIG_DFL)
stop = Stop(None)
with stop.catch_signals(), show_progress("training") as update:
    Path(sys.argv[1]).touch()
    while stop.stop_request() is None:
        time.sleep(0.01)
sys.exit(int(stop.stop_request().partition(" ")[0]))
"""


def test_a_closed_terminal_ends_no_save(tmp_path: Path) -> None:
    """Whatever the bar then writes to the terminal fails."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", ON_A_TERMINAL, str(tmp_path / "waits")])
    wait_until((tmp_path / "waits").exists)
    os.close(terminal)
    assert wait_for(pid) == EXIT_REQUEUE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_verb_that_is_ended_takes_its_processes_along(
    tmp_path: Path, number: signal.Signals
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("a text " * 5_000_000)  # more than a unit
    command = [sys.executable, "-m", "trainyard.cli", "prepare", str(tmp_path / "*.txt")]
    command += ["-o", str(tmp_path / "out"), "--workers", "2", "--tokenizer", "gpt2"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, preexec_fn=default_handlers
    ) as running:
        children: list[int] = []

        def have_started() -> bool:
            path = Path(f"/proc/{running.pid}/task/{running.pid}/children")
            children[:] = map(int, path.read_text().split())
            return len(children) >= 3  # two workers, and what Python starts with them

        wait_until(have_started)
        running.send_signal(number)
        assert running.stderr is not None
        assert f"ended by {number.name}" in running.stderr.read()
    assert running.returncode == 128 + number
    wait_until(lambda: not any(map(is_running, children)))
