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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainyard.corpus.preparation.plan import PreparationPlan
from trainyard.corpus.preparation.work_folder import MAX_ATTEMPTS, WorkFolder, name_process
from trainyard.corpus.preparation.worker import CorpusWorker, is_prepared
from trainyard.data.tokenizer import Tokenizer
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import MachineError, UserError
from trainyard.launch.environment import hide_secrets
from trainyard.log import build_logger

_PROGRESS_SECONDS = 0.5


@dataclass(frozen=True)
class _Crash:
    """A bug in a worker, with its traceback."""

    trace: str


@dataclass(frozen=True)
class _Child:
    process: BaseProcess
    connection: Connection
    name: str


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
    children = [_start(plan, vocabulary, folder.path, quarantine) for _ in range(workers)]
    deaths = _Deaths(folder, workers * MAX_ATTEMPTS)
    try:
        while children:
            # A message may be too long for a pipe; its sender waits until it is read.
            waiting = [child.process.sentinel for child in children]
            waiting += [child.connection for child in children]  # type: ignore[misc]
            wait(waiting, timeout=_PROGRESS_SECONDS)
            on_beat()
            for child in list(children):
                if child.connection.poll() or not child.process.is_alive():
                    _raise_what_it_raised(child)
                    children.remove(child)
                    if _was_killed(child) and not is_prepared(plan):
                        deaths.add(child.name)
                        children.append(_start(plan, vocabulary, folder.path, quarantine))
    finally:
        for child in children:
            child.process.terminate()
            child.process.join()
            child.connection.close()
            with suppress(FileNotFoundError):
                folder.take_back(child.name, count=False)


class _Deaths:
    """Counts workers that died since a piece was last finished."""

    def __init__(self, folder: WorkFolder, most: int) -> None:
        self._folder = folder
        self._most = most
        self._deaths = 0
        self._n_done = -1

    def add(self, worker: str) -> None:
        """Puts the worker's piece back.

        Raises:
            MachineError: the piece, or the work in all, ended too many workers.
        """
        try:
            n_done = len(self._folder.names("done"))
            self._folder.take_back(worker)
        except FileNotFoundError:
            return
        self._deaths = 1 if n_done != self._n_done else self._deaths + 1
        self._n_done = n_done
        if self._deaths > self._most:
            raise MachineError(
                f"{self._deaths} workers died in a row without finishing any work",
                "out of memory is the usual reason: use fewer workers; then run the same command "
                "again",
            )


def _start(plan: PreparationPlan, vocabulary: Vocabulary, path: Path, quarantine: bool) -> _Child:
    # Spawned, because a forked copy of a process with threads can hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_work, args=(theirs, plan, vocabulary, path, quarantine), daemon=True
    )
    process.start()
    theirs.close()
    assert process.pid is not None
    return _Child(process, ours, name_process(process.pid))


def _raise_what_it_raised(child: _Child) -> None:
    message = None
    with suppress(EOFError, ConnectionResetError):
        if child.connection.poll():
            message = child.connection.recv()
    if isinstance(message, UserError):
        raise message
    if isinstance(message, _Crash):
        raise RuntimeError(f"a worker failed:\n{message.trace}")


def _was_killed(child: _Child) -> bool:
    """Waits for a worker that has ended, and tells whether it was killed.

    Raises:
        MachineError: it ended by itself and said nothing.
    """
    child.process.join()
    child.connection.close()
    code = child.process.exitcode or 0
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
        tokenizer = Tokenizer(vocabulary, plan.tokenizer.name, plan.tokenizer.special_tokens)
        CorpusWorker(plan, folder, tokenizer, quarantine=quarantine).work(lambda: None)
    except UserError as error:
        connection.send(error)
    except Exception:
        connection.send(_Crash(traceback.format_exc()))
