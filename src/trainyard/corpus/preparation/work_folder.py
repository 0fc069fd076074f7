"""A work queue in a folder, for any number of processes on any number of machines.

    web_text_document.work/
        plan.json               what the work is; rejected if it does not match the request
        claims/unit-3f2a..      the name of the process that works on the piece, such as n1-77-12
        done/unit-8c01..        the piece's result: counts and checksums, sealed; written last
        parts/unit-8c01...bin   its output
        stopped/unit-77de..     a document in it cannot be read; the reason
        deaths/unit-3f2a..@..   a process that died while it worked on the piece
        scratch/n1-77-12/       what that process is writing
        workers/n1-77-12        its progress; rewritten every few seconds

A piece is done when it has a result, and only then: a result is renamed into place after its parts.
Whoever makes a piece makes the same bytes, in a folder of its own, so two processes that make the
same one replace equal by equal. Claims therefore only save work, and may get lost. A claim is a
file that can be created only once. Idle processes take over claims of dead owners: on this machine,
the process is gone; elsewhere, its file in `workers` has not changed for a minute, by the
observer's clock.
"""

from __future__ import annotations

import glob
import os
import random
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trainyard.corpus.preparation.plan import PreparationPlan
from trainyard.errors import SPACE, MachineError, explain_failure
from trainyard.files import publish_text
from trainyard.launch.environment import read_process_state

MAX_ATTEMPTS = 3
STALE_SECONDS = 60.0
_WATCHED = 4
"""Claims that an idle process looks at together; others look at others."""
_FOLDERS = ("claims", "done", "parts", "stopped", "deaths", "scratch", "workers")


class WorkerState(msgspec.Struct, kw_only=True):
    """A process's status; `heard` changes with every write, to show that it is alive."""

    piece: str = ""
    finished_bytes: int = 0
    piece_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    started: float = 0.0
    heard: float = 0.0


def name_process(pid: int) -> str:
    """Names a process so that others on the same machine can tell whether it still lives."""
    return f"{_machine()}-{pid}-{_start_of(pid)}"


def _machine() -> str:
    """The machine and its table of processes: containers may share a name, not that table."""
    with suppress(OSError):
        table = os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116 (a link that is not a path)
        return f"{socket.gethostname()}.{table}"
    return socket.gethostname()


def _start_of(pid: int) -> str:
    """When a process started, in ticks; "gone" when there is none, or only its exit code."""
    if fields := read_process_state(pid):
        return "gone" if fields[0] in "ZX" else fields[19]
    try:  # a system without /proc; or it has just ended
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "0"


def is_running(worker: str) -> bool | None:
    """Returns whether a process of this machine is alive; None if it is on another machine."""
    machine, *process = worker.rsplit("-", 2)
    if machine != _machine():
        return None
    pid, start = process
    return start != "gone" and _start_of(int(pid)) == start


class WorkFolder:
    """A work folder, as one process sees it."""

    def __init__(self, path: Path, worker: str, stale_seconds: float = STALE_SECONDS) -> None:
        self.path = path
        self.worker = worker
        self.parts = path / "parts"
        self.scratch = path / "scratch" / worker
        self._stale_seconds = stale_seconds
        # By process: what it wrote last, and when that was first seen.
        self._seen: dict[str, tuple[bytes, float]] = {}

    def create(self, plan: bytes) -> None:
        """Makes what is missing of the folder; a plan that is there stays.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        hint = f"{SPACE}, or write to another folder"
        with explain_failure(f"{self.path} cannot be made", hint):
            for name in _FOLDERS:
                (self.path / name).mkdir(parents=True, exist_ok=True)
        if not (self.path / "plan.json").exists():
            self._write_plan(plan)

    def _write_plan(self, plan: bytes) -> None:
        draft = self.path / f"plan.json-{self.worker}"
        publish_text(draft, plan.decode())
        draft.rename(self.path / "plan.json")

    def read_plan(self) -> bytes:
        """Returns the plan; FileNotFoundError without a folder."""
        return (self.path / "plan.json").read_bytes()

    def replace_plan(self, plan: bytes, pieces: Sequence[str]) -> int:
        """Switches to another plan with these pieces; removes the results of all others.

        Returns:
            how many of the pieces are done.
        """
        self._write_plan(plan)
        kept = set(pieces)
        for folder in ("done", "parts"):
            for name in self.list_names(folder):
                if name.partition(".")[0] not in kept:
                    (self.path / folder / name).unlink(missing_ok=True)
        return len(kept.intersection(self.list_names("done")))

    def clear(self) -> None:
        """Forgets the faults and deaths of earlier commands, and releases what they claimed."""
        for folder in ("stopped", "deaths"):
            for name in self.list_names(folder):
                (self.path / folder / name).unlink(missing_ok=True)
        self.release_dead()

    def release_dead(self) -> None:
        """Removes the claims and scratch folders of dead processes of this machine."""
        for piece in self.list_names("claims"):
            with suppress(FileNotFoundError):
                if is_running((self.path / "claims" / piece).read_text()) is False:
                    self.release(piece)
        for worker in self.list_names("scratch"):
            if is_running(worker) is False:
                shutil.rmtree(self.path / "scratch" / worker, ignore_errors=True)

    def join(self) -> None:
        """Announces this process; to be called before it claims."""
        self.scratch.mkdir(exist_ok=True)
        self.beat(WorkerState(started=time.time()))

    def leave(self) -> None:
        """Removes this process's scratch folder, if it still exists."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def is_joined(self) -> bool:
        """Returns whether this is still the folder that this process joined."""
        return (self.path / "workers" / self.worker).exists()

    def list_names(self, folder: str) -> list[str]:
        """Lists the files in one of the folders, sorted; what begins with a dot is not ours."""
        return sorted(name for name in os.listdir(self.path / folder) if name[0] != ".")  # noqa: PTH208 (59,000 names)

    def is_done(self, piece: str) -> bool:
        """Returns whether a piece is finished."""
        return (self.path / "done" / piece).exists()

    def redo(self, piece: str) -> None:
        """Makes a finished piece unfinished again."""
        (self.path / "done" / piece).unlink(missing_ok=True)

    def claim(self, piece: str) -> bool:
        """Claims a piece; False if another process was faster."""
        path = self.path / "claims" / piece
        try:
            file = path.open("x")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self.worker)
        except OSError:
            path.unlink(missing_ok=True)
            raise
        if self.is_done(piece):  # since this process looked
            self.release(piece)
            return False
        return True

    def take_over(self, claimed: Sequence[str], label: Callable[[str], str]) -> str | None:
        """Claims one of these pieces if its owner is dead; `label` names a piece for people.

        Raises:
            MachineError: a piece ended as many workers as it may.
        """
        for piece in random.sample(claimed, min(len(claimed), _WATCHED)):
            path = self.path / "claims" / piece
            try:
                owner = path.read_text() or piece  # empty: it is being written, or was lost
            except FileNotFoundError:  # finished just now
                continue
            if self._is_alive(owner) or self.is_done(piece):
                continue
            (self.path / "deaths" / f"{piece}@{owner}").touch()
            if (
                sum(name.startswith(f"{piece}@") for name in self.list_names("deaths"))
                >= MAX_ATTEMPTS
            ):
                raise MachineError(
                    f"{MAX_ATTEMPTS} workers died at {label(piece)}, the last one {owner}",
                    "out of memory is the usual reason: use fewer workers; then run the same "
                    "command again",
                )
            path.unlink(missing_ok=True)
            if is_running(owner) is False:
                # Half-written parts take space, which may be just what is lacking.
                shutil.rmtree(self.path / "scratch" / owner, ignore_errors=True)
            if self.claim(piece):
                return piece
        return None

    def finish(self, piece: str, result: bytes) -> None:
        """Records that a piece is done, after its files have their final names."""
        self._record("done", piece, result)

    def stop(self, piece: str, reason: bytes) -> None:
        """Records that a piece cannot be done, and why."""
        self._record("stopped", piece, reason)

    def _record(self, folder: str, piece: str, content: bytes) -> None:
        draft = self.scratch / f"{folder}-{piece}"
        publish_text(draft, content.decode())
        draft.rename(self.path / folder / piece)
        self.release(piece)

    def release(self, piece: str) -> None:
        """Gives a claim back."""
        with suppress(OSError):
            (self.path / "claims" / piece).unlink()

    def _is_alive(self, worker: str, written: bytes | None = None) -> bool:
        """Returns whether a process is alive; `written` is its state, if read just now."""
        runs = is_running(worker)
        if runs is not None:
            return runs
        if written is None:
            try:
                written = (self.path / "workers" / worker).read_bytes()
            except OSError:  # its name is not written yet, or its state was lost
                written = b""
        now = time.monotonic()
        last, since = self._seen.get(worker, (None, now))
        if written != last:
            self._seen[worker] = (written, now)
            return True
        return now - since < self._stale_seconds

    def beat(self, state: WorkerState) -> None:
        """Writes this process's progress."""
        state.heard = time.time()
        draft = self.scratch / "beat"
        draft.write_bytes(msgspec.json.encode(state))
        draft.rename(self.path / "workers" / self.worker)

    def read_states(self) -> dict[str, tuple[WorkerState, bool]]:
        """Reads what every process wrote last, and whether it is alive as far as can be seen."""
        states = {}
        for name in self.list_names("workers"):
            with suppress(FileNotFoundError, msgspec.MsgspecError):
                text = (self.path / "workers" / name).read_bytes()
                state = msgspec.json.decode(text, type=WorkerState)
                states[name] = (state, self._is_alive(name, text))
        return states

    def remove(self) -> None:
        """Removes the folder, atomically for other processes."""
        away = self.path.with_name(f"{self.path.name}.done-{self.worker}")
        with suppress(FileNotFoundError):
            self.path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def sweep(self) -> None:
        """Removes what processes left that were killed while they removed the folder."""
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.done-*"):
            shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True)
class Progress:
    """What all workers together have done; documents and tokens are of those that are named."""

    done_bytes: int
    total_bytes: int
    units_done: int
    units: int
    outputs_done: int
    documents: int
    tokens: int
    bytes_per_second: float
    """The rate of input of the workers that are alive."""
    workers: dict[str, tuple[WorkerState, bool]]
    """By name: its status, and whether it is alive."""
    stopped: list[str]
    """Pieces with a document that cannot be read."""

    @property
    def seconds_left(self) -> float | None:
        """At the present rate; None where there is none."""
        if not self.bytes_per_second:
            return None
        return (self.total_bytes - self.done_bytes) / self.bytes_per_second


def read_progress(folder: WorkFolder, plan: PreparationPlan) -> Progress | None:
    """Reads a work folder; None when it is gone: the work is done, or has not begun."""
    try:
        states = folder.read_states()
        done = folder.list_names("done")
        stopped = folder.list_names("stopped")
    except FileNotFoundError:
        return None
    units, _, joins = plan.stages
    units_done = set(units).intersection(done)
    alive = [state for state, is_alive in states.values() if is_alive]
    working_bytes = sum(state.piece_bytes for state in alive if state.piece not in done)
    now = time.time()
    for state in alive:
        state.piece = plan.label(state.piece) if state.piece in plan.numbers else ""
    return Progress(
        done_bytes=sum(plan.unit_bytes[plan.numbers[unit]] for unit in units_done) + working_bytes,
        total_bytes=sum(plan.unit_bytes),
        units_done=len(units_done),
        units=len(units),
        outputs_done=len(set(joins).intersection(done)),
        documents=sum(state.documents for state, _ in states.values()),
        tokens=sum(state.tokens for state, _ in states.values()),
        bytes_per_second=sum(
            (state.finished_bytes + state.piece_bytes) / max(now - state.started, 1.0)
            for state in alive
        ),
        workers=states,
        stopped=[plan.label(piece) for piece in stopped if piece in plan.numbers],
    )
