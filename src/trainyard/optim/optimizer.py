"""The optimizer of a run: its interface, which one it is, and its learning rate."""

from __future__ import annotations

import math
from typing import Protocol

from torch import Tensor

from trainyard.config.precisions import MASTER
from trainyard.config.run import Run
from trainyard.optim.adamw import AdamW
from trainyard.optim.low_precision import LowPrecisionAdamW
from trainyard.parallel.model import LocalParameter, ParallelModel
from trainyard.parallel.placement import place
from trainyard.plan.resolve import Plan


class LocalOptimizer(Protocol):
    """Updates this rank's part of the weights from the gradients of its local parameters."""

    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates all weights, without waiting for the device.

        Args:
            learning_rate: of this step.
            divisor: of the gradients: clipping and loss scale; fp32, on the device.
            skip: 1 to keep weights, states and the number of updates, else 0; on the device.
        """

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's states of a parameter by checkpoint name.

        The names are those in `config/precisions.py`. One in a block-scaled format is two tensors:
        the values, and under its name with `EXPONENTS` the exponents.
        """

    def prepare_state(self, n_updates: int | None) -> None:
        """Prepares the states after `n_updates` updates, for a checkpoint to fill; None: no update.

        Without updates there are no moments, and the weights are those last loaded into the model.
        """


def build_optimizer(parallel_model: ParallelModel, run: Run) -> LocalOptimizer:
    """Builds the optimizer of this rank's part of a model."""
    parameters = parallel_model.local_parameters
    if not any(MASTER in each.stored.states for each in parameters):
        return AdamW([each.parameter for each in parameters], run.optimizer)
    places = [
        (each, place(each.parameter, each.dimension, parallel_model.tensor_shard))
        for each in parameters
    ]
    return LowPrecisionAdamW(places, run.optimizer, run.train.seed, run.train.compile != "never")


def learning_rate(run: Run, plan: Plan, consumed_sequences: int) -> float:
    """Returns the rate of the step that ends at `consumed_sequences` in total.

    Counting the step's own batch makes the first rate of a warmup positive.

    Source: the rules of Megatron-LM's OptimizerParamScheduler; warmup starts from zero.
    """
    peak, lowest = run.optimizer.learning_rate, run.schedule.minimum_learning_rate
    if consumed_sequences <= plan.warmup_sequences and plan.warmup_sequences > 0:
        return peak * consumed_sequences / plan.warmup_sequences
    if run.schedule.kind == "constant":
        return peak
    if consumed_sequences > plan.decay_sequences:
        return lowest
    return lowest + (peak - lowest) * _share_of_peak(run, plan, consumed_sequences)


def _share_of_peak(run: Run, plan: Plan, consumed_sequences: int) -> float:
    if run.schedule.kind == "warmup_stable_decay":
        left = (plan.decay_sequences - consumed_sequences) / max(plan.cooldown_sequences, 1.0)
        return min(1.0, left)
    span = plan.decay_sequences - plan.warmup_sequences
    done = (consumed_sequences - plan.warmup_sequences) / span if span > 0 else 1.0
    if run.schedule.kind == "linear":
        return 1.0 - done
    return 0.5 * (1.0 + math.cos(math.pi * done))
