"""One worker process of a corpus: takes pieces of work until none is left.

    units     read -> filter -> clean -> tokenize -> a part         any number at a time
    compares  find repeated documents, band by band                 when all units are done
    joins     parts -> token files and their record                 when all of these are done

An idle process waits for the others, to replace one that dies, and exits once all is done. So every
process of a job that exits with code 0 has seen the finished token files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from trainyard.corpus.preparation.duplicates import compared_columns, find_repeats
from trainyard.corpus.preparation.join import (
    FinishedUnit,
    check_not_empty,
    check_unchanged,
    join_output,
)
from trainyard.corpus.preparation.plan import Output, PreparationPlan
from trainyard.corpus.preparation.unit import (
    Place,
    UnitResult,
    UnitWorker,
    UnreadableDocumentError,
    save_array,
)
from trainyard.corpus.preparation.work_folder import Claim, WorkerState, WorkFolder
from trainyard.data.index_cache import FileBlock
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import DataError, MachineError
from trainyard.files import seal, unseal

_log = logging.getLogger("trainyard")

BEAT_SECONDS = 2.0
# A worker without a piece looks again after the first of these, then after twice as long ..
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.2, 5.0
# Of all workers together, once their pauses are as long as they get.
POLLS_PER_SECOND = 100


def unit_name(number: int) -> str:
    """Names a unit's piece of work."""
    return f"unit-{number:06d}"


def join_name(number: int) -> str:
    """Names the piece of work that finishes an output."""
    return f"join-{number:05d}"


def compare_name(number: int) -> str:
    """Names the piece of work that looks for repeats by one key."""
    return f"compare-{number:03d}"


def list_compares(plan: PreparationPlan) -> list[tuple[int, list[int]]]:
    """Lists what repeats are looked for by: the number of a comparing step, and columns of keys."""
    steps = enumerate(plan.corpus.comparing_steps)
    return [(number, columns) for number, step in steps for columns in compared_columns(step)]


def piece_names(plan: PreparationPlan) -> list[str]:
    """Lists all pieces of work of a corpus."""
    names = [unit_name(number) for number in range(len(plan.units))]
    names += [compare_name(number) for number in range(len(list_compares(plan)))]
    return names + [join_name(number) for number in range(len(plan.outputs))]


def is_prepared(plan: PreparationPlan) -> bool:
    """Returns whether every output exists and was made from this plan."""
    return all(_is_made(plan, output) for output in plan.outputs)


def _is_made(plan: PreparationPlan, output: Output) -> bool:
    try:
        sidecar = load_sidecar(output.prefix)
        sidecar.check_sizes(output.prefix)
    except DataError:
        return False
    return sidecar.recipe == plan.recipe


def read_result(path: Path) -> UnitResult:
    """Reads what was recorded of a finished piece.

    Raises:
        DataError: it is damaged.
    """
    try:
        return msgspec.json.decode(unseal(path.read_bytes()), type=UnitResult)
    except (ValueError, msgspec.MsgspecError) as error:
        hint = "run the same command with --overwrite"
        raise DataError(f"{path} is damaged: {error}", hint) from error


class CorpusWorker:
    """One of the processes that work on a corpus."""

    def __init__(
        self, plan: PreparationPlan, folder: WorkFolder, tokenizer: Tokenizer, *, quarantine: bool
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._quarantine = quarantine
        self._units = UnitWorker(plan.corpus, tokenizer, quarantine=quarantine)
        self._state = WorkerState(started=time.time())
        self._joins = {join_name(number) for number in range(len(plan.outputs))}
        self._compares = list_compares(plan)
        self._sound: set[tuple[str, bool]] = set()
        self._pause = FIRST_PAUSE_SECONDS

    def work(self, on_beat: Callable[[], None]) -> None:
        """Works until the corpus is prepared; `on_beat` is called every few seconds meanwhile.

        Raises:
            DataError: a document cannot be read, or the corpus is empty.
            MachineError: the disk is full, or workers keep dying.
        """
        ended = threading.Event()
        try:
            self._folder.join()
            for number, output in enumerate(self._plan.outputs):
                piece = join_name(number)
                if self._folder.is_done(piece) and not _is_made(self._plan, output):
                    self._put_back(piece)
            heart = threading.Thread(target=self._beat, args=(ended, on_beat), daemon=True)
            heart.start()
            try:
                while (taken := self.take()) is not None:
                    if isinstance(taken, Claim):
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
                if is_prepared(self._plan):
                    return
                raise MachineError(
                    f"another process removed or replaced the work folder {self._folder.path}",
                    "see that process's output; then run the same command again",
                ) from error
            if isinstance(error, MachineError):
                raise
            raise MachineError(
                f"{error.filename or self._folder.path}: {error.strerror or error}",
                "free space or repair the disk; then run the same command again: it resumes",
            ) from error

    def _beat(self, ended: threading.Event, on_beat: Callable[[], None]) -> None:
        parent = os.getppid()
        while not ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                self._folder.beat(self._state)
                on_beat()
            if os.getppid() != parent:  # killed: whoever wanted the work is gone
                os._exit(1)

    def take(self) -> Claim | float | None:
        """Claims a piece; else returns the seconds until the next try, None once all is done.

        Raises:
            DataError: a document cannot be read.
            MachineError: workers keep dying at a piece.
        """
        done = set(self._folder.names("done"))
        if self._joins <= done:
            return None
        n_workers = len(self._folder.names("workers"))
        stopped = self._folder.names("stopped")
        ready = self._ready(done, stopped)
        n_idle = n_workers - len(self._folder.names("claimed"))
        # Of many idle workers only about as many try as find something: lists may be old.
        if ready and random.random() * n_idle < 4 * len(ready):
            # Seldom what others choose, and near the front, so that a bad document is found early.
            claim = self._folder.claim(random.choice(ready[: max(4 * (n_workers - 1), 1)]))
            if claim is not None:
                self._pause = FIRST_PAUSE_SECONDS
                return claim
        self._raise_if_stopped(done, stopped)
        self._folder.take_back()
        pause = self._pause * random.uniform(0.5, 1.5)
        longest = min(n_workers / POLLS_PER_SECOND, LONGEST_PAUSE_SECONDS)
        self._pause = max(min(2 * self._pause, longest), FIRST_PAUSE_SECONDS)
        return pause

    def _ready(self, done: set[str], stopped: list[str]) -> list[str]:
        """Lists what can be taken now: units, what compares them, and joins, in this order."""
        first_stopped = min(stopped, default="z")
        units_left = any(unit_name(number) not in done for number in range(len(self._plan.units)))
        compares_left = any(
            compare_name(number) not in done for number in range(len(self._compares))
        )
        ready = []
        for name in self._folder.names("todo"):
            piece = name.rpartition(".")[0]
            kind = piece.partition("-")[0]
            if (
                (kind == "unit" and piece < first_stopped)
                or (kind == "compare" and not units_left)
                or (kind == "join" and not compares_left and not units_left)
            ):
                ready.append(name)
        return sorted(ready, key=lambda name: ("ucj".index(name[0]), name))

    def _do(self, claim: Claim) -> None:
        kind, _, number = claim.piece.partition("-")
        self._state.piece = claim.piece
        try:
            if kind == "unit":
                self._do_unit(claim, int(number))
            elif kind == "join" and self._join(int(number)):
                self._folder.finish(claim, b"{}")
            elif kind == "compare" and self._compare(int(number)):
                self._publish(claim, UnitResult())
            else:
                self._folder.release(claim)
        except UnreadableDocumentError as error:
            self._folder.stop(claim, msgspec.json.encode(error.place))
        except BaseException:
            self._folder.release(claim)
            raise
        finally:
            self._state.piece = ""
            self._state.piece_bytes = 0

    def _do_unit(self, claim: Claim, number: int) -> None:
        made = self._folder.scratch / claim.piece
        sources = self._plan.unit_sources(number)
        try:
            result = self._units.run(self._plan.units[number], made, self._report)
        except UnreadableDocumentError:
            check_unchanged(sources)
            raise
        check_unchanged(sources)
        result.inputs = self._plan.unit_inputs(number)
        self._publish(claim, result)
        self._state.finished_bytes += self._plan.unit_bytes[number]

    def _publish(self, claim: Claim, result: UnitResult) -> None:
        """Gives the files of a piece their final names, and records it as done."""
        for path in self._folder.scratch.glob(f"{claim.piece}.*"):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                suffix = path.name.removeprefix(claim.piece)
                if suffix != ".bin":
                    result.files[suffix] = hashlib.file_digest(file, "sha256").hexdigest()
            path.replace(self._folder.parts / path.name)
        self._folder.finish(claim, seal(msgspec.json.encode(result)))

    def _are_sound(self, pieces: Iterable[str], *, with_tokens: bool) -> bool:
        """Returns whether finished pieces are whole; puts back those that are not.

        Looks at what was done before this process began, when a machine may have crashed.
        """
        n_bad = 0
        for piece in pieces:
            if (piece, with_tokens) in self._sound or not self._folder.is_of_before(piece):
                continue
            if self._is_sound(piece, with_tokens=with_tokens):
                self._sound.add((piece, with_tokens))
                continue
            self._put_back(piece)
            n_bad += 1
        return n_bad == 0

    def _put_back(self, piece: str) -> None:
        _log.warning("%s: %s is damaged or lost; it is made anew", self._folder.path, piece)
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
            if piece.startswith("unit") and not path.exists():
                return False
            for block in result.blocks if with_tokens else []:
                place = FileBlock(path, end, block.n_bytes)
                if place.read_digest().hex() != block.sha256:
                    return False
                end += block.n_bytes
        except (OSError, DataError):
            return False
        return True

    def _report(self, n_bytes: int, documents: int, tokens: int) -> None:
        self._state.piece_bytes += n_bytes
        self._state.documents += documents
        self._state.tokens += tokens

    def _part(self, number: int) -> Path:
        return self._folder.parts / unit_name(number)

    def _compare(self, number: int) -> bool:
        """Finds the documents that repeat an earlier one by one key; False: a unit is missing."""
        step, columns = self._compares[number]
        if not self._are_sound(map(unit_name, range(len(self._plan.units))), with_tokens=False):
            return False
        keys = [Path(f"{self._part(n)}.keys-{step}.npy") for n in range(len(self._plan.units))]
        made = self._folder.scratch / f"{compare_name(number)}.mask"
        save_array(made.with_suffix(".ends.npy"), find_repeats(columns, keys, made))
        return True

    def _read_repeats(self, number: int) -> npt.NDArray[np.uint8] | None:
        """Returns for each document of a unit the first step that drops it, from 1; 0: none."""
        if not self._compares:
            return None
        ends = np.load(self._folder.parts / f"{compare_name(0)}.ends.npy")
        start, end = ends[number : number + 2]
        marks = np.zeros(end - start, np.uint8)
        for compare, (step, _) in enumerate(self._compares):
            if len(marks):
                path = self._folder.parts / f"{compare_name(compare)}.mask"
                found = np.memmap(path, np.bool_, "r", int(start), (len(marks),))
                marks[found & (marks == 0)] = step + 1
        return marks

    def _join(self, number: int) -> bool:
        """Makes an output; False: a piece that it needs is missing."""
        output = self._plan.outputs[number]
        compares = map(compare_name, range(len(self._compares)))
        if not self._are_sound(chain(compares, map(unit_name, output.units)), with_tokens=True):
            return False
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
            every = range(len(self._plan.units))
            if not self._are_sound(map(unit_name, every), with_tokens=False):
                return False
            check_not_empty(self._plan, self._read_finished(every))
        join_output(self._plan, output, units, self._folder.scratch)
        return True

    def _read_finished(self, numbers: range) -> list[FinishedUnit]:
        results = [self._read_result(unit_name(number)) for number in numbers]
        before = self._lines_before(list(numbers), results)
        return [
            FinishedUnit(result, self._part(number), lines, self._read_repeats(number))
            for number, result, lines in zip(numbers, results, before, strict=True)
        ]

    def _read_result(self, piece: str) -> UnitResult:
        return read_result(self._folder.path / "done" / piece)

    def _lines_before(self, numbers: list[int], results: list[UnitResult]) -> list[int]:
        """Counts the lines of the same file in units before each unit."""

        def carry(lines: int, number_and_result: tuple[int, UnitResult]) -> int:
            number, result = number_and_result
            starts_file = number + 1 < len(self._plan.units) and (
                self._plan.units[number + 1][0].start == 0
            )
            return 0 if starts_file else lines + result.n_lines

        pairs = zip(numbers, results, strict=True)
        return list(accumulate(pairs, carry, initial=0))[: len(numbers)]

    def _raise_if_stopped(self, done: set[str], stopped: list[str]) -> None:
        """Raises for the first unreadable document, once nothing before it can hold another."""
        if not stopped:
            return
        first = int(stopped[0].partition("-")[2])
        if any(unit_name(number) not in done for number in range(first)):
            return
        text = (self._folder.path / "stopped" / stopped[0]).read_bytes()
        place = msgspec.json.decode(text, type=Place)
        lines = 0
        unit = self._plan.units[first]
        for number in range(first - 1, -1, -1):
            if unit[0].start == 0:
                break
            try:
                lines += self._read_result(unit_name(number)).n_lines
            except DataError:
                self._put_back(unit_name(number))
                return
            unit = self._plan.units[number]
        raise place.to_error(lines)
