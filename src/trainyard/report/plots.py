"""Curves of one or several runs over the tokens consumed, with restarts and rollbacks marked.

A curve with too many points to draw is divided into intervals with equal numbers of points: the
line is the mean of each, the band spans its minimum to maximum, so no spike is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    MaxNLocator,
    MultipleLocator,
    NullLocator,
)

from trainyard.report.history import Curve, EventKind, RunMetrics, Table
from trainyard.report.pictures import ALERT, MUTED, RUN_COLOURS, Plot, drawing_style
from trainyard.report.thinning import Thin, thin_out
from trainyard.units import format_bytes, format_large

SIZE_INCHES = (4.0, 2.6)
"""Of a column of a paper, without the legend; on the page it fills the width of a phone, or a third
of a screen's."""
LEGEND_ROW_INCHES = 0.17
LEGEND_CHARACTERS_PER_INCH = 15
LEGEND_HANDLE_CHARACTERS = 8
NAME_CHARACTERS = 48
POINTS_IN_ALL = 3000
POINTS_IN_A_CURVE = 500
ABANDONED_POINTS = 300
HELD_OUT_POINTS = 60
MARKS_LIMIT = 100
NATS_TICKS = (0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 15, 20)

HELD_OUT, UNIGRAM, ABANDONED = "held out", "token frequencies alone", "repeated later"
HELD_OUT_STYLE: Any = {"marker": "o", "markersize": 3.5, "linestyle": ""}
MARKS: dict[EventKind, tuple[str, str]] = {
    "restart": ("restart", ":"),
    "rollback": ("rollback", "--"),
    "save failed": ("save failed", "-."),
}
LINE_STYLES: tuple[Any, ...] = ("-", (0, (4, 1.5)), (0, (1.5, 1)))
"""Of the first six runs, of the next six, of all others."""
SKIPPED, NOT_A_NUMBER = "skipped steps", "not a number"
RUGS = {SKIPPED: "^", NOT_A_NUMBER: "x"}
"""Markers along the lower edge."""


@dataclass(frozen=True)
class Quantity:
    """One thing to draw over training, and its key in metrics.jsonl."""

    name: str
    key: str
    title: str
    unit: str = ""
    logarithmic_from: float = math.inf
    """Ratio of greatest to least from which a logarithmic axis shows more."""
    from_zero: bool = False
    only_if_it_changes: bool = False


LOSS = Quantity("loss", "loss", "Loss", "nats per token", 2)
MEMORY = Quantity("memory", "memory_bytes", "Peak memory", "device or process", from_zero=True)
QUANTITIES = (
    LOSS,
    Quantity("learning_rate", "learning_rate", "Learning rate", from_zero=True),
    Quantity("gradient_norm", "gradient_norm", "Gradient norm", "before clipping", 20),
    Quantity(
        *("throughput", "tokens_per_second_per_device", "Throughput", "tokens/s per device"),
        from_zero=True,
    ),
    MEMORY,
    Quantity("loss_scale", "loss_scale", "Loss scale", "fp16", 4, only_if_it_changes=True),
)


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run."""

    name: str
    metrics: RunMetrics
    unigram_loss: float | None = None


def build_plots(runs: list[RunCurves]) -> list[Plot]:
    """Draws each quantity over the tokens consumed, all runs in one picture."""
    return [
        build_plot(quantity, runs)
        for quantity in QUANTITIES
        if not quantity.only_if_it_changes or any(_changes(run, quantity.key) for run in runs)
    ]


def build_plot(quantity: Quantity, runs: list[RunCurves], scale: float = 1.0) -> Plot:
    """Draws one quantity.

    Args:
        quantity: what to draw.
        runs: of which.
        scale: of the picture against its usual size; letters stay as they are.
    """
    title = f"{quantity.title} ({quantity.unit})" if quantity.unit else quantity.title
    width, height = SIZE_INCHES
    with drawing_style():
        figure = Figure(figsize=(scale * width, scale * height), layout="constrained")
        axes = figure.add_subplot()
        for patch in (figure.patch, axes.patch):
            patch.set_alpha(0)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlabel("tokens consumed")
        n_points = min(POINTS_IN_A_CURVE, POINTS_IN_ALL // len(runs))
        for number, run in enumerate(runs):
            colour = RUN_COLOURS[number % len(RUN_COLOURS)]
            style = LINE_STYLES[min(number // len(RUN_COLOURS), len(LINE_STYLES) - 1)]
            _draw_run(axes, quantity, run, {"color": colour, "linestyle": style}, n_points)
            _draw_marks(axes, run.metrics, colour if len(runs) > 1 else None)
            if quantity is LOSS:
                _draw_held_out(axes, run, colour if len(runs) > 1 else RUN_COLOURS[1])
                _draw_unigram_loss(axes, run)
        _scale(axes, quantity, runs)
        _add_legend(figure, axes, runs, scale)
    description = " ".join(_describe(quantity, run) for run in runs)
    return Plot(quantity.name, title, description, figure)


def _draw_run(
    axes: Any, quantity: Quantity, run: RunCurves, style: dict[str, Any], n_points: int
) -> None:
    thin = _thin(run.metrics.train, quantity.key, n_points)
    _draw_line(axes, thin, style | {"linewidth": 1.3, "label": run.name})
    if thin.n_in_each > 1:
        axes.fill_between(
            thin.x, thin.low, thin.high, color=style["color"], alpha=0.25, linewidth=0
        )
    n_ways = max(1, len(run.metrics.abandoned))
    for way in run.metrics.abandoned[:MARKS_LIMIT]:
        old = _thin(way, quantity.key, max(2, ABANDONED_POINTS // n_ways))
        _draw_line(axes, old, style | {"linewidth": 0.9, "alpha": 0.45, "label": ABANDONED})
    missing = np.flatnonzero(~np.isfinite(run.metrics.train[quantity.key]))
    if 0 < len(missing) < len(run.metrics.train):
        at = run.metrics.train["tokens"][_some(missing)]
        _draw_rug(axes, at, NOT_A_NUMBER, ALERT)


def _draw_line(axes: Any, thin: Thin, style: dict[str, Any]) -> None:
    axes.plot(thin.x, thin.mean, **style)
    # A number between two that are none has no line to be part of.
    known = np.isfinite(np.concatenate([[np.nan], thin.mean, [np.nan]]))
    alone = known[1:-1] & ~known[:-2] & ~known[2:]
    if alone.any():
        dots = {"color": style["color"], "alpha": style.get("alpha"), "linestyle": ""}
        axes.plot(thin.x[alone], thin.mean[alone], marker=".", markersize=4, **dots)


def _draw_marks(axes: Any, metrics: RunMetrics, colour: str | None) -> None:
    """Marks the interruptions of a run, in its own colour if there are several runs."""
    across = axes.get_xaxis_transform()
    for kind, (label, style) in MARKS.items():
        steps = [event.step for event in metrics.events if event.kind == kind]
        if steps:
            at = metrics.tokens_at(steps)[_some(np.arange(len(steps)))]
            mark = colour or (ALERT if kind == "save failed" else MUTED)
            axes.vlines(
                *(at, 0, 1), transform=across, color=mark, linestyle=style, linewidth=1, label=label
            )
    steps = [event.step for event in metrics.events if event.kind == "skipped"]
    if steps:
        at = metrics.tokens_at(steps)[_some(np.arange(len(steps)))]
        _draw_rug(axes, at, SKIPPED, colour or ALERT)


def _draw_rug(axes: Any, at: Curve, label: str, colour: str) -> None:
    style: Any = {"marker": RUGS[label], "markersize": 4, "linestyle": "", "clip_on": False}
    style["zorder"] = 6  # above the legend
    edge = axes.get_xaxis_transform()
    axes.plot(at, np.full(len(at), 0.02), color=colour, label=label, transform=edge, **style)


def _draw_held_out(axes: Any, run: RunCurves, colour: str) -> None:
    lines = [line for line in run.metrics.held_out_losses if line.get("tokens") is not None]
    if lines:
        x, y = (np.array([line[key] for line in lines], float) for key in ("tokens", "loss"))
        thin = thin_out(x, y, HELD_OUT_POINTS)
        axes.plot(thin.x, thin.mean, color=colour, label=HELD_OUT, **HELD_OUT_STYLE)


def _draw_unigram_loss(axes: Any, run: RunCurves) -> None:
    if run.unigram_loss is not None:
        axes.axhline(
            run.unigram_loss, color=MUTED, linestyle=(0, (6, 2)), linewidth=1, label=UNIGRAM
        )


def _thin(table: Table, key: str, n_points: int) -> Thin:
    known = np.isfinite(table["tokens"])
    return thin_out(table["tokens"][known], table[key][known], n_points)


def _some(rows: Any) -> Any:
    """Picks as many evenly spaced marks as can be distinguished."""
    n_shown = min(MARKS_LIMIT, len(rows))
    return rows[np.linspace(0, len(rows) - 1, n_shown).astype(int)]


def _changes(run: RunCurves, key: str) -> bool:
    values = run.metrics.train[key]
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() < values.max()


def _scale(axes: Any, quantity: Quantity, runs: list[RunCurves]) -> None:
    tables = [table for run in runs for table in (run.metrics.train, *run.metrics.abandoned)]
    values = np.concatenate([table[quantity.key] for table in tables])
    values = values[np.isfinite(values)]
    if not len(values):
        axes.text(0.5, 0.5, "nothing logged", transform=axes.transAxes, ha="center", color=MUTED)
        axes.set(xticks=[], yticks=[])
        return
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))
    low, high = values.min(), values.max()
    if quantity.from_zero:
        axes.set_ylim(bottom=0, top=1.08 * high or 1)
    elif low > 0 and high > quantity.logarithmic_from * low:
        axes.set_yscale("log")
        if high < 10 * low:  # too short for powers of ten
            axes.yaxis.set_major_locator(FixedLocator(NATS_TICKS))
            axes.yaxis.set_minor_locator(NullLocator())
    if quantity is MEMORY:
        step = 2.0 ** math.floor(math.log2(max(high, 1) / 2.5))
        axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.yaxis.set_major_formatter(
        FuncFormatter(_format_memory if quantity is MEMORY else _format_tick)
    )


def _add_legend(figure: Figure, axes: Any, runs: list[RunCurves], scale: float) -> None:
    """Draws a legend of line kinds below the axes, where it hides no data."""
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    lines = {run.name: handles.pop(run.name) for run in runs}
    if len(runs) == 1:
        lines = {"training": lines[runs[0].name]} if handles else {}
    else:  # each run has its own colour, so what all have in common shows none
        common: dict[str, Any] = {label: {"linestyle": style} for label, style in MARKS.values()}
        common |= {HELD_OUT: HELD_OUT_STYLE, ABANDONED: {"linewidth": 0.9, "alpha": 0.45}}
        common |= {label: {"marker": mark, "linestyle": ""} for label, mark in RUGS.items()}
        for label in handles.keys() & common.keys():
            handles[label] = Line2D([], [], color=MUTED, **common[label])
    handles = {**lines, **handles}
    if not handles:
        return
    labels = [_shorten(label) for label in handles]
    width, height = figure.get_size_inches()
    # As many rows as in the usual size, so that a larger picture keeps its proportions.
    n_rows = -(-len(labels) // _legend_columns(labels, width / scale))
    figure.set_size_inches(width, height + scale * LEGEND_ROW_INCHES * n_rows)
    n_columns = _legend_columns(labels, width)
    legend = figure.legend(
        *(handles.values(), labels),
        loc="outside lower left",
        ncols=n_columns,
        fontsize=8,
        columnspacing=1.2,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # names are text, not formulas


def _legend_columns(labels: list[str], width: float) -> int:
    """Finds how many columns of labels fit, filled column by column."""
    room = width * LEGEND_CHARACTERS_PER_INCH
    for n_columns in range(len(labels), 1, -1):
        columns = np.array_split(labels, n_columns)
        if sum(max(map(len, each)) + LEGEND_HANDLE_CHARACTERS for each in columns) <= room:
            return n_columns
    return 1


def _shorten(name: str) -> str:
    """Keeps the end of a long name, the most specific part of a path."""
    return name if len(name) <= NAME_CHARACTERS else f"…{name[1 - NAME_CHARACTERS :]}"


def _format_tick(value: float, _position: int = 0) -> str:
    return "0" if value == 0 else format_large(value)


def _format_memory(value: float, _position: int = 0) -> str:
    return "0" if value == 0 else format_bytes(value).replace(".0 ", " ")


def _describe(quantity: Quantity, run: RunCurves) -> str:
    known = np.isfinite(run.metrics.train[quantity.key]) & np.isfinite(run.metrics.train["tokens"])
    if not known.any():
        return f"{run.name}: nothing logged."
    x, y = run.metrics.train["tokens"][known], run.metrics.train[quantity.key][known]
    return (
        f"{run.name}: from {y[0]:.4g} at {format_large(x[0])} tokens "
        f"to {y[-1]:.4g} at {format_large(x[-1])} tokens."
    )
