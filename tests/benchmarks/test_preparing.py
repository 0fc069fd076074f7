"""Benchmarks of preparation, in small: what they count holds for few workers and documents too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import WATCHDOG_SECONDS

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def measure(script: str, *options: str) -> dict[str, Any]:
    """Runs a benchmark and gives its record, which must say where it comes from."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *options],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    assert record["machine"]
    assert record["command"].split() == ["python", f"benchmarks/{script}", *options]
    return record


@pytest.mark.exhaustive
def test_many_workers_neither_storm_the_file_system_nor_collide() -> None:
    found = measure("sharing.py", "--workers=128", "--units=140", "--joins=4", "--dead=4")
    assert found["calls_per_second_at_rest_max"] <= 10
    assert found["failed_claims_per_unit_mean"] <= 2
    assert found["progress_calls_per_second"] <= 10
    # The pieces of the dead were taken over: after a minute of silence, not much later.
    assert 120 < found["virtual_seconds"] < 400


def test_each_band_is_compared_alone() -> None:
    found = measure("comparing.py", "--documents=32000", "--bands=3", "--processes=2")
    assert len(found["exact"]["cpu_seconds_of_each"]) == 1
    assert len(found["near"]["cpu_seconds_of_each"]) == 3
    assert min(found["near"]["wall_seconds_of_each"]) <= found["near"]["wall_seconds"]
