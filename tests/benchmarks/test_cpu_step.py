"""The comparison of training steps, in small: all start alike, and the record says who was fast."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_a_step_of_each_family(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    record = tmp_path / "record.json"
    options = ["--cells=gpt2-tiny,llama-tiny", "--rounds=2", "--threads=1", f"--output={record}"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "cpu_step.py"), *options],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    cells = json.loads(record.read_text(encoding="utf-8"))["cells"]
    assert list(cells) == ["gpt2-tiny", "llama-tiny"]
    for found in cells.values():
        assert found["same_mathematics"]
        assert {"ours", "transformers"} <= found["candidates"].keys()
        for row in found["candidates"].values():
            assert row["last_loss"] < row["first_loss"]
