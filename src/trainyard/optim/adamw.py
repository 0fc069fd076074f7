"""AdamW with weight decay on matrices only, and state in the run's precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainyard.config.run import Optimizer, Run
from trainyard.optim.low_precision import LowBitAdamW, begin_at, moments_of
from trainyard.parallel.model import LocalParameter, ParallelModel
from trainyard.parallel.placement import place


def build_optimizer(parallel_model: ParallelModel, run: Run) -> torch.optim.Optimizer:
    """Builds the optimizer of this rank's part of a model."""
    parameters, settings = parallel_model.local_parameters, run.optimizer
    if not any(each.is_low_bit for each in parameters):
        return build_adamw([each.parameter for each in parameters], settings)
    return LowBitAdamW(
        [
            (each, place(each.parameter, each.dimension, parallel_model.tensor_shard))
            for each in parameters
        ],
        lambda parameters: build_adamw(parameters, settings),
        {
            "lr": settings.learning_rate,
            "betas": settings.betas,
            "eps": settings.epsilon,
            "weight_decay": settings.weight_decay,
        },
        run.train.seed,
        compiled=run.train.compile != "never" and _compiles_codes(parallel_model.mesh.device),
    )


def build_adamw(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> torch.optim.AdamW:
    """Builds AdamW; one-dimensional parameters (biases and norms) are not decayed."""
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": optimizer.weight_decay},
        {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=optimizer.learning_rate,
        betas=optimizer.betas,
        eps=optimizer.epsilon,
        fused=True,
    )


def state_of(optimizer: torch.optim.Optimizer, local: LocalParameter) -> dict[str, Tensor]:
    """Returns this rank's optimizer state of a parameter, for a checkpoint."""
    if isinstance(optimizer, LowBitAdamW):
        return optimizer.state_of(local)
    assert isinstance(optimizer, torch.optim.AdamW)
    return moments_of(optimizer, local.parameter)


def prepare_state(optimizer: torch.optim.Optimizer, n_updates: int | None) -> None:
    """Prepares the state after `n_updates` updates, for a checkpoint to fill; None: no update yet.

    Without updates there are no moments, and the weights are those last loaded into the model.
    """
    if isinstance(optimizer, LowBitAdamW):
        optimizer.begin_at(n_updates)
    else:
        assert isinstance(optimizer, torch.optim.AdamW)
        begin_at(optimizer, n_updates)


def _compiles_codes(device: torch.device) -> bool:
    """Whether kernels that read and write e4m3 can be compiled: on NVIDIA GPUs since Ada."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)
