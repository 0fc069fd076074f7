"""Charts as PNG files for papers, and the look of every drawing by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter

from trainyard.report.charts import Chart, Style
from trainyard.units import format_large

SIZE_INCHES = (4.0, 3.0)
NAME_CHARACTERS = 48
PNG_DOTS_PER_INCH = 300

TEXT, MUTED, GRID, CARD, ALERT = "#1d2430", "#5b6675", "#dde1e7", "#fefefe", "#b3261e"
# Okabe and Ito's palette, which colour-blind readers can tell apart, darkened to read on white.
RUN_COLOURS = ("#0b6bb3", "#c2570a", "#11805a", "#9b4a8a", "#8a6d00", "#3b8ea5")
HEX_OF_COLOUR = {
    "muted": MUTED,
    "alert": ALERT,
    **{f"run-{number}": colour for number, colour in enumerate(RUN_COLOURS)},
}
LOOKS: dict[Style, dict[str, Any]] = {
    "line": {"linewidth": 1.3},
    "thin": {"linewidth": 1, "linestyle": (0, (4, 1.5))},
    "dashed": {"linewidth": 1, "linestyle": (0, (6, 2))},
    "points": {"linewidth": 1.3, "marker": "o", "markersize": 3},
    "faint": {"linewidth": 0.9, "alpha": 0.45},
}


def save_png(chart: Chart, folder: Path) -> Path:
    """Writes `folder/<name>.png` on white, sized for a column of a paper."""
    path = folder / f"{chart.name}.png"
    with drawing_style():
        figure = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.set_xlabel("tokens consumed")
        _draw(axes, chart)
        axes.set_yscale("log" if chart.is_logarithmic else "linear")
        for axis, is_plain in ((axes.xaxis, True), (axes.yaxis, not chart.is_logarithmic)):
            axis.set_major_formatter(_format_tick)
            if is_plain:
                axis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_minor_formatter(_format_tick if _is_short(chart) else NullFormatter())
        if chart.from_zero:
            axes.set_ylim(bottom=0)
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        if handles:
            legend = figure.legend(
                handles=list(handles.values()), loc="outside lower left", ncols=2, fontsize=8
            )
            for text in legend.get_texts():
                text.set_parse_math(False)  # names are text, not formulas
        figure.savefig(path, dpi=PNG_DOTS_PER_INCH, facecolor="white")
    return path


def _draw(axes: Any, chart: Chart) -> None:
    for number, one in enumerate(chart.series):
        colour = HEX_OF_COLOUR[one.colour]
        if one.style == "high":
            low = chart.series[number + 1].y
            axes.fill_between(one.x, low, one.y, color=colour, alpha=0.25, linewidth=0)
        elif one.style != "low":
            axes.plot(
                one.x, one.y, color=colour, label=one.label[-NAME_CHARACTERS:], **LOOKS[one.style]
            )
    for mark in chart.marks:
        top, dashes = (1.0, (0, mark.dash)) if mark.dash else (0.04, "-")
        style: Any = {"colors": HEX_OF_COLOUR[mark.colour], "linestyles": [dashes]}
        across = axes.get_xaxis_transform()
        axes.vlines(mark.x, 0, top, transform=across, linewidth=1, label=mark.label, **style)


def _is_short(chart: Chart) -> bool:
    """Whether a logarithmic axis is too short for powers of ten."""
    values = np.concatenate([one.y for one in chart.series]) if chart.series else np.ones(1)
    return chart.is_logarithmic and bool(np.nanmax(values) < 10 * np.nanmin(values))


def _format_tick(value: float, _position: float | None = 0) -> str:
    return "0" if value == 0 else format_large(value)


@contextmanager
def drawing_style() -> Iterator[None]:
    """Sets the fonts and colours of a figure."""
    settings = {
        "svg.fonttype": "none",
        "svg.hashsalt": "trainyard",
        "font.size": 9,
        "text.color": TEXT,
        "axes.titlecolor": TEXT,
        "axes.labelcolor": MUTED,
        "axes.edgecolor": MUTED,
        "xtick.color": MUTED,
        "ytick.color": MUTED,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": GRID,
        "axes.axisbelow": True,
        "legend.edgecolor": "none",
        "legend.facecolor": CARD,
        "legend.framealpha": 0.85,
        "axes.unicode_minus": False,
    }
    with mpl.rc_context(settings):
        yield
