"""Cost of a run: days, device-hours and money, checkpoints, epochs over its data.

A run of 1,500 steps of 20 s saves every 100 steps, which stalls it for 5 s, on 128 nodes with one
failure every 28.8 hours:

    steps                      1,500 x 20 s            8.3 h
    useful share of the time   (1 - (15 + 16.7 min) / 28.8 h) / (1 + 5 s / 2,000 s) = 97.9 %
    total                      8.3 h / 0.979           8.5 h = 8,720 device-hours on 1,024 devices
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trainyard import units
from trainyard.config import rules
from trainyard.config.run import Blend, Run
from trainyard.layout.resolve import Plan, resolve
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.planning import saving
from trainyard.planning.hardware import Machine
from trainyard.planning.time import StepTime, step_time
from trainyard.units import Duration

HOST_COPY_BYTES_PER_SECOND = 20e9
"""From a device to host memory: achieved by PCIe 4.0 x16, of 32e9."""
STORAGE_BYTES_PER_SECOND = (5e9, 20e9, 100e9)
"""Default file systems to report writing for: a small, a usual and a large one."""
LEAST_USEFUL_SHARE = 0.95
"""Below it, a plan says which way of saving loses less."""
LEAST_GAIN = 0.015
"""In useful share, for which a plan proposes more frequent saves or another file system."""
NICE_MINUTES = (5, 10, 15, 20, 30, 60)


@dataclass(frozen=True)
class Saving:
    """Writing one checkpoint to a file system."""

    storage_bytes_per_second: float
    write_seconds: float
    """Time to write the whole checkpoint."""
    stall_seconds: float
    """How long it stalls training."""
    best_interval_seconds: float
    """Between saves, to lose the least time."""


@dataclass(frozen=True)
class Cost:
    """A whole run, including failures."""

    step_seconds: float
    """All steps, each once."""
    evaluation_seconds: float
    interval_seconds: float
    """Between saves, as configured."""
    savings: tuple[Saving, ...]
    """By file system; the other figures use the first."""
    seconds_between_failures: float
    useful_share: float
    """Share of time in steps that need no repetition; 0 if the run would never finish."""
    useful_shares: tuple[float, float]
    """The same with the highest and the lowest failure rates of published runs."""
    seconds: float
    """Total time; infinite if the run would never finish."""
    n_failures: float
    device_hours: float
    price: float | None
    """In the currency of the device-hour price."""


def run_cost(
    run: Run,
    plan: Plan,
    machine: Machine,
    time: StepTime,
    storage: tuple[float, ...] = STORAGE_BYTES_PER_SECOND,
    price_per_device_hour: float | None = None,
) -> Cost:
    """Computes the cost of a run.

    Args:
        run: the run.
        plan: its plan, for its devices.
        machine: the devices.
        time: of a step with the full batch.
        storage: write speeds of file systems in bytes per second, the one to use first.
        price_per_device_hour: in any currency.
    """
    steps = all_steps_seconds(run, plan, machine, time)
    evaluation = _evaluation_seconds(run, plan, time)
    interval = run.checkpoint.interval_seconds(steps / plan.n_steps, plan.n_steps)
    n_nodes = math.ceil(plan.n_ranks / machine.devices_per_node)
    between = saving.mean_seconds_between_failures(n_nodes)
    copy = saving.host_bytes(run, plan) / HOST_COPY_BYTES_PER_SECOND
    n_bytes = checkpoint_bytes(run, plan.n_parameters)
    savings = tuple(
        _saving(speed, n_bytes, copy if run.checkpoint.background else None, interval, between)
        for speed in storage
    )

    def useful(failures_per_node_day: float) -> float:
        mean = saving.mean_seconds_between_failures(n_nodes, failures_per_node_day)
        return saving.useful_share(interval, savings[0].stall_seconds, mean)

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


def better_saving(
    run: Run, plan: Plan, machine: Machine, time: StepTime, storage: float
) -> tuple[str, float]:
    """Finds how to save so that failures and saves leave enough useful time, or most.

    Args:
        run: the run.
        plan: its plan.
        machine: the devices.
        time: of a step with the full batch.
        storage: write speed of the file system, in bytes per second.

    Returns:
        the smallest change, empty if none gains, and the useful share with it.
    """

    def cost_of(changes: rules.Changes, speed: float) -> Cost:
        return run_cost(rules.change(run, changes), plan, machine, time, (speed,))

    found, best = "", cost_of({}, storage).useful_share
    faster = [(True, speed) for speed in STORAGE_BYTES_PER_SECOND if speed > storage]
    for in_background, speed in [(run.checkpoint.background, storage), (True, storage), *faster]:
        changes: dict[str, object] = {"checkpoint.background": in_background}
        least = math.ceil(cost_of(changes, speed).savings[0].best_interval_seconds / 60)
        shares: dict[int, float] = {}
        for minutes in {least, *(n for n in NICE_MINUTES if n > least)}:
            interval = {"checkpoint.interval": Duration(60 * minutes)}
            shares[minutes] = cost_of(changes | interval, speed).useful_share
        # As rarely as costs next to nothing.
        minutes = max(
            n for n, share in shares.items() if share >= max(shares.values()) - LEAST_GAIN
        )
        if shares[minutes] >= best + LEAST_GAIN:
            changes["checkpoint.interval"], best = Duration(60 * minutes), shares[minutes]
            found = rules.describe(run, changes, " ")
            found += f" --storage {speed / 1e9:g}" if speed > storage else ""
        if best >= LEAST_USEFUL_SHARE:
            break
    return found, best


def all_steps_seconds(run: Run, plan: Plan, machine: Machine, time: StepTime) -> float:
    """Returns the time of all steps, including the smaller ones of a batch ramp.

    A step takes a fixed time plus one per micro batch, so two batch sizes determine all.
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
    n_batches = _n_evaluations(run, plan) * run.evaluate.batches
    forward = sum(forward for forward, _ in time.stage_seconds)
    both = sum(sum(passes) for passes in time.stage_seconds)
    without_update = time.seconds - time.parts.get("optimizer", 0.0)
    return n_batches * without_update * (forward / both if both else 0.0)


def _n_evaluations(run: Run, plan: Plan) -> int:
    """Counts evaluations: every interval, at the end, and once of the test split."""
    data, interval = run.data, run.evaluate.interval or plan.n_steps
    n_held_out = math.ceil(plan.n_steps / interval)
    if data.train.prefixes:
        has_valid, has_test = bool(data.valid.prefixes), bool(data.test.prefixes)
    else:
        _, valid, test = units.parse_shares(data.split)
        has_valid, has_test = valid > 0, test > 0
    return n_held_out * has_valid + has_test


def _saving(
    bytes_per_second: float, n_bytes: int, copy: float | None, interval: float, between: float
) -> Saving:
    """Evaluates one file system; `copy` is the stall of a background save, or None."""
    write = n_bytes / bytes_per_second
    if copy is None:
        best = saving.suggest_interval(write, between)
        return Saving(bytes_per_second, write, write, best)
    # One save at a time: the next waits until the previous one is written.
    stall = copy + max(0.0, write - interval)
    best = max(write, saving.suggest_interval(copy, between))
    return Saving(bytes_per_second, write, stall, best)


@dataclass(frozen=True)
class CorpusUse:
    """How often a run reads one corpus of its blend."""

    prefix: str
    tokens: int | None
    """In its token files; None if they are missing."""
    share: float | None
    """Share of all training tokens; None if it depends on unknown sizes."""
    epochs: float | None


def corpora_use(run: Run, plan: Plan, sizes: Mapping[str, int]) -> list[CorpusUse]:
    """Returns how often each corpus of the training blend is read.

    Args:
        run: the run.
        plan: its plan.
        sizes: tokens by prefix, of existing token files.
    """
    blend, train_share = training_blend(run)
    weights = list(blend.weights)
    if not weights and all(prefix in sizes for prefix in blend.prefixes):
        weights = [float(sizes[prefix]) for prefix in blend.prefixes]
    total, found = sum(weights), []
    for number, prefix in enumerate(blend.prefixes):
        size, epochs = sizes.get(prefix), None
        share = weights[number] / total if total else None
        if size and share is not None and train_share:
            epochs = plan.n_tokens * share / (size * train_share)
        found.append(CorpusUse(prefix, size, share, epochs))
    return found


def training_blend(run: Run) -> tuple[Blend, float]:
    """Returns the blend a run trains on, and the share of its documents that training gets."""
    if run.data.train.prefixes:
        return run.data.train, 1.0
    shares = units.parse_shares(run.data.split)
    return run.data.blend, shares[0] / sum(shares)
