"""The optimizer of a run: its interface, and which one it is."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trainyard.config.precisions import MASTER
from trainyard.config.run import Run
from trainyard.optim.adamw import AdamW, LowPrecisionAdamW
from trainyard.optim.muon import Muon
from trainyard.parallel.model import LocalParameter, ParallelModel


class LocalOptimizer(Protocol):
    """Updates this rank's part of the weights from the gradients of its local parameters."""

    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates all weights, without waiting for the device.

        Args:
            learning_rate: of this step.
            divisor: of the gradients: clipping and loss scale; fp32, on the device.
            skip: 1 to keep weights, states and the number of updates, else 0; on the device.
                Gradients may then be NaN or infinite, so multiplying them by 0 does not do.
        """

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's states of a parameter by checkpoint name.

        The names are those in `config/precisions.py`. One in a block-scaled format is two tensors:
        the values, and under its name with `EXPONENTS` the exponents.
        """

    def prepare_state(self, n_updates: int | None) -> None:
        """Prepares the states after `n_updates` updates, for a checkpoint to fill.

        None: those of no update, as when it was built, for the weights now in the model.
        """


def build_optimizer(parallel_model: ParallelModel, run: Run) -> LocalOptimizer:
    """Builds the optimizer of this rank's part of a model."""
    parameters = parallel_model.local_parameters
    if run.optimizer.kind == "muon":
        return Muon(parallel_model, run)
    assert run.optimizer.kind == "adamw", f"optimizer.kind={run.optimizer.kind!r} has no class"
    if not any(MASTER in each.stored.states for each in parameters):
        multipliers = [each.multipliers for each in parameters]
        return AdamW([each.parameter for each in parameters], run.optimizer, multipliers)
    places = [(each, each.placement) for each in parameters]
    return LowPrecisionAdamW(places, run.optimizer, run.train.seed, run.train.compile != "never")
