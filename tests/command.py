"""The command line without its start: a fork of this process, which has imported everything.

To start Python and to import torch takes seconds, which tests of what a command says and leaves
behind need not wait for. Those of the start itself run real processes.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pty
import select
import sys
import tempfile
import traceback
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

import typer
from tests.waiting import SHOW_STACKS, prepare_fork, wait_for
from typer.testing import CliRunner

STACKS: list[int] = []


def trainyard(*words: str, folder: Path, **environment: str) -> CompletedProcess[str]:
    """Runs `trainyard WORDS` in a folder; gives its exit code and what it said."""
    from trainyard.cli.main import main

    def run() -> None:
        os.chdir(folder)
        os.environ.update(environment)
        sys.argv = ["trainyard", *words]
        main()

    return Fork(run).wait()


def on_terminal(
    *words: str, folder: Path, typed: Sequence[tuple[str, str]] = (), **environment: str
) -> tuple[int, str]:
    """Runs `trainyard WORDS` on a terminal; gives its exit code and what it printed.

    Types each text once what it waits for has been printed since the last; the last one again and
    again, since a signal just before a program begins to wait for a line is lost.
    """
    from trainyard.cli.main import main

    prepare_fork()
    pid, terminal = pty.fork()
    if pid == 0:
        code = 1
        try:
            os.chdir(folder)
            os.environ.update(environment)
            sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115
            main([*words])
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.stdout.flush()
            os._exit(code)
    printed, seen, waiting = "", 0, [*typed]
    with suppress(OSError):  # the terminal's end on Linux
        while True:
            if typed and not waiting and not select.select([terminal], [], [], 0.5)[0]:
                os.write(terminal, typed[-1][1].encode())
                continue
            chunk = os.read(terminal, 65536)
            printed += chunk.decode(errors="replace")
            if waiting and (place := printed.find(waiting[0][0], seen)) >= 0:
                seen = place + len(waiting[0][0])
                os.write(terminal, waiting.pop(0)[1].encode())
    os.close(terminal)
    return wait_for(pid), printed


def call(verb: Callable[..., None], *arguments: object) -> str:
    """Calls one verb in this process; gives what it prints, and raises what it raises."""
    app = typer.Typer()
    app.command()(verb)
    result = CliRunner().invoke(app, [*map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class Fork:
    """A fork of this process that calls a function, and ends as Python would."""

    def __init__(self, call: Callable[[], object]) -> None:
        prepare_fork()
        self._files = [tempfile.TemporaryFile("w+") for _ in range(2)]  # noqa: SIM115
        self.pid = os.fork()
        if self.pid == 0:
            be_process(call, *(file.fileno() for file in self._files))

    def wait(self) -> CompletedProcess[str]:
        """Waits until it has ended; gives its exit code and what it said."""
        status = wait_for(self.pid)
        texts = []
        for file in self._files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return CompletedProcess([], status, *texts)


def peak_bytes(call: Callable[[], object]) -> int:
    """Calls a function in a fork, where no thread of another test allocates; gives its peak."""

    def measure() -> None:
        tracemalloc.start()
        call()
        sys.stdout.write(f"\n{tracemalloc.get_traced_memory()[1]}\n")

    done = Fork(measure).wait()
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def be_process(call: Callable[[], object], out: int, error: int) -> NoReturn:
    """Makes a fork call a function and end as a process of its own does.

    When the watchdog ends a test, its forks print their stacks to the test's error output.
    """
    code = 1
    try:
        STACKS[:] = STACKS or [os.dup(2)]  # of pytest, also in forks of forks
        faulthandler.register(SHOW_STACKS, file=STACKS[0], all_threads=True)
        gc.freeze()  # looking at what is there already would copy it
        warnings.resetwarnings()  # pytest's filters, which a command does not have
        for number, file in ((1, out), (2, error)):
            os.dup2(file, number)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        call()
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    except BaseException:
        with suppress(OSError):
            traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # its disk may be full
                stream.flush()
        os._exit(code)
