"""AdamW with weight decay on matrices alone."""

from __future__ import annotations

import torch
from torch import nn

from trainyard.config.run import Optimizer


def build_adamw(module: nn.Module, optimizer: Optimizer) -> torch.optim.AdamW:
    """Builds AdamW; biases and norms, which have one dimension, are not decayed."""
    parameters = list(module.parameters())
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
