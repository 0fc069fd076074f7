"""Causal self-attention, and the KV cache for generation."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend

from trainyard.architecture import block_layers
from trainyard.config.run import Model
from trainyard.model.dropout import ATTENTION_WEIGHTS, at_site, dropout, rows_of_heads
from trainyard.model.linear import Linear


class KeyValueCache:
    """Keys and values of the tokens seen so far in one block, for generation.

    Args:
        most_tokens: that it will hold; the first ones decide all other sizes.
    """

    def __init__(self, most_tokens: int) -> None:
        self.n_tokens = 0
        self._most_tokens = most_tokens
        self._keys = self._values = torch.empty(0)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new tokens, (B, H, new, K) each; returns all so far."""
        if self.n_tokens == 0:
            B, H, _, K = keys.shape
            self._keys = keys.new_empty(B, H, self._most_tokens, K)
            self._values = torch.empty_like(self._keys)
        end = self.n_tokens + keys.shape[2]
        self._keys[:, :, self.n_tokens : end] = keys
        self._values[:, :, self.n_tokens : end] = values
        self.n_tokens = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class CausalAttention(nn.Module):
    """Attention core: mixes the values of each token and those before it; has no weights.

    On a CPU, dropout of the attention weights is computed here. On a GPU it is that of
    `scaled_dot_product_attention`, which draws from the device's generator: the same rate, but
    other elements.

    Attributes:
        first_head: number of the first head in the whole model.
        positions: of the tokens in the sequence, ascending, int64, on the CPU.
    """

    def __init__(self, dropout: float, site: int, sequence_length: int) -> None:
        super().__init__()
        self.dropout = dropout
        self.site = site
        self.first_head = 0
        # No buffer: a model built on "meta" gets uninitialized memory for its buffers.
        self.positions = torch.arange(sequence_length, device="cpu")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_seeds: Tensor | None = None
    ) -> Tensor:
        """Maps queries, keys and values, (B, H, T, K) each, to mixed values of the same shape.

        Args:
            q: queries.
            k: keys.
            v: values.
            dropout_seeds: of the block, (B,); None for no dropout.
        """
        if dropout_seeds is not None and q.is_cpu:
            return self._mix_with_dropout(q, k, v, at_site(dropout_seeds, self.site))
        rate = 0.0 if dropout_seeds is None else self.dropout
        return F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)

    def _mix_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, dropout_seeds: Tensor) -> Tensor:
        B, H, T, K = q.shape
        precise = torch.promote_types(q.dtype, torch.float32)
        queries, keys_of_tokens, values = (x.to(precise).flatten(0, 1) for x in (q, k, v))
        positions = self.positions[:T]
        later = torch.zeros(T, T, dtype=precise)
        later.masked_fill_(positions > positions[:, None], -torch.inf)
        scores = torch.baddbmm(
            later, queries, keys_of_tokens.transpose(1, 2), alpha=1 / math.sqrt(K)
        )
        weights = scores.softmax(-1).view(B, H, T, T)
        rows = rows_of_heads(self.first_head, H, positions)
        weights = dropout(weights, self.dropout, dropout_seeds, rows, positions)
        return (weights.flatten(0, 1) @ values).view(B, H, T, K).to(q.dtype)


class Attention(nn.Module):
    """Multi-head causal self-attention.

    The rows of `qkv` are ordered (H, 3, K), so that equal shards keep heads whole.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.n_heads = model.n_heads
        self.d_head = model.d_model // model.n_heads
        layers = block_layers(model)
        self.qkv = Linear(layers["attention.qkv"])
        self.core = CausalAttention(model.dropout, ATTENTION_WEIGHTS, model.sequence_length)
        self.out = Linear(layers["attention.out"])

    def forward(
        self, x: Tensor, dropout_seeds: Tensor | None = None, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attends from each token of `x`, (B, T, D), to itself and those before it.

        Args:
            x: the normalized residual stream.
            dropout_seeds: dropout seeds of the block, (B,); None for no dropout.
            cache: keys and values of the tokens before `x`, when generating.
        """
        qkv = self.qkv(x)
        # Tensor parallelism may gather more tokens than `x` has, and leaves fewer heads.
        B, T, _ = qkv.shape
        qkv = qkv.view(B, T, -1, 3, self.d_head)  # (B, T, H, 3, K)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))  # (B, H, T, K)
        if cache is None:
            mixed = self.core(q, k, v, dropout_seeds)
        else:
            k, v = cache.append(k, v)
            is_start = k.shape[2] == T
            # Flash attention takes no mask; one new token needs none.
            mask = None if is_start or T == 1 else _new_see_all_before(T, k.shape[2], x.device)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_start)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)
        return out


def attention_kernel(d_head: int, dtype: torch.dtype, device: torch.device) -> str:
    """Names the kernel of attention on a GPU, with and without dropout; "cpu" on a CPU.

    `choose_device` leaves torch one choice: "flash_attention" in bf16 and fp16, which has no fp32,
    and "efficient_attention" there; "math" if neither takes the device or the size of heads.
    """
    if device.type != "cuda":
        return device.type
    x = torch.empty(1, 1, 1, d_head, dtype=dtype, device=device, requires_grad=True)
    return str(SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True)).name).lower()


def _new_see_all_before(new: int, total: int, device: torch.device) -> Tensor:
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
