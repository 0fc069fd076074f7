"""A run on a terminal: state, progress, and the loss curve in characters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from trainyard.errors import printable
from trainyard.report.history import Curve, Line, is_finite
from trainyard.report.status import Status
from trainyard.report.summary import UNKNOWN, large, memory, show
from trainyard.report.thinning import thin_out
from trainyard.units import format_seconds

CHART_ROWS, LEAST_CHART_ROWS = 12, 3
LABEL_WIDTH = 8
BRAILLE = 0x2800
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of the dots of a Braille character, by row and column."""


def render_screen(
    status: Status, last_lines: Sequence[str], width: int, height: int, *, in_unicode: bool = True
) -> RenderableType:
    """Renders a run's status; without room, first shortens the last lines, then the curve.

    Args:
        status: of the run.
        last_lines: texts of the newest events.
        width: of the terminal, in characters.
        height: of the terminal, in lines.
        in_unicode: the terminal has Braille characters.
    """
    train, facts = status.metrics.train, status.facts_in_detail()
    head = Text(printable(status.name), style="bold")
    style = "green" if status.state == "training" else "yellow"
    head.append(f"  {printable(status.text)}", style=f"not bold {style}")
    grid = Grid.grid(padding=(0, 2, 0, 0))
    if status.n_steps and status.step is not None:
        grid.add_row("", ProgressBar(status.n_steps, status.step, width=min(60, width - 14)))
    for label, text in facts.items():
        grid.add_row(Text(label, style="cyan"), Text(printable(text)))
    parts: list[RenderableType] = [head]
    if status.metrics.damage:
        parts.append(Text(printable(status.metrics.damage), style="yellow"))
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
            f"{large(line.get('tokens_per_second_per_device'))} tokens/s/device",
            f"memory {memory(line.get('memory_bytes'))}",
            f"skipped {show(line.get('skipped_steps'), '{:.0f}')}",
            f"ETA {_seconds(line.get('seconds_left'))}",
        ]
        return " | ".join(columns)
    texts = {
        "start": f"{'resumed' if line.get('resumed') else 'started'} on {line.get('device')}",
        "evaluate": f"{'test' if line.get('split') == 'test' else 'held-out'} loss "
        f"{show(line.get('loss'), '{:.4f}')}",
        "sample": f"sample: {line.get('prompt')}{line.get('text')}",
        "save": f"saved {memory(line.get('bytes'))} in {_seconds(line.get('seconds'))}",
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

    Of more lines than dots, each dot shows the mean of equally many.
    """
    known = np.isfinite(y)
    x, y = x[known], y[known]
    n_columns = width - LABEL_WIDTH - 2
    across, down = (2, 4) if in_unicode else (1, 1)
    if len(y) < 2 or n_columns < 10 or n_rows < LEAST_CHART_ROWS:
        return []
    thin = thin_out(x, y, n_columns * across)
    low, high = float(thin.mean.min()), float(thin.mean.max())
    height = n_rows * down - 1
    # Between few points the line is straight.
    at = np.linspace(thin.x[0], thin.x[-1], n_columns * across)
    drawn_y = np.interp(at, thin.x, thin.mean)
    share = (drawn_y - low) / (high - low) if high > low else np.full(len(at), 0.5)
    rows = np.rint((1 - share) * height).astype(int)
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


def _seconds(value: object) -> str:
    return format_seconds(value) if is_finite(value) else UNKNOWN  # type: ignore[arg-type]
