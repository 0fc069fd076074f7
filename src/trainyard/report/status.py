"""The status of a run as text, as JSON, and on a terminal with its loss curve in characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from trainyard.architecture import describe_parts
from trainyard.errors import printable
from trainyard.jobs.status import EXCLUDED_FROM, Start
from trainyard.planning import saving
from trainyard.report.charts import thin_out
from trainyard.report.figures import describe_active, list_scores
from trainyard.report.metrics import Curve, Line, is_finite
from trainyard.report.run_view import RunView, show
from trainyard.training.run_folder import describe_ancestry
from trainyard.units import format_bytes, format_large, format_number, format_seconds

NOT_KNOWN_YET = "not known yet"
N_STARTS, N_EVENTS, N_SCORES = 10, 10, 10
RANKS_PER_NODE = 8
LEAST_GAIN = 0.005
"""Share of the time that another interval must save to be worth a line."""
THEN = {
    "finish": "done",
    "requeue": "started again",
    "stay": "needs attention",
    "cancelled": "cancelled",
}
CHART_ROWS, LEAST_CHART_ROWS = 12, 3
LABEL_WIDTH = 8
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a Braille character, by row and column."""


def status_as_json(view: RunView) -> dict[str, Any]:
    """Returns the status for programs; unknown values are null."""
    held_out = view.metrics.held_out_losses
    return {
        "name": view.name,
        "state": view.state,
        "text": view.text,
        "step": view.step,
        "n_steps": view.n_steps,
        "loss": view.metrics.last_loss,
        "held_out_loss": held_out[-1]["loss"] if held_out else None,
        "tokens_per_second": view.tokens_per_second,
        "seconds_left": view.seconds_left,
        "tasks": {one.label: one.amount for one in list_scores(view.evaluation)},
        "checkpoint": asdict(view.checkpoint) if view.checkpoint else None,
        "submission": view.submission.model_dump() if view.submission else None,
        "job": asdict(view.job) if view.job else None,
        "n_restarts": view.n_restarts,
        "starts": [asdict(start) for start in view.starts],
        "events": _events(view),
        "bad_nodes": view.bad_nodes,
    }


def render_status(view: RunView) -> str:
    """Returns the status for people."""
    lines = [f"{view.name}: {view.text}"]
    lines += [f"{label:<12}{text}" for label, text in _facts(view).items()]
    lines += [f"    {_describe_start(view, start)}" for start in view.starts[-N_STARTS:]]
    lines += [f"    {event}" for event in _events(view)[-N_EVENTS:]]
    for node, n_failures in view.bad_nodes.items():
        excluded = ", and is excluded" if n_failures >= EXCLUDED_FROM else ""
        times = "once" if n_failures == 1 else f"{n_failures} times"
        lines.append(f"    node {node} failed {times}{excluded}")
    return "\n".join(map(printable, lines))


def status_row(view: RunView) -> tuple[str, ...]:
    """Returns state, step, loss and the age of the last logged step, for a list of runs."""
    facts = _facts(view)
    return view.state, facts["step"], facts["loss"].partition(";")[0], _ago(view)


def _events(view: RunView) -> list[str]:
    return [f"step {event.step:,}: {event.text}" for event in view.metrics.events]


def _ago(view: RunView) -> str:
    seconds = view.seconds_ago
    return "" if seconds is None else f"{format_seconds(max(0.0, seconds))} ago"


def _describe_job(view: RunView) -> str:
    submission, job = view.submission, view.job
    if submission is None:
        return ""
    size = format_number(submission.n_nodes, "node")
    if job is None or not submission.job:
        return f"{size} of {submission.cluster}, since {submission.submitted}"
    text = f"{submission.job} on {submission.cluster}, {size}: {job.text}"
    text += f" on {job.nodes}" if job.nodes else ""
    before = ", ".join(f"{stage} {id_}" for stage, id_ in submission.waits_for.items())
    return text + (f"; after {before}" if before and job.phase == "waiting" else "")


def _facts(view: RunView, *, in_detail: bool = False) -> dict[str, str]:
    """Returns the known facts as texts, by their labels.

    Args:
        view: of the run.
        in_detail: add what else is known of the last logged step.
    """
    step, n_steps = view.step, view.n_steps
    scores = list_scores(view.evaluation)
    tasks = [f"{one.label} {one.value}" for one in scores[:N_SCORES]]
    tasks += [f"{len(scores) - N_SCORES} more"] if len(scores) > N_SCORES else []
    facts = {
        "job": _describe_job(view),
        "model": _describe_model(view),
        "ancestry": describe_ancestry(view.ancestors),
        "step": NOT_KNOWN_YET if step is None else f"{step:,}",
        "loss": _describe_losses(view),
        "tasks": "; ".join(tasks),
        "speed": NOT_KNOWN_YET,
        "ETA": "" if view.seconds_left is None else format_seconds(view.seconds_left),
        "checkpoint": "none",
        "save every": _suggest_interval(view),
        "restarts": f"{view.n_restarts}",
    }
    if step is not None and n_steps:
        facts["step"] += f" of {n_steps:,} ({step / n_steps:.0%})"
    if view.tokens_per_second is not None:
        facts["speed"] = f"{format_large(view.tokens_per_second)} tokens/s"
    if saved := view.checkpoint:
        ago = format_seconds(max(0.0, saved.seconds_ago))
        facts["checkpoint"] = f"step {saved.step:,}, {ago} ago, {format_bytes(saved.n_bytes)}"
    if in_detail and step is not None:
        for label, more in _details(view).items():
            facts[label] = facts.get(label, "") + more
    return {label: text for label, text in facts.items() if text}


def _describe_model(view: RunView) -> str:
    """Describes a model with experts; empty for others, which their name says enough of."""
    if not (active := describe_active(view)):
        return ""
    size = format_large(view.plan["n_parameters"])
    return f"{size} parameters, {active}; {', '.join(describe_parts(view.run.model))}"


def _details(view: RunView) -> dict[str, str]:
    """Returns what else is known of the last logged step: texts to append, by label."""
    metrics, last = view.metrics, view.last
    best, by_formula = metrics.best, last("formula_tflops_per_second_per_device")
    tflops = show(last("tflops_per_second_per_device"), "{:.3g}")
    tokens = show(last("tokens"), format_large)
    return {
        "step": f", {_ago(view)}".rstrip(", "),
        "loss": f", best {best['loss']:.4f} at step {best['step']:,}" if best else "",
        "speed": f", {tflops} TFLOP/s per device"
        + (f" ({by_formula:.4g} by log.flop_formula)" if by_formula else ""),
        "restarts": f"; {show(last('skipped_steps'), '{:.0f}')} skipped steps, "
        f"{metrics.count('rollback')} rollbacks, {metrics.count('save failed')} failed saves",
        "gradient": f"norm {show(last('gradient_norm'), '{:.3f}')}, "
        f"learning rate {show(last('learning_rate'), '{:.3e}')}",
        "experts": f"imbalance {found:.2f}" if (found := last("expert_imbalance")) else "",
        "memory": show(last("memory_bytes"), format_bytes),
        "consumed": f"{tokens} tokens in {format_seconds(metrics.seconds)}",
    }


def _describe_losses(view: RunView) -> str:
    metrics = view.metrics
    missing = NOT_KNOWN_YET if view.step is None else "none: the newest steps were skipped"
    text = missing if metrics.last_loss is None else f"{metrics.last_loss:.4f}"
    for what, line in (("held out", (metrics.held_out_losses or [{}])[-1]), ("test", metrics.test)):
        if is_finite(line.get("loss")):
            text += f"; {what} {line['loss']:.4f} at step {line['step']:,}"
    return text


def _suggest_interval(view: RunView) -> str:
    """Suggests how often to save, from the newest saves; empty if little is to be won."""
    metrics = view.metrics
    stall, write = map(metrics.median_of_saves, ("stall_seconds", "seconds"))
    step = (metrics.train.median("milliseconds_per_step") or 0) / 1000
    if not (stall and write and min(stall, write, step) > 0):
        return ""
    n_nodes = math.ceil(view.n_ranks / RANKS_PER_NODE)
    between_failures = saving.mean_seconds_between_failures(n_nodes)
    # A save waits for the previous one, so the interval cannot be shorter than a write.
    best = max(saving.suggest_interval(stall, between_failures), write)
    n_steps = max(1, round(best / step))
    interval = view.run.checkpoint.interval
    as_set = view.run.checkpoint.interval_seconds(step, view.n_steps or n_steps)
    set_to = f"{as_set / step:,.0f}" if isinstance(interval, int) else str(interval)
    useful, useful_as_set = (
        saving.useful_share(each, stall, between_failures) for each in (n_steps * step, as_set)
    )
    if useful - useful_as_set < LEAST_GAIN:
        return ""
    return (
        f"{n_steps:,} steps ({format_seconds(best)}) lose least, set is {set_to}: "
        f"{useful:.1%} and {useful_as_set:.1%} of the time are useful, if training stalls "
        f"for {stall:.2g} s per save as measured and {format_number(n_nodes, 'node')} of "
        f"{RANKS_PER_NODE} ranks fail {saving.FAILURES_PER_NODE_DAY:.2g} times per day each"
    )


def _describe_start(view: RunView, start: Start) -> str:
    if start.lost:
        how = f"was lost with {start.lost}"
    elif start.exit_code is not None:
        then = THEN.get(start.then, "not started again")
        how = f"ended {start.ended} with {start.exit_code}: {then}"
    elif start is view.starts[-1] and view.state in ("training", "starting"):
        how = "runs"
    else:
        how = "was killed: a lost node, or the scheduler"
    return f"{start.time} job {start.job} on {start.nodes}: {how}"


def render_screen(
    view: RunView, last_lines: Sequence[str], width: int, height: int, *, in_unicode: bool = True
) -> RenderableType:
    """Renders a run's status; without room, first shortens the last lines, then the curve.

    Args:
        view: of the run.
        last_lines: texts of the newest events.
        width: of the terminal, in characters.
        height: of the terminal, in lines.
        in_unicode: the terminal has Braille characters.
    """
    train = view.metrics.train
    head = Text(printable(view.name), style="bold")
    style = "green" if view.state == "training" else "yellow"
    head.append(f"  {printable(view.text)}", style=f"not bold {style}")
    grid = Grid.grid(padding=(0, 2, 0, 0))
    if view.n_steps and view.step is not None:
        grid.add_row("", ProgressBar(view.n_steps, view.step, width=min(60, width - 14)))
    for label, text in _facts(view, in_detail=True).items():
        grid.add_row(Text(label, style="cyan"), Text(printable(text)))
    parts: list[RenderableType] = [head]
    if view.metrics.damage:
        parts.append(Text(printable(view.metrics.damage), style="yellow"))
    n_free = height - len(parts) - grid.row_count
    n_last = min(len(last_lines), max(1, n_free // 4))
    n_rows = min(CHART_ROWS, n_free - n_last - 6)
    loss = draw_curve(train["step"], train["loss"], width, n_rows, in_unicode=in_unicode)
    parts.append(grid)
    if loss:
        parts += [Text("\nloss over steps", style="dim"), Text("\n".join(loss))]
    if n_last:
        parts.append(Text("\nlast lines", style="dim"))
        for line in list(last_lines)[-n_last:]:
            parts.append(Text(line, no_wrap=True, overflow="ellipsis"))
    return Group(*parts)


def describe_line(line: Line, n_steps: int | None) -> str:
    """Formats a line of metrics.jsonl as text; empty for unknown kinds."""
    step = f"step {int(line['step']):,}"
    if line["kind"] == "train":
        columns = [
            step + (f"/{n_steps:,}" if n_steps else ""),
            f"loss {show(line.get('loss'), '{:.4f}')}",
            f"lr {show(line.get('learning_rate'), '{:.2e}')}",
            f"grad norm {show(line.get('gradient_norm'), '{:.3f}')}",
            f"{show(line.get('tokens_per_second_per_device'), format_large)} tokens/s/device",
            f"memory {show(line.get('memory_bytes'), format_bytes)}",
            f"skipped {show(line.get('skipped_steps'), '{:.0f}')}",
            f"ETA {show(line.get('seconds_left'), format_seconds)}",
        ]
        return " | ".join(columns)
    n_bytes, seconds = show(line.get("bytes"), format_bytes), line.get("seconds")
    texts = {
        "start": f"{'resumed' if line.get('resumed') else 'started'} on {line.get('device')}",
        "evaluate": f"{'test' if line.get('split') == 'test' else 'held-out'} loss "
        f"{show(line.get('loss'), '{:.4f}')}",
        "sample": f"sample of {line.get('prompt')!r}: {line.get('text')}",
        "save": f"saved {n_bytes} in {show(seconds, format_seconds)}",
        "dead experts": f"{line.get('problem')}",
        "save failed": f"a checkpoint was not saved: {line.get('problem')}",
        "rollback": f"rolled back here from step {line.get('from_step')}; "
        f"{line.get('skipped_sequences')} sequences are skipped",
        "end": f"ended: {line.get('reason')}",
    }
    text = texts.get(line["kind"])
    return "" if text is None else f"{step}: {printable(text)}"


def draw_curve(
    x: Curve, y: Curve, width: int, n_rows: int, *, in_unicode: bool = True
) -> list[str]:
    """Draws a curve in characters, from minimum to maximum; empty where it does not fit.

    With more lines than dots, each dot shows the mean of equally many.
    """
    is_number = np.isfinite(y)
    x, y = x[is_number], y[is_number]
    n_columns = width - LABEL_WIDTH - 2
    across, down = (2, 4) if in_unicode else (1, 1)
    if len(y) < 2 or n_columns < 10 or n_rows < LEAST_CHART_ROWS:
        return []
    thin = thin_out(x, y, n_columns * across)
    low, high = float(thin.mean.min()), float(thin.mean.max())
    # Between few points the line is straight.
    at = np.linspace(thin.x[0], thin.x[-1], n_columns * across)
    drawn_y = np.interp(at, thin.x, thin.mean)
    share = (drawn_y - low) / (high - low) if high > low else np.full(len(at), 0.5)
    rows = np.rint((1 - share) * (n_rows * down - 1)).astype(int)
    cells = np.zeros((n_rows, n_columns), int)
    for column, row in enumerate(rows):
        bit = DOTS[row % 4][column % 2] if in_unicode else 1
        cells[row // down, column // across] |= bit
    lines = []
    for number, cell_row in enumerate(cells):
        label = f"{high:.4g}" if number == 0 else f"{low:.4g}" if number == n_rows - 1 else ""
        drawn = (chr(BRAILLE + c) if in_unicode else " *"[c] for c in cell_row)
        lines.append(f"{label:>{LABEL_WIDTH}} {'│' if in_unicode else '|'}{''.join(drawn)}")
    first, last = f"{x[0]:,.0f}", f"{x[-1]:,.0f}"
    lines.append(" " * (LABEL_WIDTH + 2) + first + f"{last:>{n_columns - len(first)}}")
    return lines
