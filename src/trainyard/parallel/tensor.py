"""Tensor and sequence parallelism: shards the layers of the single-device model.

    residual stream (B, T, D)          replicated, or sharded by tokens ("sequence")
        |  every rank reads it whole
    qkv, up     column-parallel        this rank's heads, or features of the MLP
        |
    out, down   row-parallel           a partial sum of every output
        |  sum over ranks, then the bias
    residual stream

Norms of all queries or keys of a token reduce the mean of the squares over ranks.

Parameters are plain tensors, this rank's shards, with the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainyard.config.run import Parallel
from trainyard.model.gpt import GPT
from trainyard.parallel.collectives import (
    InputOfGroup,
    all_reduce,
    copy_to_group,
    gather_tokens,
    over,
    reduce_from_group,
    scatter_tokens,
)


@dataclass(frozen=True)
class AverageOfGroup:
    """The average of the means of ranks (`Norm.average`)."""

    group: dist.ProcessGroup

    def __call__(self, mean: Tensor) -> Tensor:
        """Averages one mean of each rank."""
        return all_reduce(mean, self.group) / self.group.size()


class VocabularyShard:
    """This rank's rows of the vocabulary, and reductions over the others (`CrossEntropy.shard`)."""

    def __init__(
        self, group: dist.ProcessGroup, first_row: int, spread: Callable[[Tensor], Tensor]
    ) -> None:
        self.first_row, self.spread = first_row, spread
        self._group = group

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        return all_reduce(x, self._group, "max")

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        return all_reduce(x, self._group)


def apply_tensor_parallel(model: GPT, group: dist.ProcessGroup, parallel: Parallel) -> None:
    """Reduces `model` to this rank's part of every layer, with uninitialized weights.

    Args:
        model: the single-device model, or a pipeline stage of it.
        group: the tensor ranks.
        parallel: decides what the ranks exchange, and when.
    """
    rank, n_ranks, sequence = group.rank(), group.size(), parallel.sequence
    spread = over(group, gather_tokens if sequence else copy_to_group)
    collect = over(group, scatter_tokens if sequence else reduce_from_group)
    for name, spec in model.layers.items():
        layer: Any = model.get_submodule(name)
        layer.allocate(spec.shard(n_ranks))
        if spec.sharding == "vocabulary":
            layer.first_row, layer.collect = rank * len(layer.weight), collect
        elif spec.sharding == "row":
            layer.collect = collect
        elif spec.sharding == "features":
            layer.average = AverageOfGroup(group)
        elif spec.sharding == "column" and parallel.schedule == "zero_bubble":
            layer.spread = spread  # a split backward pass needs the gradients' matmuls apart
        elif spec.sharding == "column":
            layer.shared_input = InputOfGroup(group, sequence, parallel.gathers_again)
    for block in model.blocks.values():
        attention: Any = block.attention
        attention.core.first_head = rank * (attention.n_heads // n_ranks)
    if model.cross_entropy is not None:
        first_row = rank * len(model.head_weight)
        model.cross_entropy.shard = VocabularyShard(group, first_row, spread)
    if sequence:
        table = model.position_table
        table.residual = table.tokens.chunk(n_ranks)[rank]
