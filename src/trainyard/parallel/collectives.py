"""Collective operations as steps of a forward pass, each with the operation its backward needs.

    forward           backward          where
    identity          all-reduce        into a column cut: every rank reads the whole input
    all-reduce        identity          out of a row cut: every rank holds a part of the sum
    all-gather        reduce-scatter    into a column cut, when the residual stream is cut by tokens
    reduce-scatter    all-gather        out of a row cut, when the residual stream is cut by tokens
    all-to-all        all-to-all        heads for tokens, in attention over a shared sequence

Tokens are dimension 1, in equal parts. All are asynchronous on a GPU until their result is used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from trainyard.model.linear import Product

TOKENS = 1

# torch 2.13 has new names for them, and warns of the old ones.
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = (
    getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor
)


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Combines a tensor of every rank; a new tensor, not differentiable."""
    return _wait(collectives.all_reduce(x.contiguous(), operation, group))


def all_gather(x: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    """Joins the tensors of every rank along a dimension, in the order of ranks."""
    return _wait(_gather(x.contiguous(), dimension, group))


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dimension: int) -> Tensor:
    """Adds up a tensor of every rank and keeps this rank's part along a dimension."""
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
        bias: Tensor,
        product: Product,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.group = product, group
        return product(all_gather(x, group, TOKENS), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        if torch.compiler.is_compiling():
            # Else it is the same as in the forward pass to the compiler, which then keeps it.
            x = x + 0 * gradient.flatten()[0]
        gathered = all_gather(x, ctx.group, TOKENS)
        of_gathered, of_weight = ctx.product.backward(gradient, gathered, weight)
        of_x = reduce_scatter(of_gathered, ctx.group, TOKENS)
        return of_x, of_weight, gradient.flatten(0, -2).sum(0), None, None


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
    """Gives `x` to a computation that each rank does a part of; gradients of the parts add up."""
    out: Tensor = _CopyToGroup.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds up what each rank computed a part of."""
    out: Tensor = _ReduceFromGroup.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Joins (B, T/tp, ...) of every rank to (B, T, ...); gradients of the parts add up."""
    out: Tensor = _GatherTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def product_of_gathered(
    x: Tensor, weight: Tensor, bias: Tensor, product: Product, group: dist.ProcessGroup
) -> Tensor:
    """Multiplies what `gather_tokens` gives: gathered again in the backward pass, not kept."""
    out: Tensor = _GatheredProduct.apply(x, weight, bias, product, group)  # type: ignore[no-untyped-call]
    return out


def scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Adds up (B, T, ...) of every rank and keeps this rank's (B, T/tp, ...)."""
    out: Tensor = _ScatterTokens.apply(x, group)  # type: ignore[no-untyped-call]
    return out


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; `[i]` of the result came from rank i."""
    out: Tensor = _ExchangeParts.apply(x, group)  # type: ignore[no-untyped-call]
    return out
