"""A work queue in a folder, for any number of processes on any number of machines.

It only needs `rename` from the file system: a process claims a piece by renaming its file, and only
one process can succeed.

    web_text_document.work/
        plan.json                        the work; rejected if it does not match the request
        todo/unit-000003.0               unclaimed; started 0 times before
        claimed/unit-000002.0@n1-77-12   process 77 of machine n1 works on it
        done/unit-000001                 its result: counts and checksums, sealed; written last
        parts/unit-000001.bin            its output
        stopped/unit-000000              a document in it cannot be read; the reason
        scratch/n1-77-12/                what that process is writing
        workers/n1-77-12                 its progress; rewritten every few seconds

A process that dies leaves a claim behind. Idle processes take over claims of dead owners (on this
machine: the process is gone; elsewhere: its file in `workers` has not changed for a minute, by the
observer's clock). If the owner was only slow, the piece is done twice: both write the same bytes,
each in its own folder, and a rename replaces equal by equal.
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import msgspec

from trainyard.errors import SPACE, MachineError
from trainyard.files import explain_disk_errors, publish_text

MAX_ATTEMPTS = 3
STALE_SECONDS = 60.0
_LOOKS = 12
"""How often, before it counts as dead, a silent process of another machine is looked at."""
_WATCHED = 16
"""Claims of other machines that a process watches; others watch the rest."""
_RENEWAL_SECONDS = 0.2
_FOLDERS = ("todo", "claimed", "done", "parts", "stopped", "scratch", "workers")


class WorkerState(msgspec.Struct, kw_only=True):
    """A process's status; `beat` changes with every write, to show that it is alive."""

    piece: str = ""
    finished_bytes: int = 0
    piece_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    started: float = 0.0
    heard: float = 0.0
    beat: int = 0


@dataclass(frozen=True)
class Claim:
    """A piece of work that this process has taken."""

    piece: str
    attempt: int
    path: Path


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
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return "gone"
    except (OSError, ValueError):
        pass
    else:
        return "gone" if fields[0] in "ZX" else fields[19]
    try:  # a system without /proc
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except PermissionError:
        pass
    return "0"


def is_running(worker: str) -> bool | None:
    """Returns whether a process of this machine is alive; None if it is on another machine."""
    machine, pid, start = worker.rsplit("-", 2)
    if machine != _machine():
        return None
    return start != "gone" and _start_of(int(pid)) == start


class WorkFolder:
    """A work folder, as one process sees it."""

    def __init__(self, path: Path, worker: str, stale_seconds: float = STALE_SECONDS) -> None:
        self.path = path
        self.worker = worker
        self.parts = path / "parts"
        self.scratch = path / "scratch" / worker
        self._stale_seconds = stale_seconds
        self._before: frozenset[str] = frozenset()
        # By process: what it said last, when that changed, when it was looked at.
        self._seen: dict[str, tuple[bytes | None, float, float]] = {}

    @staticmethod
    def create(path: Path, plan: str, pieces: list[str], worker: str) -> None:
        """Creates the folder with all its pieces atomically, unless another process was first.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        draft = path.with_name(f"{path.name}.draft-{worker}")
        try:
            for name in _FOLDERS:
                (draft / name).mkdir(parents=True)
            for piece in pieces:
                (draft / "todo" / f"{piece}.0").touch()
            publish_text(draft / "plan.json", plan)
            draft.rename(path)
        except OSError as error:
            if not path.exists():
                hint = f"{SPACE}, or write to another folder"
                raise MachineError(f"{path} cannot be made: {error.strerror}", hint) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def renew(
        self,
        plan: str,
        pieces: list[str],
        find_kept: Callable[[Path], dict[str, str]],
    ) -> None:
        """Switches the folder to another plan, and keeps finished pieces.

        Meanwhile it has another name, so that processes of the old plan lose it and those of the
        new one wait for it.

        Args:
            plan: the text to create it with; if it has it already, another process was faster.
            pieces: all pieces of the new plan.
            find_kept: takes the folder of results; maps the pieces to keep to their new names.

        Raises:
            MachineError: the disk is full or the folder cannot be written.
        """
        draft = self.path.with_name(f"{self.path.name}.renew-{self.worker}")
        old = draft / "old"
        try:
            if self.read_plan() == plan.encode():
                return
            self.path.rename(draft)
        except FileNotFoundError:
            return
        with explain_disk_errors(draft):
            old.mkdir()
            for name in _FOLDERS:
                (draft / name).rename(old / name)
                (draft / name).mkdir()
            kept = find_kept(old / "done")
            for path in [*(old / "parts").iterdir(), *(old / "done").iterdir()]:
                piece, dot, rest = path.name.partition(".")
                if piece in kept:
                    path.rename(draft / path.parent.name / f"{kept[piece]}{dot}{rest}")
            for piece in set(pieces).difference(kept.values()):
                (draft / "todo" / f"{piece}.0").touch()
            publish_text(draft / "plan.json", plan)
            shutil.rmtree(old)
            draft.rename(self.path)

    def wait_for_renewal(self) -> None:
        """Waits as long as another process renews the folder."""
        pattern = f"{glob.escape(self.path.name)}.renew-*"
        while any(
            self._is_alive(left.name.removeprefix(f"{self.path.name}.renew-"))
            for left in self.path.parent.glob(pattern)
        ):
            time.sleep(_RENEWAL_SECONDS)

    def read_plan(self) -> bytes:
        """Returns the text that the folder was created with; FileNotFoundError without a folder."""
        return (self.path / "plan.json").read_bytes()

    def join(self) -> None:
        """Announces this process; to be called before it claims."""
        self.scratch.mkdir(exist_ok=True)
        self.beat(WorkerState(started=time.time()))
        self._before = frozenset(self.names("done"))

    def is_done(self, piece: str) -> bool:
        """Returns whether a piece is finished."""
        return (self.path / "done" / piece).exists()

    def is_of_before(self, piece: str) -> bool:
        """Returns whether a piece was done before this process joined, or no longer is."""
        return piece in self._before or not self.is_done(piece)

    def redo(self, piece: str) -> None:
        """Puts a finished piece back, unless another process did."""
        with suppress(FileNotFoundError):
            (self.path / "done" / piece).rename(self.path / "todo" / f"{piece}.0")

    def is_joined(self) -> bool:
        """Returns whether this is still the folder that this process joined."""
        return (self.path / "workers" / self.worker).exists()

    def leave(self) -> None:
        """Removes this process's scratch folder, if it still exists."""
        shutil.rmtree(self.scratch, ignore_errors=True)

    def names(self, folder: str) -> list[str]:
        """Lists the files in one of the folders, sorted; what begins with a dot is not ours."""
        return sorted(name for name in os.listdir(self.path / folder) if name[0] != ".")  # noqa: PTH208 (59,000 names)

    def claim(self, name: str) -> Claim | None:
        """Claims an entry of `todo`; None if another process was faster."""
        piece, _, attempt = name.rpartition(".")
        mine = self.path / "claimed" / f"{name}@{self.worker}"
        with suppress(FileNotFoundError):
            (self.path / "todo" / name).rename(mine)
            return Claim(piece, int(attempt), mine)
        if not self.path.exists():
            raise FileNotFoundError(self.path)
        return None

    def finish(self, claim: Claim, result: bytes) -> None:
        """Records that a piece is done, after its files have their final names."""
        publish_text(self._unique("done", claim.piece), result.decode())
        self._unique("done", claim.piece).rename(self.path / "done" / claim.piece)
        claim.path.unlink(missing_ok=True)

    def stop(self, claim: Claim, reason: bytes) -> None:
        """Records that a piece cannot be done, and why."""
        publish_text(self._unique("stopped", claim.piece), reason.decode())
        self._unique("stopped", claim.piece).rename(self.path / "stopped" / claim.piece)
        claim.path.unlink(missing_ok=True)

    def _unique(self, folder: str, piece: str) -> Path:
        return self.scratch / f"{folder}-{piece}"

    def release(self, claim: Claim) -> None:
        """Returns a piece that was not finished through no fault of its own."""
        with suppress(OSError):
            claim.path.rename(self.path / "todo" / f"{claim.piece}.{claim.attempt}")

    def retry_stopped(self) -> None:
        """Puts every piece that stopped back, for a new attempt by hand."""
        for piece in self.names("stopped"):
            (self.path / "todo" / f"{piece}.0").touch()
            (self.path / "stopped" / piece).unlink(missing_ok=True)

    def find_lost(self, pieces: list[str]) -> None:
        """Puts pieces back that a crash of the file system left nowhere."""
        # In the order in which a piece moves, so that it is met at least once.
        names = [self.names(folder) for folder in ("todo", "claimed", "done", "stopped")]
        known = {name.partition("@")[0].partition(".")[0] for name in chain(*names)}
        for piece in set(pieces) - known:
            (self.path / "todo" / f"{piece}.0").touch()

    def forgive(self) -> None:
        """Forgets earlier attempts, for a new attempt by hand."""
        for name in self.names("todo"):
            piece, _, attempt = name.rpartition(".")
            if attempt != "0":
                with suppress(FileNotFoundError):
                    (self.path / "todo" / name).rename(self.path / "todo" / f"{piece}.0")

    def take_back(self, worker: str | None = None, *, count: bool = True) -> None:
        """Puts the claims of a worker back, or of all that are dead.

        Args:
            worker: whose; None: of all that are dead.
            count: whether this was an attempt that failed.

        Raises:
            MachineError: a piece ended as many workers as it may.
        """
        claims = self.names("claimed")
        for name in claims if worker is not None else self._watched(claims):
            claimed, _, owner = name.rpartition("@")
            if worker != owner and (worker is not None or self._is_alive(owner)):
                continue
            piece, _, attempt = claimed.rpartition(".")
            path = self.path / "claimed" / name
            if worker is not None or owner.startswith(f"{_machine()}-"):  # dead for certain
                # Half-written parts take space, which may be just what is lacking.
                shutil.rmtree(self.path / "scratch" / owner, ignore_errors=True)
            if (self.path / "done" / piece).exists():
                path.unlink(missing_ok=True)
                continue
            try:
                path.rename(self.path / "todo" / f"{piece}.{int(attempt) + count}")
            except FileNotFoundError:  # finished, or taken back by another, just now
                continue
            if int(attempt) + count >= MAX_ATTEMPTS:
                raise MachineError(
                    f"{MAX_ATTEMPTS} workers died at {piece}, the last one {owner}",
                    "out of memory is the usual reason: use fewer workers; then run the same "
                    "command again",
                )

    def _watched(self, claims: list[str]) -> list[str]:
        """Chooses claims to watch: all of this machine, and a few of others, the same each time."""

        def place(name: str) -> int:
            return -1 if f"@{_machine()}-" in name else hash((self.worker, name)) % 2**32

        n_own = sum(place(name) < 0 for name in claims)
        return sorted(claims, key=place)[: n_own + _WATCHED]

    def _is_alive(self, worker: str, beat: bytes | None = None) -> bool:
        """Returns whether a process is alive; `beat` is its heartbeat, if read just now."""
        runs = is_running(worker)
        if runs is not None:
            return runs
        now = time.monotonic()
        last, since, looked = self._seen.get(worker, (None, now, float("-inf")))
        if beat is None:
            if now - looked < self._stale_seconds / _LOOKS:
                return True
            try:
                beat = (self.path / "workers" / worker).read_bytes()
            except FileNotFoundError:
                beat = b""
        since = since if beat == last else now
        self._seen[worker] = (beat, since, now)
        return beat != last or now - since < self._stale_seconds

    def beat(self, state: WorkerState) -> None:
        """Writes this process's progress."""
        state.beat += 1
        state.heard = time.time()
        draft = self.scratch / "beat"
        draft.write_bytes(msgspec.json.encode(state))
        draft.rename(self.path / "workers" / self.worker)

    def read_states(self) -> dict[str, tuple[WorkerState, bool]]:
        """Reads what every process said last, and whether it is alive as far as can be seen."""
        states = {}
        for name in self.names("workers"):
            with suppress(FileNotFoundError, msgspec.MsgspecError):
                text = (self.path / "workers" / name).read_bytes()
                states[name] = (
                    msgspec.json.decode(text, type=WorkerState),
                    self._is_alive(name, text),
                )
        return states

    def remove(self) -> None:
        """Removes the folder, atomically for other processes."""
        away = self.path.with_name(f"{self.path.name}.done-{self.worker}")
        with suppress(FileNotFoundError):
            self.path.rename(away)
        shutil.rmtree(away, ignore_errors=True)

    def sweep(self) -> None:
        """Removes leftovers of processes killed while creating or removing the folder."""
        for left in self.path.parent.glob(f"{glob.escape(self.path.name)}.*-*-*-*"):
            kind, _, worker = left.name.removeprefix(f"{self.path.name}.").partition("-")
            is_draft = kind in ("draft", "renew")
            if kind == "done" or (is_draft and not self._is_alive(worker)):
                shutil.rmtree(left, ignore_errors=True)
