"""Worker processes for a corpus on this machine, and a parent that replaces dead ones.

The processes are independent: each takes pieces from the work folder, like a process on another
machine.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainyard.corpus.preparation.plan import PreparationPlan
from trainyard.corpus.preparation.work_folder import MAX_ATTEMPTS, WorkFolder, name_process
from trainyard.corpus.preparation.worker import CorpusWorker
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import MachineError, UserError
from trainyard.launch.environment import hide_secrets
from trainyard.log import build_logger

_PROGRESS_SECONDS = 0.5


def work_in_processes(
    plan: PreparationPlan,
    vocabulary: Vocabulary,
    folder: WorkFolder,
    workers: int,
    on_beat: Callable[[], None],
    *,
    quarantine: bool,
) -> None:
    """Prepares a corpus with several processes; `on_beat` is called now and then meanwhile.

    Raises:
        UserError: what a worker raised, or that workers keep dying.
    """

    def start() -> tuple[Connection, BaseProcess]:
        # Spawned, because a forked copy of a process with threads can hang.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, plan, vocabulary, folder.path, quarantine)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        return ours, process

    children = dict(start() for _ in range(workers))
    n_deaths, n_done = 0, -1  # in a row, without a finished piece in between
    try:
        while children:
            wait([*children], timeout=_PROGRESS_SECONDS)
            on_beat()
            # A connection can be read when its worker has raised or ended.
            for connection in [connection for connection in children if connection.poll()]:
                _raise_what_it_raised(connection)
                if not _was_killed(children.pop(connection)) or plan.is_prepared():
                    continue
                with suppress(FileNotFoundError):
                    n_deaths, before = n_deaths + 1, n_done
                    n_done = len(folder.list_names("done"))
                    n_deaths = n_deaths if n_done == before else 1
                if n_deaths > workers * MAX_ATTEMPTS:
                    raise MachineError(
                        f"{n_deaths} workers died in a row without finishing any work",
                        "out of memory is the usual reason: use fewer workers; then run the same "
                        "command again",
                    )
                children.update([start()])
    finally:
        for process in children.values():
            process.terminate()
            process.join()
        with suppress(FileNotFoundError):
            folder.release_dead()


def _raise_what_it_raised(connection: Connection) -> None:
    with connection:
        try:
            message = connection.recv()
        except (EOFError, ConnectionResetError):
            return
    if isinstance(message, UserError):
        raise message
    raise RuntimeError(f"a worker failed:\n{message}")


def _was_killed(process: BaseProcess) -> bool:
    """Waits for a worker that has ended, and tells whether it was killed.

    Raises:
        MachineError: it ended by itself and said nothing.
    """
    process.join()
    code = process.exitcode or 0
    if code > 0:
        raise MachineError(
            f"a worker ended with exit code {code} before it started",
            "see its messages above; a program must call prepare() with several workers "
            'under `if __name__ == "__main__":`',
        )
    if code < 0:
        name = signal.Signals(-code).name
        build_logger().warning("a worker was killed by %s; starting another", name)
    return code < 0


def _work(
    connection: Connection,
    plan: PreparationPlan,
    vocabulary: Vocabulary,
    path: Path,
    quarantine: bool,
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    build_logger(hide_secrets)
    try:
        folder = WorkFolder(path, name_process(os.getpid()))
        CorpusWorker(plan, folder, vocabulary, quarantine=quarantine).work(lambda: None)
    except UserError as error:
        connection.send(error)
    except Exception:
        connection.send(traceback.format_exc())
