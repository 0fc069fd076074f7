"""The page of a set in a real browser: no width makes it scroll sideways; all is drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command import call
from tests.report.test_browser import chromium, run_in_frames

from trainyard.cli.report import report

from .conftest import MakeSet

__all__ = ["chromium"]

pytestmark = pytest.mark.exhaustive


def test_at_any_width(make_set: MakeSet, chromium: str) -> None:
    values = ["optimizer.learning_rate=1e-3,2e-3,4e-3", "model.dropout=0,0.1"]
    make_set(values, [3.0, 3.1, 3.2, 3.3, 3.4, 3.5])
    call(report, "web")
    page = Path("runs/web/report.html").resolve()
    widths = (320, 400, 700, 1280)
    measure = """frame => {
      const page = frame.contentDocument, root = page.documentElement;
      const pictures = [...page.querySelectorAll("figure > svg")];
      const height = Math.min(...pictures.map(one => one.getBoundingClientRect().height));
      const charts = page.querySelectorAll("canvas").length;
      return [root.scrollWidth - frame.clientWidth, pictures.length, height > 150, charts > 3];
    }"""
    found = run_in_frames(chromium, page, widths, measure)
    assert found == [[0, 2, True, True]] * len(widths)
