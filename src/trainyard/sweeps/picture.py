"""Pictures of sets of runs: what a field does; and a law, with its runs, sizes and predictions."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure as Canvas

from trainyard.report.pictures import (
    ALERT,
    HEX_OF_COLOUR,
    MUTED,
    PLAN_INCHES,
    RUN_COLOURS,
    TEXT,
    drawing_style,
    save_picture,
)
from trainyard.sweeps.law import Law, Points
from trainyard.sweeps.results import SetResults
from trainyard.units import format_large

MOST_CURVES, MOST_LABELS, LABEL_CHARACTERS = 12, 6, 14
PANEL_INCHES = (3.2, 2.1)


def draw_effect(results: SetResults, field: str) -> str:
    """Draws the losses of all members that are done over a field, as SVG in colours of a page."""
    means = {one.value: one.mean for one in results.effects if one.field == field}
    try:
        places = {value: float(value) for value in means}
    except ValueError:  # words, at equal distances
        places = {value: float(number) for number, value in enumerate(means)}
    shown = sorted(places, key=places.__getitem__)
    done = [(places[one.values[field]], loss) for one in results.ranked for loss in one.losses]
    with drawing_style():
        figure = Canvas(figsize=PANEL_INCHES, layout="constrained")
        axes = figure.add_subplot()
        if places[shown[0]] > 0:
            axes.set_xscale("log")
        axes.plot(*zip(*done, strict=True), "o", color=RUN_COLOURS[0], alpha=0.6)
        line = [places[value] for value in shown], [means[value] for value in shown]
        axes.plot(*line, color=RUN_COLOURS[1], linewidth=1.3)
        axes.set_ylabel("held-out loss")
        axes.minorticks_off()
        shown = shown if len(shown) <= MOST_LABELS else [shown[0], shown[-1]]
        labels = [value.strip("'\"")[:LABEL_CHARACTERS] for value in shown]
        axes.set_xticks([places[value] for value in shown], labels, parse_math=False)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = file.getvalue()
    for name, colour in (*HEX_OF_COLOUR.items(), ("text", TEXT)):
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def draw_law(path: Path, law: Law, points: Points, asked: Sequence[tuple[float, float]]) -> None:
    """Draws the runs of `points`, the law at their sizes, and predictions with intervals.

    Args:
        path: .png or .svg.
        law: fitted to the runs.
        points: the runs; those that the law leaves out are crosses.
        asked: parameters and tokens of runs to predict; those without a trusted loss are absent.
    """
    n, d, losses = (np.array(values) for values in points[:3])
    asked = [run for run in asked if not law.problems(*run)]
    is_kept = ~np.isin(points.names, list(law.left_out))
    sizes = np.unique(n[is_kept])
    shown = sizes[np.unique(np.linspace(0, len(sizes) - 1, MOST_CURVES).astype(int))]
    with drawing_style():
        figure = Canvas(figsize=(PLAN_INCHES, PLAN_INCHES * 0.6), layout="constrained")
        axes = figure.add_subplot()
        for marks, own in ((".", is_kept), ("x", ~is_kept)):
            axes.plot(6 * n[own] * d[own], losses[own], marks, color=MUTED, markersize=4)
        for number, size in enumerate([] if law.ratio else shown):
            own = is_kept & (n == size)
            tokens = np.geomspace(d[own].min() / 2, d[own].max() * 2)
            curve = [law.predict(size, each).value for each in tokens]
            colour, label = RUN_COLOURS[number % len(RUN_COLOURS)], format_large(size)
            axes.plot(6 * size * tokens, curve, color=colour, linewidth=1, label=label)
            axes.plot(6 * size * d[own], losses[own], ".", color=colour, markersize=6)
        if law.ratio:
            ray = np.geomspace(sizes[0], max([sizes[-1], *(size for size, _ in asked)]))
            curve = [law.predict(size, law.ratio * size).value for size in ray]
            axes.plot(6 * law.ratio * ray**2, curve, linewidth=1, label="law")
        for size, length in asked:
            value, low, high = law.predict(size, length)
            label = f"{format_large(size)} on {format_large(length)}: {value:.3f}"
            place = ([6 * size * length], [value], [[value - low], [high - value]])
            axes.errorbar(*place, fmt="D", color=ALERT, markersize=4, capsize=3, label=label)
        axes.set(xscale="log", xlabel="FLOP: 6 parameters tokens", ylabel="held-out loss")
        axes.legend(fontsize=7.5, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_picture(figure, path)
