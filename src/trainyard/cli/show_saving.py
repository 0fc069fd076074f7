"""Checkpoint size of a run, and how often to save: part of `trainyard show RUN`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from trainyard.config.run import Run
from trainyard.plan import saving
from trainyard.plan.resolve import Plan
from trainyard.units import format_bytes, format_number, format_seconds

RANKS_PER_NODE = 8
_TAIL_BYTES = 4 * 2**20  # more than the lines between two saves
_PLAN_LIMIT_BYTES = 2**20


def describe_saving(run: Run, plan: Plan, folder: Path) -> dict[str, str]:
    """Returns the size of a checkpoint and, if the run has saved before, how often to save.

    Args:
        run: the run.
        plan: its plan, for any number of ranks.
        folder: its run folder, which may be absent.
    """
    in_memory = saving.host_bytes(run, plan)
    copy = f"; {format_bytes(in_memory)} of host memory a rank at most" if in_memory else ""
    found = {"checkpoint": f"{format_bytes(saving.checkpoint_bytes(run, plan.n_parameters))}{copy}"}
    suggestion = _suggest(run, plan, folder)
    return found | ({"save every": suggestion} if suggestion else {})


def _suggest(run: Run, plan: Plan, folder: Path) -> str:
    """Suggests an interval from the duration of the newest saves; empty without saves."""
    lines = _last_lines(folder / "metrics.jsonl")
    stalls = _numbers(lines, "save", "stall_seconds")
    seconds = _numbers(lines, "save", "seconds")
    steps = _numbers(lines, "train", "milliseconds_per_step")
    if not (stalls and seconds and steps):
        return ""
    stall, step_seconds = median(stalls), median(steps) / 1000
    n_nodes = math.ceil(_ranks_of(folder, plan) / RANKS_PER_NODE)
    between_failures = saving.mean_seconds_between_failures(n_nodes)
    # A save waits for the previous one, so the interval cannot be shorter than a write.
    interval = max(saving.suggest_interval(stall, between_failures), median(seconds))
    n_steps = max(1, round(interval / step_seconds))
    useful = saving.useful_share(n_steps * step_seconds, stall, between_failures)
    set_to = run.checkpoint.interval or plan.n_steps
    useful_as_set = saving.useful_share(set_to * step_seconds, stall, between_failures)
    nodes = format_number(n_nodes, "node")
    return (
        f"{n_steps:,} steps ({format_seconds(interval)}) lose least, set is {set_to:,}: "
        f"{useful:.1%} and {useful_as_set:.1%} of the time are useful, if training stalls "
        f"for {stall:.2g} s per save as measured and {nodes} of {RANKS_PER_NODE} ranks fail "
        f"{saving.FAILURES_PER_NODE_DAY:g} times per day each"
    )


def _last_lines(path: Path) -> list[Mapping[str, Any]]:
    """Reads the end of metrics.jsonl; skips lines that are not JSON."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES).decode(errors="replace")
    except OSError:
        return []
    return [line for line in map(_parse, text.splitlines()) if isinstance(line, dict)]


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _numbers(lines: list[Mapping[str, Any]], kind: str, key: str) -> list[float]:
    values = (line.get(key) for line in lines if line.get("kind") == kind)
    return [
        value
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9
    ]


def _ranks_of(folder: Path, plan: Plan) -> int:
    """Reads the number of ranks of the run's last training."""
    path = folder / "plan.json"
    if not path.is_file() or path.stat().st_size > _PLAN_LIMIT_BYTES:
        return plan.n_ranks
    written = _parse(path.read_text(encoding="utf-8", errors="replace"))
    n_ranks = written.get("n_ranks") if isinstance(written, dict) else None
    is_count = isinstance(n_ranks, int) and 0 < n_ranks < 10**7
    return n_ranks if is_count and n_ranks else plan.n_ranks
