"""What follows from a run: every derived value, computed once and never configured."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.plan import flops, size
from trainyard.plan.batches import BatchSchedule


@dataclass(frozen=True)
class Plan:
    """The consequences of a run on a number of ranks."""

    n_ranks: int
    """All processes: tensor x pipeline x context x data."""
    data_parallel_size: int
    """Replicas that see different sequences."""
    padded_vocabulary_size: int
    """Rows of the embedding."""
    n_parameters: int
    """Weights that are trained, padding included."""
    n_steps: int
    """Optimizer steps of the whole run."""
    n_sequences: int
    """Sequences those steps consume."""
    n_tokens: int
    """Tokens those steps consume."""
    order_sequences: tuple[int, int, int]
    """Sequences the train, valid and test orders are built for, by Megatron-LM's rule."""
    model_flops_per_token: float
    """FLOP of forward and backward; recomputation is not counted."""
    warmup_sequences: float
    """Where the learning rate reaches its peak."""
    decay_sequences: float
    """Where it reaches its minimum."""
    cooldown_sequences: float
    """The final fall of warmup_stable_decay."""

    def as_json(self) -> dict[str, Any]:
        """Gives the values as JSON can hold them."""
        return asdict(self) | {"order_sequences": list(self.order_sequences)}


def resolve(run: Run, n_ranks: int | None = None) -> Plan:
    """Computes the plan of a run.

    Args:
        run: what was asked for.
        n_ranks: all processes; absent: the fewest the layout can have.

    Raises:
        ConfigError: the ranks or the batch cannot be divided as asked.
    """
    parallel = run.parallel
    ranks_per_replica = parallel.tensor * parallel.pipeline * parallel.context
    n_ranks = n_ranks or ranks_per_replica
    data_parallel_size = _divide_ranks(run, n_ranks, ranks_per_replica)
    padded = size.padded_vocabulary_size(run.model, parallel.tensor)
    batches = BatchSchedule(run)
    asked = batches.sequences(run.train.length)
    n_steps = batches.steps_within(asked)
    n_sequences = batches.consumed(n_steps)
    return Plan(
        n_ranks=n_ranks,
        data_parallel_size=data_parallel_size,
        padded_vocabulary_size=padded,
        n_parameters=size.parameter_count(run.model, padded).total,
        n_steps=n_steps,
        n_sequences=n_sequences,
        n_tokens=n_sequences * run.model.sequence_length,
        order_sequences=_order_sequences(run, asked, n_steps),
        model_flops_per_token=flops.model_flops_per_token(run.model, padded),
        warmup_sequences=_exact_sequences(run, batches, "warmup"),
        decay_sequences=_exact_sequences(run, batches, "decay"),
        cooldown_sequences=_exact_sequences(run, batches, "cooldown"),
    )


def _divide_ranks(run: Run, n_ranks: int, ranks_per_replica: int) -> int:
    if n_ranks % ranks_per_replica:
        raise ConfigError(
            f"{n_ranks} ranks cannot be divided by parallel.tensor={run.parallel.tensor} x "
            f"parallel.pipeline={run.parallel.pipeline} x parallel.context={run.parallel.context}",
            f"use a multiple of {ranks_per_replica} ranks",
        )
    data_parallel_size = n_ranks // ranks_per_replica
    step = run.train.micro_batch_size * data_parallel_size
    if run.train.global_batch_size % step:
        raise ConfigError(
            f"train.global_batch_size={run.train.global_batch_size} cannot be divided by "
            f"train.micro_batch_size={run.train.micro_batch_size} x {data_parallel_size} replicas",
            f"nearest: {max(1, run.train.global_batch_size // step) * step}",
        )
    return data_parallel_size


def _order_sequences(run: Run, asked: int, n_steps: int) -> tuple[int, int, int]:
    """Megatron-LM's sizes: they decide how often the data is repeated, and so its order."""
    one_evaluation = run.evaluate.batches * run.train.global_batch_size
    interval = run.evaluate.interval or n_steps
    return asked, (n_steps // interval + 1) * one_evaluation, one_evaluation


def _exact_sequences(run: Run, batches: BatchSchedule, field: str) -> float:
    length = getattr(run.schedule, field)
    if length.unit == "tokens":
        return float(length.amount / run.model.sequence_length)
    return float(batches.sequences(length))
