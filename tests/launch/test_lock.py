"""A run folder belongs to one job at a time, and to nobody once that has ended, however it did."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.launch.processes import is_running, process_ids, start
from tests.waiting import wait_until

from trainyard.errors import LaunchError, MachineError
from trainyard.launch import lock
from trainyard.launch.lock import find_holder, hold

LONG = '{"n_steps": 100000}'


def test_the_second_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    folder = tmp_path / "runs/run"
    with hold(folder), pytest.raises(LaunchError) as caught, hold(folder, wait_seconds=0.0):
        pass
    assert re.fullmatch(
        re.escape(f"{folder} is being trained by process {os.getpid()} on {socket.gethostname()}")
        + r" since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC",
        caught.value.problem,
    )
    assert caught.value.hint == "stop that one, or give this run another name"
    with hold(folder, wait_seconds=0.0):
        pass


@pytest.mark.parametrize("change", [lambda path: path.write_text("[]"), Path.unlink])
def test_what_becomes_of_the_file_does_not_matter(
    change: Callable[[Path], object], tmp_path: Path
) -> None:
    (tmp_path / "lock").write_text("no JSON" * 100)
    with hold(tmp_path, wait_seconds=0.0):
        change(tmp_path / "lock")
        for _ in range(2):
            with pytest.raises(LaunchError, match="by another process"), hold(tmp_path, 0.0):
                pass
        assert find_holder(tmp_path) == "another process"
    assert find_holder(tmp_path) == ""


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    text = r"runs/run/lock cannot be written: Not a directory"
    with pytest.raises(MachineError, match=text), hold(tmp_path / "runs" / "run"):
        pass


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    said: list[str] = []
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(lock.logger, "warning", lambda text, *values: said.append(text % values))
    with hold(tmp_path):
        pass
    assert said == [
        f"the file system of {tmp_path} has no locks: make sure no other job trains there"
    ]


def started(folder: Path, wanted: str = LONG) -> subprocess.Popen[str]:
    running = start(folder, 2, wanted)
    wait_until(lambda: len(process_ids(folder)) == 2)
    return running


def is_free(folder: Path) -> bool:
    try:
        with hold(folder, wait_seconds=0.0):
            return True
    except LaunchError:
        return False


def is_held(path: Path) -> bool:
    """Whether the worker that is to hold Python's lock has begun to write what it never ends."""
    if not path.exists():
        return False
    pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return bool(select.select([pipe], [], [], 0)[0])
    finally:
        os.close(pipe)


@pytest.mark.exhaustive
def test_the_lock_outlives_a_killed_parent_with_its_workers(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # A worker that holds Python's lock does not notice that its parent has gone.
    first = started(folder, json.dumps({"n_steps": 100000, "faults": [[1, 2, "lock", 1]]}))
    workers = process_ids(folder)
    wait_until(lambda: is_held(folder / "held"))
    first.kill()
    wait_until(lambda: not is_running(workers[0]))
    assert not is_free(folder)
    os.kill(workers[1], signal.SIGKILL)
    first.communicate()
    wait_until(lambda: is_free(folder))
