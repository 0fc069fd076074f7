"""The benchmark of growth, in small; its page shows what the record says."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import WATCHDOG_SECONDS

from benchmarks import growth_page

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "growth.py"
RECORD = json.loads(growth_page.RECORD.read_text(encoding="utf-8"))
QUICK, OTHERS = ["files", "documents"], ["tensors", "saving", "devices", "depth", "ranks"]


@pytest.mark.parametrize("cells", [QUICK, pytest.param(OTHERS, marks=pytest.mark.exhaustive)])
def test_the_small_form_fits_slopes(cells: list[str], tmp_path: Path) -> None:
    output = tmp_path / "record.json"
    options = ["--small", "--only", *cells, "--output", str(output)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *options],
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(output.read_text(encoding="utf-8"))
    assert record["machine"]
    assert list(record["cells"]) == cells
    for cell in record["cells"].values():
        for cost in cell["costs"].values():
            assert math.isfinite(cost["slope"])
            assert 0 <= cost["fixed_share"] <= 1
            assert len(cost["sizes"]) == len(cost["values"]) >= 2
    check_drawn(record, tmp_path / "growth.svg")
    for name in ("tensors", "saving"):
        if name in cells:  # bytes are the same on every machine
            assert record["cells"][name]["costs"]["manifest"]["slope"] < growth_page.STEEP


def check_drawn(record: growth_page.Figures, path: Path) -> None:
    growth_page.draw(record, path)
    picture = path.read_text(encoding="utf-8")
    table = growth_page.render_table(record)
    for cell in record["cells"].values():
        for name, cost in cell["costs"].items():
            slope = growth_page.show_slope(cost)
            assert f">{name} {slope}<" in picture
            assert f"| {cell['counted']} | " in table and f"| {name}" in table


def test_the_page_shows_the_record() -> None:
    again = "if so: python benchmarks/growth.py --table"
    page = growth_page.PAGE.read_text(encoding="utf-8")
    assert growth_page.render_table(RECORD).join(growth_page.MARKERS) in page, again
    picture = growth_page.PICTURE.read_text(encoding="utf-8")
    for cell in RECORD["cells"].values():
        for name, cost in cell["costs"].items():
            assert f">{name} {growth_page.show_slope(cost)}<" in picture, again


def test_names_at_the_ends_of_lines_do_not_overlap() -> None:
    gap = growth_page.LINE_GAP
    assert growth_page.spread([0.5, 0.5, 0.1]) == pytest.approx([0.5, 0.5 + gap, 0.1])
    high = growth_page.spread([1.0, 1.0, 0.99])
    assert max(high) == pytest.approx(1.0)
    assert sorted(high)[1] - sorted(high)[0] == pytest.approx(gap)
