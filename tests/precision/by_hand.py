"""Products in fp8 by plain arithmetic, in fp64: rounding is that of fp8, sums are exact to 1e-15.

They serve as reference for those of torchao, and in their place where layouts are compared: torchao
adds up in fp32, of which another order makes, now and then, another number when rounded to fp8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainyard.config.precisions import Fp8
from trainyard.model.linear import MatmulFunction

# Bits after the point, smallest exponent of a number with all of them, largest number.
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)


def round_by_hand(x: Tensor, numbers: tuple[int, int, float], dimension: int | None) -> Tensor:
    """Rounds to fp8 with one scale, or with one for each row along a dimension; fp64."""
    n_bits, smallest, largest = numbers
    x = x.double()
    magnitudes = x.abs()
    top = magnitudes.max() if dimension is None else magnitudes.amax(dimension, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(largest / top.clamp(min=1e-12))))
    _, exponent = torch.frexp(x * scale)  # of a fraction from 1/2 to 1
    step = torch.exp2((exponent - 1).clamp(min=smallest).double() - n_bits)
    rounded = torch.round(x * scale / step) * step  # half to even
    return rounded.clamp(-largest, largest) / scale


class _ByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, by_rows: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.by_rows = by_rows
        along = 1 if by_rows else None
        rounded = round_by_hand(x.flatten(0, -2), E4M3, along)
        out = rounded @ round_by_hand(weight, E4M3, along).T
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        of_x = _input_gradient(gradients[0], weight, ctx.by_rows)
        return of_x, _weight_gradient(gradients[0], x, ctx.by_rows), None


def _input_gradient(gradient: Tensor, weight: Tensor, by_rows: bool) -> Tensor:
    numbers, along, across = (E4M3, 1, 0) if by_rows else (E5M2, None, None)
    rounded = round_by_hand(gradient.flatten(0, -2), numbers, along)
    of_x = rounded @ round_by_hand(weight, E4M3, across)
    return of_x.view(*gradient.shape[:-1], -1)


def _weight_gradient(gradient: Tensor, x: Tensor, by_rows: bool) -> Tensor:
    numbers, across = (E4M3, 0) if by_rows else (E5M2, None)
    rounded = round_by_hand(gradient.flatten(0, -2), numbers, across)
    return rounded.T @ round_by_hand(x.flatten(0, -2), E4M3, across)


def build_product_by_hand(fp8: Fp8) -> MatmulFunction:
    """Stands in for `build_product`, for inputs of fp64 that need a gradient."""

    by_rows = fp8.scaling == "rowwise"

    class ByHand:
        def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
            out: Tensor = _ByHand.apply(x, weight, by_rows)  # type: ignore[no-untyped-call]
            return out if bias is None else out + bias

        def input_gradient(self, gradient: Tensor, weight: Tensor, /) -> Tensor:
            return _input_gradient(gradient, weight, by_rows)

        def weight_gradient(self, gradient: Tensor, x: Tensor, /) -> Tensor:
            return _weight_gradient(gradient, x, by_rows)

    return ByHand()
