"""Causal self-attention, and the KV cache for generation."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from trainyard.architecture import block_layers, rotation_values
from trainyard.config.run import CUDNN_TOKENS, Model, Recompute
from trainyard.model.dropout import ATTENTION_WEIGHTS, at_site, dropout, rows_of_heads
from trainyard.model.linear import Linear, Norm, apply, as_output
from trainyard.model.positions import Positions, cumulative_lengths, document_mask

CUDNN, FLASH = "cudnn_attention", "flash_attention"
FLASH_HEAD_MULTIPLE = 8
"""Its kernels take head sizes in multiples of this."""


Forward = Callable[..., Tensor]
"""The forward pass of a module: its input, the positions of tokens, and perhaps a cache."""


def recomputes(part: Recompute) -> Callable[[Forward], Forward]:
    """Decorates the forward pass of a part: its backward pass computes again what this one did.

    Args:
        part: does so in modules whose `recompute` is this, while they train.
    """

    def decorate(forward: Forward) -> Forward:
        @wraps(forward)
        def run(module: Any, x: Tensor, positions: Any, cache: Any = None) -> Tensor:
            if module.recompute != part or not module.training:
                return forward(module, x, positions, cache)
            # Only attention dropout on a GPU draws from a generator.
            seeds = positions.dropout_seeds
            draws = seeds is not None and not seeds.is_cpu
            out: Tensor = checkpoint(
                forward, module, x, positions, use_reentrant=False, preserve_rng_state=draws
            )
            return out

        return run

    return decorate


class KeyValueCache:
    """Keys and values of the tokens seen so far in one block, for generation.

    Args:
        most_tokens: that it will hold; the first ones decide all other sizes.

    Attributes:
        n_tokens: so far; 0 to start anew in the same memory.
        place: where the next token goes, (1,), int64, on the device; if set, a CUDA graph can
            repeat an append, which returns the whole memory.
    """

    def __init__(self, most_tokens: int) -> None:
        self.n_tokens = 0
        self.place: Tensor | None = None
        self.most_tokens = most_tokens
        self._keys = self._values = torch.empty(0)

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Appends new tokens, (B, S, new, K) each; returns all so far."""
        if self.place is not None:
            self._keys.index_copy_(2, self.place, keys)
            self._values.index_copy_(2, self.place, values)
            return self._keys, self._values
        if self._keys.ndim == 1:
            B, S, _, K = keys.shape  # zeros, as a mask leaves out no NaN
            self._keys = keys.new_zeros(B, S, self.most_tokens, K)
            self._values = torch.zeros_like(self._keys)
        end = self.n_tokens + keys.shape[2]
        self._keys[:, :, self.n_tokens : end] = keys
        self._values[:, :, self.n_tokens : end] = values
        self.n_tokens = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Appends new tokens, and mixes the values of all so far: returns (B, H, new, K).

        Args:
            q: queries, (B, H, new, K).
            k: keys, (B, S, new, K).
            v: values, like the keys.
            mask: of the documents, (B, 1, new, all so far); None to see all tokens before.
        """
        shape = q.shape
        k, v = self.append(k, v)
        if self.place is not None:
            # As if the heads of a group were tokens: fewer kernels take shared keys and a mask.
            q = q.reshape(len(q), k.shape[1], -1, q.shape[-1])
        new, total = shape[2], k.shape[2]
        # Flash attention takes no mask; one new token needs none.
        if mask is None and 1 < new < total:
            mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        mixed = _attend(q, k, v, attn_mask=mask, is_causal=new == total and mask is None)
        return mixed.reshape(shape)


class CausalAttention(nn.Module):
    """Attention core: mixes the values of each token and those before it; has no weights.

    On a CPU, dropout of the attention weights is computed here. On a GPU it is that of
    `scaled_dot_product_attention`, which draws from the device's generator: the same rate, but
    other elements.

    Attributes:
        first_head: number of the first head in the whole model.
        takes_cudnn: whether cuDNN computes what it can: on a GPU, without dropout and documents.
    """

    def __init__(self, d_head: int, dropout: float, site: int) -> None:
        super().__init__()
        self.d_head, self.dropout, self.site = d_head, dropout, site
        self.first_head = 0
        self.takes_cudnn = False

    def describe(self, ends: Tensor, n_tokens: int, dtype: torch.dtype) -> Tensor:
        """Describes the documents of a micro batch for `forward`, once for all blocks.

        Returns a mask, (B, 1, T, T), or cumulative lengths, (longest, documents + 1), all rows
        alike: a number of rows may differ between calls of a compiled block.

        Args:
            ends: of documents, from `find_document_ends`.
            n_tokens: of whole sequences, T.
            dtype: of queries.
        """
        if attention_kernel(self.d_head, dtype, ends.device) == FLASH:
            return cumulative_lengths(ends).expand(n_tokens, -1)
        positions = torch.arange(n_tokens, device=ends.device)
        return document_mask(ends, positions, positions, dtype)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_seeds: Tensor | None = None,
        documents: Tensor | None = None,
        n_before: int = 0,
    ) -> Tensor:
        """Mixes values: returns (B, H, T, K).

        Args:
            q: queries, (B, H, T, K).
            k: keys, (B, S, T, K); each serves H/S heads.
            v: values, like the keys.
            dropout_seeds: of the block, (B,); None for no dropout.
            documents: from `describe`; None to see all tokens before.
            n_before: heads between `first_head` and the first one here.
        """
        if dropout_seeds is not None and q.is_cpu:
            seeds = at_site(dropout_seeds, self.site)
            return self._mix_with_dropout(q, k, v, seeds, documents, self.first_head + n_before)
        rate = 0.0 if dropout_seeds is None else self.dropout
        if documents is None:
            if self.takes_cudnn and rate == 0 and q.shape[2] % CUDNN_TOKENS == 0:
                return _attend_by_cudnn(q, k, v)
            return _attend(q, k, v, dropout_p=rate, is_causal=True)
        if documents.ndim == 2:
            return _attend_packed(q, k, v, documents, rate)
        return _attend(q, k, v, dropout_p=rate, attn_mask=documents)

    def _mix_with_dropout(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_seeds: Tensor,
        documents: Tensor | None,
        first_head: int,
    ) -> Tensor:
        B, H, T, K = q.shape
        precise = torch.promote_types(q.dtype, torch.float32)
        queries, keys, values = (_repeat_heads(x, H).to(precise).flatten(0, 1) for x in (q, k, v))
        later = torch.full((T, T), -torch.inf, dtype=precise).triu(1)
        scores = torch.baddbmm(later, queries, keys.transpose(1, 2), alpha=1 / math.sqrt(K))
        scores = scores.view(B, H, T, T)
        weights = (scores if documents is None else scores + documents).softmax(-1)
        rows = rows_of_heads(first_head, H, T, q.device)
        weights = dropout(weights, self.dropout, dropout_seeds, rows)
        return (weights.flatten(0, 1) @ values).view(B, H, T, K).to(q.dtype)


class Attention(nn.Module):
    """Multi-head causal self-attention, whose heads may share keys and values in groups.

    The rows of `qkv` are ordered (S, H/S + 2, K), so that equal shards keep groups whole.

    Attributes:
        n_shared: heads of keys and values in the whole model, S.
        group_size: heads of queries that share one here.
        share: exchanges outputs of `qkv` with other ranks, where more than S shard it.
    """

    def __init__(self, model: Model, recompute: Recompute = "none") -> None:
        super().__init__()
        self.recompute = recompute
        self.d_head, self.n_heads = model.d_head, model.n_heads
        self.share: Callable[[Tensor], Tensor] | None = None
        layers = block_layers(model)
        _, (of_queries, *_) = layers["attention.qkv"].fused
        self.group_size = of_queries // model.d_head
        self.n_shared = self.n_heads // self.group_size
        self.qkv = Linear(layers["attention.qkv"])
        norms = (layers.get(f"attention.{name}") for name in ("query_norm", "key_norm"))
        self.query_norm, self.key_norm = (
            None if spec is None else Norm(spec, model) for spec in norms
        )
        copied = {"none": rotation_values(model) > 0, "head": False, "all": True}
        self.copies_queries = copied[model.query_key_norm]
        self.core = CausalAttention(model.d_head, model.dropout, ATTENTION_WEIGHTS)
        self.out = Linear(layers["attention.out"])

    @recomputes("attention")
    def forward(
        self, x: Tensor, positions: Positions, cache: KeyValueCache | None = None
    ) -> Tensor:
        """Attends from each token of `x`, (B, T, D), to itself and those before it.

        Args:
            x: the normalized residual stream.
            positions: of its tokens.
            cache: keys and values of the tokens before `x`, when generating.
        """
        qkv = self.qkv(x)
        q, k, v = self._split(qkv if self.share is None else self.share(qkv))
        if self.query_norm is not None and self.key_norm is not None:
            q, k = _normalize(q, self.query_norm), _normalize(k, self.key_norm)
        if positions.rotation is not None:
            q, k = (apply(_Rotation, part, positions.rotation) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # (B, H, T, K), (B, S, T, K) twice
        if cache is None:
            mixed = self.core(q, k, v, positions.dropout_seeds, positions.documents)
        else:
            mixed = cache.attend(q, k, v, positions.documents)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))  # (B, T, D)
        return out

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits the output of `qkv` into (B, T, H, K) and (B, T, S, K) twice.

        Tensor parallelism may have gathered more tokens than `x` has, and leaves fewer heads.
        """
        groups = qkv.view(*qkv.shape[:2], -1, self.group_size + 2, self.d_head)
        # Queries of groups are copies, and so are values where queries and keys become copies: a
        # view would keep all of `qkv` as well.
        if self.group_size > 1:
            parts = torch.split(groups, [self.group_size, 1, 1], 3)
            q, k, v = (part.flatten(2, 3).contiguous() for part in parts)
            return q, k, v
        # In the backward pass one kernel stacks them, and several would join a split.
        q, k, v = groups.unbind(3)
        return q, k, v.contiguous() if self.copies_queries else v


def _normalize(x: Tensor, norm: Norm) -> Tensor:
    """Normalizes (B, T, heads, K): each head or all of a token, by the number of its weights."""
    out: Tensor = norm(x.reshape(*x.shape[:2], -1, *norm.weight.shape))
    return out.view(x.shape)


def _attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Attends with shared keys and values, (B, S, T, K); in fp32 no kernel of a GPU takes them."""
    if q.is_cuda and q.dtype == torch.float32:
        k, v = (_repeat_heads(x, q.shape[1]) for x in (k, v))
    shared = k.shape[1] < q.shape[1]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=shared, **options)


def _attend_by_cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attends by cuDNN, also with shared keys and values, whatever torch would choose."""
    needs_gradient = q.requires_grad
    mixed: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, needs_gradient, is_causal=True
    )[0]
    return mixed


def _attend_packed(q: Tensor, k: Tensor, v: Tensor, documents: Tensor, rate: float) -> Tensor:
    """Attends within documents by flash attention, given their cumulative lengths by `describe`.

    `torch.nn.attention.varlen` has no dropout, and in torch 2.11 no grouped queries.
    """
    B, _, T, K = q.shape
    if K % FLASH_HEAD_MULTIPLE:
        q, k, v = (F.pad(x, (0, -K % FLASH_HEAD_MULTIPLE)) for x in (q, k, v))
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, heads, K)
    longest, lengths = documents.shape[0], documents[0]
    mixed: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, lengths, lengths, longest, longest, rate, True, False, scale=1 / math.sqrt(K)
    )[0]
    return mixed[..., :K].view(B, T, -1, K).transpose(1, 2)


def _repeat_heads(x: Tensor, n_heads: int) -> Tensor:
    """Gives each head its keys or values: (B, S, T, K) to (B, H, T, K)."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], 1)


class _Rotation(torch.autograd.Function):
    """Turns pairs of features of (B, T, heads, K), in the precision of `rotation`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Tensor) -> Tensor:
        ctx.save_for_backward(rotation)
        return as_output(_rotate(x, rotation, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rotation,) = ctx.saved_tensors
        return _rotate(gradient, rotation, -1), None


def _rotate(x: Tensor, rotation: Tensor, sign: int) -> Tensor:
    cosine, sine = rotation.unbind()
    first, second = x.to(rotation.dtype).chunk(2, -1)
    turned = x * cosine
    of_first, of_second = turned.chunk(2, -1)
    sine = sine[..., : first.shape[-1]]
    of_first.addcmul_(second, sine, value=-sign)
    of_second.addcmul_(first, sine, value=sign)
    return turned.to(x.dtype)


def attention_kernel(d_head: int, dtype: torch.dtype, device: torch.device) -> str:
    """Names torch's kernel of attention on a GPU, with and without dropout; "cpu" on a CPU.

    `choose_device` leaves torch one choice: "flash_attention" in bf16 and fp16, which has no fp32,
    and "efficient_attention" there; "math" if neither takes the device or the size of heads.
    """
    if device.type != "cuda":
        return device.type
    x = torch.empty(1, 1, 1, d_head, dtype=dtype, device=device, requires_grad=True)
    return str(SDPBackend(torch._fused_sdp_choice(x, x, x, is_causal=True)).name).lower()


def cudnn_can_attend(d_head: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether torch would compute attention by the cuDNN found, on a GPU."""
    x = torch.empty(1, 1, CUDNN_TOKENS, d_head, dtype=dtype, device=device, requires_grad=True)
    call = cuda.SDPAParams(x, x, x, None, 0.0, True, False)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return cuda.can_use_cudnn_attention(call)
