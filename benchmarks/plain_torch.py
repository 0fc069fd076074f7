"""Baseline: GPT-2 in a page of plain PyTorch, like small training scripts.

It has what makes such scripts fast: scaled dot product attention, one matmul for queries, keys and
values, an embedding padded to a round size. Unlike ours, its loss includes vocabulary padding
(0.001 nats with 50,304 rows for 50,257 tokens), all logits of a micro batch are in memory at once,
and its dropout uses the device's generator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.config.run import Model
from trainyard.export.families import GPT2
from trainyard.model.gpt import GPT


class PlainBlock(nn.Module):
    """Attention and MLP, each with pre-norm and residual."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        D, epsilon = model.d_model, model.layer_norm_epsilon
        self.n_heads, self.rate = model.n_heads, model.dropout
        self.attention_norm = nn.LayerNorm(D, epsilon)
        self.attention = nn.ModuleDict({"qkv": nn.Linear(D, 3 * D), "out": nn.Linear(D, D)})
        self.mlp_norm = nn.LayerNorm(D, epsilon)
        self.mlp = nn.ModuleDict({"up": nn.Linear(D, model.d_ff), "down": nn.Linear(model.d_ff, D)})
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        B, T, D = x.shape
        qkv = self.attention["qkv"](self.attention_norm(x)).split(D, dim=2)
        q, k, v = (each.view(B, T, self.n_heads, -1).transpose(1, 2) for each in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(B, T, D)
        x = x + self.dropout(self.attention["out"](mixed))
        hidden = F.gelu(self.mlp["up"](self.mlp_norm(x)), approximate="tanh")
        out: Tensor = x + self.dropout(self.mlp["down"](hidden))
        return out


class PlainGPT(nn.Module):
    """Maps token ids, (B, T), to logits, (B, T, V)."""

    def __init__(self, model: Model, padded_vocabulary_size: int) -> None:
        super().__init__()
        D = model.d_model
        self.embedding = nn.Embedding(padded_vocabulary_size, D)
        self.positions = nn.Embedding(model.sequence_length, D)
        self.dropout = nn.Dropout(model.dropout)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model.n_layers))
        self.final_norm = nn.LayerNorm(D, model.layer_norm_epsilon)
        self.head = nn.Linear(D, padded_vocabulary_size, bias=False)
        if model.tied_embeddings:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Computes the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.final_norm(x))
        return logits


def build_plain(model: Model, ours: GPT) -> PlainGPT:
    """Builds one with our weights."""
    plain = PlainGPT(model, ours.head_weight.shape[0])
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    for name, weight in weights.items():
        if ".qkv." in name:  # interleaved by head in ours; queries, keys, values consecutive here
            (theirs,) = GPT2.to_theirs(name, weight, model).values()
            weights[name] = theirs.t()
    if model.tied_embeddings:
        weights["head.weight"] = weights["embedding.weight"]
    plain.load_state_dict(weights)
    return plain
