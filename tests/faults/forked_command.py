"""`trainyard train --ranks N` and its workers as forks of this process, which has imported torch.

A start of the command imports torch once for each rank, and again at each restart: five seconds of
a processor each time, in which nothing is tested. The forks are watched, signalled, killed and
started again as processes of their own are, with the same environment and open files.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

from tests.command import STACKS, Fork, be_process
from tests.waiting import WATCHDOG_SECONDS

WATCHED = "trainyard.launch.watched"
Prepare = Callable[[int, int], None]
"""Gets the rank of a worker, and how many workers the command has started before it."""


class ForkedWorker:
    """Stands in for the `Popen` that starts a worker."""

    n_started = 0

    def __init__(
        self,
        prepare: Prepare,
        kept: int,
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
            be_process(partial(_work, command, env, [*pass_fds, kept], prepare), log, log)
        ForkedWorker.n_started += 1

    def poll(self, options: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self) -> int | None:
        return self.poll(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run(
    words: Sequence[str], folder: Path, prepare: Prepare = lambda *_: None
) -> subprocess.CompletedProcess[str]:
    """Runs `trainyard WORDS` in a folder; returns when its workers have ended, too.

    Args:
        prepare: called in each worker before it trains.
    """
    from trainyard.training import worker

    assert worker, "all that training imports is there"
    reading, writing = os.pipe()

    def command() -> None:
        from trainyard.cli.main import main
        from trainyard.launch import local

        start_worker = partial(ForkedWorker, prepare, writing)
        stand_in: Any = SimpleNamespace(Popen=start_worker, DEVNULL=subprocess.DEVNULL)
        local.subprocess = stand_in
        os.chdir(folder)
        sys.argv = ["trainyard", *words]
        main()

    running = Fork(command)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        done = running.wait()
        assert select.select([pipe], [], [], WATCHDOG_SECONDS)[0], "workers outlive their parent"
    return done


def _work(
    command: Sequence[str], environment: Mapping[str, str], kept: Sequence[int], prepare: Prepare
) -> None:
    from trainyard.launch.environment import read_process
    from trainyard.launch.watched import be_watched
    from trainyard.training.worker import main

    # Such as the pipe that tells of the parent's end, which only the parent may have.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) not in (0, 1, 2, *kept, *STACKS):
            with suppress(OSError):  # that of the listing is closed already
                os.close(int(path.name))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = list(command[command.index(WATCHED) + 1 :])
    process = read_process()
    prepare(process.rank, ForkedWorker.n_started)
    be_watched(process)
    main()
