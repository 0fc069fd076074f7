"""Training whose ranks are killed anywhere ends as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.faults.kill_training import run_all

N_KILLS = 20


@pytest.mark.exhaustive
def test_killed_anywhere_nothing_is_lost(tmp_path: Path) -> None:
    """The same with 200 kills: `python -m tests.faults.kill_training`."""
    record = run_all(N_KILLS, 5, tmp_path)
    assert record["failures"] == []
    assert record["kills"] == N_KILLS
    assert record["runs_equal_to_the_last_bit"] == record["runs"] >= 2
