"""What idle workers ask of a shared file system stays small, however many there are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.waiting import WATCHDOG_SECONDS

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sharing.py"


def test_many_workers_neither_storm_the_file_system_nor_collide() -> None:
    sizes = ["--workers=256", "--units=280", "--joins=4", "--dead=4"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["calls_per_second_at_rest_max"] <= 10
    assert found["failed_claims_per_unit_mean"] <= 2
    assert found["progress_calls_per_second"] <= 10
    # The pieces of the dead were taken over: after a minute of silence, not much later.
    assert 120 < found["virtual_seconds"] < 400
