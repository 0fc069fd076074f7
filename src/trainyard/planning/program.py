"""What a training program adds to the matmuls of a step: bytes moved and kernels launched.

`own_program` describes this one, from a table by parts of a model; a test compares it with the
kernels that `simulate/kernels.py` counts. benchmarks/planning_tables.py describes others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from trainyard.config.precisions import Scaling
from trainyard.config.run import Model

Passes = tuple[float, float]
"""A figure of a forward and one of a backward pass."""
LAUNCH_VALUES = 320 * 65_536
"""Values of lists of tensors that one launch takes (ATen/native/cuda/MultiTensorApply.cuh): their
norm, update and cast."""


@dataclass(frozen=True)
class Program:
    """How a program does the same mathematics, besides its matmuls and fused attention.

    Defaults are this program's with compiled blocks; `own_program` has those that depend on the
    model.
    """

    stream_bytes: Passes = (0, 0)
    """Moved by each block per value of the residual stream."""
    heads_bytes: Passes = (0, 0)
    """Moved by each block per query, key and value."""
    mlp_bytes: Passes = (0, 0)
    """Moved by each block per value of the MLP's first matmul."""
    rest_bytes: Passes = (0, 0)
    """Moved outside the blocks per value of the residual stream: embedding, final norm."""
    logit_bytes: float = 6
    """Moved per logit, forward and backward together, beside the products."""
    gradient_bytes: float = 10
    """Moved per parameter and micro batch to add to gradients."""
    fused_gradient_bytes: float = 6
    """As `gradient_bytes`, where matmuls add to gradients."""
    table_bytes: float = 8
    """As `gradient_bytes`, of embedding and head."""
    recast_bytes: float = 17
    """Moved per parameter of a recomputed block and micro batch to cast it at each use."""
    unneeded_bytes: float = 8
    """Moved by a block's last sum per value of the stream, which is not recomputed."""
    cast_bytes: tuple[float, float] = (0, 0)
    """Moved to convert each factor of an fp8 matmul, per token's value and per weight."""
    block_kernels: Passes = (0, 0)
    """Launched by each block."""
    fp8_kernels: Passes = (0, 0)
    """Launched in addition by a block with fp8 matmuls."""
    rest_kernels: Passes = (0, 0)
    """Launched outside the blocks: embedding, head, loss, sums of gradients."""
    chunk_kernels: float = 14
    """Launched for each chunk of the loss, whose products add to the gradient of the head; 0: the
    loss has no chunks."""
    recast_kernels: tuple[float, float] = (2.1, 0.6)
    """Launched to cast a parameter at each use, in 16 bits and in fp8, whose casts include it."""
    step_kernels: int = 100
    """Launched in a step besides micro batches."""
    list_kernels: float = 3 / LAUNCH_VALUES
    """Launched in a step for each parameter, by operations on lists of many."""
    matrix_kernels: int = 53
    """Launched in a step for each matrix with low-precision state: its gradient is encoded, its
    state decoded, updated and encoded."""
    is_compiled: bool = True
    """Whether the host calls compiled blocks."""
    exposed_share: float = 0.2
    """Share of communication that is exposed despite overlap, by data ranks and by tensor ranks
    with `hides_tensor`: 1 without overlap, else its slowdown of computation. Exchanges take up to
    24 of 108 to 132 multiprocessors: an estimate."""
    hides_tensor: Literal["none", "backward", "all"] = "backward"
    """Which exchanges of tensor ranks overlap with matmuls: those in backward passes of
    column-parallel layers, or all but a first part."""
    hides_in_pipeline: bool = False
    """Whether exchanges of data ranks below ZeRO 3 overlap in a pipeline too."""
    reduced_bytes: int = 4
    """Bytes of a gradient in data-parallel reductions."""
    score_bytes: float = 0
    """Moved per attention score and forward pass; 0 if attention is fused."""
    attention_speed: float | None = None
    """Speed of its fused attention relative to flash; None: of the kernel that a run takes."""


@dataclass(frozen=True)
class _Part:
    """What a part of a model adds: values moved, and kernels, of a pass through a block."""

    stream: Passes = (0, 0)
    heads: Passes = (0, 0)
    mlp: Passes = (0, 0)
    kernels: Passes = (0, 0)


# Compiled, by Inductor of torch 2.13 on a GPU. A norm reads the stream and writes its result; with
# a residual sum before it, it reads the two addends. Biases are sums over tokens. Heads are views,
# but for rotations, and for their gradients, which are written into one matrix.
_MATMULS = _Part(kernels=(4, 8))
_ATTENTION = _Part(kernels=(1, 2))
_NORMS = _Part(stream=(9, 13), kernels=(3, 3))
_BIASES = _Part(stream=(0, 2), heads=(0, 1), mlp=(0, 1), kernels=(0, 4))
_POSITIONS = {
    "learned": _Part(heads=(0, 2), kernels=(0, 3)),
    "rotary": _Part(heads=(2.7, 2), kernels=(3, 3)),
}
_MLPS = {
    "gelu": _Part(mlp=(2, 3), kernels=(1, 1)),
    "swiglu": _Part(mlp=(1.5, 2.6), kernels=(1, 2)),
}
_DROPOUT = _Part(stream=(4.5, 6), kernels=(0, 2))
# A factor is read for its scale, then read and cast, for products with its rows and with its
# columns; Inductor computes each time what made it.
_FP8_KERNELS: dict[Scaling, Passes] = {"tensorwise": (20, 28), "rowwise": (6, 25)}
_FP8_CAST_BYTES = {
    "tensorwise": {"gelu": 7.5, "swiglu": 6.2},
    "rowwise": {"gelu": 5.2, "swiglu": 3.6},
}
_FP8_WEIGHT_BYTES = 2.6
# Embedding and final norm, not compiled: bytes for each value of the stream, and kernels.
_REST: dict[str, tuple[Passes, Passes]] = {
    "layer": ((27, 21), (11, 13)),
    "rms": ((54, 72), (17, 20)),
    "dropout": ((60, 50), (45, 11)),
}
_VALUE_BYTES = 2


@cache
def own_program(model: Model, scaling: Scaling, *, is_compiled: bool) -> Program:
    """Describes this program; where blocks are not compiled, bytes are estimates."""
    parts = [_MATMULS, _ATTENTION, _NORMS, _POSITIONS[model.positions], _MLPS[model.mlp]]
    parts += [_BIASES] * model.bias + [_DROPOUT] * (model.dropout > 0)
    rest = [_REST[model.norm]] + [_REST["dropout"]] * (model.dropout > 0)
    program = Program(
        stream_bytes=_sum([part.stream for part in parts], _VALUE_BYTES),
        heads_bytes=_sum([part.heads for part in parts], _VALUE_BYTES),
        mlp_bytes=_sum([part.mlp for part in parts], _VALUE_BYTES),
        rest_bytes=_sum([n_bytes for n_bytes, _ in rest]),
        cast_bytes=(_FP8_CAST_BYTES[scaling][model.mlp], _FP8_WEIGHT_BYTES),
        block_kernels=_sum([part.kernels for part in parts]),
        fp8_kernels=_FP8_KERNELS[scaling],
        rest_kernels=_sum([kernels for _, kernels in rest]),
    )
    if is_compiled:
        return program
    # Every operation of a block is a kernel.
    return replace(
        program,
        stream_bytes=twice(24),
        heads_bytes=twice(6),
        mlp_bytes=twice(6),
        logit_bytes=44,
        block_kernels=twice(47 if model.dropout else 12),
        fp8_kernels=twice(129),
        matrix_kernels=336,
        is_compiled=False,
    )


def twice(forward: float) -> Passes:
    """A backward pass that costs twice as much as a forward pass."""
    return forward, 2 * forward


def _sum(passes: list[Passes], factor: float = 1) -> Passes:
    forward, backward = (factor * sum(each) for each in zip(*passes, strict=True))
    return forward, backward
