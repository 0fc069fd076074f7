"""The ladder of model shapes, and what fits into a time: the largest model, or the fewest devices.

The shapes are those of small models, then of GPT-3 and of Megatron-LM's papers. Each is timed in
the fastest layout that fits, for the whole run with evaluation, saves and failures. On 64 H100:

    8.3B on 165B tokens     2d 22h
    12.9B on 257B tokens    7d 2h     the largest within 10 days
    18.4B on 369B tokens    14d 4h    too long
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainyard.architecture import matmuls, padded_vocabulary_size, parameter_count
from trainyard.config import rules
from trainyard.config.run import Run
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.flops import active_parameter_count, model_flops_per_token
from trainyard.planning.cost import Cost, run_cost
from trainyard.planning.hardware import Machine
from trainyard.planning.search import FIELDS, Candidate, search_with_ramp
from trainyard.planning.time import find_extremes
from trainyard.units import Length, format_seconds

TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (arXiv:2203.15556)."""
MOST_TIMES_AS_MANY = 16
"""Highest multiple to try of the devices that would suffice at peak speed."""
SHAPES = (
    *((2, 64), (2, 96), (3, 128), (4, 128), (4, 192), (4, 256), (6, 320), (8, 512)),
    *((12, 768), (24, 1024), (24, 1536), (24, 2048), (32, 2560), (30, 3072), (32, 4096)),
    *((40, 4096), (40, 5120), (40, 6144), (48, 6144), (48, 7168), (48, 8192), (64, 8192)),
    *((60, 10240), (80, 10240), (80, 12288), (96, 12288), (96, 16384), (105, 20480)),
    *((128, 20480), (128, 25600)),
)
"""n_layers and d_model, smallest first."""
SMALL_SHAPES, LARGE_SHAPES = SHAPES[:10], SHAPES[8:]
"""From 0.1M to 300M parameters in the blocks, for a first run; and from GPT-3's smallest."""
CHANGED_FIELDS = (
    *("model.n_layers", "model.d_model", "model.n_heads", "model.d_ff"),
    *("model.d_head", "model.n_key_value_heads", "model.d_expert", "model.n_dense_blocks"),
    *("train.length", "train.batch_ramp", "schedule.warmup", "schedule.decay"),
    "schedule.points",
    *FIELDS,
)
"""Fields in which a model of `SHAPES` in its layout may differ from the run."""


@dataclass(frozen=True)
class TrainingEstimate:
    """A run on a number of devices, in its fastest layout, if any fits."""

    run: Run
    n_devices: int
    candidate: Candidate | None = None
    cost: Cost | None = None

    @property
    def seconds(self) -> float:
        """Time of the whole run; infinite if it does not fit or never ends."""
        return self.cost.seconds if self.cost else math.inf

    @property
    def duration(self) -> str:
        """That time in words: "takes 3d 4h", or "does not fit"."""
        is_known = math.isfinite(self.seconds)
        return f"takes {format_seconds(self.seconds)}" if is_known else "does not fit"


@dataclass(frozen=True)
class Estimator:
    """Estimates training times on a machine, at the slow end of predictions."""

    machine: Machine
    storage: tuple[float, ...]
    """Write speeds of file systems in bytes per second; the first is used."""
    price: float | None = None
    """Price of a device-hour."""

    def estimate(self, run: Run, n_devices: int) -> TrainingEstimate:
        """Finds the fastest layout of a run, and its total cost at the slow end of its range."""
        for best in search_with_ramp(run, self.machine, n_devices, most=1):
            slow = find_extremes(best.run, best.plan, self.machine, best.time)[1]
            cost = run_cost(best.run, best.plan, self.machine, slow, self.storage, self.price)
            return TrainingEstimate(best.run, n_devices, best, cost)
        return TrainingEstimate(run, n_devices)


def largest_model(
    run: Run, estimator: Estimator, n_devices: int, seconds: float, *, keeps_length: bool
) -> list[TrainingEstimate]:
    """Finds the largest model that trains in time.

    Args:
        run: gives each model its batch, sequence length, vocabulary and precision.
        estimator: predicts times.
        n_devices: total number of devices.
        seconds: the deadline.
        keeps_length: train each model for the run's length, not on 20 tokens per parameter.

    Returns:
        it and the next size, which does not; if none does, only the smallest.
    """
    tried: dict[int, TrainingEstimate] = {}

    def seconds_of(number: int) -> float:
        shaped = shape_run(run, LARGE_SHAPES[number], keeps_length=keeps_length)
        tried[number] = estimator.estimate(shaped, n_devices)
        return tried[number].seconds

    late = bisect.bisect_right(range(len(LARGE_SHAPES)), seconds, key=seconds_of)
    return [tried[number] for number in (late - 1, late) if number in tried]


def shape_run(run: Run, shape: tuple[int, int], *, keeps_length: bool) -> Run:
    """Returns a run with another model: head size 64, 128 from d_model 2048; d_ff 4 d_model.

    The smallest models have two heads. SwiGLU, whose three matrices are to have as many parameters
    as these two, gets 8/3 d_model, in multiples of 128. As many heads share keys and values as
    before, if they divide the heads; experts keep their number and their share of d_model. The
    length becomes 20 tokens per parameter that a token uses.
    """
    n_layers, d_model = shape
    n_heads = max(2, d_model // (128 if d_model >= 2048 else 64))
    group_size = math.gcd(n_heads, run.model.n_heads // run.model.n_key_value_heads)
    plain = run.model.model_copy(update={"n_experts": 0})
    n_matrices = sum(len(layer.matrices) for layer in matmuls(plain, "mlp"))
    size: rules.Changes = {
        "model.n_layers": n_layers,
        "model.d_model": d_model,
        "model.n_heads": n_heads,
        "model.d_head": d_model // n_heads,
        "model.n_key_value_heads": n_heads // group_size,
        "model.d_ff": round(8 * d_model / n_matrices / 128) * 128,
        "model.n_dense_blocks": min(run.model.n_dense_blocks, n_layers - 1),
    }
    if run.model.n_experts:
        d_expert = run.model.d_expert * d_model / run.model.d_model
        size["model.d_expert"] = max(1, round(d_expert / 64)) * 64
    shaped = rules.change(run, size)
    if keeps_length:
        return shaped
    padded = padded_vocabulary_size(shaped.model)
    n_tokens = TOKENS_PER_PARAMETER * active_parameter_count(shaped.model, padded)
    n_tokens = round(n_tokens, 3 - len(str(n_tokens)))  # three significant digits
    n_before = BatchSchedule(run).sequences(run.train.length) * run.model.sequence_length
    lengths: rules.Changes = {
        "train.length": Length(n_tokens, "tokens"),
        "train.batch_ramp": None,
        "schedule.warmup": Length(n_tokens // 100, "tokens"),
        "schedule.decay": Length(n_tokens, "tokens"),
        "schedule.points": run.schedule.points.scaled(n_tokens, n_before),
    }
    return rules.change(shaped, lengths)


def find_minimum(losses: Mapping[float, float]) -> float:
    """Finds where the loss is lowest, by a parabola in the logarithm through the three around it.

    Args:
        losses: by factor, or by learning rate; at an edge, or beside a run that diverged, the best
            one tried is it.
    """
    factors = sorted(losses)
    best = min(factors, key=losses.__getitem__)
    place = factors.index(best)
    around = factors[max(0, place - 1) : place + 2]
    if len(around) < 3 or not all(math.isfinite(losses[factor]) for factor in around):
        return best
    x, y, z = map(math.log, around)
    before = (losses[best] - losses[around[0]]) / (y - x)
    after = (losses[around[2]] - losses[best]) / (z - y)
    return math.exp((x + y) / 2 - before * (z - x) / (2 * (after - before)))


def count_parameters(run: Run) -> int:
    """Counts the parameters of a run's model."""
    return parameter_count(run.model, padded_vocabulary_size(run.model))


def fewest_devices(run: Run, estimator: Estimator, seconds: float) -> list[TrainingEstimate]:
    """Finds the fewest devices on which a run trains in time.

    Returns:
        the last number that was too few, and this one; if none does, only the highest one tried.
    """
    tried: list[TrainingEstimate] = []
    for n_devices in _device_counts(run, estimator.machine, seconds):
        tried = [*tried[-1:], estimator.estimate(run, n_devices)]
        if tried[-1].seconds <= seconds:
            return tried
    return tried[-1:]


def _device_counts(run: Run, machine: Machine, seconds: float) -> Iterator[int]:
    """Lists numbers of devices to try: parts of a node, then 1, 2, 3, 4, 6, 8, 12 .. nodes."""
    n_tokens = BatchSchedule(run).sequences(run.train.length) * run.model.sequence_length
    flops = n_tokens * model_flops_per_token(run.model, padded_vocabulary_size(run.model))
    peak = machine.device.peak_flops_per_second(run.precision.kind) or math.inf
    least, node = flops / peak / seconds, machine.devices_per_node
    powers = (2**power for power in itertools.count())
    nodes = (n for power in powers for n in ([power, power + power // 2] if power > 1 else [1]))
    most = MOST_TIMES_AS_MANY * max(least, node)
    several = itertools.takewhile(lambda n: n <= most, (node * n for n in nodes))
    return (n for n in (*rules.divisors(node)[:-1], *several) if n >= least)
