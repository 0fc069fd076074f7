"""AdamW with 6 bytes per parameter for matrices of blocks instead of 16.

    per parameter         elsewhere          matrices of blocks
    weight in use                            bf16, for the forward pass and gathers
    gradient              fp32     4         e4m3     1     from completion to the update
    master weight         fp32     4         fp16     2     rounded stochastically
    first moment          fp32     4         e4m3     1     rounded stochastically
    second moment         fp32     4         fp16     2     rounded stochastically
                          16 bytes           6 bytes, and 4/32 for the scales

An update decodes to fp32, computes, and encodes again. Its steps are often below the resolution of
a code: with rounding to nearest, such weights would never move, and a moment would stay put until a
value a quarter away arrives. Stochastic rounding is right on average. The noise follows from (seed,
updates done, name, position in the whole matrix): the same in every layout and after a resume.

Vectors of blocks are bf16 in use, since ranks gather them together with the matrices, and otherwise
fp32. They and everything outside the blocks use fused AdamW.

Source: the recipe of FP8-LM (arXiv:2310.18313), which scales whole tensors and rounds to nearest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainyard.config.fp8_rules import SCALED_COLUMNS
from trainyard.model.dropout import INCREMENT, mix
from trainyard.parallel.model import LocalParameter
from trainyard.parallel.placement import Placement, local_part
from trainyard.precision.block_scaled import E4M3, FP16, BlockScaledTensor, decode, encode, noise

MOMENTS = ("exp_avg", "exp_avg_sq")
# Uses of noise.
_MASTER, _FIRST, _SECOND = 1, 2, 3
_BITS = {1: torch.uint8, 2: torch.int16}


@dataclass(frozen=True)
class Matrix:
    """A matrix of a block, or this rank's shard, with its state."""

    local: LocalParameter
    place: Placement
    key: Tensor
    """Key of its noise, int64."""
    master: BlockScaledTensor
    exp_avg: BlockScaledTensor
    exp_avg_sq: BlockScaledTensor

    @classmethod
    def of(cls, local: LocalParameter, place: Placement, seed: int) -> Matrix:
        """Makes the state before the first update."""
        weight = local_part(local.parameter)
        digest = hashlib.sha256(f"rounding {seed} {local.name}".encode()).digest()
        number = int.from_bytes(digest[:8], "little", signed=True)
        return cls(
            local,
            place,
            torch.tensor(number, device=weight.device),
            BlockScaledTensor.of(weight, FP16),
            BlockScaledTensor.zeros(weight.shape, E4M3, weight.device),
            BlockScaledTensor.zeros(weight.shape, FP16, weight.device),
        )

    @property
    def codes(self) -> dict[str, BlockScaledTensor]:
        """The state by checkpoint name."""
        return {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}

    def numbers(self, here: slice) -> Tensor:
        """Numbers blocks of 32 values as in the whole matrix, (n, 1), int64."""
        n_blocks = self.place.local_shape[1] // SCALED_COLUMNS
        index = torch.arange(here.start, here.stop, device=self.key.device)
        rows = self.place.offsets[0] + index // n_blocks
        columns = self.place.offsets[1] // SCALED_COLUMNS + index % n_blocks
        return (rows * (self.place.shape[1] // SCALED_COLUMNS) + columns)[:, None]


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW for a model with bf16 blocks; clips and skips like fused AdamW.

    Args:
        parameters: all parameters of this rank, with their positions in the whole.
        build_plain: builds the AdamW of parameters with fp32 state.
        settings: AdamW's `lr`, `betas`, `eps` and `weight_decay`.
        seed: of the noise.
        compiled: compile the update to one pass over the state.

    Attributes:
        grad_scale: divisor of gradients, on the device.
        found_inf: 1 on the device to skip the update, else 0.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[LocalParameter, Placement]],
        build_plain: Callable[[list[nn.Parameter]], torch.optim.AdamW],
        settings: dict[str, Any],
        seed: int,
        *,
        compiled: bool,
    ) -> None:
        low_bit = [(each, place) for each, place in parameters if each.is_low_bit]
        self.matrices = {
            each.name: Matrix.of(each, place, seed)
            for each, place in low_bit
            if each.parameter.ndim > 1
        }
        self.vectors = {
            each.name: (each, nn.Parameter(local_part(each.parameter).float()))
            for each, _ in low_bit
            if each.parameter.ndim == 1
        }
        super().__init__([each.local.parameter for each in self.matrices.values()], settings)
        precise = [each.parameter for each, _ in parameters if not each.is_low_bit]
        self.plain = build_plain(precise)
        # In a separate group: the fused kernel does not mix plain and distributed tensors.
        masters = [master for _, master in self.vectors.values()]
        self.plain.add_param_group({"params": masters, "weight_decay": 0.0})
        self.param_groups += self.plain.param_groups  # shared, so that setting a rate sets theirs
        device = next(iter(self.matrices.values())).key.device
        self._n_updates = torch.zeros((), dtype=torch.int64, device=device)
        self._update = torch.compile(_update, dynamic=True) if compiled else _update
        self.grad_scale = torch.ones((), device=device)
        self.found_inf = torch.zeros((), device=device)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all weights with the gradients in `LocalParameter`."""
        self.plain.grad_scale, self.plain.found_inf = self.grad_scale, self.found_inf  # type: ignore[attr-defined]
        for each, master in self.vectors.values():
            assert isinstance(each.quantized_gradient, Tensor), each.name
            master.grad = each.quantized_gradient
        self.plain.step()
        if self.vectors:
            torch._foreach_copy_(
                [local_part(each.parameter) for each, _ in self.vectors.values()],
                [master.detach() for _, master in self.vectors.values()],
            )
        self._n_updates += self.found_inf == 0
        settings = self.param_groups[0]
        n, (beta1, beta2) = self._n_updates.double(), settings["betas"]
        step = (
            torch.full((), settings["lr"], device=n.device),  # a tensor created without a copy
            self.grad_scale,
            self.found_inf != 0,
            (1 - beta1**n).float(),
            (1 - beta2**n).float(),
        )
        constants = (beta1, beta2, settings["eps"], settings["weight_decay"])
        for matrix in self.matrices.values():
            key = mix(matrix.key + self._n_updates * INCREMENT)
            gradient = matrix.local.quantized_gradient
            assert isinstance(gradient, BlockScaledTensor), matrix.local.name
            weight = local_part(matrix.local.parameter).view(-1, SCALED_COLUMNS)
            parts = zip(
                *(each.chunks() for each in (*matrix.codes.values(), gradient)), strict=True
            )
            for chunks in parts:
                here = chunks[0][1]
                tensors = [t for codes, _ in chunks for t in (codes.values, codes.exponents)]
                numbers = matrix.numbers(slice(here.start, here.start + len(tensors[0])))
                self._update(weight[here], tensors, key, numbers, step, constants)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears all gradients."""
        super().zero_grad(set_to_none)
        for each in (
            *(m.local for m in self.matrices.values()),
            *(v for v, _ in self.vectors.values()),
        ):
            each.quantized_gradient = None

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's state of a parameter by checkpoint name."""
        matrix = self.matrices.get(local.name)
        if matrix is not None:
            return {
                name: tensor
                for what, codes in matrix.codes.items()
                for name, tensor in ((what, codes.values), (f"{what}_exponents", codes.exponents))
            }
        _, master = self.vectors.get(local.name, (local, None))
        moments = moments_of(self.plain, local.parameter if master is None else master)
        return moments if master is None else {"master": master.detach(), **moments}

    def begin_at(self, n_updates: int | None) -> None:
        """Prepares the state for a checkpoint's, or adopts new weights.

        Args:
            n_updates: done so far; None before the first, with freshly filled weights.
        """
        self._n_updates.fill_(n_updates or 0)
        begin_at(self.plain, n_updates)
        if n_updates is None:
            for matrix in self.matrices.values():
                fresh = BlockScaledTensor.of(local_part(matrix.local.parameter), FP16)
                matrix.master.values.copy_(fresh.values)
                matrix.master.exponents.copy_(fresh.exponents)
            for each, master in self.vectors.values():
                master.detach().copy_(local_part(each.parameter))


def moments_of(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Returns this rank's moments of a parameter; none before the first update."""
    state = optimizer.state.get(parameter, {})
    return {moment: local_part(state[moment]) for moment in MOMENTS if moment in state}


def begin_at(optimizer: torch.optim.AdamW, n_updates: int | None) -> None:
    """Makes zero moments for a checkpoint to fill; None for none, as at the start."""
    optimizer.state.clear()
    parameters: Iterable[nn.Parameter] = (
        parameter for group in optimizer.param_groups for parameter in group["params"]
    )
    for parameter in parameters if n_updates is not None else ():
        moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        done = torch.tensor(float(n_updates or 0), device=parameter.device)
        optimizer.state[parameter] = {"step": done, **moments}


def _update(
    weight: Tensor,
    state: Sequence[Tensor],
    key: Tensor,
    numbers: Tensor,
    step: tuple[Tensor, ...],
    constants: tuple[float, ...],
) -> None:
    """Updates blocks of 32 values in place.

    Args:
        weight: bf16, (n, 32).
        state: codes and exponents, (n, 32) and (n, 1), of master weight, first moment, second
            moment and gradient.
        key: of the noise of this matrix and update.
        numbers: of the blocks in the whole matrix, (n, 1).
        step: learning rate, divisor of gradients, whether to skip, and the bias corrections of
            both moments.
        constants: both betas, epsilon and weight decay.
    """
    rate, grad_scale, is_skipped, correction1, correction2 = step
    beta1, beta2, epsilon, decay = constants
    master, first, second, gradient = (decode(*state[i : i + 2]) for i in (0, 2, 4, 6))
    gradient = gradient / grad_scale
    first = beta1 * first + (1 - beta1) * gradient
    second = beta2 * second + (1 - beta2) * gradient * gradient
    moved = (first / correction1) / ((second / correction2).sqrt() + epsilon)
    master = master - rate * (moved + decay * master)
    new = [
        tensor
        for values, dtype, purpose in (
            (master, FP16, _MASTER),
            (first, E4M3, _FIRST),
            (second, FP16, _SECOND),
        )
        for tensor in encode(values, dtype, noise(mix(key + purpose), numbers))
    ]
    working = decode(new[0], new[1]).to(weight.dtype)
    for old, found in zip([*state[:6], weight], [*new, working], strict=True):
        bits = _BITS[old.element_size()]
        old = old.view(bits)
        old.copy_(torch.where(is_skipped, old, found.view(bits)))
