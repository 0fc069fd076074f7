"""Expert parallelism: the experts of a block on several ranks, with tokens sent to them and back.

    rank 0, experts 0 and 1            rank 1, experts 2 and 3
    rows for  0 0 1 2 3 3              rows for  0 1 1 2 2 3       sorted by expert
        |  all-to-all of counts, then of rows
    0 0 1 | 0 1 1                      2 3 3 | 2 2 3               from rank 0 | from rank 1
        |  sorted by expert
    0 0 0 1 1 1                        2 2 2 3 3 3                 one matmul each
        |  the same way back

The host waits for the counts, once in a pass: a message needs its size. On one rank it never waits.
While rows are under way, the shared expert computes, in both passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.model.experts import ExpertMLP, Groups, invert, move, wait_for
from trainyard.model.gpt import GPT
from trainyard.model.linear import apply
from trainyard.parallel.collectives import all_reduce, finish, start_all_to_all
from trainyard.parallel.mesh import Mesh


@dataclass(eq=False)
class _Rows:
    """Rows on their way to experts."""

    values: Tensor
    sent: list[int]
    """Rows to each rank."""
    received: list[int]
    order: Tensor
    """Sorts received rows by expert."""
    inverse: Tensor
    groups: Groups
    gradient: Tensor | None = None
    """That of the rows that were sent, on its way back."""


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: _Rows, group: dist.ProcessGroup) -> Tensor:
        ctx.rows = rows
        return start_all_to_all(x, rows.sent, rows.received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        arrived, ctx.rows.gradient = finish(ctx.rows.gradient), None
        return arrived, None, None


class _Finish(torch.autograd.Function):
    """Its backward pass starts the message that that of `_Start`, which comes later, waits for."""

    @staticmethod
    def forward(ctx: Any, started: Tensor, rows: _Rows, group: dist.ProcessGroup) -> Tensor:
        ctx.rows, ctx.group = rows, group
        return finish(started).view_as(started)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rows = ctx.rows
        rows.gradient = start_all_to_all(gradient, rows.received, rows.sent, ctx.group)
        return gradient, None, None


class TokenExchange:
    """Moves rows between the ranks of a group (`ExpertExchange`).

    Args:
        group: the ranks that share experts; rank i has the i-th part of them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._n_ranks = group, group.size()

    def start(self, rows: Tensor, groups: Groups) -> _Rows:
        """Starts to send rows sorted by expert of all, once their counts have arrived."""
        here = groups.counts.view(self._n_ranks, -1)
        one = [1] * self._n_ranks
        there = finish(start_all_to_all(here, one, one, self._group))
        sent, received = wait_for(torch.stack([here.sum(1), there.sum(1)]), len(rows))
        n_own = here.shape[1]
        owners = torch.arange(n_own, device=rows.device).repeat(self._n_ranks)
        owners = owners.repeat_interleave(there.flatten(), output_size=sum(received))
        order = owners.argsort(stable=True)
        own = Groups(there.sum(0), sum(received))
        moving = _Rows(rows, sent, received, order, invert(order), own)
        moving.values = apply(_Start, rows, moving, self._group)
        return moving

    def finish(self, started: _Rows) -> tuple[Tensor, Groups]:
        """Returns the rows of this rank's experts, sorted."""
        arrived = apply(_Finish, started.values, started, self._group)
        started.values = arrived.new_empty(0)  # autograd keeps what it needs
        return move(arrived, started.order, started.inverse), started.groups

    def send_back(self, outputs: Tensor, started: _Rows) -> Tensor:
        """Returns the outputs of the rows that were sent, in their order."""
        outputs = move(outputs, started.inverse, started.order)
        how = started.received, started.sent, started.order, started.inverse, started.groups
        back = _Rows(started.values, *how)
        return apply(_Finish, apply(_Start, outputs, back, self._group), back, self._group)


def apply_expert_parallel(model: GPT, mesh: Mesh) -> None:
    """Reduces the experts of `model` to those of this rank, with uninitialized weights.

    Args:
        model: after tensor parallelism.
        mesh: its ranks with parts of a sequence count the load of a sequence together.
    """
    topology = mesh.topology
    for name, spec in model.layers.items():
        layer: Any = model.get_submodule(name)
        if spec.kind == "experts":
            layer.allocate(spec.shard(topology.tensor, topology.expert))
        elif spec.kind == "router" and mesh.context is not None:
            layer.add_up = _SumOfGroup(mesh.context)
    if mesh.expert is not None:
        exchange = TokenExchange(mesh.expert)
        for block in model.blocks.values():
            mlp: Any = block.mlp
            if isinstance(mlp, ExpertMLP):
                mlp.exchange = exchange


@dataclass(frozen=True)
class _SumOfGroup:
    group: dist.ProcessGroup

    def __call__(self, counts: Tensor) -> Tensor:
        return all_reduce(counts, self.group)
