"""Tests the guarantees and the speed of the run folder's file system.

Checkpoints and the lock of a run folder need a few guarantees, which network file systems keep,
break, or keep on one machine only. Each is tested with a second process (`second.py`), in a
temporary folder:

    rename   atomic: readers see the whole old or the whole new file; a folder is renamed whole, and
             never replaces one that is not empty
    sync     a file and its folder can be flushed to the disk
    lock     a file locked by one process (flock) cannot be locked by another
    map      a file can be memory-mapped, like token files

Speed: each rank writes a file like a checkpoint, in pieces, each submitted to the disk at once, and
flushes it at the end. It reads the file back past the page cache (O_DIRECT) if possible, else after
advising the kernel to drop it.
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
from trainyard.errors import MachineError, explain_failure
from trainyard.units import format_bytes

PIECE_BYTES = 8 * 2**20
MEMORY_KINDS = ("tmpfs", "ramfs")
QUOTA_SECONDS = 10.0
SHARING_SECONDS, POLL_SECONDS = 10.0, 0.1
"""For a new file to become visible on another machine; NFS caches for some seconds."""
LEAST_FREE_INODES = 10_000
"""A checkpoint has one file per rank and a manifest; several are kept."""
ELSEWHERE = "keep run folders on another file system"


@dataclass(frozen=True)
class Rates:
    """Write and read rates of a file, in bytes per second."""

    write: float
    read: float
    read_how: str


@contextlib.contextmanager
def trial_folder(runs: Path) -> Iterator[Path]:
    """Yields a temporary folder inside the runs folder, which it creates if needed.

    Raises:
        MachineError: it cannot be written.
    """
    missing = [each for each in (runs, *runs.parents) if not each.exists()]
    with explain_failure(f"cannot write to {runs}", "set a folder for runs with --folder"):
        runs.mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(prefix=".doctor-", dir=runs))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


def describe_folder(folder: Path) -> dict[str, str]:
    """Describes the file system of a folder and its free space."""
    space = os.statvfs(folder)
    kind, mount = find_mount(folder)
    facts = {
        "folder": str(folder.resolve()),
        "file system": f"{kind}, mounted at {mount}" if kind else "unknown",
        "space": f"{format_bytes(space.f_bavail * space.f_frsize)} free of "
        f"{format_bytes(space.f_blocks * space.f_frsize)}",
        # Some create inodes as needed, and report 0 of 0.
        "inodes": f"{space.f_favail:,} free of {space.f_files:,}" if space.f_files else "as needed",
    }
    quota = read_quota(folder, kind)
    return facts | ({"quota": quota} if quota else {})


def find_mount(
    folder: Path, mounts: Path = Path("/proc/self/mounts")
) -> tuple[str | None, str | None]:
    """Returns the type of a folder's file system, and its mount point."""
    path = folder.resolve()
    found: tuple[str | None, str | None] = (None, None)
    longest = -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, escaped, kind, *_ = line.split()
            place = escaped.replace("\\040", " ")
            # The last of several mounts at one place is visible.
            if path.is_relative_to(place) and len(place) >= longest:
                found, longest = (kind, place), len(place)
    return found


def read_quota(folder: Path, kind: str | None) -> str | None:
    """Returns the user's quota, as printed by the file system's own program."""
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
    """Tests the guarantees that run folders need, in an empty folder on their file system."""
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
    """Yields a locked file for other machines to look for; removes it at the end."""
    descriptor, name = tempfile.mkstemp(prefix=".doctor-", dir=runs)
    path = Path(name).resolve()
    try:
        os.write(descriptor, NEW)
        os.fsync(descriptor)
        with contextlib.suppress(OSError):  # a file system without locks: `_try_lock` reports it
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def look_for(path: Path) -> list[Finding]:
    """Looks on another machine for the file of `locked_file`, and tries to lock it."""
    deadline = time.monotonic() + SHARING_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    try:
        is_same = path.read_bytes() == NEW
    except OSError:
        is_same = False
    if not is_same:
        text = f"{path.parent} is not the folder that the first machine sees"
        hint = "set a folder for runs that all machines share: --folder"
        return [Finding("shared folder", text, REPLACE, hint)]
    found = [Finding("shared folder", "files of the first machine are visible", PASS)]
    with path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                found.append(Finding("lock between machines", "excludes another machine", PASS))
            return found
    text = "does not exclude another machine"
    hint = "never train two jobs in one run folder; Lustre: mount it with -o flock"
    return [*found, Finding("lock between machines", text, WARN, hint)]


def measure_rates(folder: Path, n_bytes: int, wait: Callable[[], None] = lambda: None) -> Rates:
    """Writes a file and reads it back.

    Args:
        folder: folder of the temporary file.
        n_bytes: its size, at least one piece.
        wait: a barrier of all ranks.

    Raises:
        MachineError: the disk is full or failed.
    """
    n_pieces = max(1, n_bytes // PIECE_BYTES)
    path = folder / f"bytes-{os.getpid()}"
    # Page-aligned for O_DIRECT; random like weights, because some file systems compress.
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
            "free space or quota there, or use a smaller file: --gigabytes",
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
    """Reads a whole file; returns the seconds, and how the page cache was bypassed."""
    if hasattr(os, "O_DIRECT"):
        with contextlib.suppress(OSError):  # some file systems have none
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
            return _read_to_end(descriptor, piece), "read past the page cache"
    descriptor = os.open(path, os.O_RDONLY)
    if not hasattr(os, "posix_fadvise") or find_mount(path)[0] in MEMORY_KINDS:
        return _read_to_end(descriptor, piece), "possibly read from memory"
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return _read_to_end(descriptor, piece), "read after advising the kernel to drop it"


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
    return Finding("memory map", "shows different bytes from the file", REPLACE, ELSEWHERE)


def _try_folders(folder: Path) -> Finding:
    """Publishes a folder by rename, like a checkpoint, and tries to replace a non-empty one."""
    for name in ("partial", "other"):
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(NEW)
    (folder / "partial").rename(folder / "final")
    if (folder / "final" / "file").read_bytes() != NEW or (folder / "partial").exists():
        return Finding("rename of a folder", "does not move its contents", REPLACE, ELSEWHERE)
    try:
        (folder / "other").rename(folder / "final")
    except OSError:
        return Finding("rename of a folder", "moves it whole, replaces no other folder", PASS)
    return Finding("rename of a folder", "replaces a non-empty folder", REPLACE, ELSEWHERE)


def _try_rename(folder: Path) -> Finding:
    """Reads a file while a second process replaces it repeatedly."""
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
        return Finding("rename of a file", f"is atomic ({n_reads} reads)", PASS)
    problem = "missing" if b"" in seen else "incomplete"
    return Finding("rename of a file", f"leaves it {problem} for a moment", REPLACE, ELSEWHERE)


def _try_lock(folder: Path) -> Finding:
    path = folder / "locked"
    path.touch()
    with _second(LOCKED, path), path.open("rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Finding("lock", "excludes another process", PASS)
    hint = "never train two jobs in one run folder"
    return Finding("lock", "does not exclude another process", WARN, hint)


@contextlib.contextmanager
def _second(task: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a second process during the block; it has started when the block begins."""
    command = [sys.executable, "-P", "-m", "trainyard.doctor.second", task, str(path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            assert process.stdout and process.stderr
            if not process.stdout.readline():  # it prints a line once it has started
                said = process.stderr.read().decode(errors="replace").splitlines()
                raise OSError(errno.EIO, f"a second process failed: {said[-1] if said else ''}")
            yield process
        finally:
            process.kill()


def _check_room(folder: Path) -> list[Finding]:
    space = os.statvfs(folder)
    if space.f_files and space.f_favail < LEAST_FREE_INODES:
        text = f"{space.f_favail:,} free"
        return [Finding("inodes", text, WARN, "remove old files, or request more")]
    return []
