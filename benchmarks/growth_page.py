"""The table of docs/growth.md and its picture, by the record of `growth.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainyard.units import format_bytes

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks" / "records" / "suite-growth.json"
PAGE = ROOT / "docs" / "growth.md"
PICTURE = ROOT / "docs" / "pictures" / "growth.svg"
MARKERS = ("<!-- growth.py --table writes this -->\n", "<!-- to here -->\n")
HEAD = """| input | sizes | cost | at the smallest | at the largest | slope | fixed |
|---|---|---|---|---|---|---|
"""
STEEP = 1.1
"""A slope above this is growth faster than the input; below, it may be noise."""
LINE_GAP = 0.12

Figures = dict[str, Any]


def show(value: float, unit: str) -> str:
    """Formats a cost."""
    if unit == "bytes":
        return format_bytes(value)
    return f"{value:,.0f}" if unit == "count" else f"{value:.2g} s"


def show_slope(cost: Figures) -> str:
    """Formats a slope, without the sign of a zero."""
    return f"{cost['slope'] + 0.0:.2f}".replace("-0.00", "0.00")


def rows(record: Figures) -> Iterator[str]:
    """Yields a row of the table for each cost."""
    for cell in record["cells"].values():
        for name, cost in cell["costs"].items():
            sizes, values, unit = cost["sizes"], cost["values"], cost["unit"]
            slope = show_slope(cost)
            yield " | ".join(
                [
                    f"| {cell['counted']}",
                    f"{sizes[0]:,} to {sizes[-1]:,}",
                    f"{name}, CPU" if unit == "CPU s" else name,
                    show(values[0], unit),
                    show(values[-1], unit),
                    f"**{slope}**" if cost["slope"] > STEEP else slope,
                    f"{cost['fixed_share']:.0%} |\n",
                ]
            )


def render_table(record: Figures) -> str:
    """Renders the table, after the commit and machine of the record."""
    source = f"Commit {record['commit']}, {record['date']}, {record['machine']}"
    for cell in record["cells"].values():  # measured anew, alone
        if "commit" in cell:
            source += f"; {cell['counted']}: commit {cell['commit']}, {cell['date']}"
    return f"{source}.\n\n{HEAD}{''.join(rows(record))}"


def write_page(record: Figures) -> None:
    """Writes the table between its markers, and draws the picture."""
    before, rest = PAGE.read_text(encoding="utf-8").split(MARKERS[0])
    _, after = rest.split(MARKERS[1])
    text = before + MARKERS[0] + render_table(record) + MARKERS[1] + after
    PAGE.write_text(text, encoding="utf-8")
    draw(record, PICTURE)


def draw(record: Figures, path: Path) -> None:
    """Draws each cost over its input, in multiples of that at the smallest size."""
    from matplotlib.figure import Figure

    from trainyard.report.pictures import MUTED, drawing_style

    cells = list(record["cells"].values())
    n_rows = -(-len(cells) // 2)
    with drawing_style():
        figure = Figure(figsize=(10, 2.5 * n_rows), facecolor="white")
        grid = figure.subplots(n_rows, 2, squeeze=False)
        figure.subplots_adjust(
            left=0.06,
            right=0.79,
            top=1 - 0.14 / n_rows,
            bottom=0.16 / n_rows,
            hspace=0.5,
            wspace=1.1,
        )
        for axes, cell in zip(grid.flat, cells, strict=False):
            draw_cell(axes, cell)
        for axes in grid.flat[len(cells) :]:
            axes.axis("off")
            text = "Dashed: slope 1, as the input grows.\nNumbers: slopes at the largest sizes."
            axes.text(0, 0.8, text, color=MUTED, va="top")
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=110, metadata=metadata)


def draw_cell(axes: Any, cell: Figures) -> None:
    """Draws the costs of a cell, each with its name and slope at its end."""
    from matplotlib.ticker import NullLocator

    from trainyard.report.pictures import MUTED, RUN_COLOURS, TEXT
    from trainyard.units import format_large

    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(cell["counted"], loc="left", fontsize=9)
    sizes = sorted({size for cost in cell["costs"].values() for size in cost["sizes"]})
    guide = [size / sizes[0] for size in sizes]
    axes.plot(sizes, guide, color=MUTED, linewidth=0.9, linestyle="--")
    lines = []
    for (name, cost), colour in zip(cell["costs"].items(), (*RUN_COLOURS, TEXT), strict=False):
        # A cost that has no value at the smallest size starts on the guide.
        start = cost["sizes"][0] / sizes[0] / cost["values"][0]
        multiples = [value * start for value in cost["values"]]
        axes.plot(cost["sizes"], multiples, color=colour, linewidth=1.3, marker="o", markersize=2.5)
        lines.append((multiples[-1], f"{name} {show_slope(cost)}", colour))
    axes.set_xticks(sizes, [format_large(size) for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    ends = [
        axes.transAxes.inverted().transform(axes.transData.transform((1, y)))[1] for y, *_ in lines
    ]
    for height, (_, text, colour) in zip(spread(ends), lines, strict=True):
        axes.text(
            1.03, height, text, color=colour, fontsize=8, va="center", transform=axes.transAxes
        )


def spread(heights: Sequence[float]) -> list[float]:
    """Moves heights apart, upwards from the lowest, so that lines of text do not overlap."""
    moved = dict.fromkeys(range(len(heights)), 0.0)
    floor = -LINE_GAP
    for number in sorted(moved, key=heights.__getitem__):
        floor = moved[number] = max(heights[number], floor + LINE_GAP)
    over = max(0.0, floor - 1.0)
    return [height - over for height in moved.values()]
