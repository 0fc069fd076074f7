"""Collectives as differentiable functions, each with the collective of its backward pass.

    forward           backward          where
    identity          all-reduce        into a column-parallel layer: all ranks read the whole input
    all-reduce        identity          out of a row-parallel layer: every rank holds a partial sum
    all-gather        reduce-scatter    into a column-parallel layer, with sequence parallelism
    reduce-scatter    all-gather        out of a row-parallel layer, with sequence parallelism
    all-to-all        all-to-all        heads for tokens, in attention over a sharded sequence

Tokens are dimension 1, in equal parts. A started collective runs beside computation until it is
finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.model.linear import as_output

Collective = Callable[[Tensor, dist.ProcessGroup], Tensor]

# torch.distributed's functional collectives wait at once where they are compiled; these never do.
_started = torch.ops._c10d_functional


def start_all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Starts to reduce a tensor over all ranks; `finish` returns the result."""
    out: Tensor = _started.all_reduce(x.contiguous(), operation, group.group_name)
    return out


def start_all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts to gather tokens, (B, T/n, ...), of all ranks; `finish_all_gather` returns them."""
    out: Tensor = _started.all_gather_into_tensor(x.contiguous(), group.size(), group.group_name)
    return out


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Starts to sum (B, T, ...) over ranks; `finish` returns this rank's tokens, (B, T/n, ...)."""
    n_ranks = group.size()
    split = x.unflatten(1, (n_ranks, -1))  # type: ignore[no-untyped-call]
    parts = split.transpose(0, 1).flatten(0, 1).contiguous()
    out: Tensor = _started.reduce_scatter_tensor(parts, "sum", n_ranks, group.group_name)
    return out


def start_all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Starts to send `sent[i]` rows to rank i; `finish` returns `received[i]` rows of each rank."""
    out: Tensor = _started.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return out


def finish(started: Tensor) -> Tensor:
    """Waits for a collective: on a GPU, only its stream waits."""
    out: Tensor = _started.wait_tensor(started)
    return out


def finish_all_gather(started: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns the tokens of all ranks, (B, T, ...), in rank order."""
    split = finish(started).unflatten(0, (group.size(), -1))  # type: ignore[no-untyped-call]
    out: Tensor = split.transpose(0, 1).flatten(1, 2)  # of one sequence: a view
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Reduces a tensor over all ranks into a new tensor; not differentiable."""
    return finish(start_all_reduce(x, group, operation))


def all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gathers the tokens of all ranks, (B, T/n, ...) each, in rank order; not differentiable."""
    return finish_all_gather(start_all_gather(x, group), group)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums (B, T, ...) over ranks and keeps this rank's tokens; not differentiable."""
    return finish(start_reduce_scatter(x, group))


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; not differentiable."""
    rows = [1] * group.size()
    return finish(start_all_to_all(x, rows, rows, group))


def _same(x: Tensor, _group: dist.ProcessGroup) -> Tensor:
    return x


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, forward: Collective, backward: Collective
    ) -> Tensor:
        ctx.group, ctx.backward_collective = group, backward
        return as_output(forward(x, group))

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


@dataclass(frozen=True)
class InputOfGroup:
    """An input that all ranks of a group multiply by their shard of a weight (`SharedInput`).

    Attributes:
        group: the ranks.
        by_tokens: each has its tokens of the input; otherwise all have all of it.
    """

    group: dist.ProcessGroup
    by_tokens: bool
    gathers_again: bool

    def start(self, x: Tensor, gradient: Tensor | None = None) -> Tensor:
        """Starts to gather it."""
        if not self.by_tokens:
            return x
        x = x if gradient is None else sent_again(x, gradient)
        return start_all_gather(x, self.group)

    def finish(self, started: Tensor) -> Tensor:
        """Returns all of it."""
        return finish_all_gather(started, self.group) if self.by_tokens else started

    def start_sum(self, gradient: Tensor) -> Tensor:
        """Starts to sum its gradient."""
        if self.by_tokens:
            return start_reduce_scatter(gradient, self.group)
        return start_all_reduce(gradient, self.group)

    def finish_sum(self, started: Tensor) -> Tensor:
        """Returns the gradient of this rank's part."""
        return finish(started)


def over(group: dist.ProcessGroup, collective: Collective) -> Callable[[Tensor], Tensor]:
    """Returns a collective as a function of one tensor."""
    return lambda x: collective(x, group)


def _differentiable(forward: Collective, backward: Collective) -> Collective:
    def exchange(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        out: Tensor = _Collective.apply(x, group, forward, backward)  # type: ignore[no-untyped-call]
        return out

    return exchange


copy_to_group = _differentiable(_same, all_reduce)
"""Passes a tensor to a computation split over ranks; sums their gradients."""
reduce_from_group = _differentiable(all_reduce, _same)
"""Sums the partial results of all ranks."""
gather_tokens = _differentiable(all_gather, reduce_scatter)
"""Gathers (B, T/tp, ...) of all ranks to (B, T, ...); sums their gradients."""
scatter_tokens = _differentiable(reduce_scatter, all_gather)
"""Sums (B, T, ...) over ranks and keeps this rank's (B, T/tp, ...)."""
exchange_parts = _differentiable(all_to_all, all_to_all)
"""Sends `x[i]` to rank i, for every rank; `[i]` of the result came from rank i."""
