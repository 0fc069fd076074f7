"""Layers that keep weights in one precision and compute in that of their input.

Master weights stay fp32. The cast to the compute precision is part of the graph, so their gradients
accumulate in fp32. Casts are explicit, without autocast: the forward pass shows what runs in which
precision.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.architecture import LayerSpec


class MatmulFunction(Protocol):
    """A matmul of (..., in) with a weight (out, in), plus a bias, like `F.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Returns (..., out), in the precision of `x` and of the weight."""

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, /) -> tuple[Tensor, Tensor]:
        """Returns the gradients of `x` and of the weight, given that of the output."""


class PlainProduct:
    """`F.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Multiplies."""
        return F.linear(x, weight, bias)

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, /) -> tuple[Tensor, Tensor]:
        """Computes both matmuls."""
        return gradient @ weight, gradient.flatten(0, -2).T @ x.flatten(0, -2)


class Layer(nn.Module):
    """A weight and perhaps a bias, kept in one precision and used in another.

    Attributes:
        casts: of both, while passes share them (`cast_once`).
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    casts: tuple[Tensor, Tensor | None] | None = None

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.weight))
        self.bias = nn.Parameter(torch.empty(spec.weight[:1])) if spec.has_bias else None

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias in a precision, as part of the graph."""
        if self.casts is None:
            return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        weight, bias = self.casts
        shared: Tensor = _KnownCast.apply(self.weight, weight)  # type: ignore[no-untyped-call]
        return shared, None if bias is None else _KnownCast.apply(self.bias, bias)  # type: ignore[no-untyped-call]


class Linear(Layer):
    """A matmul, plus a bias, in the precision of the input.

    Attributes:
        product: computes the matmul; replaceable.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.product: MatmulFunction = PlainProduct()

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        weight, bias = self.cast(x.dtype)
        return self.product(x, weight, bias)


class LayerNorm(Layer):
    """Layer normalization over the last dimension, in the precision of the input."""

    def __init__(self, spec: LayerSpec, epsilon: float) -> None:
        super().__init__(spec)
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes (..., D)."""
        weight, bias = self.cast(x.dtype)
        return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)


@contextmanager
def cast_once(layers: Iterable[Layer], dtype: torch.dtype) -> Iterator[None]:
    """Shares one cast of each parameter among all passes inside its block.

    Otherwise each micro batch in flight would keep its own until its backward pass.

    Args:
        layers: their parameters must not change inside the block.
        dtype: of their inputs.
    """
    cast = [each for each in layers if each.weight.dtype != dtype]
    for each in cast:
        bias = None if each.bias is None else each.bias.detach().to(dtype)
        each.casts = each.weight.detach().to(dtype), bias
    try:
        yield
    finally:
        for each in cast:
            each.casts = None


class _KnownCast(torch.autograd.Function):
    """A cast whose values already exist: only adds the backward pass."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, cast: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None
