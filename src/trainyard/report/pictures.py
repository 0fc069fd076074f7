"""Drawings by matplotlib: charts of a run as PNG files for papers, and pictures of a plan.

The picture of a plan shows the memory of each pipeline rank against its capacity and, below it, the
timeline of one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
import numpy as np
from matplotlib import rc_params_from_file
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, NullFormatter

from trainyard.config.devices import GIB
from trainyard.config.run import Run
from trainyard.errors import explain_failure
from trainyard.layout.resolve import Plan
from trainyard.planning.memory import RankMemory
from trainyard.planning.time import StepTime
from trainyard.planning.timeline import Kind, lay_out
from trainyard.report.charts import Chart, Style
from trainyard.units import format_figure, format_large

if TYPE_CHECKING:
    from trainyard.simulate.parametrization import ScalingTable

PNG_INCHES, PNG_DOTS_PER_INCH = (4.0, 3.0), 300
NAME_CHARACTERS = 48

PLAN_INCHES, PLAN_DOTS_PER_INCH = 8.0, 200
ROW_INCHES, LEAST_PANEL_INCHES, MOST_PANEL_INCHES = 0.26, 1.3, 5.0
MOST_LABELLED_PASSES = 200
MOST_RANKS_IN_DETAIL = 8

TEXT, MUTED, ALERT = "#1d2430", "#5b6675", "#b3261e"
# Okabe and Ito's palette, which colour-blind readers can tell apart, darkened to read on white.
RUN_COLOURS = ("#0b6bb3", "#c2570a", "#11805a", "#9b4a8a", "#8a6d00", "#3b8ea5")
HEX_OF_COLOUR = {"muted": MUTED, "alert": ALERT} | {
    f"run-{number}": colour for number, colour in enumerate(RUN_COLOURS)
}
LOOKS: dict[Style, dict[str, Any]] = {
    "line": {"linewidth": 1.3},
    "thin": {"linewidth": 1, "linestyle": (0, (4, 1.5))},
    "dashed": {"linewidth": 1, "linestyle": (0, (6, 2))},
    "points": {"linewidth": 1.3, "marker": "o", "markersize": 3},
    "faint": {"linewidth": 0.9, "alpha": 0.45},
}
# Families by hue: what stays is blue, what passes orange, what the machine takes grey.
COLOUR_OF_ITEM = {
    "weights": "#084a7d",
    "gradients": "#0b6bb3",
    "optimizer": "#5aa5d8",
    "gathered weights": "#a9d1ee",
    "activations": "#9c4408",
    "logits and loss": "#c2570a",
    "recomputing": "#ef9a5a",
    "exchanged activations": "#f8cfae",
    "buffers": "#5b6675",
    "context and libraries": "#b5bdc8",
}
PASSES: dict[Kind, tuple[str, str]] = {
    "F": ("forward", "#0b6bb3"),
    "B": ("backward", "#c2570a"),
    "W": ("gradients of weights", "#11805a"),
}
REST = {"data": ("data ranks", "#8a6d00"), "optimizer": ("optimizer", "#9b4a8a")}
"""What follows the passes of a step."""


@contextmanager
def drawing_style() -> Iterator[None]:
    """Sets the fonts and colours of a figure."""
    file = files("trainyard.report").joinpath("pictures.mplstyle")
    with (
        as_file(file) as path,
        mpl.rc_context(rc_params_from_file(path, use_default_template=False)),
    ):
        yield


def save_png(chart: Chart, folder: Path) -> Path:
    """Writes `folder/<name>.png` on white, sized for a column of a paper."""
    path = folder / f"{chart.name}.png"
    with drawing_style():
        figure = Canvas(figsize=PNG_INCHES, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(chart.title, loc="left", fontsize=10)
        axes.set_xlabel("tokens consumed")
        (_draw_map if chart.load_map else _draw_chart)(axes, chart)
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


def _draw_chart(axes: Any, chart: Chart) -> None:
    for number, one in enumerate(chart.series):
        colour = HEX_OF_COLOUR[one.colour]
        if one.style == "high":
            low = chart.series[number + 1].y
            axes.fill_between(one.x, low, one.y, color=colour, alpha=0.25, linewidth=0)
        elif one.style != "low":
            label = one.label[-NAME_CHARACTERS:]
            axes.plot(one.x, one.y, color=colour, label=label, **LOOKS[one.style])
    for mark in chart.marks:
        top, dashes = (1.0, (0, mark.dash)) if mark.dash else (0.04, "-")
        style: Any = {"colors": HEX_OF_COLOUR[mark.colour], "linestyles": [dashes]}
        across = axes.get_xaxis_transform()
        axes.vlines(mark.x, 0, top, transform=across, linewidth=1, label=mark.label, **style)


def _draw_map(axes: Any, chart: Chart) -> None:
    drawn = chart.load_map
    assert drawn is not None
    ramp: Any = LinearSegmentedColormap.from_list("load", [RUN_COLOURS[0], "white", RUN_COLOURS[1]])
    ramp, norm = ramp.with_extremes(bad=TEXT), LogNorm(1 / drawn.most, drawn.most)
    edges = np.arange(len(drawn.values) + 1) + drawn.first - 0.5
    loads = np.ma.masked_equal(drawn.values, 0)
    image = axes.pcolormesh(chart.series[0].x, edges, loads, cmap=ramp, norm=norm)
    axes.set_ylim(edges[-1], edges[0])
    axes.set_ylabel(drawn.row)
    axes.grid(visible=False)
    bar = axes.figure.colorbar(image, label="times the mean load; black: no token")
    bar.minorticks_off()
    bar.set_ticks([1 / drawn.most, 1, drawn.most])
    bar.set_ticklabels([f"1/{drawn.most:.2g}", "1", f"{drawn.most:.2g}"])


def _is_short(chart: Chart) -> bool:
    """Whether a logarithmic axis is too short for powers of ten."""
    values = np.concatenate([one.y for one in chart.series]) if chart.series else np.ones(1)
    return chart.is_logarithmic and bool(np.nanmax(values) < 10 * np.nanmin(values))


def _format_tick(value: float, _position: float | None = 0) -> str:
    return "0" if value == 0 else format_large(value)


def draw_plan(
    run: Run,
    plan: Plan,
    memories: Sequence[RankMemory],
    usable_bytes: int | None,
    time: StepTime | None,
) -> Canvas:
    """Draws memory by pipeline rank, and below it the timeline of a step.

    Args:
        run: the run.
        plan: its plan.
        memories: of each pipeline rank, in order.
        usable_bytes: of a device; None where it is unknown.
        time: of a step; without it there is no time line.
    """
    panel = ROW_INCHES * len(memories) + 0.9
    panel = min(max(panel, LEAST_PANEL_INCHES), MOST_PANEL_INCHES)
    n_panels = 2 if time else 1
    with drawing_style():
        figure = Canvas(figsize=(PLAN_INCHES, n_panels * (panel + 0.75)), layout="constrained")
        panels = figure.subplots(n_panels, 1, squeeze=False)[:, 0]
        _draw_memory(panels[0], memories, usable_bytes)
        panels[0].set_title(f"{run.name}: memory of a device", loc="left", fontsize=10)
        if time:
            _draw_step(panels[1], run, plan, time)
    return figure


def save_picture(figure: Canvas, path: Path) -> None:
    """Writes a drawing in the format of its extension, .png or .svg.

    Raises:
        MachineError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".").lower()
    FigureCanvasAgg(figure)
    metadata = {"Date": None} if kind == "svg" else None
    failed = explain_failure(f"cannot write {path}", "use another file: --picture")
    with failed, drawing_style():
        dots = PLAN_DOTS_PER_INCH
        figure.savefig(path, format=kind, dpi=dots, facecolor="white", metadata=metadata)


def _draw_memory(axes: Any, memories: Sequence[RankMemory], usable_bytes: int | None) -> None:
    ranks = range(len(memories))
    ends = np.zeros(len(memories))
    for name, colour in COLOUR_OF_ITEM.items():
        sizes = np.array([memory.items.get(name, 0) / GIB for memory in memories])
        if sizes.any():
            axes.barh(ranks, sizes, left=ends, height=0.75, color=colour, label=name)
            ends = ends + sizes
    limit = np.inf if usable_bytes is None else usable_bytes / GIB
    if usable_bytes is not None:
        axes.axvline(limit, color=ALERT, linewidth=1.5, label=f"usable: {limit:.1f} GiB")
    if len(memories) <= 16:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # before lines
        text = {"textcoords": "offset points", "va": "center", "fontsize": 8, "bbox": box}
        for rank, end in enumerate(ends):
            colour = ALERT if end > limit else TEXT
            axes.annotate(f"{end:.1f}", (end, rank), (4, 0), color=colour, **text)
    axes.set_xlim(0, 1.1 * max(*ends, (usable_bytes or 0) / GIB))
    axes.set_xlabel("GiB")
    _label_ranks(axes, len(memories))


def _draw_step(axes: Any, run: Run, plan: Plan, time: StepTime) -> None:
    n_ranks, schedule = plan.topology.pipeline, run.parallel.schedule
    m = run.train.global_batch_size // run.train.micro_batch_size // plan.topology.data
    # A multiple of the ranks, which every schedule takes; the middle of a long step repeats itself.
    shown = min(m, n_ranks * (4 if n_ranks <= MOST_RANKS_IN_DETAIL else 2) if n_ranks > 1 else 8)
    by_rank = lay_out(schedule, n_ranks, shown, time.stage_seconds)
    passes = [(rank, one) for rank, row in enumerate(by_rank) for one in row]
    end = max(one.end for _, one in passes)
    is_labelled = len(passes) <= MOST_LABELLED_PASSES
    edge = {"edgecolor": "white", "linewidth": 0.4 if is_labelled else 0.1}
    for kind, (name, colour) in PASSES.items():
        for rank, row in enumerate(by_rank):
            bars = [(one.start, one.end - one.start) for one in row if one.kind == kind]
            if bars:
                label = None if name in axes.get_legend_handles_labels()[1] else name
                at = (rank - 0.375, 0.75)
                axes.broken_barh(bars, at, facecolor=colour, label=label, **edge)
    for rank, one in passes if is_labelled else []:
        if one.end - one.start > 0.012 * end:  # room for the number of a micro batch
            style = {"ha": "center", "va": "center", "fontsize": 6, "color": "white"}
            axes.text((one.start + one.end) / 2, rank, str(one.micro_batch), **style)
    after = end
    for part, (name, colour) in REST.items():
        seconds = time.parts.get(part, 0.0)
        if seconds > 1e-3 * end:
            at = (-0.375, n_ranks - 0.25)
            axes.broken_barh([(after, seconds)], at, facecolor=colour, label=name)
            after += seconds
    order = f", {schedule}" if n_ranks > 1 else ""
    some = f"shortened to {shown} of {m:,}" if shown < m else f"{m}"
    batches = "micro batch" if shown == m == 1 else "micro batches"
    title = f"one step of {format_figure(time.seconds)} s{order}: {some} {batches}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, after)
    axes.set_xlabel("seconds")
    _label_ranks(axes, n_ranks)
    axes.grid(visible=False)


def _label_ranks(axes: Any, n_ranks: int) -> None:
    """Numbers the pipeline ranks, and adds the legend."""
    axes.set_yticks(range(0, n_ranks, max(1, n_ranks // 16)))
    axes.set_ylim(n_ranks - 0.5, -0.5)
    axes.set_ylabel("pipeline rank" if n_ranks > 1 else "")
    if n_ranks == 1:
        axes.set_yticks([0], ["each rank"])
    axes.grid(visible=False, axis="y")
    axes.tick_params(colors=MUTED)
    handles, labels = axes.get_legend_handles_labels()
    boxes = [
        Patch(facecolor=one.patches[0].get_facecolor()) if hasattr(one, "patches") else one
        for one in handles
    ]
    place: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    axes.legend(boxes, labels, fontsize=7.5, borderaxespad=0.3, **place)


def draw_sweeps(sweeps: Sequence[ScalingTable], path: Path) -> None:
    """Draws loss over learning rate, a curve for each shape, as .png or .svg.

    Raises:
        MachineError: the file cannot be written.
    """
    with drawing_style():
        figure = Canvas(figsize=(PNG_INCHES[0] * len(sweeps), PNG_INCHES[1]), layout="constrained")
        panels = figure.subplots(1, len(sweeps), sharey=True, squeeze=False)[0]
        for axes, sweep in zip(panels, sweeps, strict=True):
            axes.set(xscale="log", xlabel="learning rate", ylabel="loss", title=sweep.name)
            for n, size in enumerate(sweep.sizes):
                look = {"color": RUN_COLOURS[n % len(RUN_COLOURS)]}
                rates = [*map(float, sweep.columns)]
                axes.plot(rates, sweep.rows[n], label=str(size), **look, **LOOKS["points"])
                axes.axvline(sweep.best[n], **look, **LOOKS["thin"])
            axes.set_xticks([*map(float, sweep.columns)], sweep.columns, rotation=45)
            axes.minorticks_off()
            axes.legend(framealpha=0.5)
    save_picture(figure, path)
