"""AdamW with weight decay on matrices alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from trainyard.config.run import Optimizer


def build_adamw(parameters: Sequence[nn.Parameter], optimizer: Optimizer) -> torch.optim.AdamW:
    """Builds AdamW; biases and norms, which have one dimension, are not decayed."""
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
