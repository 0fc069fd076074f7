"""Progress on a terminal and in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

import trainyard
from trainyard.log import show_progress


def test_a_file_gets_no_bar_where_colours_are_forced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter and CI systems do
    with show_progress("training", plain_lines=False) as update:
        update(1, 2, "step 1 of 2")
    assert capsys.readouterr().err == ""


def test_every_console_is_built_here() -> None:
    """Consoles of rich print control characters of texts."""
    sources = Path(trainyard.__file__).parent.rglob("*.py")
    found = {path.name for path in sources if "Console(" in path.read_text(encoding="utf-8")}
    assert not found, "use build_console of trainyard.log"
