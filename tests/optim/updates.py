"""The update of a training step, as train/step.py does it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainyard.optim.clip import set_clipping


def apply_update(optimizer: torch.optim.Optimizer, *arguments: Any) -> Tensor:
    """Clips and updates; returns 1 if the update was skipped, else 0."""
    skipped = set_clipping(optimizer, *arguments)
    optimizer.step()
    return skipped
