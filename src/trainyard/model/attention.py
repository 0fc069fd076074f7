"""Causal self-attention, and the keys and values that generation keeps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.model.linear import Linear


class KeyValueCache:
    """Keys and values of the tokens seen so far in one block, for generation.

    Args:
        shape: (B, H, T, K), room for T tokens.
        dtype: the compute precision.
        device: where the model is.
    """

    def __init__(
        self, shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.n_tokens = 0
        self._keys = torch.empty(shape, dtype=dtype, device=device)
        self._values = torch.empty(shape, dtype=dtype, device=device)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Adds new tokens, (B, H, new, K) each; returns all kept so far."""
        end = self.n_tokens + keys.shape[2]
        self._keys[:, :, self.n_tokens : end] = keys
        self._values[:, :, self.n_tokens : end] = values
        self.n_tokens = end
        return self._keys[:, :, :end], self._values[:, :, :end]


class Attention(nn.Module):
    """Multi-head causal self-attention.

    The rows of `qkv` are ordered (H, 3, K), so that cutting them in equal parts keeps heads whole.
    """

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.d_head = d_model // n_heads
        self.dropout = dropout
        self.qkv = Linear(d_model, 3 * d_model)
        self.out = Linear(d_model, d_model)

    def forward(self, x: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Attends from each token of `x`, (B, T, D), to itself and those before it."""
        B, T, _ = x.shape
        qkv = self.qkv(x).view(B, T, -1, 3, self.d_head)  # (B, T, H, 3, K)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(3))  # (B, H, T, K)
        if cache is None:
            mask = None
        else:
            k, v = cache.append(k, v)
            mask = _new_tokens_see_all_before(T, k.shape[2], x.device)
        mixed = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=mask is None,
        )
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(B, T, -1))  # (B, T, D)
        return out


def _new_tokens_see_all_before(new: int, total: int, device: torch.device) -> Tensor:
    return torch.ones(new, total, dtype=torch.bool, device=device).tril(total - new)
