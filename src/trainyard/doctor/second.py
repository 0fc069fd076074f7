"""The second process for the file system tests in `filesystem.py`.

    python -P -m trainyard.doctor.second lock PATH       locks the file until it is terminated
    python -P -m trainyard.doctor.second rename PATH     replaces the file repeatedly, then exits

Both print a line once they have started.
"""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path

LOCKED, RENAMED = "lock", "rename"
OLD, NEW = b"o" * 4096, b"n" * 4096
N_RENAMES = 200


def _lock(path: Path) -> None:
    with path.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _say_begun()
        sys.stdin.read()


def _rename(path: Path) -> None:
    _say_begun()
    for number in range(N_RENAMES):
        other = path.with_suffix(".new")
        other.write_bytes(NEW if number % 2 else OLD)
        other.replace(path)


def _say_begun() -> None:
    sys.stdout.write("begun\n")
    sys.stdout.flush()


if __name__ == "__main__":
    (_lock if sys.argv[1] == LOCKED else _rename)(Path(sys.argv[2]))
