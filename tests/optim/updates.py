"""The update of a training step, as training/step.py does it."""

from __future__ import annotations

from trainyard.optim.clip import StepStats
from trainyard.optim.optimizer import LocalOptimizer


def apply_update(
    optimizer: LocalOptimizer, totals: StepStats, clip_norm: float, rate: float = 1e-2
) -> bool:
    """Clips and updates; returns whether the update was skipped."""
    skip = (~totals.is_finite).float()
    optimizer.step(rate, totals.divisor(clip_norm), skip)
    return bool(skip.item())
