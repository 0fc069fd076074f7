"""What a run comes to: days, device-hours and money, its checkpoints, the passes over its data.

A run of 1,500 steps of 20 s that saves every 100 steps, standing still for 5 s each time, on 128
nodes that fail once in 28.8 hours together:

    steps                      1,500 x 20 s            8.3 h
    useful share of the time   (1 - (15 + 16.7 min) / 28.8 h) / (1 + 5 s / 2,000 s) = 97.9 %
    in all                     8.3 h / 0.979           8.5 h = 8,720 device-hours on 1,024 devices
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainyard import units
from trainyard.config import rules
from trainyard.config.run import Blend, Run
from trainyard.plan import saving
from trainyard.plan.hardware import Machine
from trainyard.plan.resolve import Plan, resolve
from trainyard.plan.time import StepTime, step_time

HOST_COPY_BYTES_PER_SECOND = 20e9
"""From a device to host memory: what PCIe 4.0 with 16 lanes reaches, of 32e9."""
STORAGE_BYTES_PER_SECOND = (5e9, 20e9, 100e9)
"""File systems for which writing is told where none is named: a small, a usual and a large one."""


@dataclass(frozen=True)
class Saving:
    """Writing one checkpoint to a file system."""

    storage_bytes_per_second: float
    write_seconds: float
    """Of the whole checkpoint."""
    stall_seconds: float
    """How long training stands still for it."""
    best_interval_seconds: float
    """Between saves, if the least time is to be lost."""


@dataclass(frozen=True)
class Cost:
    """A whole run, failures counted."""

    step_seconds: float
    """All steps, each once."""
    evaluation_seconds: float
    interval_seconds: float
    """Between saves, as the run sets it."""
    savings: tuple[Saving, ...]
    """By file system; the first is the one the rest is counted with."""
    seconds_between_failures: float
    useful_share: float
    """Of the time, in steps that need not be repeated; 0 where none would ever be done."""
    useful_shares: tuple[float, float]
    """The same with the most and the fewest failures that published runs had."""
    seconds: float
    """Everything; infinite where nothing would ever be done."""
    n_failures: float
    device_hours: float
    price: float | None
    """In the currency of the price of a device-hour."""


def run_cost(
    run: Run,
    plan: Plan,
    machine: Machine,
    time: StepTime,
    storage: tuple[float, ...] = STORAGE_BYTES_PER_SECOND,
    price_per_device_hour: float | None = None,
) -> Cost:
    """Adds a run up.

    Args:
        run: the run.
        plan: its plan, for the devices it will have.
        machine: what they are.
        time: of a step of the full batch.
        storage: bytes a second that file systems take, the one to count with first.
        price_per_device_hour: in any currency.
    """
    steps = all_steps_seconds(run, plan, machine, time)
    evaluation = _evaluation_seconds(run, plan, time)
    interval = min(run.checkpoint.interval or plan.n_steps, plan.n_steps) * steps / plan.n_steps
    n_nodes = math.ceil(plan.n_ranks / machine.devices_per_node)
    between = saving.mean_seconds_between_failures(n_nodes)
    copy = saving.host_bytes(run, plan) / HOST_COPY_BYTES_PER_SECOND
    n_bytes = saving.checkpoint_bytes(run, plan.n_parameters)
    savings = tuple(
        _saving(
            n_bytes / speed,
            copy if run.checkpoint.background else None,
            interval,
            between,
            speed,
        )
        for speed in storage
    )
    stall = savings[0].stall_seconds

    def useful(failures_per_node_day: float) -> float:
        mean = saving.mean_seconds_between_failures(n_nodes, failures_per_node_day)
        return saving.useful_share(interval, stall, mean)

    share = useful(saving.FAILURES_PER_NODE_DAY)
    seconds = (steps + evaluation) / share if share else math.inf
    device_hours = seconds * plan.n_ranks / 3600
    return Cost(
        step_seconds=steps,
        evaluation_seconds=evaluation,
        interval_seconds=interval,
        savings=savings,
        seconds_between_failures=between,
        useful_share=share,
        useful_shares=(
            useful(saving.MOST_FAILURES_PER_NODE_DAY),
            useful(saving.FEWEST_FAILURES_PER_NODE_DAY),
        ),
        seconds=seconds,
        n_failures=seconds / between,
        device_hours=device_hours,
        price=None if price_per_device_hour is None else device_hours * price_per_device_hour,
    )


def all_steps_seconds(run: Run, plan: Plan, machine: Machine, time: StepTime) -> float:
    """Returns the time of all steps, the smaller ones of a batch ramp among them.

    A step takes a fixed time and one for each micro batch, so two sizes of batch tell all.
    """
    ramp, full = run.train.batch_ramp, run.train.global_batch_size
    if ramp is None or ramp.start == full:
        return time.seconds * plan.n_steps
    small = rules.change(run, {"train.global_batch_size": ramp.start, "train.batch_ramp": None})
    first = step_time(small, resolve(small, plan.n_ranks), machine).seconds
    of_sequence = (time.seconds - first) / (full - ramp.start)
    fixed = time.seconds - of_sequence * full
    return fixed * plan.n_steps + of_sequence * plan.n_sequences


def _evaluation_seconds(run: Run, plan: Plan, time: StepTime) -> float:
    """Returns the time of forward passes over held-out data."""
    interval = run.evaluate.interval or plan.n_steps
    n_batches = (plan.n_steps // interval + 1) * run.evaluate.batches
    forward = sum(forward for forward, _ in time.stage_seconds)
    both = sum(sum(passes) for passes in time.stage_seconds)
    without_update = time.seconds - time.parts.get("optimizer", 0.0)
    return n_batches * without_update * (forward / both if both else 0.0)


def _saving(
    write: float,
    copy: float | None,
    interval: float,
    between_failures: float,
    bytes_per_second: float,
) -> Saving:
    """Weighs one file system; `copy` is the stall of a save in the background, None without."""
    if copy is None:
        best = saving.suggest_interval(write, between_failures)
        return Saving(bytes_per_second, write, write, best)
    # One save at a time: the next waits until the one before is written.
    stall = copy + max(0.0, write - interval)
    best = max(write, saving.suggest_interval(copy, between_failures))
    return Saving(bytes_per_second, write, stall, best)


@dataclass(frozen=True)
class CorpusUse:
    """How often a run reads one corpus of its blend."""

    prefix: str
    tokens: int | None
    """In its token files; None where they are not there."""
    share: float | None
    """Of all training tokens; None where it follows from sizes that are not known."""
    epochs: float | None


def corpora_use(run: Run, plan: Plan, sizes: Mapping[str, int]) -> list[CorpusUse]:
    """Returns how often each corpus of the training blend is read.

    Args:
        run: the run.
        plan: its plan.
        sizes: tokens by prefix, of the token files that are there.
    """
    blend, train_share = training_blend(run)
    weights: list[float] | None = list(blend.weights)
    if not weights:
        known = [sizes[prefix] for prefix in blend.prefixes if prefix in sizes]
        weights = [float(size) for size in known] if len(known) == len(blend.prefixes) else None
    found = []
    for number, prefix in enumerate(blend.prefixes):
        size = sizes.get(prefix)
        total = sum(weights) if weights else 0.0
        share = weights[number] / total if weights and total else None
        is_known = size and share is not None and train_share
        epochs = plan.n_tokens * share / (size * train_share) if is_known else None  # type: ignore[operator]
        found.append(CorpusUse(prefix, size, share, epochs))
    return found


def training_blend(run: Run) -> tuple[Blend, float]:
    """Returns the blend a run trains on, and the share of its documents that training gets."""
    if run.data.train.prefixes:
        return run.data.train, 1.0
    shares = units.parse_shares(run.data.split)
    return run.data.blend, shares[0] / sum(shares)
