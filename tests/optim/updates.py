"""The update of a training step, as training/step.py does it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainyard.optim.clip import StepStats
from trainyard.optim.optimizer import LocalOptimizer


def fill_gradients(module: nn.Module, seed: int, size: float = 1.0) -> None:
    """Gives every parameter a gradient."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


def are_equal(these: list[Tensor], others: list[Tensor]) -> bool:
    """Compares tensors bit for bit."""
    pairs = zip(these, others, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def apply_update(
    optimizer: LocalOptimizer, totals: StepStats, clip_norm: float, rate: float = 1e-2
) -> bool:
    """Clips and updates; returns whether the update was skipped."""
    skip = (~totals.is_finite).float()
    optimizer.step(rate, totals.divisor(clip_norm), skip)
    return bool(skip.item())
