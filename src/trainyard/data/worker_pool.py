"""Several processes that work on a corpus on this machine, and a parent that replaces the dead.

The processes know nothing of each other: each takes pieces from the work folder, as a process on
another machine would.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from trainyard.data.corpus_plan import CorpusPlan
from trainyard.data.corpus_worker import CorpusWorker, is_prepared
from trainyard.data.tokenizer import load_tokenizer
from trainyard.data.work_folder import WorkFolder, name_process
from trainyard.errors import UserError
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
    plan: CorpusPlan,
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
    children = [_start(plan, folder.path, quarantine) for _ in range(workers)]
    try:
        while children:
            wait([child.process.sentinel for child in children], timeout=_PROGRESS_SECONDS)
            on_beat()
            for child in [child for child in children if not child.process.is_alive()]:
                children.remove(child)
                if _died(child):
                    if folder.path.exists():
                        folder.take_back(child.name)
                    if not is_prepared(plan):
                        children.append(_start(plan, folder.path, quarantine))
    finally:
        for child in children:
            child.process.terminate()
            child.process.join()
            if folder.path.exists():
                folder.take_back(child.name, count=False)


def _start(plan: CorpusPlan, path: Path, quarantine: bool) -> _Child:
    # Spawned, because a forked copy of a process with threads can hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, plan, path, quarantine), daemon=True)
    process.start()
    theirs.close()
    assert process.pid is not None
    return _Child(process, ours, name_process(process.pid))


def _died(child: _Child) -> bool:
    """Tells whether a worker that ended was killed; raises what it raised."""
    child.process.join()
    message = None
    try:
        if child.connection.poll():
            message = child.connection.recv()
    except (EOFError, ConnectionResetError):
        pass
    if isinstance(message, UserError):
        raise message
    if isinstance(message, _Crash):
        raise RuntimeError(f"a worker failed:\n{message.trace}")
    code = child.process.exitcode or 0
    if code < 0:
        name = signal.Signals(-code).name
        build_logger().warning("a worker was killed by %s; another takes its place", name)
    return code != 0


def _work(connection: Connection, plan: CorpusPlan, path: Path, quarantine: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    build_logger()
    try:
        tokenizer = load_tokenizer(Path(plan.corpus.tokenizer), plan.corpus.special_tokens)
        folder = WorkFolder(path, name_process(os.getpid()))
        CorpusWorker(plan, folder, tokenizer, quarantine=quarantine).work(lambda: None)
    except UserError as error:
        connection.send(error)
    except Exception:
        connection.send(_Crash(traceback.format_exc()))
