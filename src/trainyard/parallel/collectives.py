"""Collectives as differentiable functions, each with the collective of its backward pass.

    forward           backward          where
    identity          all-reduce        into a column-parallel layer: all ranks read the whole input
    all-reduce        identity          out of a row-parallel layer: every rank holds a partial sum
    all-gather        reduce-scatter    into a column-parallel layer, with sequence parallelism
    reduce-scatter    all-gather        out of a row-parallel layer, with sequence parallelism
    all-to-all        all-to-all        heads for tokens, in attention over a sharded sequence

Tokens are dimension 1, in equal parts. On a GPU all run asynchronously until their result is used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from trainyard.model.linear import Product

TOKENS = 1

# torch 2.13 renamed them, and warns about the old names.
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Reduces a tensor over all ranks into a new tensor; not differentiable."""
    return _wait(collectives.all_reduce(x.contiguous(), operation, group))


def all_gather(x: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    """Concatenates the tensors of all ranks along a dimension, in rank order."""
    return _wait(_gather(x.contiguous(), dimension, group))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    """Sums a tensor over ranks and keeps this rank's part along a dimension."""
    return _wait(_reduce_scatter(x.contiguous(), "sum", dimension, group))


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; not differentiable."""
    return _wait(collectives.all_to_all_single(x.contiguous(), None, None, group))


def _wait(x: Tensor) -> Tensor:
    out: Tensor = collectives.wait_tensor(x)  # type: ignore[no-untyped-call]
    return out


class _CopyToGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient, ctx.group), None


class _ReduceFromGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_gather(x, group, TOKENS)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter(gradient, ctx.group, TOKENS), None


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: Product,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.group, ctx.has_bias = product, group, bias is not None
        return product(all_gather(x, group, TOKENS), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # Else the compiler sees the forward pass's gather again, and keeps its result.
            x = x + 0 * gradient.flatten()[0]
        gathered = all_gather(x, ctx.group, TOKENS)
        of_gathered, of_weight = ctx.product.backward(gradient, gathered, weight)
        of_x = reduce_scatter(of_gathered, ctx.group, TOKENS)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return of_x, of_weight, of_bias, None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return reduce_scatter(x, group, TOKENS)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_gather(gradient, ctx.group, TOKENS), None


class _ExchangeParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_to_all(gradient, ctx.group), None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Passes `x` to a computation split over ranks; sums their gradients in the backward pass."""
    out: Tensor = _CopyToGroup.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums the partial results of all ranks."""
    out: Tensor = _ReduceFromGroup.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers (B, T/tp, ...) of all ranks to (B, T, ...); sums gradients in the backward pass."""
    out: Tensor = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def product_of_gathered(
    x: Tensor, weight: Tensor, bias: Tensor | None, product: Product, group: dist.ProcessGroup
) -> Tensor:
    """Multiplies gathered tokens; the backward pass gathers them again."""
    out: Tensor = _GatheredProduct.apply(x, weight, bias, product, group)  # type: ignore[no-untyped-call]
    return out


def scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums (B, T, ...) over ranks and keeps this rank's (B, T/tp, ...)."""
    out: Tensor = _ScatterTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; `[i]` of the result came from rank i."""
    out: Tensor = _ExchangeParts.apply(x, group)  # type: ignore[no-untyped-call]
    return out
