"""A shorter run with the same schedule.

    length 20_000 steps   warmup 400 steps   decay 20_000 steps   evaluate every 1_000 steps

shortened to 4_000 steps:

    length  4_000 steps   warmup  80 steps   decay  4_000 steps   evaluate every   500 steps
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trainyard.config.load import build_run, load_run, override_run
from trainyard.config.run import Run
from trainyard.files import read_file
from trainyard.layout.resolve import Plan, learning_rate, resolve
from trainyard.units import Length, parse_length

WRITTEN = "# Written by trainyard "
"""The beginning of run files whose schedule was chosen for their length."""
LEAST_PER_RUN = {
    ("evaluate", "interval"): 8,
    ("evaluate", "sample_interval"): 4,
    ("log", "interval"): 60,
}
"""Intervals shrink if the shorter run would have fewer of these."""
HIGH_SHARE = 0.5
"""A decay that ends above this share of the peak is likely one for a longer run."""


def shorten(run: Run, n_steps: int) -> Run:
    """Shortens a run; its learning-rate schedule and batch ramp shrink by the same factor.

    Args:
        run: as asked for.
        n_steps: the new length, in steps of the full batch; a run that is no longer is unchanged.

    Raises:
        ConfigError: the run's layout or batch is impossible.
    """
    n_sequences, whole = n_steps * run.train.global_batch_size, resolve(run).n_sequences
    if n_sequences >= whole:
        return run
    tables = run.model_dump()

    def shrink(table: dict[str, Any], name: str, least: int) -> None:
        length = parse_length(table[name])
        table[name] = Length(max(least, length.amount * n_sequences // whole), length.unit)

    shrink(tables["train"], "length", 1)
    shrink(tables["schedule"], "decay", 1)
    shrink(tables["schedule"], "warmup", 0)
    if run.schedule.kind == "warmup_stable_decay":
        shrink(tables["schedule"], "cooldown", 0)
    tables["schedule"]["points"] = run.schedule.points.scaled(n_sequences, whole)
    if run.train.batch_ramp:
        shrink(tables["train"]["batch_ramp"], "length", 1)
    for (section, name), least in LEAST_PER_RUN.items():
        tables[section][name] = min(tables[section][name], math.ceil(n_steps / least))
    return build_run(tables)


def follow_length(run: Run, source: str, overrides: Sequence[str], begun: Run | None) -> Run:
    """Shortens schedule and intervals with a typed `train.length`, in a file Trainyard wrote.

    A run that has begun keeps its schedule, so it can be continued and extended.

    Args:
        run: with the overrides.
        source: as for `load_run`.
        overrides: what they set stays as it is.
        begun: the run as it was started, if it was.

    Raises:
        ConfigError: the run's layout or batch is impossible.
    """
    path = Path(source)
    is_written = path.is_file() and read_file(path).startswith(WRITTEN.encode())
    others = [text for text in overrides if not text.startswith("train.length=")]
    if not is_written or len(others) == len(overrides):
        return run
    if begun is not None:
        return override_run(with_lengths_of(begun, run), overrides)
    n_steps = resolve(run).n_sequences // run.train.global_batch_size
    return override_run(shorten(load_run(source, others).run, max(1, n_steps)), overrides)


def describe_too_short(run: Run, plan: Plan) -> Iterator[str]:
    """Says which settings do not suit the run's length, each in one line."""
    schedule, peak = run.schedule, run.optimizer.learning_rate
    rate, length = learning_rate(run, plan, plan.n_sequences), str(run.train.length)
    if schedule.kind != "points" and plan.warmup_sequences >= plan.n_sequences:
        yield (
            f"the run ends in warmup, at a learning rate of {rate:.3g} of {peak:.3g}: "
            f"schedule.warmup={str(schedule.warmup)!r}, train.length={length!r}"
        )
    elif schedule.kind in ("cosine", "linear") and rate > HIGH_SHARE * peak:
        yield (
            f"the learning rate falls only to {rate:.3g} of {peak:.3g}: "
            f"schedule.decay={str(schedule.decay)!r}, train.length={length!r}"
        )
    for section, name in LEAST_PER_RUN:
        interval = getattr(getattr(run, section), name)
        if plan.n_steps < interval != getattr(getattr(Run(), section), name):
            yield f"{section}.{name}={interval} is longer than the run of {plan.n_steps:,} steps"


def with_lengths_of(other: Run, run: Run) -> Run:
    """Copies every length and interval that `shorten` may have changed from another run."""
    tables, others = run.model_dump(), other.model_dump()
    lengths = [("train", "length"), ("train", "batch_ramp")]
    lengths += [("schedule", name) for name in ("warmup", "decay", "cooldown", "points")]
    for section, name in [*lengths, *LEAST_PER_RUN]:
        tables[section][name] = others[section][name]
    return build_run(tables)
