"""Processes that tokenise units side by side, and a parent that notices when one of them dies."""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

from trainyard.data.indexed import IndexedWriter, optimal_dtype
from trainyard.data.sources import Segment
from trainyard.data.tokenizer import load_tokenizer
from trainyard.data.unit import PrepareOptions, Report, UnitResult, tokenize_unit
from trainyard.errors import MachineError, UserError

_REPORT_EVERY_SECONDS = 0.5


@dataclass(frozen=True)
class _Done:
    """What a worker did since its last message."""

    n_bytes: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class _Crash:
    """A bug in a worker, with its traceback."""

    trace: str


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    number: int = -1  # of the unit it works on


def tokenize_in_processes(
    units: Sequence[list[Segment]], parts: Sequence[Path], options: PrepareOptions, report: Report
) -> Generator[UnitResult]:
    """Tokenises unit `i` into token files `parts[i]`; yields the results in order.

    After a unit that stopped, only the units before it are finished.

    Raises:
        MachineError: a worker was killed, or the disk is full.
    """
    workers = [_start_worker(options) for _ in range(min(options.workers, len(units)))]
    idle, busy = list(workers), dict[Connection, _Worker]()
    results: dict[int, UnitResult] = {}
    handed_out = yielded = 0
    end = len(units)
    try:
        while yielded < end:
            while idle and handed_out < end:
                worker = idle.pop()
                worker.number, handed_out = handed_out, handed_out + 1
                _send(worker, units[worker.number], parts[worker.number])
                busy[worker.connection] = worker
            for connection in wait(list(busy)):
                worker = busy[connection]  # type: ignore[index]
                message = _receive(worker, units[worker.number])
                if isinstance(message, _Done):
                    report(message.n_bytes, message.documents, message.tokens)
                    continue
                results[worker.number] = message
                if message.stopped:
                    end = min(end, worker.number + 1)
                idle.append(busy.pop(worker.connection))
            while yielded in results:
                yield results.pop(yielded)
                yielded += 1
    finally:
        for worker in workers:
            worker.process.terminate()
            worker.process.join()
            worker.connection.close()


def _start_worker(options: PrepareOptions) -> _Worker:
    # Spawned, because a forked copy of a process with threads can hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, options), daemon=True)
    process.start()
    theirs.close()  # so that the death of the worker closes the pipe
    return _Worker(process, ours)


def _send(worker: _Worker, unit: list[Segment], part: Path) -> None:
    try:
        worker.connection.send((unit, part))
    except (BrokenPipeError, ConnectionResetError):
        _raise_death(worker, unit)


def _receive(worker: _Worker, unit: list[Segment]) -> _Done | UnitResult:
    try:
        message = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        _raise_death(worker, unit)
    if isinstance(message, UserError):
        raise message
    if isinstance(message, _Crash):
        raise RuntimeError(f"a worker failed while it read {unit[0].path}:\n{message.trace}")
    assert isinstance(message, _Done | UnitResult)
    return message


def _raise_death(worker: _Worker, unit: list[Segment]) -> NoReturn:
    worker.process.join()
    code = worker.process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    first, last = unit[0], unit[-1]
    place = f"{first.path}, bytes {first.start} to {first.end}"
    if first.path != last.path:
        place = f"{first.path} to {last.path}"
    raise MachineError(
        f"a worker {how} while it tokenised {place}",
        "out of memory is the usual reason: use fewer workers; then run the same command again",
    )


def _work(connection: Connection, options: PrepareOptions) -> None:
    """Tokenises the units that arrive until the parent goes away; runs in a process of its own."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        tokenizer = load_tokenizer(options.tokenizer, options.special_tokens)
        dtype = optimal_dtype(tokenizer.vocabulary_size)
        while True:
            unit, part = connection.recv()
            reporter = _Reporter(connection)
            with IndexedWriter(part, dtype) as writer:
                result = tokenize_unit(unit, options, tokenizer, writer, reporter.add)
            reporter.flush()
            connection.send(result)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except UserError as error:
        connection.send(error)
    except Exception:
        connection.send(_Crash(traceback.format_exc()))


class _Reporter:
    """Sends progress now and then, not after every batch."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sent_at = time.monotonic()
        self._done = _Done(0, 0, 0)

    def add(self, n_bytes: int, documents: int, tokens: int) -> None:
        done = self._done
        self._done = _Done(done.n_bytes + n_bytes, done.documents + documents, done.tokens + tokens)
        if time.monotonic() - self._sent_at > _REPORT_EVERY_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Sends what has come together."""
        self._connection.send(self._done)
        self._done, self._sent_at = _Done(0, 0, 0), time.monotonic()
