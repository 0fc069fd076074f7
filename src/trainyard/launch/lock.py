"""One job per run folder: a second one is rejected with the name of the holder.

The lock is the kernel's (flock) on the open file RUN_FOLDER/lock, and on the folder, in case that
file is removed; NFS does not lock folders. It lasts as long as any process has them open: the
process that took it, and its workers, which inherit it. So a kill or a crash needs no cleanup, and
no job starts while a worker of the last one lives. The content of the file is only for people and
messages.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from trainyard.errors import LaunchError, explain_failure
from trainyard.files import parse_json
from trainyard.launch.local import wait_until

logger = logging.getLogger("trainyard")

WAIT_SECONDS = 10.0
CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextmanager
def hold(folder: Path, wait_seconds: float = WAIT_SECONDS) -> Iterator[list[int]]:
    """Locks a run folder inside its block; creates the folder.

    Args:
        folder: of the run.
        wait_seconds: for an earlier job to end.

    Yields:
        file descriptors, for the processes that hold the lock as well.

    Raises:
        LaunchError: another process trains there; names it.
        MachineError: the folder cannot be written.
    """
    path = folder / "lock"
    hint = "start in a writable folder with free disk space"
    with explain_failure(f"{path} cannot be written", hint):
        folder.mkdir(parents=True, exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        itself = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if not wait_until(lambda: _lock(file, itself, folder), wait_seconds):
            raise LaunchError(
                f"{folder} is being trained by {_read_holder(file)}",
                "stop that one, or give this run another name",
            )
        now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
        with explain_failure(f"{path} cannot be written", "free some space"):
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(holder).encode(), 0)
        yield [file, itself]
    finally:
        os.close(file)
        os.close(itself)


def find_holder(folder: Path) -> str | None:
    """Returns the holder of a run folder; empty if free, None if unknown."""
    for path in (folder / "lock", folder):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        except OSError:
            return None
        try:
            # Held only briefly; a starting run waits ten seconds for it.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _read_holder(descriptor)
        except OSError:
            return None
        finally:
            os.close(descriptor)
    return ""


def _lock(file: int, itself: int, folder: Path) -> bool:
    """Locks the file and the folder; returns whether nobody else holds them."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in CANNOT_LOCK:
            raise
        logger.warning(
            "the file system of %s has no locks: make sure no other job trains there", folder
        )
        return True
    try:
        fcntl.flock(itself, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # NFS
        pass
    return True


def _read_holder(descriptor: int) -> str:
    try:
        holder = parse_json(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (ValueError, TypeError, KeyError, OSError):
        return "another process"
