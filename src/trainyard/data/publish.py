"""Writes small text files atomically."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from trainyard.errors import MachineError


def publish_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file under a temporary name beside it, then renames it.

    Raises:
        MachineError: the disk is full or the folder cannot be written.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # a read-only file system refuses this even for a missing file
            partial.unlink(missing_ok=True)
        hint = "free space or quota, or choose another folder; then run the same command again"
        raise MachineError(f"{path} cannot be written: {error.strerror}", hint) from error
