"""The film of docs/growing.md: its lines, and losses without a jump where the run changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.e2e import growing


@pytest.mark.exhaustive
def test_the_film_plays_and_its_losses_are_continuous(tmp_path: Path) -> None:
    page = growing.PAGE.read_text(encoding="utf-8")
    typed = growing.play(tmp_path)
    assert all(f"$ {line}\n" in page for line, _ in typed)
    assert (tmp_path / "compare.html").exists()
    shown, status = " ".join(typed[-3][1].split()), typed[-2][1]
    assert "from step 200 train.length: 300 steps, before 200 steps" in shown
    assert "data.from_step: 300, before 0" in shown and "schedule.decay: 500 steps" in shown
    assert "base@200 (weights and optimizer, " in status
    seams = growing.find_seams(tmp_path)
    assert len(seams) == 4
    usual = max(growing.usual_changes(tmp_path))
    for seam in seams:
        assert abs(seam.after - seam.before) <= 2 * usual, seam
        assert seam.after < seam.earlier + usual, seam
