"""Whether a run is alive, from its lock and outcome.json, without its processes.

lock is held    outcome.json             the run
yes             (of an earlier start)    is training
no              exists                   has ended, for the reason there
no              missing                  was killed, or lost its machine
unknown         missing                  is training if its metrics are recent
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE
from trainyard.launch.lock import find_holder
from trainyard.report.summary import load_facts
from trainyard.training.stop import INTERRUPTED

YOUNG_SECONDS = 600.0
MEANINGS = {
    str(EXIT_REQUEUE): "; the same command continues",
    str(EXIT_HOLD): "; needs attention before it is started again",
}


@dataclass(frozen=True)
class Liveness:
    """Whether a run is training, with one line of text."""

    is_training: bool
    text: str


def find_liveness(folder: Path) -> Liveness:
    """Finds out whether a process trains in a run folder.

    Raises:
        DataError: its outcome.json is damaged.
    """
    holder = find_holder(folder)
    if holder:
        return Liveness(True, f"training: {holder}")
    outcome = load_facts(folder / "outcome.json")
    if outcome:
        reason = str(outcome.get("reason", "unknown reason")).split("\n")[0]
        if reason == INTERRUPTED.reason:
            return Liveness(False, f"ended: stopped by Ctrl-C{MEANINGS[str(EXIT_REQUEUE)]}")
        return Liveness(False, f"ended: {reason}{MEANINGS.get(str(outcome.get('exit_code')), '')}")
    if holder is None and (age := _metrics_age(folder)) is not None and age < YOUNG_SECONDS:
        return Liveness(True, "probably training: its file system has no locks to check")
    return Liveness(False, "not running, reason unknown: killed, or its machine failed")


def _metrics_age(folder: Path) -> float | None:
    try:
        return time.time() - (folder / "metrics.jsonl").stat().st_mtime
    except OSError:
        return None
