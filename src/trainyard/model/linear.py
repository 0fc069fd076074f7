"""Layers whose weights are kept in one precision and used in that of their input.

Master weights stay fp32; the cast to the compute precision is part of the graph, so their gradients
arrive and accumulate in fp32. Casts are explicit, not autocast's: what runs in which precision can
be read in the forward pass.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Product(Protocol):
    """A matrix product of (..., in) with a weight (out, in), and a bias: as `F.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Gives (..., out), in the precision of `x`, which the weight has too."""


class Linear(nn.Module):
    """A matrix product and a bias, in the precision of the input.

    Attributes:
        product: what multiplies; another may take its place.
    """

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.product: Product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., in_features) to (..., out_features)."""
        return self.product(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class LayerNorm(nn.Module):
    """Layer normalisation over the last dimension, in the precision of the input."""

    def __init__(self, d_model: int, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(d_model))
        self.bias = nn.Parameter(torch.empty(d_model))

    def forward(self, x: Tensor) -> Tensor:
        """Normalises (..., D)."""
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
