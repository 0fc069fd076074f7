"""Pictures of a plan: memory of each rank against its capacity, and the timeline of one step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trainyard.config.run import Run
from trainyard.errors import explain_failure
from trainyard.planning.hardware import GIB
from trainyard.planning.memory import RankMemory
from trainyard.planning.resolve import Plan
from trainyard.planning.time import StepTime
from trainyard.planning.timeline import Kind, TimedPass, lay_out
from trainyard.report.pictures import ALERT, MUTED, TEXT, drawing_style
from trainyard.units import format_figure

DOTS_PER_INCH = 200
WIDTH_INCHES = 8.0
ROW_INCHES = 0.26
LEAST_PANEL_INCHES, MOST_PANEL_INCHES = 1.3, 5.0
MOST_LABELLED_PASSES = 200
MOST_RANKS_IN_DETAIL = 8

# Families by hue: what stays is blue, what passes orange, what the machine takes grey.
COLOURS = (
    ("#084a7d", "#0b6bb3", "#5aa5d8", "#a9d1ee"),
    ("#9c4408", "#c2570a", "#ef9a5a", "#f8cfae"),
    ("#5b6675", "#b5bdc8"),
)
ITEMS = (
    ("weights", "gradients", "optimizer", "gathered weights"),
    ("activations", "logits and loss", "recomputing", "exchanged activations"),
    ("buffers", "context and libraries"),
)
COLOUR_OF_ITEM = {
    item: colour
    for items, colours in zip(ITEMS, COLOURS, strict=True)
    for item, colour in zip(items, colours, strict=True)
}
PASSES: dict[Kind, tuple[str, str]] = {
    "F": ("forward", "#0b6bb3"),
    "B": ("backward", "#c2570a"),
    "W": ("gradients of weights", "#11805a"),
}
DATA, UPDATE = ("data ranks", "#8a6d00"), ("optimizer", "#9b4a8a")


def draw_plan(
    run: Run,
    plan: Plan,
    memories: Sequence[RankMemory],
    usable_bytes: int | None,
    time: StepTime | None,
) -> Figure:
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
        figure = Figure(figsize=(WIDTH_INCHES, n_panels * (panel + 0.75)), layout="constrained")
        panels = figure.subplots(n_panels, 1, squeeze=False)[:, 0]
        _draw_memory(panels[0], memories, usable_bytes)
        panels[0].set_title(f"{run.name}: memory of a device", loc="left", fontsize=10)
        if time:
            _draw_step(panels[1], run, plan, time)
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Writes a drawing in the format of its extension, .png or .svg.

    Raises:
        MachineError: the file cannot be written.
    """
    kind = path.suffix.removeprefix(".").lower()
    FigureCanvasAgg(figure)
    metadata = {"Date": None} if kind == "svg" else None
    with explain_failure(f"cannot write {path}", "use another file: --picture"), drawing_style():
        figure.savefig(path, format=kind, dpi=DOTS_PER_INCH, facecolor="white", metadata=metadata)


def _draw_memory(axes: Any, memories: Sequence[RankMemory], usable_bytes: int | None) -> None:
    names = [name for name in COLOUR_OF_ITEM if any(each.items.get(name) for each in memories)]
    ranks = range(len(memories))
    ends = [0.0] * len(memories)
    for name in names:
        sizes = [each.items.get(name, 0) / GIB for each in memories]
        axes.barh(ranks, sizes, left=ends, height=0.75, color=COLOUR_OF_ITEM[name], label=name)
        ends = [end + size for end, size in zip(ends, sizes, strict=True)]
    limit = None if usable_bytes is None else usable_bytes / GIB
    if limit is not None:
        axes.axvline(limit, color=ALERT, linewidth=1.5, label=f"usable: {limit:.1f} GiB")
    for rank, end in enumerate(ends):
        colour = ALERT if limit is not None and end > limit else TEXT
        if len(memories) <= 16:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # before lines
            text = {"va": "center", "fontsize": 8, "color": colour, "bbox": box}
            axes.annotate(f"{end:.1f}", (end, rank), (4, 0), textcoords="offset points", **text)
    axes.set_xlim(0, 1.1 * max(*ends, limit or 0.0))
    axes.set_xlabel("GiB")
    _number_ranks(axes, len(memories))
    _add_legend(axes)


def _draw_step(axes: Any, run: Run, plan: Plan, time: StepTime) -> None:
    n_ranks, schedule = plan.topology.pipeline, run.parallel.schedule
    m = run.train.global_batch_size // run.train.micro_batch_size // plan.topology.data
    # A multiple of the ranks, which every schedule takes; the middle of a long step repeats itself.
    shown = min(m, n_ranks * (4 if n_ranks <= MOST_RANKS_IN_DETAIL else 2) if n_ranks > 1 else 8)
    by_rank = lay_out(schedule, n_ranks, shown, time.stage_seconds)
    end = max(passes[-1].end for passes in by_rank)
    kinds = dict.fromkeys(each.kind for passes in by_rank for each in passes)
    labels = sum(map(len, by_rank)) <= MOST_LABELLED_PASSES
    for kind in [kind for kind in PASSES if kind in kinds]:
        name, colour = PASSES[kind]
        for rank, passes in enumerate(by_rank):
            bars = [(each.start, each.end - each.start) for each in passes if each.kind == kind]
            axes.broken_barh(
                bars,
                (rank - 0.375, 0.75),
                facecolor=colour,
                edgecolor="white",
                linewidth=0.4 if labels else 0.1,
                label=name if rank == 0 else None,
            )
    if labels:
        for rank, passes in enumerate(by_rank):
            for each in passes:
                _label(axes, rank, each, end)
    after = end
    for (name, colour), part in ((DATA, "data"), (UPDATE, "optimizer")):
        seconds = time.parts.get(part, 0.0)
        if seconds > 1e-3 * end:
            axes.broken_barh(
                [(after, seconds)], (-0.375, n_ranks - 0.25), facecolor=colour, label=name
            )
            after += seconds
    order = f", {schedule}" if n_ranks > 1 else ""
    some = f"shortened to {shown} of {m:,}" if shown < m else f"{m}"
    batches = "micro batch" if shown == m == 1 else "micro batches"
    title = f"one step of {_seconds(time.seconds)}{order}: {some} {batches}"
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, after)
    axes.set_xlabel("seconds")
    _number_ranks(axes, n_ranks)
    axes.grid(visible=False)
    _add_legend(axes)


def _label(axes: Any, rank: int, each: TimedPass, end: float) -> None:
    """Writes the number of a micro batch if there is room for it."""
    if each.end - each.start > 0.012 * end:
        middle = (each.start + each.end) / 2
        axes.text(
            middle, rank, str(each.micro_batch), ha="center", va="center", fontsize=6, color="white"
        )


def _number_ranks(axes: Any, n_ranks: int) -> None:
    every = max(1, n_ranks // 16)
    axes.set_yticks(range(0, n_ranks, every))
    axes.set_ylim(n_ranks - 0.5, -0.5)
    axes.set_ylabel("pipeline rank" if n_ranks > 1 else "")
    if n_ranks == 1:
        axes.set_yticks([0], ["each rank"])
    axes.grid(visible=False, axis="y")
    axes.tick_params(colors=MUTED)


def _add_legend(axes: Any) -> None:
    handles, labels = axes.get_legend_handles_labels()
    boxes = [
        Patch(facecolor=each.patches[0].get_facecolor()) if hasattr(each, "patches") else each
        for each in handles
    ]
    axes.legend(
        boxes, labels, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7.5, borderaxespad=0.3
    )


def _seconds(seconds: float) -> str:
    return f"{format_figure(seconds)} s"
