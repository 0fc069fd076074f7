"""Curves of one or several runs, as SVG for the page and as PNG for papers.

One figure serves both: it is drawn in the colours of the light page. In the SVG each of these
colours is replaced by a CSS variable of the page, so that the drawing turns with the dark mode.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from trainyard.report.metrics import Curve, Metrics, curve
from trainyard.units import format_large

WIDTH_INCHES, HEIGHT_INCHES = 5.4, 3.3
POINTS_IN_A_CURVE = 500
HELD_OUT_POINTS = 50
NATS_TICKS = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 15, 20)
PNG_DOTS_PER_INCH = 200

RESTART, HELD_OUT, UNIGRAM = "restart", "held out", "token frequencies alone"
HELD_OUT_STYLE: Any = {"marker": "o", "markersize": 3.5, "linestyle": ""}

TEXT, MUTED, GRID, CARD = "#1d2430", "#5b6675", "#dde1e7", "#fefefe"
# Okabe and Ito's palette, which colour-blind readers can tell apart, darkened to read on white.
RUN_COLOURS = ("#0b6bb3", "#c2570a", "#11805a", "#9b4a8a", "#8a6d00", "#3b8ea5")
CSS_OF_COLOUR = {
    TEXT: "var(--text)",
    MUTED: "var(--muted)",
    GRID: "var(--grid)",
    CARD: "var(--card)",
    **{colour: f"var(--run-{number})" for number, colour in enumerate(RUN_COLOURS)},
}


@dataclass(frozen=True)
class Quantity:
    """One thing to draw over training, and its key in metrics.jsonl."""

    name: str
    key: str
    title: str
    unit: str = ""
    logarithmic_from: float = math.inf
    """Ratio of greatest to least from which a logarithmic axis shows more."""


QUANTITIES = (
    Quantity("loss", "loss", "Loss", "nats per token", 2),
    Quantity("learning_rate", "learning_rate", "Learning rate"),
    Quantity("throughput", "sequences_per_second", "Throughput", "tokens/s"),
    Quantity("gradient_norm", "gradient_norm", "Gradient norm", "before clipping", 20),
)


@dataclass(frozen=True)
class RunCurves:
    """What is drawn of one run."""

    name: str
    metrics: Metrics
    sequence_length: int
    unigram_loss: float | None

    def values(self, key: str) -> tuple[Curve, Curve]:
        """Gives tokens consumed and one quantity of the training lines."""
        x, y = curve(self.metrics.train, key)
        return x, y * self.sequence_length if key == "sequences_per_second" else y


@dataclass(frozen=True)
class Plot:
    """A finished drawing and the sentence that stands for it where it cannot be seen."""

    name: str
    title: str
    description: str
    figure: Figure


def build_plots(runs: list[RunCurves]) -> list[Plot]:
    """Draws loss, learning rate, throughput and gradient norm over the tokens consumed."""
    return [_build_plot(quantity, runs) for quantity in QUANTITIES]


def render_svg(plot: Plot) -> str:
    """Renders a plot to stand inside a page: text as text, colours from the page's CSS."""
    buffer = io.StringIO()
    with _style():
        FigureCanvasSVG(plot.figure).print_svg(
            buffer, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    # Several drawings share one page: their ids must differ.
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{plot.name}-", svg)
    for colour, variable in CSS_OF_COLOUR.items():
        svg = svg.replace(colour, variable)
    size = re.search(r'viewBox="[^"]*"', svg)
    assert size is not None
    label = escape(f"{plot.title}. {plot.description}", quote=True)
    opening = f'<svg role="img" aria-label="{label}" {size.group()}>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).strip()


def save_png(plot: Plot, folder: Path) -> None:
    """Writes `folder/<name>.png` on white, sized for a column of a paper."""
    buffer = io.BytesIO()
    with _style():
        FigureCanvasAgg(plot.figure)
        plot.figure.savefig(buffer, format="png", dpi=PNG_DOTS_PER_INCH, facecolor="white")
    (folder / f"{plot.name}.png").write_bytes(buffer.getvalue())


@contextmanager
def _style() -> Iterator[None]:
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
        "legend.framealpha": 0.9,
        "axes.unicode_minus": False,
    }
    with mpl.rc_context(settings):
        yield


def _build_plot(quantity: Quantity, runs: list[RunCurves]) -> Plot:
    title = f"{quantity.title} ({quantity.unit})" if quantity.unit else quantity.title
    with _style():
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
        axes = figure.add_subplot()
        for patch in (figure.patch, axes.patch):
            patch.set_alpha(0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("tokens consumed")
        axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))
        for number, run in enumerate(runs):
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            _draw_run(axes, quantity, run, colour)
            if quantity.name == "loss":
                _draw_held_out(axes, run, colour if len(runs) > 1 else RUN_COLOURS[1])
                _draw_unigram_loss(axes, run)
        _scale(axes, quantity, runs)
        _add_legend(axes, runs)
    description = " ".join(_describe(quantity, run) for run in runs)
    return Plot(quantity.name, title, description, figure)


def _draw_run(axes: Any, quantity: Quantity, run: RunCurves, colour: str) -> None:
    x, y = run.values(quantity.key)
    thin_x, middle, low, high = _thin_out(x, y)
    axes.plot(thin_x, middle, color=colour, linewidth=1.3, label=run.name)
    if len(thin_x) < len(x):
        axes.fill_between(thin_x, low, high, color=colour, alpha=0.25, linewidth=0)
    for tokens in run.metrics.tokens_at(run.metrics.restarts):
        axes.axvline(tokens, color=MUTED, linestyle=":", linewidth=1, label=RESTART)


def _draw_held_out(axes: Any, run: RunCurves, colour: str) -> None:
    x, y = curve(run.metrics.evaluations, "loss")
    if len(x):
        x, y, _, _ = _thin_out(x, y, HELD_OUT_POINTS)
        axes.plot(x, y, color=colour, label=HELD_OUT, **HELD_OUT_STYLE)


def _draw_unigram_loss(axes: Any, run: RunCurves) -> None:
    if run.unigram_loss is not None:
        axes.axhline(run.unigram_loss, color=MUTED, linestyle="--", linewidth=1, label=UNIGRAM)


def _thin_out(
    x: Curve, y: Curve, n_points: int = POINTS_IN_A_CURVE
) -> tuple[Curve, Curve, Curve, Curve]:
    """Gives x, mean, least and greatest of as many equal stretches as a drawing can show."""
    if len(x) <= n_points:
        return x, y, y, y
    starts = np.linspace(0, len(x), n_points, endpoint=False).astype(int)
    counts = np.diff([*starts, len(x)])
    x, mean = (np.add.reduceat(values, starts) / counts for values in (x, y))
    return x, mean, np.minimum.reduceat(y, starts), np.maximum.reduceat(y, starts)


def _scale(axes: Any, quantity: Quantity, runs: list[RunCurves]) -> None:
    values = np.concatenate([run.values(quantity.key)[1] for run in runs])
    if not len(values):
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xlim(left=0)
    low, high = values.min(), values.max()
    if quantity.name in ("learning_rate", "throughput"):
        axes.set_ylim(bottom=0, top=1.08 * high or 1)
    elif low > 0 and high > quantity.logarithmic_from * low:
        axes.set_yscale("log")
        if high < 10 * low:  # too short for powers of ten
            axes.yaxis.set_major_locator(FixedLocator(NATS_TICKS))
            axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(_format_tick))


def _add_legend(axes: Any, runs: list[RunCurves]) -> None:
    """Names each kind of line once; names are text, never formulas."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    lines = {run.name: handles[run.name] for run in runs}
    handles = {label: handle for label, handle in handles.items() if label not in lines}
    if len(runs) == 1:
        lines = {"training": lines[runs[0].name]} if HELD_OUT in handles else {}
    elif HELD_OUT in handles:  # each run has its own colour, so the legend shows none
        handles[HELD_OUT] = Line2D([], [], color=MUTED, **HELD_OUT_STYLE)
    handles = {**lines, **handles}
    if handles:
        legend = axes.legend(handles.values(), handles.keys(), fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)


def _format_tick(value: float, _position: int = 0) -> str:
    return "0" if value == 0 else format_large(value)


def _describe(quantity: Quantity, run: RunCurves) -> str:
    x, y = run.values(quantity.key)
    if not len(x):
        return f"{run.name}: nothing logged."
    return (
        f"{run.name}: from {y[0]:.4g} at {format_large(x[0])} tokens "
        f"to {y[-1]:.4g} at {format_large(x[-1])} tokens."
    )
