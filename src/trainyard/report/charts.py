"""What the report draws: curves of one or several runs over the tokens consumed, as plain data.

The page draws a chart with uPlot (`charts.js`), `--png` with matplotlib (`pictures.py`). A curve
with too many points is divided into intervals with equal numbers of points: the line is the mean of
each, the band spans its minimum to maximum, so no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from trainyard.report.history import Curve, EventKind, RunMetrics, is_finite
from trainyard.report.thinning import Thin, thin_out
from trainyard.units import format_large

POINTS_IN_ALL = 12_000
POINTS_IN_A_CURVE = 2000
ABANDONED_POINTS = 300
MARKS_LIMIT = 100
N_COLOURS = 6

HELD_OUT, UNIGRAM, ABANDONED = "held out", "token frequencies alone", "repeated later"
SKIPPED, NOT_A_NUMBER = "skipped steps", "not a number"
MARKS: tuple[tuple[EventKind, str, tuple[int, ...]], ...] = (
    ("restart", "restart", (2, 3)),
    ("rollback", "rollback", (6, 3)),
    ("save failed", "save failed", (6, 2, 2, 2)),
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
)


@dataclass(frozen=True)
class RunCurves:
    """The curves of one run, and losses to compare with, in nats per token, by name."""

    name: str
    metrics: RunMetrics
    baselines: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Series:
    """A line: NaN breaks it. Colours are the names of CSS variables (`style.py`)."""

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
class Chart:
    """One chart with its alternative text."""

    name: str
    title: str
    description: str
    is_logarithmic: bool
    from_zero: bool
    series: list[Series]
    marks: list[Marks]

    def as_json(self) -> dict[str, Any]:
        """Returns the chart for `charts.js`: six digits, null for NaN."""
        return {
            **{key: getattr(self, key) for key in ("name", "is_logarithmic", "from_zero")},
            "series": [
                vars(one) | {"x": np.rint(one.x).tolist(), "y": [_rounded(y) for y in one.y]}
                for one in self.series
            ],
            "marks": [vars(one) | {"x": np.rint(one.x).tolist()} for one in self.marks],
        }


def build_charts(runs: Sequence[RunCurves]) -> list[Chart]:
    """Builds a chart of each quantity over the tokens consumed, all runs in one chart."""
    return [
        build_chart(quantity, runs)
        for quantity in QUANTITIES
        if not quantity.only_if_it_changes or any(_changes(run, quantity.key) for run in runs)
    ]


def build_chart(quantity: Quantity, runs: Sequence[RunCurves]) -> Chart:
    """Builds the chart of one quantity."""
    alone, series, marks = len(runs) == 1, list[Series](), list[Marks]()
    n_points = min(POINTS_IN_A_CURVE, POINTS_IN_ALL // len(runs))
    for number, run in enumerate(runs):
        colour = f"run-{number % N_COLOURS}"
        series += _curves(quantity, run, colour, n_points, number)
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
        lines = dict.fromkeys((name, loss) for run in runs for name, loss in run.baselines.items())
        for name, loss in lines:
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
    quantity: Quantity, run: RunCurves, colour: str, n_points: int, number: int
) -> Iterator[Series]:
    thin = _thin(run.metrics.train, quantity, n_points)
    if len(thin.x):
        yield Series(run.name, colour, "line" if number < N_COLOURS else "thin", thin.x, thin.mean)
    if thin.n_in_each > 1:
        yield Series(run.name, colour, "high", thin.x, thin.high)
        yield Series(run.name, colour, "low", thin.x, thin.low)
    ways = run.metrics.abandoned[:MARKS_LIMIT]
    for way in ways:
        old = _thin(way, quantity, max(2, ABANDONED_POINTS // len(ways)))
        if len(old.x):
            yield Series(ABANDONED, colour, "faint", old.x, old.mean)


def _held_out(metrics: RunMetrics, label: str, colour: str) -> Iterator[Series]:
    found = {
        line["tokens"]: line["loss"]
        for line in metrics.held_out_losses
        if is_finite(line.get("tokens"))
    }
    if found:
        x, y = (np.array(values, float) for values in zip(*sorted(found.items()), strict=True))
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
        at = metrics.train["tokens"][missing]
        yield Marks(NOT_A_NUMBER, colour or "alert", (), _some(at[np.isfinite(at)]))


def _thin(table: Any, quantity: Quantity, n_points: int) -> Thin:
    known = np.isfinite(table["tokens"])
    return thin_out(table["tokens"][known], table[quantity.key][known] / quantity.divisor, n_points)


def _some(values: Curve) -> Curve:
    """Picks as many evenly spaced marks as can be distinguished."""
    n_shown = min(MARKS_LIMIT, len(values))
    return np.array(values[np.linspace(0, len(values) - 1, n_shown).astype(int)])


def _changes(run: RunCurves, key: str) -> bool:
    values = run.metrics.train[key]
    values = values[np.isfinite(values)]
    return bool(len(values)) and values.min() < values.max()


def _rounded(value: float) -> float | None:
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _describe(quantity: Quantity, run: RunCurves) -> str:
    table = run.metrics.train
    known = np.isfinite(table[quantity.key]) & np.isfinite(table["tokens"])
    if not known.any():
        return f"{run.name}: nothing logged."
    x, y = table["tokens"][known], table[quantity.key][known] / quantity.divisor
    return (
        f"{run.name}: from {y[0]:.4g} at {format_large(x[0])} tokens "
        f"to {y[-1]:.4g} at {format_large(x[-1])} tokens."
    )
