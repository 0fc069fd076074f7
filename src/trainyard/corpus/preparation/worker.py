"""Worker processes of a corpus: each takes pieces of work until none is left.

    units     read -> filter -> clean -> tokenize -> a part         any number at a time
    compares  find repeated documents, band by band                 when all units are done
    joins     parts -> token files and their record                 when all of these are done

An idle process waits for the others, to replace one that dies, and exits once all is done. So every
process of a job that exits with code 0 has seen the finished token files. Processes of one command
are as independent as those of several machines; their parent replaces dead ones.
"""

from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from trainyard.corpus.preparation.duplicates import find_repeats
from trainyard.corpus.preparation.join import (
    FinishedUnit,
    check_not_empty,
    check_unchanged,
    join_output,
    publish_output,
)
from trainyard.corpus.preparation.plan import PreparationPlan
from trainyard.corpus.preparation.unit import (
    UnitResult,
    UnitWorker,
    save_array,
)
from trainyard.corpus.preparation.work_folder import (
    MAX_ATTEMPTS,
    WorkerState,
    WorkFolder,
    name_process,
)
from trainyard.corpus.sources.batch import Fault, UnreadableDocumentError
from trainyard.data.index_cache import FileBlock
from trainyard.data.tokenizer import Tokenizer
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import DataError, MachineError, UserError
from trainyard.files import seal, unseal
from trainyard.launch.environment import hide_secrets
from trainyard.log import build_logger

BEAT_SECONDS = 2.0
_log = logging.getLogger("trainyard")
_PROGRESS_SECONDS = 0.5
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.2, 5.0
_LOOKS_PER_SECOND = 60
"""How often all idle workers together look for work, unless they are very many."""


class CorpusWorker:
    """One of the processes that work on a corpus."""

    def __init__(
        self, plan: PreparationPlan, folder: WorkFolder, vocabulary: Vocabulary, *, quarantine: bool
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._quarantine = quarantine
        self._vocabulary = vocabulary
        self._state = WorkerState(started=time.time())
        self._units, self._compares, self._joins = plan.stages
        self._done_before: set[str] = set()
        self._sound: set[tuple[str, bool]] = set()

    @cached_property
    def _tokenizing(self) -> UnitWorker:
        made_by = self._plan.tokenizer
        tokenizer = Tokenizer(self._vocabulary, made_by.name, made_by.special_tokens)
        return UnitWorker(self._plan.corpus, tokenizer, quarantine=self._quarantine)

    def work(self, on_beat: Callable[[], None]) -> None:
        """Works until the corpus is prepared; `on_beat` is called every few seconds meanwhile.

        Raises:
            DataError: a document cannot be read, or the corpus is empty.
            MachineError: the disk is full, or workers keep dying.
        """
        ended = threading.Event()
        heart = threading.Thread(target=self._beat, args=(ended, on_beat), daemon=True)
        try:
            self._folder.join()
            self._done_before = set(self._folder.list_names("done"))
            for piece, output in zip(self._joins, self._plan.outputs, strict=True):
                if self._folder.is_done(piece) and not self._plan.is_made(output):
                    self._put_back(piece)
            heart.start()
            try:
                while (taken := self.take()) is not None:
                    if isinstance(taken, str):
                        self._do(taken)
                    else:
                        time.sleep(taken)
                self._folder.remove()
            finally:
                ended.set()
                heart.join()
                self._folder.leave()
        except (OSError, MachineError) as error:
            missing = isinstance(error.__cause__ or error, FileNotFoundError)
            if missing and not self._folder.is_joined():
                if self._plan.is_prepared():
                    return
                raise self._build_replaced_error() from error
            if isinstance(error, MachineError):
                raise
            raise MachineError(
                f"{error.filename or self._folder.path}: {error.strerror or error}",
                "free space or repair the disk; then run the same command again: it resumes",
            ) from error

    def _build_replaced_error(self) -> MachineError:
        problem = f"another process removed or replaced the work folder {self._folder.path}"
        return MachineError(problem, "see that process's output; then run the same command again")

    def _beat(self, ended: threading.Event, on_beat: Callable[[], None]) -> None:
        parent = os.getppid()
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                self._folder.beat(self._state)
                on_beat()
            if os.getppid() != parent:  # killed: whoever wanted the work is gone
                os._exit(1)

    def take(self) -> str | float | None:
        """Claims a piece; else returns the seconds until the next try, None once all is done.

        Raises:
            DataError: a document cannot be read.
            MachineError: workers keep dying at a piece.
        """
        # Claims first: a finished piece goes from there to the results.
        claimed = set(self._folder.list_names("claims"))
        done = set(self._folder.list_names("done"))
        stages = ([piece for piece in stage if piece not in done] for stage in self._plan.stages)
        left = next(filter(None, stages), None)
        if left is None:
            return None
        stopped = set(self._folder.list_names("stopped"))
        if left[0] in stopped:
            self._raise_stopped(left[0])
        # What is before the first unreadable document may hold another one.
        left = list(takewhile(lambda piece: piece not in stopped, left))
        n_workers = len(self._folder.list_names("workers"))
        if free := [piece for piece in left if piece not in claimed]:
            # Seldom what others choose, and near the front, so that a bad document is found early.
            piece = random.choice(free[: max(4 * (n_workers - 1), 1)])
            if self._folder.claim(piece):
                return piece
        elif taken := self._folder.take_over(left, self._plan.label):
            return taken
        pause = max(_SHORTEST_PAUSE, min(n_workers / _LOOKS_PER_SECOND, _LONGEST_PAUSE))
        return pause * random.uniform(0.5, 1.5)

    def _do(self, piece: str) -> None:
        work = {"unit": self._do_unit, "compare": self._compare, "join": self._join}
        self._state.piece = piece
        try:
            result = work[piece.partition("-")[0]](self._plan.numbers[piece])
            if result is None:
                self._folder.release(piece)
            else:
                self._publish(piece, result)
                self._state.finished_bytes += self._state.piece_bytes
        except UnreadableDocumentError as error:
            self._folder.stop(piece, msgspec.json.encode(error.fault))
        except BaseException:
            self._folder.release(piece)
            raise
        finally:
            self._state.piece = ""
            self._state.piece_bytes = 0

    def _do_unit(self, number: int) -> UnitResult:
        made = self._folder.scratch / self._units[number]
        try:
            return self._tokenizing.run(self._plan.units[number], made, self._report)
        finally:
            check_unchanged(self._plan.unit_sources(number))

    def _report(self, n_bytes: int, documents: int, tokens: int) -> None:
        self._state.piece_bytes += n_bytes
        self._state.documents += documents
        self._state.tokens += tokens

    def _publish(self, piece: str, result: UnitResult) -> None:
        """Gives the files of a piece their final names, and records it as done."""
        for path in self._folder.scratch.glob(f"{piece}.*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                suffix = path.name.removeprefix(piece)
                if suffix != ".bin":
                    result.files[suffix] = hashlib.file_digest(file, "sha256").hexdigest()
            path.replace(self._folder.parts / path.name)
        self._folder.finish(piece, seal(msgspec.json.encode(result)))

    def _are_sound(self, pieces: Iterable[str], *, with_tokens: bool) -> bool:
        """Returns whether finished pieces are whole; puts back those that are not.

        Looks at what was done before this process began, when a machine may have crashed.
        """
        bad = []
        for piece in pieces:
            is_new = piece not in self._done_before and self._folder.is_done(piece)
            if is_new or (piece, with_tokens) in self._sound:
                continue
            if self._is_sound(piece, with_tokens=with_tokens):
                self._sound.add((piece, with_tokens))
            else:
                self._put_back(piece)
                bad.append(piece)
        return not bad

    def _put_back(self, piece: str) -> None:
        message = "%s: %s is damaged or lost; it is made anew"
        _log.warning(message, self._folder.path, self._plan.label(piece))
        self._folder.redo(piece)

    def _is_sound(self, piece: str, *, with_tokens: bool) -> bool:
        parts = self._folder.parts
        try:
            result = self._read_result(piece)
            for suffix, checksum in result.files.items():
                with (parts / f"{piece}{suffix}").open("rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != checksum:
                        return False
            path, end = parts / f"{piece}.bin", 0
            if piece.startswith("unit") and not path.exists():  # one without tokens has no block
                return False
            for block in result.blocks if with_tokens else []:
                if FileBlock(path, end, block.n_bytes).read_digest().hex() != block.sha256:
                    return False
                end += block.n_bytes
        except (OSError, DataError):
            return False
        return True

    def _read_result(self, piece: str) -> UnitResult:
        path = self._folder.path / "done" / piece
        try:
            return msgspec.json.decode(unseal(path.read_bytes()), type=UnitResult)
        except (ValueError, msgspec.MsgspecError) as error:
            hint = "run the same command with --overwrite"
            raise DataError(f"{path} is damaged: {error}", hint) from error

    def _compare(self, number: int) -> UnitResult | None:
        """Finds the documents that repeat an earlier one by one key; None: a unit is missing."""
        step, columns = self._plan.comparisons[number]
        if not self._are_sound(self._units, with_tokens=False):
            return None
        keys = [self._folder.parts / f"{unit}.keys-{step}.npy" for unit in self._units]
        made = self._folder.scratch / f"{self._compares[number]}.mask"
        save_array(made.with_suffix(".ends.npy"), find_repeats(columns, keys, made))
        return UnitResult()

    def _read_repeats(self, number: int) -> npt.NDArray[np.uint8] | None:
        """Returns for each document of a unit the first step that drops it, from 1; 0: none."""
        if not self._compares:
            return None
        ends = np.load(self._folder.parts / f"{self._compares[0]}.ends.npy")
        start, end = ends[number : number + 2]
        steps = np.zeros(end - start, np.uint8)
        for piece, (step, _) in zip(self._compares, self._plan.comparisons, strict=True):
            if len(steps):
                path = self._folder.parts / f"{piece}.mask"
                is_repeat = np.memmap(path, np.bool_, "r", int(start), (len(steps),))
                steps[is_repeat & (steps == 0)] = step + 1
        return steps

    def _join(self, number: int) -> UnitResult | None:
        """Makes an output; None: a piece that it needs is missing."""
        output = self._plan.outputs[number]
        needed = [*self._compares, *(self._units[unit] for unit in output.units)]
        if not self._are_sound(needed, with_tokens=True):
            return None
        units = self._read_finished(output.units)
        for unit in units:
            if unit.result.places and not self._quarantine:
                raise DataError(
                    f"{unit.result.places[0].render(unit.lines_before)}; "
                    "an earlier attempt set it aside",
                    "pass --on-error quarantine to accept it, or --overwrite to start over",
                )
        # An output may be empty, a corpus may not.
        if all(unit.result.documents == unit.result.empty_documents for unit in units):
            if not self._are_sound(self._units, with_tokens=False):
                return None
            check_not_empty(self._plan, self._read_finished(range(len(self._units))))
        made = self._folder.scratch / "joined"
        join_output(self._plan, output, units, made)
        if self._folder.read_plan() != self._plan.text:
            raise self._build_replaced_error()
        publish_output(self._plan, output, made)
        return UnitResult()

    def _read_finished(self, numbers: Sequence[int]) -> list[FinishedUnit]:
        """Reads the results of units in a row, of whole files."""
        units = []
        lines = 0
        for number in numbers:
            lines = lines if self._plan.units[number][0].start else 0
            result = self._read_result(self._units[number])
            part = self._folder.parts / self._units[number]
            units.append(FinishedUnit(result, part, lines, self._read_repeats(number)))
            lines += result.n_lines
        return units

    def _raise_stopped(self, piece: str) -> None:
        """Raises for an unreadable document; returns if a result that gives its line is damaged."""
        number = first = self._plan.numbers[piece]
        while self._plan.units[first][0].start:
            first -= 1
        before = self._units[first:number]
        with suppress(FileNotFoundError):  # another process puts one of them back
            if self._are_sound(before, with_tokens=False):
                lines = sum(self._read_result(unit).n_lines for unit in before)
                text = (self._folder.path / "stopped" / piece).read_bytes()
                raise msgspec.json.decode(text, type=Fault).to_error(lines)


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
    # Spawned, because a forked copy of a process with threads can hang.
    context = multiprocessing.get_context("spawn")

    def start() -> tuple[Connection, BaseProcess]:
        reader, writer = context.Pipe(duplex=False)
        arguments = (writer, plan, vocabulary, folder.path, quarantine)
        process = context.Process(target=_run_worker, args=arguments, daemon=True)
        process.start()
        writer.close()
        return reader, process

    children = dict(start() for _ in range(workers))
    n_deaths, n_done = 0, -1  # in a row, without a finished piece in between
    try:
        while children:
            wait([*children], timeout=_PROGRESS_SECONDS)
            on_beat()
            # A connection can be read when its worker has raised or ended.
            for connection in [connection for connection in children if connection.poll()]:
                was_killed = _was_killed(connection, children[connection])
                del children[connection]
                if not was_killed or plan.is_prepared():
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


def _was_killed(connection: Connection, process: BaseProcess) -> bool:
    """Waits for a worker that has ended, and returns whether it was killed.

    Raises:
        UserError: what it raised.
        MachineError: it ended by itself without an error.
    """
    with connection, suppress(EOFError, ConnectionResetError):
        message = connection.recv()
        if isinstance(message, UserError):
            raise message
        raise RuntimeError(f"a worker failed:\n{message}")
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
        _log.warning("a worker was killed by %s; starting another", name)
    return code < 0


def _run_worker(
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
