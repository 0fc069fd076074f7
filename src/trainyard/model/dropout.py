"""Dropout as a function of position, without generator or state.

Besides the rate, only four numbers decide what is dropped. A mask is thus the same for every micro
batch size and layout, and a rank computes only its part of it:

    key of the sequence   from (seed, step, number of the sequence in the batch of the step)
    site                  0 after the embedding; 3i + 1, 3i + 2, 3i + 3 in block i: attention
                          weights, attention output, MLP output
    row                   position of the token; of attention weights: head and position
    column                feature; of attention weights: position of the token attended to

A row takes 64 random bits, number (site, row) of the SplitMix64 stream of its key; they pick the
numbers a and m, m odd, of a function of columns, in wrapping 32-bit arithmetic:

    x = a + m f(column)        f(column): 32 random bits, the same for all rows
    h = x + C x x              C is even, so that every x gives another h
    dropped where h, from -2^31 to 2^31 - 1, is below (rate - 1/2) 2^32

Two rows share nothing; two columns of a row are practically independent, since m is random. This
takes a few passes of 32-bit multiplications and additions, which the backward pass repeats instead
of keeping the mask; both together take less than half the time of torch's dropout on a CPU.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.model.linear import as_output

# Sites of a block, beyond 3i of its seeds.
ATTENTION_WEIGHTS, ATTENTION_OUTPUT, MLP_OUTPUT = 1, 2, 3
SITES_PER_BLOCK = 3

# Constants of SplitMix64 (https://doi.org/10.1145/2660193.2660195), as signed numbers.
INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_INVERSE = pow(INCREMENT, -1, 2**64) - 2**64
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - 2**64
_SECOND_FACTOR = 0x94D049BB133111EB - 2**64
QUADRATIC_FACTOR = 0x2C1B3C6E  # any even number with mixed bits


def sequence_seeds(seed: int, step: int, first: int, count: int) -> Tensor:
    """Returns the dropout seeds, (count,), of a step's sequences from `first` on."""
    digest = hashlib.sha256(f"dropout {seed} {step}".encode()).digest()
    start = int.from_bytes(digest[:8], "little", signed=True)
    return mix(torch.arange(first, first + count) * INCREMENT + start)


def at_site(seeds: Tensor, site: int) -> Tensor:
    """Advances seeds by `site` sites, below 32,768; 3i moves those of the model to block i."""
    wrapped = (site << 48) * INCREMENT % 2**64
    return seeds + (wrapped - 2**64 if wrapped >= 2**63 else wrapped)


def rows_of_heads(first_head: int, n_heads: int, n_tokens: int, device: torch.device) -> Tensor:
    """Numbers the rows of attention weights, (H, T), by head of the whole model and position."""
    heads = torch.arange(first_head, first_head + n_heads, device=device)
    return (heads << 32)[:, None] + number_columns(n_tokens, device)


def dropout(
    x: Tensor, rate: float, seeds: Tensor, rows: Tensor, columns: Tensor | None = None
) -> Tensor:
    """Sets elements of `x` to zero with probability `rate` and scales the others by 1/(1 - rate).

    Args:
        x: (B, *R, N).
        rate: at least 0, below 1.
        seeds: of the sequences at this site, (B,), int64.
        rows: what the middle dimensions are, (*R), int64; positions of tokens are below 2^32.
        columns: what the last dimension is, (N,), int64; 0 to N - 1 if not given.
    """
    if columns is None:
        columns = number_columns(x.shape[-1], x.device)
    # seeds + rows x INCREMENT. Of rows that a C++ compiler knows, such as heads 2 and 3, it takes
    # the product for one that does not overflow: wrong (torch 2.13). No compiler knows seeds.
    starts = (seeds * _INVERSE).view(-1, *[1] * rows.ndim)
    bits = mix((starts + rows) * INCREMENT)[..., None]  # (B, *R, 1)
    factors = mix(columns * INCREMENT).to(torch.int32)  # (N)
    dropped: Tensor = _Dropout.apply(x, rate, bits, factors)  # type: ignore[no-untyped-call]
    return dropped


class Dropout(nn.Module):
    """Dropout of the residual stream at one site."""

    def __init__(self, rate: float, site: int) -> None:
        super().__init__()
        self.rate = rate
        self.site = site

    def forward(self, x: Tensor, seeds: Tensor | None, positions: Tensor) -> Tensor:
        """Drops out elements of (B, T, D), whose tokens are at `positions`, (T,).

        `seeds`, (B,), are those of the model or the block; None disables dropout.
        """
        return x if seeds is None else dropout(x, self.rate, at_site(seeds, self.site), positions)


class _Dropout(torch.autograd.Function):
    """Keeps the random bits of rows and columns for the backward pass, but no mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, bits: Tensor, factors: Tensor) -> Tensor:
        ctx.rate = rate
        ctx.save_for_backward(bits, factors)
        return as_output(_apply(x, rate, bits, factors))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _apply(gradient, ctx.rate, *ctx.saved_tensors), None, None, None


def _apply(x: Tensor, rate: float, bits: Tensor, factors: Tensor) -> Tensor:
    kept = ((bits >> 32).to(torch.int32) | 1) * factors  # (B, *R, N)
    kept += bits.to(torch.int32)
    # Not addcmul_, which computes in float32 when compiled (torch 2.13).
    kept.add_(kept * kept, alpha=QUADRATIC_FACTOR)
    kept.ge_(int(rate * 2**32) - 2**31)  # 1 or 0 in int32: in eager mode, bool is ten times slower
    return kept.to(x.dtype).mul_(x).mul_(1 / (1 - rate))


def number_columns(count: int, device: torch.device) -> Tensor:
    """Returns 0 to `count` - 1, int64, which compiled code multiplies in 64 bits.

    Inductor folds a multiplied `torch.arange` into an index, which has 32 bits on a GPU, too few
    for `INCREMENT` (torch 2.13). It does not fold an exclusive or.
    """
    return torch.arange(count, device=device) ^ 0


def mix(x: Tensor) -> Tensor:
    """Maps int64 numbers one-to-one to random-looking ones: SplitMix64's output."""
    x = (x ^ _shift_right(x, 30)) * _FIRST_FACTOR
    x = (x ^ _shift_right(x, 27)) * _SECOND_FACTOR
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, n_bits: int) -> Tensor:
    shifted: Tensor = (x >> n_bits) & (2 ** (64 - n_bits) - 1)  # without sign extension
    return shifted
