"""Products in fp8 by plain arithmetic, in fp64: rounding is that of fp8, sums are exact to 1e-15.

They serve as reference for those of torchao, and in their place where layouts are compared: torchao
adds up in fp32, of which another order makes, now and then, another number when rounded to fp8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainyard.config.precisions import Fp8
from trainyard.model.linear import multiply_by

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


class ByHand:
    """Stands in for what `build_product` builds; the gradients are those below."""

    def __init__(self, fp8: Fp8) -> None:
        self.by_rows = fp8.scaling == "rowwise"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        if torch.is_grad_enabled():  # and not inside `multiply_by`
            return multiply_by(self, x, weight, bias)
        along = 1 if self.by_rows else None
        rounded = round_by_hand(x.flatten(0, -2), E4M3, along)
        out = (rounded @ round_by_hand(weight, E4M3, along).T).view(*x.shape[:-1], -1)
        return out if bias is None else out + bias

    def input_gradient(self, gradient: Tensor, weight: Tensor, /) -> Tensor:
        numbers, along, across = (E4M3, 1, 0) if self.by_rows else (E5M2, None, None)
        rounded = round_by_hand(gradient.flatten(0, -2), numbers, along)
        of_x = rounded @ round_by_hand(weight, E4M3, across)
        return of_x.view(*gradient.shape[:-1], -1)

    def weight_gradient(self, gradient: Tensor, x: Tensor, /) -> Tensor:
        numbers, across = (E4M3, 0) if self.by_rows else (E5M2, None)
        rounded = round_by_hand(gradient.flatten(0, -2), numbers, across)
        return rounded.T @ round_by_hand(x.flatten(0, -2), E4M3, across)
