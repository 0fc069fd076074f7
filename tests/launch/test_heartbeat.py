"""What a worker says of itself reaches its parent, and costs nothing."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.command import Fork
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.launch.environment import MOST_FILES, Process, rank_environment
from trainyard.launch.heartbeat import (
    ANOTHER,
    NOBODY,
    STACK_SIGNAL,
    START_SECONDS,
    Heartbeat,
    HeartbeatReader,
    HeartbeatState,
)
from trainyard.launch.watched import be_watched


@pytest.fixture
def reader() -> Iterator[HeartbeatReader]:
    made = HeartbeatReader()
    yield made
    made.close()


def test_before_the_first_beat(reader: HeartbeatReader) -> None:
    assert reader.read() == HeartbeatState(0, 0, "start", START_SECONDS, 0, NOBODY)
    assert reader.read_stacks() == ""


def test_what_is_said_is_read(reader: HeartbeatReader) -> None:
    heartbeat = Heartbeat(reader.descriptor, 1200.0, 3600.0)
    heartbeat.enter("load", 0)
    heartbeat.enter("data", 2**31)
    assert reader.read() == HeartbeatState(2, 2**31, "data", 3600.0, os.getpid(), NOBODY)


def test_limits(reader: HeartbeatReader) -> None:
    heartbeat = Heartbeat(reader.descriptor, 20.0, 60.0)

    def limit(phase: str, step: int) -> float:
        heartbeat.enter(phase, step)  # type: ignore[arg-type]
        return reader.read().limit_seconds

    assert limit("load", 40) == 60
    # The first step compiles, and fills memory.
    assert [limit(phase, 40) for phase in ("data", "forward and backward", "update")] == [60] * 3
    assert [limit(phase, 41) for phase in ("data", "forward and backward", "update")] == [20] * 3
    assert [limit(phase, 42) for phase in ("evaluate", "save", "load", "end")] == [60] * 4


def test_a_second_heartbeat_goes_on_counting(reader: HeartbeatReader) -> None:
    Heartbeat(reader.descriptor).enter("start", 0)
    Heartbeat(reader.descriptor).enter("load", 0)
    assert reader.read().count == 2


@pytest.mark.parametrize("culprit", [0, 3, ANOTHER])
def test_blame(reader: HeartbeatReader, culprit: int) -> None:
    heartbeat = Heartbeat(reader.descriptor)
    heartbeat.enter("start", 0)
    assert not reader.read().is_victim
    Heartbeat(reader.descriptor).blame(culprit)
    heartbeat.enter("end", 0)
    assert (reader.read().culprit, reader.read().is_victim) == (culprit, True)


def test_a_watched_module_shows_its_stack_while_it_holds_the_lock_of_python(
    reader: HeartbeatReader,
) -> None:
    environment = rank_environment(
        replace(Process(), parent_pipe=reader.descriptor, heartbeat=reader.descriptor), 1
    )
    module = "timeit"  # any that runs what it is told
    argv = [sys.executable, "-P", "-m", "trainyard.launch.watched", module, "-n1", "-r1"]
    argv.append("import re; re.match(r'(a+)+$', 'a' * 60 + 'b')")
    running = subprocess.Popen(argv, pass_fds=[reader.descriptor], env=environment)
    wait_until(lambda: reader.read().count == 1)
    assert reader.read() == HeartbeatState(1, 0, "start", START_SECONDS, running.pid, NOBODY)
    texts: list[str] = []

    def is_in_module() -> bool:
        running.send_signal(STACK_SIGNAL)
        texts.append(reader.read_stacks())
        return 'timeit.py", line' in texts[-1] and "in match" in texts[-1]

    wait_until(is_in_module)
    running.kill()
    running.wait()


WORK = """
import sys, threading
from trainyard.launch.watched import leave_after
def work():
    threading.Thread(target=threading.Event().wait).start()  # as for a dead rank
    sys.stdout.write("said")
    {ending}
leave_after(work)
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("sys.exit(75)", 75), ("raise ValueError", 1)]
)
def test_a_worker_ends_without_waiting_for_its_threads(ending: str, code: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", WORK.format(ending=ending)],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert (ended.returncode, ended.stdout) == (code, "said")
    assert ("ValueError" in ended.stderr) == (code == 1)


def test_a_worker_ends_though_the_disk_of_its_log_is_full() -> None:
    with Path("/dev/full").open("wb") as full:
        command = [sys.executable, "-c", WORK.format(ending="pass")]
        ended = subprocess.run(command, stdout=full, stderr=full, timeout=WATCHDOG_SECONDS)
    assert ended.returncode == 1  # what it said was lost


def test_a_worker_may_open_as_many_files_as_this_machine_allows() -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]

    def be_worker() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (128, most))
        be_watched(Process())
        sys.stdout.write(str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))

    said = Fork(be_worker).wait().stdout
    assert int(said) == (MOST_FILES if most == resource.RLIM_INFINITY else most)
