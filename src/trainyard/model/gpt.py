"""The GPT-3 decoder on a single device; names follow the paper (arXiv:2005.14165).

Learned positions, LayerNorm before each sub-layer, GELU (tanh form, as in GPT-2), biases, one
matrix for embedding and head. Parallelism is applied from outside; nothing here knows of ranks.

Shapes: B micro batch, T sequence, D d_model, H heads, K d_head, F d_ff, V padded vocabulary,
L n_layers.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainyard.config.run import Model
from trainyard.model.attention import Attention, KeyValueCache
from trainyard.model.linear import LayerNorm, Linear

Recompute = Literal["none", "attention", "block"]


class GPT(nn.Module):
    """A stack of blocks between token embedding and final norm.

    Weights are left uninitialised: `initialise` or a checkpoint fills them.

    Args:
        model: the shape.
        padded_vocabulary_size: rows of the embedding, V.
        compute_dtype: precision of activations and matrix products; parameters are always fp32.
        recompute: what the backward pass computes again instead of storing.
    """

    def __init__(
        self,
        model: Model,
        padded_vocabulary_size: int,
        compute_dtype: torch.dtype = torch.float32,
        recompute: Recompute = "none",
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.vocabulary_size = model.vocabulary_size
        self.n_heads = model.n_heads
        self.dropout = model.dropout
        self.embedding = nn.Embedding(
            padded_vocabulary_size,
            model.d_model,
            _weight=torch.empty(padded_vocabulary_size, model.d_model),
        )
        self.positions = nn.Embedding(
            model.sequence_length,
            model.d_model,
            _weight=torch.empty(model.sequence_length, model.d_model),
        )
        # Keyed by index, so that a part of the stack keeps the names of the whole.
        self.blocks = nn.ModuleDict(
            {str(index): Block(model, recompute) for index in range(model.n_layers)}
        )
        self.final_norm = LayerNorm(model.d_model, model.layer_norm_epsilon)
        self.head = None
        if not model.tied_embeddings:
            self.head = nn.Embedding(
                padded_vocabulary_size,
                model.d_model,
                _weight=torch.empty(padded_vocabulary_size, model.d_model),
            )

    @property
    def head_weight(self) -> Tensor:
        """The output matrix, (V, D)."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(self, tokens: Tensor, caches: list[KeyValueCache] | None = None) -> Tensor:
        """Computes the final hidden states, (B, T, D), of token ids (B, T).

        Args:
            tokens: ids below the vocabulary size, int64.
            caches: one per block when generating; `tokens` then continue what they hold.
        """
        start = caches[0].n_tokens if caches else 0
        positions = self.positions.weight[start : start + tokens.shape[1]]  # (T, D)
        x = F.embedding(tokens, self.embedding.weight) + positions  # (B, T, D)
        x = F.dropout(x.to(self.compute_dtype), self.dropout, self.training)
        for index, block in enumerate(self.blocks.values()):
            x = block(x, caches[index] if caches else None)
        out: Tensor = self.final_norm(x)
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores the real vocabulary: (..., D) -> (..., vocabulary_size), fp32."""
        weight = self.head_weight[: self.vocabulary_size].to(hidden.dtype)
        return F.linear(hidden, weight).float()

    def build_caches(self, batch_size: int, n_tokens: int) -> list[KeyValueCache]:
        """Makes empty key-value caches with room for `n_tokens`, one per block."""
        weight = self.embedding.weight
        shape = (batch_size, self.n_heads, n_tokens, weight.shape[1] // self.n_heads)
        return [KeyValueCache(shape, self.compute_dtype, weight.device) for _ in self.blocks]


class Block(nn.Module):
    """Attention, then MLP, each on the normalised residual stream and added back to it."""

    def __init__(self, model: Model, recompute: Recompute) -> None:
        super().__init__()
        self.dropout = model.dropout
        self.recompute = recompute
        self.attention_norm = LayerNorm(model.d_model, model.layer_norm_epsilon)
        self.attention = Attention(model.d_model, model.n_heads, model.dropout)
        self.mlp_norm = LayerNorm(model.d_model, model.layer_norm_epsilon)
        self.mlp = MLP(model.d_model, model.d_ff)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Maps the residual stream, (B, T, D), to the next."""
        if self.recompute == "block" and self.training:
            out: Tensor = checkpoint(self._add_both, x, cache, use_reentrant=False)
            return out
        return self._add_both(x, cache)

    def _add_both(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        if self.recompute == "attention" and self.training:
            mixed = checkpoint(self.attention, self.attention_norm(x), use_reentrant=False)
        else:
            mixed = self.attention(self.attention_norm(x), cache)
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), self.dropout, self.training)


class MLP(nn.Module):
    """Two matrix products with a GELU between."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = Linear(d_model, d_ff)
        self.down = Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D) through (B, T, F)."""
        out: Tensor = self.down(F.gelu(self.up(x), approximate="tanh"))
        return out


def compile_blocks(model: GPT) -> None:
    """Compiles each block in place; parameter names stay."""
    for block in model.blocks.values():
        block.compile()
