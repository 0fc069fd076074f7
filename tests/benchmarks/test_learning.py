"""What learns best, in small: what the record says follows from the held-out losses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.exhaustive
def test_tokens_to_the_loss_of_the_baseline(tmp_path: Path) -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    text = tmp_path / "pages.txt"
    text.write_text("\n\n".join(page.read_text(encoding="utf-8") for page in pages))
    options = ["--steps=20", "--seeds=1", "--rates", "0.004", "0.008"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "learning.py"), str(text), *options],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["machine"]
    assert record["command"].split()[2] == "pages.txt"
    for kind in ("gpt3 adamw", "gpt3 muon", "modern adamw", "modern muon"):
        found = record[kind]
        grid = found["final_loss_by_learning_rate"]
        assert list(grid) == ["0.004", "0.008"]
        assert grid[str(found["learning_rate"])] == min(grid.values()) == found["final_losses"][0]
        assert [losses[-1][1] for losses in found["held_out"]] == found["final_losses"]
        for tokens, losses in zip(found["tokens_to_target"], found["held_out"], strict=True):
            reached = min(loss for _, loss in losses) <= record["target_loss"]
            assert 0 < tokens <= 20 * 32 * 64 if reached else tokens is None
        if found["tokens_to_target"][0] is not None:
            (baseline,) = record["gpt3 adamw"]["tokens_to_target"]
            ratio = found["tokens_to_target"][0] / baseline
            assert found["tokens_over_baseline"] == pytest.approx(ratio, abs=1e-3)
    assert record["target_loss"] == max(record["gpt3 adamw"]["final_losses"])
