"""Running a script of `benchmarks/` as people do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.waiting import WATCHDOG_SECONDS

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"


def run(script: str, *options: str, folder: Path = ROOT) -> str:
    """Runs a script, or with -m a module, that must succeed; gives what it prints."""
    words = script.split() if script.startswith("-m ") else [str(BENCHMARKS / script)]
    done = subprocess.run(
        [sys.executable, *words, *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def measure(script: str, *options: str) -> dict[str, Any]:
    """Runs a benchmark and gives its record, which must say where it comes from."""
    record: dict[str, Any] = json.loads(run(script, *options))
    assert record["machine"]
    shown = [Path(option).name if "/" in option else option for option in options]
    assert record["command"].split() == ["python", f"benchmarks/{script}", *shown]
    return record
