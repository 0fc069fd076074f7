from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainyard.errors import DataError
from trainyard.launch.lock import find_holder, hold
from trainyard.report.liveness import YOUNG_SECONDS, find_liveness
from trainyard.training.stop import INTERRUPTED


def test_the_lock_tells_who_trains(tmp_path: Path) -> None:
    assert find_holder(tmp_path) == ""
    with hold(tmp_path):
        (tmp_path / "outcome.json").write_text('{"reason": "of an earlier start", "exit_code": 75}')
        found = find_liveness(tmp_path)
        assert found.is_training
        assert found.text.startswith(f"training: process {os.getpid()} on ")
    assert find_holder(tmp_path) == ""
    assert find_liveness(tmp_path).text == "ended: of an earlier start; the same command continues"
    with hold(tmp_path, wait_seconds=0):  # looking took it from nobody
        pass


@pytest.mark.parametrize(
    ("code", "meaning"),
    [
        (0, ""),
        (75, "; the same command continues"),
        (93, "; needs attention before it is started again"),
        ("x", ""),
    ],
)
def test_the_outcome_tells_how_it_ended(tmp_path: Path, code: object, meaning: str) -> None:
    (tmp_path / "outcome.json").write_text(json.dumps({"reason": "why\nat", "exit_code": code}))
    found = find_liveness(tmp_path)
    assert (found.is_training, found.text) == (False, f"ended: why{meaning}")


def test_ctrl_c_stops_a_run(tmp_path: Path) -> None:
    outcome = {"reason": INTERRUPTED.reason, "exit_code": INTERRUPTED.exit_code}
    (tmp_path / "outcome.json").write_text(json.dumps(outcome))
    stopped = "ended: stopped by Ctrl-C; the same command continues"
    assert find_liveness(tmp_path).text == stopped


def test_a_run_that_was_killed_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    found = find_liveness(tmp_path)
    assert not found.is_training
    assert found.text.startswith("not running, reason unknown")


def test_without_locks_the_age_of_the_metrics_has_to_do(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("lock")  # which nobody can open
    assert find_holder(tmp_path) is None
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    assert find_liveness(tmp_path).is_training
    os.utime(metrics, (0, metrics.stat().st_mtime - 2 * YOUNG_SECONDS))
    assert not find_liveness(tmp_path).is_training


def test_a_damaged_outcome_is_named(tmp_path: Path) -> None:
    (tmp_path / "outcome.json").write_text("{")
    with pytest.raises(DataError, match=r"outcome.json cannot be read"):
        find_liveness(tmp_path)
