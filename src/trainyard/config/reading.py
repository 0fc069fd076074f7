"""Reads files from untrusted sources: only regular files, and only up to a size limit.

A pipe would block, a device would never end, and a million brackets would crash the interpreter:
each raises an error that callers already handle, an OSError or a ValueError.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

FILE_LIMIT_BYTES = 2**30
SETTINGS_LIMIT_BYTES = 16 * 2**20


def open_file(path: Path) -> BinaryIO:
    """Opens an ordinary file, or a link to one, for reading.

    Raises:
        OSError: it cannot be opened, or is a pipe, a device or a folder.
    """
    # Opening a pipe without a writer would block forever.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not an ordinary file", str(path))
    return file


def read_file(path: Path, limit_bytes: int = FILE_LIMIT_BYTES) -> bytes:
    """Reads a whole ordinary file.

    Raises:
        OSError: as `open_file`, or it has more bytes than the limit.
    """
    with open_file(path) as file:
        if os.fstat(file.fileno()).st_size > limit_bytes:
            problem = f"larger than {limit_bytes:,} bytes, which no such file is"
            raise OSError(errno.EFBIG, problem, str(path))
        return file.read()


def parse_json(text: str | bytes) -> Any:
    """Reads JSON.

    Raises:
        ValueError: it is none, is not text, or nests too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
