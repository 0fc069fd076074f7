"""Training whose ranks are killed anywhere ends as if nothing had happened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

N_KILLS = 20


@pytest.mark.exhaustive
def test_killed_anywhere_nothing_is_lost(tmp_path: Path) -> None:
    """The same with 200 kills: `python -m tests.faults.kill_training`."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.faults.kill_training"),
            *("--kills", str(N_KILLS), "--seed", "5", "--folder", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=WATCHDOG_SECONDS,
        check=False,
    )
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record["failures"] == []
    assert record["kills"] == N_KILLS
    assert record["runs_equal_to_the_last_bit"] == record["runs"] >= 2
    assert done.returncode == 0
