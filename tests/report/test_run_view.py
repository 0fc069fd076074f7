from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainyard.errors import DataError
from trainyard.launch.lock import find_holder, hold
from trainyard.report.run_view import YOUNG_SECONDS, find_state
from trainyard.training.stop import INTERRUPTED


def test_the_lock_tells_who_trains(tmp_path: Path) -> None:
    assert find_holder(tmp_path) == ""
    with hold(tmp_path):
        (tmp_path / "outcome.json").write_text('{"reason": "of an earlier start", "exit_code": 75}')
        state, text, outcome = find_state(tmp_path)
        assert (state, outcome) == ("training", {})
        assert text.startswith(f"training: process {os.getpid()} on ")
    assert find_holder(tmp_path) == ""
    state, text, _ = find_state(tmp_path)
    assert (state, text) == ("stopped", "ended: of an earlier start; the same command continues")
    with hold(tmp_path, wait_seconds=0):  # looking took it from nobody
        pass


@pytest.mark.parametrize(
    ("code", "state", "meaning"),
    [
        (0, "done", ""),
        (75, "stopped", "; the same command continues"),
        (93, "held", "; needs attention before it is started again"),
        ("x", "stopped", ""),
    ],
)
def test_the_outcome_tells_how_it_ended(
    tmp_path: Path, code: object, state: str, meaning: str
) -> None:
    outcome = {"reason": "why\nat", "exit_code": code}
    (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    assert find_state(tmp_path) == (state, f"ended: why{meaning}", outcome)


def test_ctrl_c_stops_a_run(tmp_path: Path) -> None:
    outcome = {"reason": INTERRUPTED.reason, "exit_code": INTERRUPTED.exit_code}
    (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    stopped = "ended: stopped by Ctrl-C; the same command continues"
    assert find_state(tmp_path)[:2] == ("stopped", stopped)


def test_a_run_that_was_killed_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    state, text, _ = find_state(tmp_path)
    assert state == "lost"
    assert text.startswith("not running, reason unknown")


def test_without_locks_the_age_of_the_metrics_has_to_do(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("lock")  # which nobody can open
    assert find_holder(tmp_path) is None
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    assert find_state(tmp_path)[0] == "training"
    os.utime(metrics, (0, metrics.stat().st_mtime - 2 * YOUNG_SECONDS))
    assert find_state(tmp_path)[0] == "lost"


def test_a_damaged_outcome_is_named(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text("{")
    with pytest.raises(DataError, match=r"outcome.json cannot be read"):
        find_state(tmp_path)
