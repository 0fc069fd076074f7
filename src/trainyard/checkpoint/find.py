"""Finds checkpoints whose manifest and file sizes are correct, without torch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from trainyard.checkpoint.format import MANIFEST, list_checkpoints, read_manifest, step_of
from trainyard.errors import CheckpointError

logger = logging.getLogger("trainyard")


def complete_checkpoints(folder: Path) -> Iterator[Path]:
    """Yields the checkpoints in `folder` with correct manifest and file sizes, newest first.

    Skips others with a warning.
    """
    for path in list_checkpoints(folder):
        problem = problem_of(path)
        if problem:
            logger.warning("skipping %s: %s", path.name, problem)
        else:
            yield path


def problem_of(path: Path) -> str:
    """Returns the problem of a checkpoint's manifest or file sizes, if any."""
    try:
        read_manifest(path)
    except CheckpointError as error:
        return error.problem
    return ""


def newest_checkpoint(folder: Path) -> Path | None:
    """Finds the complete checkpoint of the highest step in `folder`."""
    return next(complete_checkpoints(folder), None)


def find_checkpoint(path: Path) -> Path:
    """Finds the checkpoint that a user names: a step folder, or the newest of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    inner = path / "checkpoints"
    newest = newest_checkpoint(inner if inner.is_dir() else path)
    if newest is None:
        raise CheckpointError(
            f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}",
            "give a run folder, or one of the step-... folders in its checkpoints/",
        )
    return newest
