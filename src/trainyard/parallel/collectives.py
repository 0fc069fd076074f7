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

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from trainyard.model.linear import MatmulFunction

TOKENS = 1
Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]

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


def _same(x: Tensor, _group: dist.ProcessGroup) -> Tensor:
    return x.view_as(x)


def _gather_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return all_gather(x, group, TOKENS)


def _reduce_part(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return reduce_scatter(x, group, TOKENS)


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.group, ctx.backward_collective = group, backward
        return forward(x, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backward_collective(gradient, ctx.group), None, None, None


def sent_again(x: Tensor, gradient: Tensor) -> Tensor:
    """Returns `x`, for a backward pass to send as the forward pass did.

    A compiler takes the same message for that of the forward pass, and keeps what arrived then. So
    this depends on `gradient`; Inductor would drop a term times 0.
    """
    if not torch.compiler.is_compiling():
        return x
    first = gradient.flatten()[0]
    return torch.where(first.isnan(), first, x)


class _GatheredProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        product: MatmulFunction,
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.group, ctx.has_bias = product, group, bias is not None
        return product(_gather_all(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        x = sent_again(x, gradient)
        gathered = _gather_all(x, ctx.group)
        of_gathered, of_weight = ctx.product.backward(gradient, gathered, weight)
        of_x = _reduce_part(of_gathered, ctx.group)
        of_bias = gradient.flatten(0, -2).sum(0) if ctx.has_bias else None
        return of_x, of_weight, of_bias, None, None


def copy_to_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Passes `x` to a computation split over ranks; sums their gradients in the backward pass."""
    out: Tensor = _Collective.apply(x, group, _same, all_reduce)  # type: ignore[no-untyped-call]
    return out


def reduce_from_group(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums the partial results of all ranks."""
    out: Tensor = _Collective.apply(x, group, all_reduce, _same)  # type: ignore[no-untyped-call]
    return out


def gather_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers (B, T/tp, ...) of all ranks to (B, T, ...); sums gradients in the backward pass."""
    out: Tensor = _Collective.apply(x, group, _gather_all, _reduce_part)  # type: ignore[no-untyped-call]
    return out


def product_of_gathered(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    product: MatmulFunction,
    group: dist.ProcessGroup,
) -> Tensor:
    """Multiplies gathered tokens; the backward pass gathers them again."""
    out: Tensor = _GatheredProduct.apply(x, weight, bias, product, group)  # type: ignore[no-untyped-call]
    return out


def scatter_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums (B, T, ...) over ranks and keeps this rank's (B, T/tp, ...)."""
    out: Tensor = _Collective.apply(x, group, _reduce_part, _gather_all)  # type: ignore[no-untyped-call]
    return out


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; `[i]` of the result came from rank i."""
    out: Tensor = _Collective.apply(x, group, all_to_all, all_to_all)  # type: ignore[no-untyped-call]
    return out
