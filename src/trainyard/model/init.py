"""Initial weights, each drawn from a generator of its own, so that a cut model starts equal."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from trainyard.config.run import Model

RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


@torch.no_grad()
def initialise(module: nn.Module, model: Model, seed: int) -> None:
    """Fills every parameter as GPT-2 and Megatron-LM do.

    Weights and embeddings are normal with `init_std`, residual outputs with init_std / sqrt(2 L);
    biases are zero, norms one.
    """
    for name, parameter in module.named_parameters():
        parameter.copy_(initial_value(name, parameter.shape, model, seed))


def initial_value(name: str, shape: torch.Size, model: Model, seed: int) -> Tensor:
    """Draws one whole parameter, fp32 on the CPU, from (seed, name) alone."""
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if "norm.weight" in name:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    std = model.init_std
    if name.endswith(RESIDUAL_OUTPUTS):
        std /= math.sqrt(2 * model.n_layers)
    return torch.empty(shape).normal_(0.0, std, generator=generator)
