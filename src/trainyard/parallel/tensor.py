"""Tensor and sequence parallelism: replaces modules of the single-device model.

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

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.architecture import LayerSpec, Sharding
from trainyard.config.run import Parallel
from trainyard.model.attention import Attention
from trainyard.model.gpt import GPT
from trainyard.model.linear import Embedding, Layer, Linear, Norm
from trainyard.model.loss import CrossEntropy, LossOptions, score_sequences, summed_cross_entropy
from trainyard.parallel.collectives import (
    InputOfGroup,
    all_reduce,
    copy_to_group,
    gather_tokens,
    reduce_from_group,
    scatter_tokens,
)


class ColumnLinear(Linear):
    """A linear layer sharded by outputs."""

    def __init__(self, spec: LayerSpec, group: dist.ProcessGroup, *, sequence: bool) -> None:
        super().__init__(spec)
        self._group = group
        self._spread = gather_tokens if sequence else copy_to_group

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T or T/tp, in_features) to (B, T, out_features/tp)."""
        return super().forward(x if self.shared_input else self._spread(x, self._group))


class RowLinear(Linear):
    """A linear layer sharded by inputs, with the whole bias on every rank."""

    def __init__(self, spec: LayerSpec, group: dist.ProcessGroup, *, sequence: bool) -> None:
        super().__init__(spec)
        self._group = group
        self._collect = scatter_tokens if sequence else reduce_from_group

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, in_features/tp) to (B, T or T/tp, out_features)."""
        weight, bias = self.cast(x.dtype)
        out = self._collect(self.multiply(x, weight, None), self._group)
        return out if bias is None else out + bias


@dataclass(frozen=True)
class AverageOfGroup:
    """The average of the means of ranks (`Norm.average`)."""

    group: dist.ProcessGroup

    def __call__(self, mean: Tensor) -> Tensor:
        """Averages one mean of each rank."""
        return all_reduce(mean, self.group) / self.group.size()


class VocabularyEmbedding(Embedding):
    """An embedding sharded by rows."""

    def __init__(self, spec: LayerSpec, group: dist.ProcessGroup, *, sequence: bool) -> None:
        super().__init__(spec)
        self._group = group
        self._n_rows = spec.weight[0]
        self._first_row = self._n_rows * group.rank()
        self._collect = scatter_tokens if sequence else reduce_from_group

    def forward(self, tokens: Tensor) -> Tensor:
        """Maps ids (B, T) to (B, T or T/tp, D)."""
        rows = tokens - self._first_row
        elsewhere = (rows < 0) | (rows >= self._n_rows)
        found = super().forward(rows.masked_fill(elsewhere, 0))
        return self._collect(found.masked_fill(elsewhere[..., None], 0.0), self._group)


class VocabularyShard:
    """This rank's rows of the vocabulary, and reductions over the others."""

    def __init__(self, group: dist.ProcessGroup, first_row: int) -> None:
        self.first_row = first_row
        self._group = group

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""
        return all_reduce(x, self._group, "max")

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over ranks."""
        return all_reduce(x, self._group)


class VocabularyCrossEntropy(CrossEntropy):
    """Cross entropy over logits sharded by vocabulary."""

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool) -> None:
        super().__init__()
        self._group = group
        self._spread = gather_tokens if sequence else copy_to_group

    def forward(
        self,
        hidden: Tensor,
        head: Layer,
        labels: Tensor,
        vocabulary_size: int,
        scale: float | Tensor,
    ) -> Tensor:
        """Sums over the labels (B, T) of this rank's tokens; the weight is (V/tp, D)."""
        hidden, weight = self._spread(hidden, self._group), head.weight
        options = LossOptions(vocabulary_size, self._shard(weight), z_loss=self.z_loss)
        return summed_cross_entropy(hidden, weight, labels, options.sharing(head), scale)

    def score(self, hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary_size: int) -> Tensor:
        """Scores the labels of each sequence, the same on all ranks."""
        hidden = self._spread(hidden, self._group)
        return score_sequences(hidden, weight, labels, vocabulary_size, self._shard(weight))

    def _shard(self, weight: Tensor) -> VocabularyShard:
        return VocabularyShard(self._group, weight.shape[0] * self._group.rank())


_SHARDED: dict[Sharding, type[ColumnLinear | RowLinear | VocabularyEmbedding]] = {
    "column": ColumnLinear,
    "row": RowLinear,
    "vocabulary": VocabularyEmbedding,
}


def apply_tensor_parallel(model: GPT, group: dist.ProcessGroup, parallel: Parallel) -> None:
    """Reduces `model` to this rank's part of every layer, with uninitialized weights.

    Args:
        model: the single-device model, or a pipeline stage of it.
        group: the tensor ranks.
        parallel: decides what the ranks exchange, and when.
    """
    sequence = parallel.sequence
    shared = InputOfGroup(group, sequence, parallel.gathers_again)
    for name, spec in model.layers.items():
        if spec.sharding in _SHARDED:
            part = _SHARDED[spec.sharding](spec.shard(group.size()), group, sequence=sequence)
            part.is_cast = getattr(model.get_submodule(name), "is_cast", True)
            # A split backward pass (zero bubble) needs the gradients' matmuls apart.
            if isinstance(part, ColumnLinear) and parallel.schedule != "zero_bubble":
                part.shared_input = shared
            model.set_submodule(name, part)
        elif spec.sharding == "features":
            norm = model.get_submodule(name)
            assert isinstance(norm, Norm), name
            norm.weight = nn.Parameter(torch.empty(spec.shard(group.size()).weight))
            norm.average = AverageOfGroup(group)
    for module in model.modules():
        if isinstance(module, Attention):
            module.core.first_head = group.rank() * (module.n_heads // group.size())
    if model.cross_entropy is not None:
        model.cross_entropy = VocabularyCrossEntropy(group, sequence=sequence)
    if sequence:
        n_tokens = len(model.token_positions) // group.size()
        start = group.rank() * n_tokens
        model.residual_positions = model.token_positions[start : start + n_tokens]
