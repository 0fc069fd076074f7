"""What the report draws: curves of one or several runs over the tokens consumed, as plain data.

The page draws a chart with uPlot (`charts.js`), `--png` with matplotlib (`pictures.py`). A curve
with too many points is divided into intervals with equal numbers of points: the line is the mean of
each, the band spans its minimum to maximum, so no spike is lost. Six points as three intervals:

    x      1  2  3  4  5  6        x     1.5  3.5  5.5
    y      4  6  5  9  3  3        mean  5    7    3
                                   low   4    5    3
                                   high  6    9    3

Maps show the load of experts by colour: over the mean of a block, of its busiest expert for every
block, and of every expert for the block that is the least balanced in the newer half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainyard.report.metrics import Curve, EventKind, RunMetrics, Table, is_finite
from trainyard.report.run_view import RunView
from trainyard.units import format_large

POINTS_IN_ALL = 12_000
POINTS_IN_A_CURVE = 2000
ABANDONED_POINTS = 300
MARKS_LIMIT = 100
MAP_COLUMNS = 200
LEAST_MOST = 2.0
"""Colours span at least half to twice the mean, so that noise looks like noise."""
N_COLOURS = 6

HELD_OUT, UNIGRAM, ABANDONED = "held out", "token frequencies alone", "repeated later"
SKIPPED, NOT_A_NUMBER = "skipped steps", "not a number"
MARKS: tuple[tuple[EventKind, str, tuple[int, ...]], ...] = (
    ("restart", "restart", (2, 3)),
    ("rollback", "rollback", (6, 3)),
    ("save failed", "save failed", (6, 2, 2, 2)),
    ("dead experts", "dead experts", (1, 3)),
    ("skipped", SKIPPED, ()),
)

Style = Literal["line", "dashed", "thin", "points", "faint", "low", "high"]


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
    divisor: float = 1.0


LOSS = Quantity("loss", "loss", "Loss", "nats per token", 2)
QUANTITIES = (
    LOSS,
    Quantity("learning_rate", "learning_rate", "Learning rate", from_zero=True),
    Quantity("gradient_norm", "gradient_norm", "Gradient norm", "before clipping", 20),
    Quantity(
        *("throughput", "tokens_per_second_per_device", "Throughput", "tokens/s per device"),
        from_zero=True,
    ),
    Quantity(
        *("memory", "memory_bytes", "Peak memory", "GiB, device or process"),
        from_zero=True,
        divisor=2.0**30,
    ),
    Quantity("loss_scale", "loss_scale", "Loss scale", "fp16", 4, only_if_it_changes=True),
    Quantity(
        *("expert_imbalance", "expert_imbalance", "Busiest expert", "times the mean load", 4),
        only_if_it_changes=True,
    ),
)


@dataclass(frozen=True)
class Series:
    """A line: NaN breaks it. Colours are the names of CSS variables (`style.css`)."""

    label: str
    colour: str
    style: Style
    x: Curve
    y: Curve


@dataclass(frozen=True)
class Marks:
    """Places on the x axis: lines across the chart, or short ticks at its foot without dashes."""

    label: str
    colour: str
    dash: tuple[int, ...]
    x: Curve


@dataclass(frozen=True)
class LoadMap:
    """Loads over the mean, as colours; its columns lie between the x of its chart's only series."""

    row: str
    """What a row is: a block or an expert."""
    first: int
    """The number of the first row."""
    most: float
    """The greatest load, which has the full colour."""
    values: Curve
    """(rows, columns)."""

    def as_json(self) -> dict[str, Any]:
        """Returns the map for `charts.js`: three digits."""
        rows = [[float(f"{value:.3g}") for value in row] for row in self.values]
        return vars(self) | {"values": rows}


@dataclass(frozen=True)
class Chart:
    """One chart with its alternative text."""

    name: str
    title: str
    description: str
    is_logarithmic: bool
    from_zero: bool
    series: list[Series]
    marks: list[Marks]
    load_map: LoadMap | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the chart for `charts.js`: six digits, null for NaN."""
        return {
            **{key: getattr(self, key) for key in ("name", "is_logarithmic", "from_zero")},
            "series": [
                vars(one) | {"x": np.rint(one.x).tolist(), "y": [_rounded(y) for y in one.y]}
                for one in self.series
            ],
            "marks": [vars(one) | {"x": np.rint(one.x).tolist()} for one in self.marks],
            "load_map": self.load_map and self.load_map.as_json(),
        }


@dataclass(frozen=True)
class Thin:
    """Mean, minimum and maximum of each interval of a curve; NaN if it has no number."""

    x: Curve
    mean: Curve
    low: Curve
    high: Curve
    n_in_each: int
    """Points in the longest interval; 1: no point is dropped."""


def build_charts(
    runs: Sequence[RunView], baselines: Mapping[str, float] | None = None
) -> list[Chart]:
    """Builds a chart of each quantity over the tokens consumed, all runs in one chart.

    Args:
        runs: the runs.
        baselines: losses to compare with, in nats per token, by name.
    """
    drawn = list(QUANTITIES)
    for quantity in QUANTITIES:
        values = [run.metrics.train.finite(quantity.key) for run in runs]
        if quantity.only_if_it_changes and not any(map(np.ptp, filter(len, values))):
            drawn.remove(quantity)
    charts = [_build_chart(quantity, runs, baselines or {}) for quantity in drawn]
    for number, run in enumerate(runs):
        title = "" if len(runs) == 1 else f"{run.name}: "
        charts += _load_maps(run, f"experts-{number}", title)
    return charts


def _load_maps(run: RunView, name: str, title: str) -> Iterator[Chart]:
    """Maps the load of experts: of the busiest of each block, and of all in the worst block."""
    loads = run.metrics.expert_loads
    same = [step for step in loads if loads[step].shape == loads[max(loads)].shape]
    if not same:
        return
    starts = np.linspace(0, len(same), min(len(same), MAP_COLUMNS), endpoint=False).astype(int)
    counts = np.add.reduceat([loads[step] for step in same], starts)  # (columns, blocks, E)
    means = counts.mean(2, keepdims=True)
    load = counts / np.where(means > 0, means, 1)
    busiest = load.max(2)
    newer = busiest[len(busiest) // 2 :].mean(0)
    first, worst, best = run.run.model.n_dense_blocks, int(newer.argmax()), int(newer.argmin())
    ends = [same[end - 1] for end in (*starts[1:], len(same))]
    edges = np.concatenate([[0.0], run.metrics.tokens_at(ends)])
    most = max(LEAST_MOST, float(busiest.max()))
    line = Series("load", "muted", "line", edges, np.zeros(len(edges)))
    text = (
        f"{run.name}: in the newer half the busiest expert of block {first + worst} has "
        f"{newer[worst]:.3g} times the mean load, that of block {first + best} {newer[best]:.3g}."
    )
    for what, row, number, values in (
        ("Busiest expert of each block", "block", first, busiest),
        (f"Experts of block {first + worst}, the least balanced", "expert", 0, load[:, worst]),
    ):
        drawn = LoadMap(row, number, most, values.T)
        yield Chart(f"{name}-{row}s", title + what, text, False, False, [line], [], drawn)


def _build_chart(
    quantity: Quantity, runs: Sequence[RunView], baselines: Mapping[str, float]
) -> Chart:
    alone, series, marks = len(runs) == 1, list[Series](), list[Marks]()
    n_points = min(POINTS_IN_A_CURVE, POINTS_IN_ALL // len(runs))
    for number, run in enumerate(runs):
        colour = f"run-{number % N_COLOURS}"
        style: Style = "line" if number < N_COLOURS else "thin"
        series += _curves(quantity, run.metrics, (run.name, colour, style), n_points)
        if quantity is LOSS:
            label = HELD_OUT if alone else f"{run.name}, {HELD_OUT}"
            other = f"run-{(number + (1 if alone else N_COLOURS // 2)) % N_COLOURS}"
            series += _held_out(run.metrics, label, other)
        marks += _marks(quantity, run.metrics, None if alone else colour)
    drawn = np.concatenate([one.y for one in series]) if series else np.empty(0)
    drawn = drawn[np.isfinite(drawn)]
    if not len(drawn):
        series, marks = [], []
    elif quantity is LOSS:
        end = max(float(one.x[-1]) for one in series)
        unigrams = [{UNIGRAM: run.evaluation.get("unigram_loss")} for run in runs]
        lines = [pair for unigram in unigrams for pair in {**unigram, **baselines}.items()]
        for name, loss in dict.fromkeys(lines):
            if loss is not None:
                x, y = np.array([0.0, end]), np.full(2, loss)
                series.append(Series(f"{name}: {loss:.4g}", "muted", "dashed", x, y))
    low, high = (drawn.min(), drawn.max()) if len(drawn) else (0.0, 0.0)
    return Chart(
        quantity.name,
        f"{quantity.title} ({quantity.unit})" if quantity.unit else quantity.title,
        " ".join(_describe(quantity, run) for run in runs),
        bool(low > 0 and high > quantity.logarithmic_from * low),
        quantity.from_zero,
        series,
        sorted(marks, key=lambda one: one.label),  # a legend names each kind once
    )


def _curves(
    quantity: Quantity, metrics: RunMetrics, look: tuple[str, str, Style], n_points: int
) -> Iterator[Series]:
    name, colour, style = look
    thin = thin_out(*_points(quantity, metrics.train), n_points)
    if len(thin.x):
        yield Series(name, colour, style, thin.x, thin.mean)
    if thin.n_in_each > 1:
        yield Series(name, colour, "high", thin.x, thin.high)
        yield Series(name, colour, "low", thin.x, thin.low)
    attempts = metrics.abandoned[:MARKS_LIMIT]
    for attempt in attempts:
        n_of_each = max(2, ABANDONED_POINTS // len(attempts))
        old = thin_out(*_points(quantity, attempt), n_of_each)
        if len(old.x):
            yield Series(ABANDONED, colour, "faint", old.x, old.mean)


def _held_out(metrics: RunMetrics, label: str, colour: str) -> Iterator[Series]:
    losses = {
        line["tokens"]: line["loss"]
        for line in metrics.held_out_losses
        if is_finite(line.get("tokens"))
    }
    if losses:
        x, y = (np.array(values, float) for values in zip(*sorted(losses.items()), strict=True))
        thin = thin_out(x, y, POINTS_IN_A_CURVE // 10)
        yield Series(label, colour, "points", thin.x, thin.mean)


def _marks(quantity: Quantity, metrics: RunMetrics, colour: str | None) -> Iterator[Marks]:
    """Marks the interruptions of a run, in its own colour if there are several runs."""
    for kind, label, dash in MARKS:
        steps = [event.step for event in metrics.events if event.kind == kind]
        if steps:
            alert = colour or ("alert" if kind in ("save failed", "skipped") else "muted")
            yield Marks(label, alert, dash, _some(metrics.tokens_at(steps)))
    missing = ~np.isfinite(metrics.train[quantity.key])
    if missing.any() and not missing.all():
        at = metrics.train.pick(missing).finite("tokens")
        yield Marks(NOT_A_NUMBER, colour or "alert", (), _some(at))


def _points(quantity: Quantity, table: Table) -> tuple[Curve, Curve]:
    """Returns tokens and values, of the lines with a number of tokens."""
    rows = table.pick(np.isfinite(table["tokens"]))
    return rows["tokens"], rows[quantity.key] / quantity.divisor


def thin_out(x: Curve, y: Curve, n_points: int) -> Thin:
    """Divides a curve into at most this many intervals with equal numbers of points."""
    if len(x) <= n_points:
        return Thin(x, y, y, y, 1)
    starts = np.linspace(0, len(x), n_points, endpoint=False).astype(int)
    counts = np.diff([*starts, len(x)])
    is_number = np.isfinite(y)
    n_numbers = np.add.reduceat(is_number.astype(int), starts)
    sums = np.add.reduceat(np.where(is_number, y, 0.0), starts)
    mean = sums / np.maximum(n_numbers, 1)
    low = np.minimum.reduceat(np.where(is_number, y, np.inf), starts)
    high = np.maximum.reduceat(np.where(is_number, y, -np.inf), starts)
    mean, low, high = (np.where(n_numbers, values, np.nan) for values in (mean, low, high))
    return Thin(np.add.reduceat(x, starts) / counts, mean, low, high, int(counts.max()))


def _some(values: Curve) -> Curve:
    """Picks as many evenly spaced marks as can be distinguished."""
    n_shown = min(MARKS_LIMIT, len(values))
    return np.array(values[np.linspace(0, len(values) - 1, n_shown).astype(int)])


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _describe(quantity: Quantity, run: RunView) -> str:
    x, y = _points(quantity, run.metrics.train)
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    if not len(x):
        return f"{run.name}: nothing logged."
    return (
        f"{run.name}: from {y[0]:.4g} at {format_large(x[0])} tokens "
        f"to {y[-1]:.4g} at {format_large(x[-1])} tokens."
    )
