"""Plans for a deadline: the largest model on given devices, or the fewest devices for a run.

Models have the shapes of GPT-3 and of Megatron-LM's papers. Each is timed in the fastest layout
that fits, for the whole run with evaluation, saves and failures. On 64 H100:

    8.3B on 165B tokens     2d 22h
    12.9B on 257B tokens    7d 2h     the largest within 10 days
    18.4B on 369B tokens    14d 4h    too long
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

from trainyard.architecture import matmuls, padded_vocabulary_size, parameter_count
from trainyard.config import rules
from trainyard.config.run import Run
from trainyard.planning.batches import BatchSchedule
from trainyard.planning.cost import Cost, run_cost
from trainyard.planning.flops import model_flops_per_token
from trainyard.planning.hardware import Machine, find_extremes
from trainyard.planning.search import FIELDS, Candidate, search
from trainyard.units import Length

TOKENS_PER_PARAMETER = 20
"""Compute-optimal tokens per parameter (arXiv:2203.15556)."""
MOST_TIMES_AS_MANY = 16
"""Highest multiple to try of the devices that would suffice at peak speed."""
SHAPES = (
    *((12, 768), (24, 1024), (24, 1536), (24, 2048), (32, 2560), (30, 3072), (32, 4096)),
    *((40, 4096), (40, 5120), (40, 6144), (48, 6144), (48, 7168), (48, 8192), (64, 8192)),
    *((60, 10240), (80, 10240), (80, 12288), (96, 12288), (96, 16384), (105, 20480)),
    *((128, 20480), (128, 25600)),
)
"""n_layers and d_model, smallest first."""
CHANGED_FIELDS = (
    *("model.n_layers", "model.d_model", "model.n_heads", "model.d_ff"),
    *("model.d_head", "model.n_key_value_heads"),
    *("train.length", "train.batch_ramp", "schedule.warmup", "schedule.decay"),
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
        """Of the whole run; infinite if it does not fit or never ends."""
        return self.cost.seconds if self.cost else math.inf


@dataclass(frozen=True)
class Trainer:
    """Predicts training times."""

    machine: Machine
    storage: tuple[float, ...]
    """Write speeds of file systems in bytes per second; the first is used."""
    price: float | None = None
    """Price of a device-hour."""

    @classmethod
    def at_its_slowest(
        cls, machine: Machine, storage: tuple[float, ...], price: float | None = None
    ) -> Self:
        """Assumes the slowest speed for unmeasured devices."""
        extremes = find_extremes(machine)
        return cls(extremes[1] if extremes else machine, storage, price)

    def train(self, run: Run, n_devices: int) -> TrainingEstimate:
        """Finds the fastest layout of a run, and its total cost."""
        for found in search(run, self.machine, n_devices, most=1):
            cost = run_cost(
                found.run, found.plan, self.machine, found.time, self.storage, self.price
            )
            return TrainingEstimate(found.run, n_devices, found, cost)
        return TrainingEstimate(run, n_devices)


def largest_model(
    run: Run, trainer: Trainer, n_devices: int, seconds: float, *, keeps_length: bool
) -> list[TrainingEstimate]:
    """Finds the largest model that trains in time.

    Args:
        run: gives each model its batch, sequence length, vocabulary and precision.
        trainer: predicts times.
        n_devices: total number of devices.
        seconds: the deadline.
        keeps_length: train each model for the run's length, not on 20 tokens per parameter.

    Returns:
        it and the next size, which does not; if none does, only the smallest.
    """
    tried: dict[int, TrainingEstimate] = {}
    low, high = -1, len(SHAPES)
    while high - low > 1:
        middle = (low + high) // 2
        shaped = shape_run(run, *SHAPES[middle], keeps_length=keeps_length)
        tried[middle] = trainer.train(shaped, n_devices)
        makes_it = tried[middle].seconds <= seconds
        low, high = (middle, high) if makes_it else (low, middle)
    return [tried[place] for place in (low, high) if place in tried]


def shape_run(run: Run, n_layers: int, d_model: int, *, keeps_length: bool) -> Run:
    """Returns a run with another model: head size 64, 128 from d_model 2048; d_ff 4 d_model.

    SwiGLU, whose three matrices are to have as many parameters as these two, gets 8/3 d_model, in
    multiples of 128. As many heads share keys and values as before, if they divide the heads.
    """
    d_head = 128 if d_model >= 2048 else 64
    n_heads = d_model // d_head
    group_size = math.gcd(n_heads, run.model.n_heads // run.model.n_key_value_heads)
    n_matrices = sum(len(layer.matrices) for layer in matmuls(run.model, "mlp"))
    size: rules.Changes = {
        "model.n_layers": n_layers,
        "model.d_model": d_model,
        "model.n_heads": n_heads,
        "model.d_head": d_head,
        "model.n_key_value_heads": n_heads // group_size,
        "model.d_ff": round(8 * d_model / n_matrices / 128) * 128,
    }
    shaped = rules.change(run, size)
    if keeps_length:
        return shaped
    count = parameter_count(shaped.model, padded_vocabulary_size(shaped.model))
    n_tokens = TOKENS_PER_PARAMETER * count
    n_tokens = round(n_tokens, 3 - len(str(n_tokens)))  # three significant digits
    length = Length(n_tokens, "tokens")
    return rules.change(
        shaped,
        {
            "train.length": length,
            "train.batch_ramp": None,
            "schedule.warmup": Length(n_tokens // 100, "tokens"),
            "schedule.decay": length,
        },
    )


def fewest_devices(run: Run, trainer: Trainer, seconds: float) -> list[TrainingEstimate]:
    """Finds the fewest devices on which a run trains in time.

    Returns:
        the last number that was too few, and this one; if none does, only the highest one tried.
    """
    found: list[TrainingEstimate] = []
    for n_devices in _counts(run, trainer.machine, seconds):
        found = [*found[-1:], trainer.train(run, n_devices)]
        if found[-1].seconds <= seconds:
            return found
    return found[-1:]


def _counts(run: Run, machine: Machine, seconds: float) -> Iterator[int]:
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
