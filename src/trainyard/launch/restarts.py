"""Automatic restarts of a run: unlimited while checkpoints get newer, else at most 3.

    start      newest checkpoint   starts without a newer one
    0          none                                              fails
    1          step-00000040       restart 1 of 3                fails: a new checkpoint is progress
    2          step-00000040       restart 2 of 3                fails
    3          step-00000040       restart 3 of 3                fails
    4                              refused: exit code 93, needs attention

A job script follows the same rule between jobs, in bash (`jobs/lib/starts.sh`), with this limit.
Under torchrun each start is a new process. So the count is in RUN_FOLDER/logs/restarts.json:

    {"newest": 40, "without_progress": 2, "exit_code": null}
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainyard.errors import EXIT_HOLD, GuardError, explain_failure

logger = logging.getLogger("trainyard")

LIMIT = 3
FINAL_CODES = (2, EXIT_HOLD)
"""A restart would not help."""


@dataclass(frozen=True)
class _Record:
    newest: int | None = None
    """Step of the newest complete checkpoint at the last start."""
    without_progress: int = 0
    exit_code: int | None = None
    """Exit code of the last start, if final."""


class Restarts:
    """Counts the starts of a run.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "logs" / "restarts.json"
        self._checkpoints = folder / "checkpoints"

    def begin(self, attempt: int) -> None:
        """Counts a start, for the process that supervises rank 0; logs it from the second on.

        Args:
            attempt: 0 for the first start of a job.

        Raises:
            GuardError: the starts before brought nothing, or ended for a reason that stays.
            MachineError: the count cannot be written.
        """
        if attempt == 0:
            if os.path.exists(self._path):  # noqa: PTH110  # False where it cannot be seen
                self._write(_Record())
            return
        before, newest = self._read(), self._newest()
        if before.exit_code is not None:
            problem = f"the run ended with code {before.exit_code} and is not restarted"
            raise _refusal(problem, before.exit_code)
        has_progress = newest is not None and newest > (
            -1 if before.newest is None else before.newest
        )
        count = 1 if has_progress else before.without_progress + 1
        place = "the beginning" if newest is None else f"step-{newest:08d}"
        if count > LIMIT:
            raise _refusal(f"{LIMIT} restarts from {place} brought no newer checkpoint", EXIT_HOLD)
        self._write(_Record(newest, count))
        logger.warning("restart %d of %d: from %s", count, LIMIT, place)

    def end(self, exit_code: int) -> None:
        """Records how a start ended, for a launcher that restarts on any exit code."""
        if exit_code in FINAL_CODES:
            self._write(replace(self._read(), exit_code=exit_code))

    def _newest(self) -> int | None:
        manifests = self._checkpoints.glob("step-*/manifest.json")
        steps = [re.fullmatch(r"step-(\d+)", path.parent.name) for path in manifests]
        return max((int(found[1]) for found in steps if found), default=None)

    def _read(self) -> _Record:
        try:
            return _Record(**json.loads(self._path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return _Record()

    def _write(self, record: _Record) -> None:
        with explain_failure(f"{self._path} cannot be written"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Parents of several ranks may do this at once.
            new = self._path.with_suffix(f".{socket.gethostname()}.{os.getpid()}")
            new.write_text(json.dumps(asdict(record)) + "\n", encoding="utf-8")
            new.replace(self._path)


def note_refusal(folder: Path, start: str | None, exit_code: int) -> None:
    """Records in the run folder that a start ended for good, for the script that started it.

    A launcher ends the other ranks when one has ended, and may tell the script of those alone.

    Args:
        folder: of the run.
        start: what the script calls this start; None where there is no script.
        exit_code: of this rank.
    """
    if start is not None and exit_code in FINAL_CODES:
        with suppress(OSError):
            (folder / "logs" / f"refused-{start}").write_text(f"{exit_code}\n", encoding="utf-8")


def _refusal(problem: str, exit_code: int) -> GuardError:
    error = GuardError(problem, "see how each attempt ended above, fix that, then start it again")
    error.exit_code = exit_code
    return error
