"""Tensor and sequence parallelism: shards the layers of the single-device model.

    residual stream (B, T, D)          replicated, or sharded by tokens ("sequence")
        |  every rank reads it whole
    qkv, up     column-parallel        this rank's heads, or features of the MLP
        |
    out, down   row-parallel           a partial sum of every output; so of experts
        |  sum over ranks, then the bias
    residual stream

Ranks exchange pieces of a micro batch, one while they compute with another (`collectives.py`).

Norms of all queries or keys of a token reduce the mean of the squares over ranks.

Parameters are plain tensors, this rank's shards, with the names of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainyard.architecture import size_of_pieces
from trainyard.config.run import Parallel
from trainyard.model.experts import ExpertMLP
from trainyard.model.gpt import GPT
from trainyard.parallel.collectives import SharedHeads, TensorRanks, all_reduce


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


def apply_tensor_parallel(
    model: GPT, group: dist.ProcessGroup, parallel: Parallel, micro_batch_size: int
) -> None:
    """Reduces `model` to this rank's part of every layer, with uninitialized weights.

    Args:
        model: the single-device model, or a pipeline stage of it.
        group: the tensor ranks.
        parallel: decides what the ranks exchange, and when.
        micro_batch_size: decides in how many pieces.
    """
    rank, n_ranks, sequence = group.rank(), group.size(), parallel.sequence
    table = model.position_table
    sizes = size_of_pieces(len(table.tokens), micro_batch_size, n_ranks)
    ranks = TensorRanks(group, sequence, *sizes, gathers_again=sequence)
    once = replace(ranks, gathers_again=False)
    for name, spec in model.layers.items():
        layer: Any = model.get_submodule(name)
        layer.allocate(spec.shard(n_ranks))
        if spec.sharding == "vocabulary":
            layer.first_row, layer.collect = rank * len(layer.weight), ranks.collect
        elif spec.sharding == "features":
            layer.average = AverageOfGroup(group)
        elif spec.kind == "router":
            layer.n_alike = n_ranks
        elif spec.kind == "linear":
            layer.sums_outputs = spec.sharding == "row"
            owner: Any = model.blocks[name.split(".")[1]]
            layer.exchange = once if owner.recompute == "block" else ranks
    for block in model.blocks.values():
        mlp: Any = block.mlp
        if isinstance(mlp, ExpertMLP):
            mlp.spread, mlp.collect = ranks.spread, ranks.collect
    _shard_heads(model, group)
    if model.cross_entropy is not None:
        first_row = rank * len(model.head_weight)
        model.cross_entropy.shard = VocabularyShard(group, first_row, ranks.spread)
    if sequence:
        by_rank = table.tokens.view(sizes[1], n_ranks, -1)
        table.residual = by_rank[:, rank].flatten()


def _shard_heads(model: GPT, group: dist.ProcessGroup) -> None:
    """Makes attention that of this rank's heads; more ranks than heads of keys share them."""
    rank, n_ranks = group.rank(), group.size()
    for block in model.blocks.values():
        attention: Any = block.attention
        n_own, n_sharing = attention.n_heads // n_ranks, n_ranks // attention.n_shared
        attention.core.first_head = rank * n_own
        if n_sharing > 1:
            n_computed, n_shared = len(attention.qkv.weight), 2 * attention.d_head
            attention.share = SharedHeads(group, n_sharing, n_computed, n_shared)
            attention.group_size = n_own
