"""Number formats of every precision and every optimizer state; all other code reads these tables.

A precision says what a run computes, sends and keeps. For a parameter, the optimizer adds its
states, which are kept in fp32 unless the precision says otherwise:

    bytes per parameter       fp32   bf16, fp16, fp8   fp8_lowbit: matrix of a block
    computing and gathers     4      2                 2
    weight                    4      4                 2
    gradient, once complete   4      4                 1
    master weight                                      2    saved, as all below
    exp_avg                   4      4                 1
    exp_avg_sq                4      4                 2

Muon keeps one state of 4 bytes for a matrix of a block, `momentum`, in place of the last two.

To add a precision, add its kind, an entry in `FORMATS`, and its effect on a model in
`precision/policy.py`; to add an optimizer, its states in `STATES` and itself in
`optim/optimizer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from pydantic import Field

from trainyard.config.section import Section

PrecisionKind = Literal["fp32", "fp16", "bf16", "fp8", "fp8_lowbit"]
OptimizerKind = Literal["adamw", "muon"]
Scaling = Literal["tensorwise", "rowwise"]

SCALED_COLUMNS = 32
"""Columns of a block-scaled matrix that share a scale."""
EXPONENTS = "_exponents"
"""Follows the name of a block-scaled state, in that of its scales."""
MASTER = "master"
"""State of a weight in low precision: a more precise copy, which the optimizer updates."""


@dataclass(frozen=True)
class DType:
    """A number format."""

    name: str
    """As in a device's peaks."""
    torch_name: str
    n_bytes: int
    is_scaled: bool = False
    """Whether it is block-scaled: `SCALED_COLUMNS` values share one byte of scale."""

    def bytes_of(self, n_values: int) -> int:
        """Returns the bytes of values, with their scales."""
        scales = n_values // SCALED_COLUMNS if self.is_scaled else 0
        return self.n_bytes * n_values + scales


FP32, BF16 = DType("fp32", "float32", 4), DType("bf16", "bfloat16", 2)
FP16, FP8 = DType("fp16", "float16", 2), DType("fp8", "float8_e4m3fn", 1)
SCALED_FP16, SCALED_E4M3 = replace(FP16, is_scaled=True), replace(FP8, is_scaled=True)


@dataclass(frozen=True)
class Stored:
    """Formats of a parameter between steps; a checkpoint has all but the gradient."""

    weight: DType = FP32
    """As the model uses it."""
    gradient: DType = FP32
    """Once complete; if not the weight's format, backward passes leave it in that one."""
    states: Mapping[str, DType] = field(default_factory=dict)
    """States of the optimizer, by name."""

    @property
    def converts_gradient(self) -> bool:
        """Whether the complete gradient is converted before the update."""
        return self.gradient != self.weight

    def state_bytes(self, n_values: int) -> int:
        """Returns the bytes of the optimizer's states."""
        return sum(dtype.bytes_of(n_values) for dtype in self.states.values())

    def saved_bytes(self, n_values: int) -> int:
        """Returns the bytes in a checkpoint."""
        return self.weight.bytes_of(n_values) + self.state_bytes(n_values)


@dataclass(frozen=True)
class Formats:
    """What a precision computes, sends and keeps."""

    compute: DType
    """Format of activations, of gathered weights of blocks, and of matmuls but those below."""
    block_matmuls: DType
    """Format of the large matmuls of blocks."""
    rounding: float
    """Largest relative difference between layouts that another summation order explains, in three
    steps of a small run: about 20 units of rounding (decisions 013, 017, 018)."""
    scales_loss: bool = False
    """Whether gradients underflow without loss scaling."""
    reduced: DType = FP32
    """Format in which data-parallel ranks send gradients of blocks: fp32, or block-scaled; they sum
    in fp32."""
    matrices: Stored = Stored()
    """Matrices of blocks; of the optimizer's states, those not in fp32."""
    vectors: Stored = Stored()
    """Biases and norms of blocks, alike."""

    @property
    def multiplies_in_fp8(self) -> bool:
        """Whether blocks compute their large matmuls in fp8."""
        return self.block_matmuls == FP8

    @property
    def scales_columns(self) -> bool:
        """Whether ranks must shard matrices of blocks at multiples of `SCALED_COLUMNS`."""
        return self.reduced.is_scaled or self.matrices.gradient.is_scaled


FORMATS: Mapping[PrecisionKind, Formats] = {
    "fp32": Formats(FP32, FP32, rounding=2.4e-6),
    "fp16": Formats(FP16, FP16, rounding=2.0e-2, scales_loss=True),
    "bf16": Formats(BF16, BF16, rounding=7.8e-2),
    "fp8": Formats(BF16, FP8, rounding=0.6),
    "fp8_lowbit": Formats(
        compute=BF16,
        block_matmuls=FP8,
        rounding=0.9,
        reduced=SCALED_E4M3,
        matrices=Stored(
            weight=BF16,
            gradient=SCALED_E4M3,
            states={MASTER: SCALED_FP16, "exp_avg": SCALED_E4M3, "exp_avg_sq": SCALED_FP16},
        ),
        # Gathered together with the matrices.
        vectors=Stored(weight=BF16, states={MASTER: FP32}),
    ),
}

MOMENTS = ("exp_avg", "exp_avg_sq")
"""States of AdamW: the first and the second moment."""
MOMENTUM = "momentum"
"""State of Muon."""
STATES: Mapping[OptimizerKind, tuple[str, ...]] = {"adamw": MOMENTS, "muon": (MOMENTUM,)}
"""States of a matrix of a block; every other parameter has those of AdamW."""


@cache
def stored(
    kind: PrecisionKind, optimizer: OptimizerKind, in_block: bool, n_dimensions: int
) -> Stored:
    """Returns the formats of a parameter.

    Args:
        kind: the precision.
        optimizer: the optimizer of the run.
        in_block: whether it belongs to a block.
        n_dimensions: dimensions of the parameter.
    """
    formats, low = FORMATS[kind], Stored()
    is_matrix = in_block and n_dimensions > 1
    if in_block:
        low = formats.matrices if is_matrix else formats.vectors
    states = dict.fromkeys(STATES[optimizer if is_matrix else "adamw"], FP32) | dict(low.states)
    return Stored(low.weight, low.gradient, states)


class LossScale(Section):
    """Dynamic loss scaling, fp16 only."""

    initial: float = Field(default=2.0**32, ge=1)
    """Loss scale of the first step."""
    window: int = Field(default=1000, ge=1)
    """Steps without overflow after which the scale doubles."""
    hysteresis: int = Field(default=2, ge=1)
    """Overflows before the scale halves; then each one halves it, until it has doubled again."""
    minimum: float = Field(default=1.0, gt=0)
    """Lowest scale."""


class Fp8(Section):
    """fp8 matmuls, fp8 and fp8_lowbit only."""

    scaling: Scaling = "tensorwise"
    """One power-of-two scale per tensor, or one per row, which is slower."""
    all_gather: bool = False
    """With ZeRO 1 to 3, all-gather block weights in fp8: half the bytes; tensorwise only."""
    precise_blocks: int = Field(default=1, ge=0)
    """Blocks at each end kept in bf16; the head always is."""
    emulate: bool = False
    """Emulate fp8 matmuls on a device without them; slow."""


class Precision(Section):
    """Number formats of matmuls; those of weights and optimizer state follow."""

    kind: PrecisionKind = "bf16"
    """Number format of matmuls. All keep weights, gradients and optimizer state in fp32, except
    fp8_lowbit, in less."""
    loss_scale: LossScale = LossScale()
    """Loss scaling of fp16."""
    fp8: Fp8 = Fp8()
    """Matmuls of fp8 and fp8_lowbit."""

    @property
    def formats(self) -> Formats:
        """What it computes, sends and keeps."""
        return FORMATS[self.kind]
