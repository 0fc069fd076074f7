"""What the file system of the run folder does, tried there, and how fast it is.

Checkpoints and the lock of a run folder rest on a few promises, which network file systems keep,
break, or keep on one machine only. Each is tried with a second process (`second.py`), in a folder
of its own that is removed again:

    rename   a file that replaces another is there at every moment, whole, as old or as new; and so
             is a folder, which must not replace one that is not empty
    sync     a file and its folder can be flushed to the disk
    lock     what one process locks (flock), another cannot
    map      a file can be mapped into memory, as token files are

How fast: each rank writes a file as checkpoints are written, in pieces, each handed to the disk at
once, and flushed at the end; and reads it back past the page cache (O_DIRECT) where that can be,
else after asking the kernel to forget it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainyard.doctor.second import LOCKED, NEW, OLD, RENAMED
from trainyard.doctor.verdict import PASS, REPLACE, WARN, Finding
from trainyard.errors import MachineError
from trainyard.units import format_bytes

PIECE_BYTES = 8 * 2**20
MEMORY_KINDS = ("tmpfs", "ramfs")
QUOTA_SECONDS = 10.0
SHARING_SECONDS, POLL_SECONDS = 10.0, 0.1
"""For a new file to be seen on another machine; NFS looks again after some seconds."""
LEAST_FREE_INODES = 10_000
"""A checkpoint is a file a rank, and a manifest; some are kept."""
ELSEWHERE = "keep run folders on another file system"


@dataclass(frozen=True)
class Rates:
    """How fast a file was written and read back, bytes a second."""

    write: float
    read: float
    read_how: str


@contextlib.contextmanager
def trial_folder(runs: Path) -> Iterator[Path]:
    """Yields a folder below the one of the runs, which is made if need be; leaves no trace.

    Raises:
        MachineError: it cannot be written.
    """
    missing = [each for each in (runs, *runs.parents) if not each.exists()]
    try:
        runs.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=".doctor-", dir=runs))
    except OSError as error:
        raise MachineError(
            f"cannot write to {runs}: {error.strerror}", "name a folder for runs with --folder"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


def describe_folder(folder: Path) -> dict[str, str]:
    """Says what file system a folder is on, and how much more it takes."""
    space = os.statvfs(folder)
    kind, mount = find_mount(folder)
    facts = {
        "folder": str(folder.resolve()),
        "file system": f"{kind}, mounted at {mount}" if kind else "unknown",
        "space": f"{format_bytes(space.f_bavail * space.f_frsize)} free of "
        f"{format_bytes(space.f_blocks * space.f_frsize)}",
        # Some make inodes as they need them, and say 0 of 0.
        "inodes": f"{space.f_favail:,} free of {space.f_files:,}" if space.f_files else "as needed",
    }
    quota = read_quota(folder, kind)
    return facts | ({"quota": quota} if quota else {})


def find_mount(
    folder: Path, mounts: Path = Path("/proc/self/mounts")
) -> tuple[str | None, str | None]:
    """Gives the kind of the file system a folder is on, and where it is mounted."""
    path = folder.resolve()
    found: tuple[str | None, str | None] = (None, None)
    longest = -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, escaped, kind, *_ = line.split()
            place = escaped.replace("\\040", " ")
            # Of several mounts at one place the last is seen.
            if path.is_relative_to(place) and len(place) >= longest:
                found, longest = (kind, place), len(place)
    return found


def read_quota(folder: Path, kind: str | None) -> str | None:
    """Asks for the user's quota, in the words of the file system's own program."""
    command = ["quota", "-s", "-w"]
    if kind == "lustre":
        command = ["lfs", "quota", "-q", "-h", "-u", getpass.getuser(), str(folder)]
    if shutil.which(command[0]) is None:
        return None
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUOTA_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(" ".join(line.split()) for line in done.stdout.splitlines() if line) or None


def try_promises(folder: Path) -> list[Finding]:
    """Tries what run folders rest on, in an empty folder on their file system."""
    found = []
    for name, attempt in (
        ("sync", _try_sync),
        ("memory map", _try_map),
        ("rename of a folder", _try_folders),
        ("rename of a file", _try_rename),
        ("lock", _try_lock),
    ):
        try:
            found.append(attempt(folder))
        except OSError as error:
            text = f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, '?')})"
            found.append(Finding(name, text, REPLACE, ELSEWHERE))
    return found + _check_room(folder)


@contextlib.contextmanager
def locked_file(runs: Path) -> Iterator[Path]:
    """Yields a file that other machines can look for; it is locked, and removed in the end."""
    descriptor, name = tempfile.mkstemp(prefix=".doctor-", dir=runs)
    path = Path(name).resolve()
    try:
        os.write(descriptor, NEW)
        os.fsync(descriptor)
        with contextlib.suppress(OSError):  # a file system without locks: `_try_lock` says so
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def look_for(path: Path) -> list[Finding]:
    """Looks on another machine for what `locked_file` made, and tries to lock it too."""
    deadline = time.monotonic() + SHARING_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    try:
        is_same = path.read_bytes() == NEW
    except OSError:
        is_same = False
    if not is_same:
        text = f"{path.parent} is not the one that the first machine sees"
        hint = "name a folder for runs that all machines share: --folder"
        return [Finding("shared folder", text, REPLACE, hint)]
    found = [Finding("shared folder", "what the first machine writes is seen", PASS)]
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                found.append(Finding("lock between machines", "keeps another machine out", PASS))
            return found
    text = "does not keep another machine out"
    hint = "see that no two jobs train in one run folder; Lustre: mount it with -o flock"
    return [*found, Finding("lock between machines", text, WARN, hint)]


def measure_rates(folder: Path, n_bytes: int, wait: Callable[[], None] = lambda: None) -> Rates:
    """Writes a file and reads it back.

    Args:
        folder: for the file, which is removed.
        n_bytes: its size, at least one piece.
        wait: returns when all other ranks are as far.

    Raises:
        MachineError: there is no room, or the disk failed.
    """
    n_pieces = max(1, n_bytes // PIECE_BYTES)
    path = folder / f"bytes-{os.getpid()}"
    # Aligned to pages, as O_DIRECT wants it; random, as weights are: some file systems compress.
    piece = mmap.mmap(-1, PIECE_BYTES)
    piece.write(os.urandom(PIECE_BYTES))
    try:
        wait()
        write_seconds = _write(path, piece, n_pieces)
        wait()
        read_seconds, how = _read(path, piece)
    except OSError as error:
        raise MachineError(
            f"{format_bytes(n_pieces * PIECE_BYTES)} cannot be written to {folder.parent} and read "
            f"back: {error.strerror}",
            "free space or quota there, or a smaller file: --gigabytes",
        ) from error
    finally:
        path.unlink(missing_ok=True)
    total = n_pieces * PIECE_BYTES
    return Rates(total / write_seconds, total / read_seconds, how)


def _write(path: Path, piece: mmap.mmap, n_pieces: int) -> float:
    start = time.perf_counter()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for number in range(n_pieces):
            rest = memoryview(piece)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
            if hasattr(os, "posix_fadvise"):  # not on macOS; as `checkpoint.shard` does
                begin = number * PIECE_BYTES
                os.posix_fadvise(descriptor, begin, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


def _read(path: Path, piece: mmap.mmap) -> tuple[float, str]:
    """Reads a whole file; gives the seconds, and how the page cache was kept out of it."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # some file systems have none
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            return _read_to_end(descriptor, piece), "read past the page cache"
    descriptor = os.open(path, os.O_RDONLY)
    if not hasattr(os, "posix_fadvise") or find_mount(path)[0] in MEMORY_KINDS:
        return _read_to_end(descriptor, piece), "read from memory perhaps"
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return _read_to_end(descriptor, piece), "read when the kernel was asked to forget it"


def _read_to_end(descriptor: int, piece: mmap.mmap) -> float:
    start = time.perf_counter()
    try:
        while os.readv(descriptor, [piece]):
            pass
    finally:
        os.close(descriptor)
    return time.perf_counter() - start


def _try_sync(folder: Path) -> Finding:
    seconds = []
    for number in range(5):
        with (folder / f"synced-{number}").open("xb") as file:
            file.write(b"x" * 4096)
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    milliseconds = 1000 * sorted(seconds)[len(seconds) // 2]
    return Finding("sync", f"of 4 KiB takes {milliseconds:.2g} ms, of the folder works", PASS)


def _try_map(folder: Path) -> Finding:
    path = folder / "mapped"
    path.write_bytes(NEW)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        is_same = mapped[:] == NEW
    if is_same:
        return Finding("memory map", "works", PASS)
    return Finding("memory map", "shows other bytes than the file has", REPLACE, ELSEWHERE)


def _try_folders(folder: Path) -> Finding:
    """Publishes a folder by its rename, as a checkpoint, and tries to replace one that is full."""
    for name in ("partial", "other"):
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(NEW)
    (folder / "partial").rename(folder / "final")
    if (folder / "final" / "file").read_bytes() != NEW or (folder / "partial").exists():
        return Finding("rename of a folder", "does not move what is in it", REPLACE, ELSEWHERE)
    try:
        (folder / "other").rename(folder / "final")
    except OSError:
        return Finding("rename of a folder", "moves it whole, and replaces none", PASS)
    return Finding("rename of a folder", "replaces another that is not empty", REPLACE, ELSEWHERE)


def _try_rename(folder: Path) -> Finding:
    """Reads a file that a second process replaces all the time."""
    path = folder / "renamed"
    path.write_bytes(OLD)
    n_reads, seen = 0, set()
    with _second(RENAMED, path) as second:
        while second.poll() is None:
            try:
                seen.add(path.read_bytes())
            except FileNotFoundError:
                seen.add(b"")
            n_reads += 1
    if seen <= {OLD, NEW}:
        return Finding("rename of a file", f"replaces it at once ({n_reads} reads)", PASS)
    problem = "missing" if b"" in seen else "in pieces"
    return Finding("rename of a file", f"leaves it {problem} for a moment", REPLACE, ELSEWHERE)


def _try_lock(folder: Path) -> Finding:
    path = folder / "locked"
    path.touch()
    with _second(LOCKED, path), path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("lock", "keeps another process out", PASS)
    hint = "see that no two jobs train in one run folder"
    return Finding("lock", "does not keep another process out", WARN, hint)


@contextlib.contextmanager
def _second(task: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Has a second process do something inside the block; it has begun when the block does."""
    command = [sys.executable, "-P", "-m", "trainyard.doctor.second", task, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout and process.stderr
            if not process.stdout.readline():  # it says when it has begun
                said = process.stderr.read().decode(errors="replace").splitlines()
                raise OSError(errno.EIO, f"a second process failed: {said[-1] if said else ''}")
            yield process
        finally:
            process.kill()


def _check_room(folder: Path) -> list[Finding]:
    space = os.statvfs(folder)
    if space.f_files and space.f_favail < LEAST_FREE_INODES:
        text = f"{space.f_favail:,} free"
        return [Finding("inodes", text, WARN, "remove old files, or ask for more")]
    return []
