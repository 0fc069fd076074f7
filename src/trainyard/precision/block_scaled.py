"""Low-precision values ("codes") with a power-of-two scale for every 32 columns of a row.

    values         0.75     -0.02      3.0  ...      32 columns of one row
    scale 2^-7                                       the largest, 3.0, becomes 384, below 448
    codes          96       -2.5     384.0  ...      e4m3: 8 bits, with 3 bits of mantissa
    exponent       120                               of the scale, plus 127, in a byte

Multiplying by a power of two is exact, so only rounding to a code loses precision. Scales belong to
positions in the whole matrix: if ranks shard it at multiples of 32 columns, or at any row, codes
and exponents are sharded alike, unchanged.

Non-finite values stay visible: the exponent of such a block is 255, as for infinity in fp32, and
all its values decode as infinite or NaN.

State that changes little per step is rounded stochastically: up or down at random, with
probabilities that keep the mean. The random bits follow only from a key and the position in the
whole matrix, by the hash of model/dropout.py, independent of the layout.

    0.1 of the way to the next code, ten times      rounded to nearest: 0    here: 1 on average
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from trainyard.config.precisions import SCALED_COLUMNS as COLUMNS
from trainyard.config.precisions import DType
from trainyard.model.dropout import INCREMENT, QUADRATIC_FACTOR, mix, number_columns

E4M3, FP16 = torch.float8_e4m3fn, torch.float16

_FP32_MANTISSA_BITS, _FP32_INFINITY, _BIAS = 23, 0x7F800000, 127
# The scaled largest value is above half of this, and at most this: 448 is the largest e4m3; fp16
# would reach 65,504, and stochastic rounding still stays in range.
_TOP_EXPONENT = {E4M3: 8, FP16: 14}
# Added to an fp32 mantissa, it carries where e4m3 ends: above 1.75 x 2^8.
_CARRY = {E4M3: 0x7FFFFF - 0x600000, FP16: 0}
_MANTISSA_BITS, _LEAST_EXPONENT = {E4M3: 3, FP16: 10}, {E4M3: -6, FP16: -14}
_NOISE_BITS = 13  # fp32 has this many beyond fp16's 11
_CHUNK_BLOCKS = {"cpu": 2**13, "cuda": 2**19}
"""Blocks of 32 values to compute at a time, so that temporaries stay small."""


def torch_dtype(dtype: DType) -> torch.dtype:
    """Returns torch's dtype of a number format, without the scales."""
    named: torch.dtype = getattr(torch, dtype.torch_name)
    return named


@dataclass(frozen=True)
class BlockScaledTensor:
    """A block-scaled matrix, or this rank's shard of one."""

    values: Tensor
    """(rows, columns), `E4M3` or `FP16`."""
    exponents: Tensor
    """Exponents of the scales, plus 127; 255 if not finite. (rows, columns / 32), uint8."""

    @classmethod
    def zeros(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Self:
        """Makes a matrix of zeros."""
        rows, columns = shape
        exponents = torch.ones(rows, columns // COLUMNS, dtype=torch.uint8, device=device)
        return cls(torch.zeros(shape, dtype=dtype, device=device), exponents)

    @classmethod
    def of(cls, values: Tensor, dtype: torch.dtype = E4M3) -> Self:
        """Returns the codes nearest to the values of a contiguous matrix, in bf16 or fp32."""
        codes = cls.zeros(values.shape, dtype, values.device)
        codes.copy_(values)
        return codes

    def copy_(self, values: Tensor) -> None:
        """Takes the codes nearest to the values of a contiguous matrix, in bf16 or fp32."""
        blocks = values.view(-1, COLUMNS)
        for chunk, part in self.chunks():
            codes, exponents = encode(blocks[part], self.values.dtype)
            chunk.values.copy_(codes)
            chunk.exponents.copy_(exponents)

    def chunks(self) -> Iterator[tuple[BlockScaledTensor, slice]]:
        """Yields chunks as views, in blocks: (n, 32) and (n, 1); with their positions."""
        values, exponents = self.values.view(-1, COLUMNS), self.exponents.view(-1, 1)
        size = _CHUNK_BLOCKS.get(values.device.type, len(values) or 1)
        for start in range(0, len(values), size):
            here = slice(start, start + size)
            yield BlockScaledTensor(values[here], exponents[here]), here

    def decode(self) -> Tensor:
        """Returns the values, exactly, in fp32."""
        blocks = decode(self.values.view(-1, COLUMNS), self.exponents.view(-1, 1))
        return blocks.view(self.values.shape)

    def block_norms(self) -> Tensor:
        """Returns the norm of every block of 32 values, fp32."""
        norms = [
            # The norm of the codes, since squares of decoded values may overflow fp32.
            torch.linalg.vector_norm(chunk.values.float(), dim=-1) * _scales(chunk.exponents)[:, 0]
            for chunk, _ in self.chunks()
        ]
        return torch.cat(norms) if norms else torch.zeros(0, device=self.values.device)


def encode(
    blocks: Tensor, dtype: torch.dtype, noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Returns codes and exponents of blocks of values, (n, 32): (n, 32) and (n, 1).

    Args:
        blocks: fp32, or bf16 without noise.
        dtype: of the codes, `E4M3` or `FP16`.
        noise: from `noise`, to round stochastically; without it, to nearest.
    """
    largest = blocks.abs().amax(dim=-1, keepdim=True).float()
    bits = largest.view(torch.int32)
    exponents = ((bits + _CARRY[dtype]) >> _FP32_MANTISSA_BITS) - _TOP_EXPONENT[dtype]
    # At least 1: the scale and its inverse are then normal numbers, which no device flushes to 0.
    exponents = torch.where(torch.isfinite(largest), exponents.clamp(min=1), 255)
    inverse = ((2 * _BIAS - exponents) << _FP32_MANTISSA_BITS).view(torch.float32)
    scaled = blocks * inverse.to(blocks.dtype)
    if noise is not None:
        scaled = _round(scaled, dtype, noise)
    return scaled.to(dtype), exponents.to(torch.uint8)


def decode(values: Tensor, exponents: Tensor) -> Tensor:
    """Decodes codes exactly, to fp32.

    Args:
        values: (n, 32).
        exponents: (n, 1).
    """
    return values.float() * _scales(exponents)


def _scales(exponents: Tensor) -> Tensor:
    scales: Tensor = (exponents.to(torch.int32) << _FP32_MANTISSA_BITS).view(torch.float32)
    return scales


def noise(key: Tensor, numbers: Tensor) -> Tensor:
    """Returns random numbers in [0, 1) for blocks: (n, 32), fp32.

    Args:
        key: of the matrix, the step and the purpose; a scalar, int64.
        numbers: of blocks in the whole matrix, (n, 1), int64.
    """
    bits = mix(key + numbers * INCREMENT)
    factors = mix(number_columns(COLUMNS, numbers.device) * INCREMENT).to(torch.int32)
    x = ((bits >> 32).to(torch.int32) | 1) * factors + bits.to(torch.int32)
    x = x + QUADRATIC_FACTOR * (x * x)
    highest: Tensor = (x >> (32 - _NOISE_BITS)) & (2**_NOISE_BITS - 1)
    return highest.float() * 2.0**-_NOISE_BITS


def _round(scaled: Tensor, dtype: torch.dtype, noise: Tensor) -> Tensor:
    """Rounds to `dtype`: up where the noise is above the missing part."""
    exponents = (scaled.view(torch.int32) >> _FP32_MANTISSA_BITS) & 0xFF
    exponents = exponents.clamp(min=_LEAST_EXPONENT[dtype] + _BIAS) - _MANTISSA_BITS[dtype]
    spacing = (exponents << _FP32_MANTISSA_BITS).view(torch.float32)
    inverse = ((2 * _BIAS - exponents) << _FP32_MANTISSA_BITS).view(torch.float32)
    return torch.floor(scaled * inverse + noise) * spacing
