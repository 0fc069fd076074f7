"""`trainyard train --ranks N` and its workers as forks of this process, which has imported torch.

A start of the command imports torch once for each rank, and again at each restart: five seconds of
a processor each time, in which nothing is tested. Here the command is a fork, and so are the
workers that it starts: they are watched, signalled, killed and started again as ever, and have the
same environment and the same open files as processes of their own.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NoReturn

from tests.faults import faulty_worker
from tests.waiting import WATCHDOG_SECONDS, prepare_fork

WATCHED = "trainyard.launch.watched"


class ForkedWorker:
    """Stands in for the `Popen` that starts a worker."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        pass_fds: Sequence[int],
        stdout: IO[bytes] | None,
        **_like: Any,
    ) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            log = 2 if stdout is None else stdout.fileno()
            _be(lambda: _work(command), env, log, pass_fds)

    def poll(self) -> int | None:
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        return self._collect(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def run(words: Sequence[str], folder: Path, environment: Mapping[str, str]) -> tuple[int, str]:
    """Runs `trainyard WORDS` in a folder; gives its exit code and all that it and rank 0 said."""
    from trainyard.training import worker

    assert worker
    prepare_fork()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be(lambda: _command(words, folder), environment, writing, [])
    os.close(writing)
    try:
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            said = _read_to_end(pipe)
    finally:
        os.kill(pid, signal.SIGKILL)  # nothing to one that has ended
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), said


def _read_to_end(pipe: IO[bytes]) -> str:
    """Reads until all have ended that could write, or nobody has written for too long."""
    parts = []
    while select.select([pipe], [], [], WATCHDOG_SECONDS)[0] and (part := pipe.read(65536)):
        parts.append(part)
    return b"".join(parts).decode()


def _command(words: Sequence[str], folder: Path) -> None:
    from trainyard.cli.main import main
    from trainyard.launch import local

    os.chdir(folder)
    stand_in: Any = SimpleNamespace(Popen=ForkedWorker, DEVNULL=subprocess.DEVNULL)
    local.subprocess = stand_in
    sys.argv = ["trainyard", *words]
    main()


def _work(command: Sequence[str]) -> None:
    from trainyard.launch.environment import read_process
    from trainyard.launch.watched import be_watched
    from trainyard.training.worker import main

    os.setpgid(0, 0)
    sys.orig_argv = list(command)
    sys.argv = list(command[command.index(WATCHED) + 1 :])
    faulty_worker.install()
    be_watched(read_process())
    main()


def _be(
    do: Callable[[], None], environment: Mapping[str, str], output: int, kept: Sequence[int]
) -> NoReturn:
    """Makes this fork what a new process is, and ends it as that ends."""
    code = 1
    try:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for here, there in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(here, there)
        _close_all_but([0, 1, 2, *kept])
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        os.environ.clear()
        os.environ.update(environment)
        do()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _close_all_but(kept: Sequence[int]) -> None:
    """Closes files that only this process should have, such as the pipe that tells of its end."""
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in kept:
            with suppress(OSError):  # that of the listing is closed already
                os.close(int(path.name))
