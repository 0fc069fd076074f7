from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainyard.errors import DataError
from trainyard.launch.lock import find_holder, hold
from trainyard.report.run_view import YOUNG_SECONDS, find_state


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
