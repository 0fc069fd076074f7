"""Every derived value of a run, computed once and never configured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from trainyard.architecture import padded_vocabulary_size, parameter_count
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.layout import flops, ranks
from trainyard.layout.batches import BatchSchedule
from trainyard.topology import Topology
from trainyard.units import Length


@dataclass(frozen=True)
class Plan:
    """The derived values of a run on a number of ranks."""

    n_ranks: int
    """All processes: tensor x pipeline x context x data."""
    data_parallel_size: int
    """Replicas that see different sequences."""
    topology: Topology
    """Ranks along each axis."""
    stages: ranks.Stages
    """First block of each pipeline stage and one past its last; stage s is on pipeline rank
    s % parallel.pipeline."""
    padded_vocabulary_size: int
    """Rows of the embedding."""
    n_parameters: int
    """Trained weights, including padding."""
    n_steps: int
    """Optimizer steps of the whole run."""
    n_sequences: int
    """Sequences those steps consume."""
    n_tokens: int
    """Tokens those steps consume."""
    order_sequences: tuple[int, int, int]
    """Sizes of the train, valid and test orders, in sequences, by Megatron-LM's rule."""
    model_flops_per_token: float
    """FLOP of forward and backward; recomputation is not counted."""
    warmup_sequences: float
    """Position where the learning rate peaks."""
    decay_sequences: float
    """Position where it reaches its minimum."""
    cooldown_sequences: float
    """The final decay of warmup_stable_decay."""
    rate_points: tuple[tuple[float, float], ...]
    """Positions and learning rates of schedule.points."""

    def as_json(self) -> dict[str, Any]:
        """Returns the values as JSON can hold them."""
        lists = {
            "order_sequences": list(self.order_sequences),
            "stages": [list(stage) for stage in self.stages],
            "rate_points": [list(point) for point in self.rate_points],
        }
        return asdict(self) | lists


def resolve(run: Run, n_ranks: int | None = None) -> Plan:
    """Computes the plan of a run.

    Args:
        run: the run.
        n_ranks: all processes; absent: the fewest that the run allows.

    Raises:
        ConfigError: the ranks or the batch cannot be divided, or the data begins at the end.
    """
    topology = ranks.find_topology(run, n_ranks)
    padded = padded_vocabulary_size(run.model, topology.tensor)
    batches = BatchSchedule(run)
    asked = batches.sequences(run.train.length)
    n_steps = batches.steps_within(asked)
    n_sequences = batches.consumed(n_steps)
    if run.data.from_step >= n_steps:
        problem = f"data.from_step={run.data.from_step}, but train.length ends at step {n_steps}"
        raise ConfigError(problem, "a greater train.length trains on the new data")
    return Plan(
        n_ranks=topology.n_ranks,
        data_parallel_size=topology.data,
        topology=topology,
        stages=ranks.find_stages(run, padded),
        padded_vocabulary_size=padded,
        n_parameters=parameter_count(run.model, padded),
        n_steps=n_steps,
        n_sequences=n_sequences,
        n_tokens=n_sequences * run.model.sequence_length,
        order_sequences=_order_sequences(run, asked + batches.order_start, n_steps),
        model_flops_per_token=flops.model_flops_per_token(run.model, padded),
        warmup_sequences=_exact_sequences(run, batches, run.schedule.warmup),
        decay_sequences=_exact_sequences(run, batches, run.schedule.decay),
        cooldown_sequences=_exact_sequences(run, batches, run.schedule.cooldown),
        rate_points=tuple(_rate_points(run, batches)),
    )


def _order_sequences(run: Run, n_train: int, n_steps: int) -> tuple[int, int, int]:
    """Computes Megatron-LM's sizes, which decide the repetitions of the data, and so its order."""
    one_evaluation = run.evaluate.batches * run.train.global_batch_size
    interval = run.evaluate.interval or n_steps
    return n_train, (n_steps // interval + 1) * one_evaluation, one_evaluation


def _exact_sequences(run: Run, batches: BatchSchedule, length: Length) -> float:
    if length.unit == "tokens":
        return float(length.amount / run.model.sequence_length)
    return float(batches.sequences(length))


def _rate_points(run: Run, batches: BatchSchedule) -> Iterator[tuple[float, float]]:
    last = 0.0
    for length, rate in run.schedule.points.points:
        position = _exact_sequences(run, batches, length)
        if position < last:  # of another unit: `config/rules.py` compares equal ones
            problem = f"schedule.points: {length} is sequence {position:,.0f}, before {last:,.0f}"
            raise ConfigError(problem, "list points in the order of training")
        last = position
        yield position, rate


def learning_rate(run: Run, plan: Plan, consumed_sequences: int) -> float:
    """Returns the rate of the step that ends at `consumed_sequences` in total.

    Counting the step's own batch makes the first rate of a warmup positive.

    Source: the rules of Megatron-LM's OptimizerParamScheduler; warmup starts from zero.
    """
    if run.schedule.kind == "points":
        return _between_points(plan.rate_points, consumed_sequences)
    peak, lowest = run.optimizer.learning_rate, run.schedule.minimum_learning_rate
    if consumed_sequences <= plan.warmup_sequences and plan.warmup_sequences > 0:
        return peak * consumed_sequences / plan.warmup_sequences
    if run.schedule.kind == "constant":
        return peak
    if consumed_sequences > plan.decay_sequences:
        return lowest
    return lowest + (peak - lowest) * _share_of_peak(run, plan, consumed_sequences)


def _between_points(points: tuple[tuple[float, float], ...], position: int) -> float:
    if position <= points[0][0]:
        return points[0][1]
    for (start, before), (end, after) in pairwise(points):
        if position <= end:
            return before + (after - before) * (position - start) / (end - start)
    return points[-1][1]


def _share_of_peak(run: Run, plan: Plan, consumed_sequences: int) -> float:
    if run.schedule.kind == "warmup_stable_decay":
        left = (plan.decay_sequences - consumed_sequences) / max(plan.cooldown_sequences, 1.0)
        return min(1.0, left)
    span = plan.decay_sequences - plan.warmup_sequences
    done = (consumed_sequences - plan.warmup_sequences) / span if span > 0 else 1.0
    if run.schedule.kind == "linear":
        return 1.0 - done
    assert run.schedule.kind == "cosine", f"schedule.kind={run.schedule.kind!r} has no formula"
    return 0.5 * (1.0 + math.cos(math.pi * done))
