"""Tests the guarantees and the speed of the run folder's file system.

Checkpoints and the lock of a run folder need a few guarantees, which network file systems keep,
break, or keep on one machine only. Each is tested in a temporary folder:

    rename   atomic: readers see the whole old or the whole new file; a folder is renamed whole, and
             never replaces one that is not empty
    sync     a file and its folder can be flushed to the disk
    lock     a file locked by who opened it (flock) cannot be locked by who opens it again
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
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainyard.doctor.diagnosis import PASS, REPLACE, WARN, Finding
from trainyard.errors import MachineError, explain_failure
from trainyard.files import flush
from trainyard.units import format_bytes

OLD, NEW = b"o" * 4096, b"n" * 4096
N_RENAMES = 200
PIECE_BYTES = 8 * 2**20
MEMORY_KINDS = ("tmpfs", "ramfs")
QUOTA_SECONDS = 10.0
SHARING_SECONDS, POLL_SECONDS = 10.0, 0.1
"""For a new file to become visible on another machine; NFS caches for some seconds."""
LEAST_FREE_INODES = 10_000
"""A checkpoint has one file per rank and a manifest; several are kept."""
ELSEWHERE = "keep run folders on another file system"


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
    kind, mount, longest = None, None, -1
    with contextlib.suppress(OSError):
        for line in mounts.read_text(encoding="utf-8").splitlines():
            _, point, other_kind, *_ = line.split()
            point = point.replace("\\040", " ")
            # The last of several mounts at one point is visible.
            if path.is_relative_to(point) and len(point) >= longest:
                kind, mount, longest = other_kind, point, len(point)
    return kind, mount


def read_quota(folder: Path, kind: str | None) -> str | None:
    """Returns the user's quota, as printed by the file system's own program."""
    command = ["quota", "-s", "-w"]
    if kind == "lustre":
        command = ["lfs", "quota", "-q", "-h", "-u", getpass.getuser(), str(folder)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=QUOTA_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return "; ".join(" ".join(line.split()) for line in done.stdout.splitlines() if line) or None


def try_guarantees(folder: Path) -> Iterator[Finding]:
    """Tests the guarantees that run folders need, in an empty folder on their file system."""
    for name, attempt, verdict, hint in (
        ("sync", _try_sync, REPLACE, ELSEWHERE),
        ("memory map", _try_map, REPLACE, ELSEWHERE),
        ("rename of a folder", _try_folders, REPLACE, ELSEWHERE),
        ("rename of a file", _try_rename, REPLACE, ELSEWHERE),
        ("lock", _try_lock, WARN, "never train two jobs in one run folder"),
    ):
        try:
            is_kept, text = attempt(folder)
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "?")
            is_kept, text = False, f"{error.strerror or error} ({code})"
            verdict, hint = REPLACE, ELSEWHERE
        yield Finding(name, text, PASS) if is_kept else Finding(name, text, verdict, hint)
    space = os.statvfs(folder)
    if space.f_files and space.f_favail < LEAST_FREE_INODES:
        text = f"{space.f_favail:,} free"
        yield Finding("inodes", text, WARN, "remove old files, or request more")


@contextlib.contextmanager
def locked_file(runs: Path) -> Iterator[Path]:
    """Yields a locked file for other machines to look for; removes it at the end."""
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=runs) as file:
        file.write(NEW)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):  # a file system without locks: `_try_lock` reports it
            fcntl.flock(file, fcntl.LOCK_EX)
        yield Path(file.name).resolve()


def look_for(path: Path) -> Iterator[Finding]:
    """Looks on another machine for the file of `locked_file`, and tries to lock it."""
    deadline = time.monotonic() + SHARING_SECONDS
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    is_same = False
    with contextlib.suppress(OSError):
        is_same = path.read_bytes() == NEW
    if not is_same:
        text = f"{path.parent} is not the folder that the first machine sees"
        hint = "set a folder for runs that all machines share: --folder"
        yield Finding("shared folder", text, REPLACE, hint)
        return
    yield Finding("shared folder", "files of the first machine are visible", PASS)
    name, text = "lock between machines", "does not exclude another machine"
    hint = "never train two jobs in one run folder; Lustre: mount it with -o flock"
    # `_try_lock` reports a file system without locks.
    with path.open("rb+") as file, contextlib.suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Finding(name, "excludes another machine", PASS)
        else:
            yield Finding(name, text, WARN, hint)


def measure_rates(
    folder: Path, n_bytes: int, wait: Callable[[], None] = lambda: None
) -> tuple[float, float, str]:
    """Writes a file and reads it back.

    Args:
        folder: folder of the temporary file.
        n_bytes: its size, at least one piece.
        wait: a barrier of all ranks.

    Returns:
        bytes written and bytes read per second, and how the page cache was bypassed.

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
    return total / write_seconds, total / read_seconds, how


def _write(path: Path, piece: mmap.mmap, n_pieces: int) -> float:
    start = time.perf_counter()
    with path.open("xb") as file:
        for number in range(n_pieces):
            file.write(piece)
            file.flush()
            if hasattr(os, "posix_fadvise"):  # not on macOS; as `checkpoint.shard` does
                begin = number * PIECE_BYTES
                os.posix_fadvise(file.fileno(), begin, PIECE_BYTES, os.POSIX_FADV_DONTNEED)
        os.fsync(file.fileno())
    return time.perf_counter() - start


def _read(path: Path, piece: mmap.mmap) -> tuple[float, str]:
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


def _try_sync(folder: Path) -> tuple[bool, str]:
    seconds = []
    for number in range(5):
        with (folder / f"synced-{number}").open("xb") as file:
            file.write(b"x" * 4096)
            file.flush()
            start = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    flush(folder)
    milliseconds = 1000 * statistics.median(seconds)
    return True, f"of 4 KiB takes {milliseconds:.2g} ms, of the folder works"


def _try_map(folder: Path) -> tuple[bool, str]:
    path = folder / "mapped"
    path.write_bytes(NEW)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        is_same = mapped[:] == NEW
    return is_same, "works" if is_same else "shows different bytes from the file"


def _try_folders(folder: Path) -> tuple[bool, str]:
    """Publishes a folder by rename, like a checkpoint, and tries to replace a non-empty one."""
    for name in ("partial", "other"):
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(NEW)
    (folder / "partial").rename(folder / "final")
    if (folder / "final" / "file").read_bytes() != NEW or (folder / "partial").exists():
        return False, "does not move its contents"
    try:
        (folder / "other").rename(folder / "final")
    except OSError:
        return True, "moves it whole, replaces no other folder"
    return False, "replaces a non-empty folder"


def _try_rename(folder: Path) -> tuple[bool, str]:
    """Reads a file while a thread replaces it repeatedly."""
    path = folder / "renamed"
    path.write_bytes(OLD)
    n_reads, contents = 0, set()

    def replace_repeatedly() -> None:
        for number in range(N_RENAMES):
            other = path.with_suffix(".new")
            other.write_bytes(NEW if number % 2 else OLD)
            other.replace(path)

    with ThreadPoolExecutor(1) as pool:
        renames = pool.submit(replace_repeatedly)
        while not renames.done():
            try:
                contents.add(path.read_bytes())
            except FileNotFoundError:
                contents.add(b"")
            n_reads += 1
        renames.result()
    if contents <= {OLD, NEW}:
        return True, f"is atomic ({n_reads} reads)"
    return False, f"leaves it {'missing' if b'' in contents else 'incomplete'} for a moment"


def _try_lock(folder: Path) -> tuple[bool, str]:
    with (folder / "locked").open("wb") as file, (folder / "locked").open("rb+") as again:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True, "excludes another process"
    return False, "does not exclude another process"
