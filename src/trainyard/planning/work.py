"""Counts the work of an optimizer step on each rank; `planning/time.py` converts it to time.

For one micro batch of n tokens, a block of width D and MLP width F on t tensor ranks has

    products    n x inputs x outputs of each matmul in architecture.py; twice in the backward pass
    attention   2 n T D/t FLOP if causal, 2.5 times that in the backward pass
    bytes       norms, dropout and sums read and write the residual stream, n x D values, a number
                of times; GELU and head transposes those inside the layers, n x (F + 3D)/t

The number of reads, writes and kernels, and whether attention is fused, depend on the training
program. `OURS` describes this one; benchmarks/planning_tables.py describes measured baselines.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from trainyard.architecture import (
    LayerSpec,
    block_layers,
    count_values,
    head_layer,
    matmuls,
    rest_layers,
)
from trainyard.config.precisions import MASTER
from trainyard.config.run import Run
from trainyard.planning.resolve import Plan
from trainyard.planning.traffic import (
    Traffic,
    block_gathers,
    count_fp8_blocks,
    rank_traffic,
    update_rounds,
)

Kind = tuple[int, int, bool, bool]
"""A stage's blocks, its fp8 blocks, and whether it is the first and the last."""
BACKWARD = 2
"""Matmuls, bytes and kernels of a backward pass, relative to a forward pass."""
NEWTON_SCHULZ_ITERATIONS = 5
NEWTON_SCHULZ_KERNELS, MUON_KERNELS = 20, 10
"""Launched for each matrix that is orthogonalized, and for each that is updated."""
ATTENTION_BACKWARD = 2.5
"""Matmuls of fused attention there: five for two, since it recomputes the scores."""


@dataclass(frozen=True)
class Program:
    """How a program does the same mathematics; per forward pass, unless stated otherwise."""

    name: str
    stream_bytes: float
    """Moved by each block per value of the residual stream."""
    inner_bytes: float
    """Moved by each block per value between its layers: queries, keys, values, MLP."""
    score_bytes: float
    """Moved per attention score; 0 if attention is fused."""
    logit_bytes: float
    """Moved per logit, forward and backward together."""
    gradient_bytes: float
    """Moved per parameter and micro batch to accumulate gradients."""
    block_kernels: int
    """Launched by each block."""
    reduced_bytes: int
    """Of a gradient in data parallel reductions."""
    cast_bytes: float
    """Moved per operand of an fp8 matmul to convert it."""
    shown_data: float
    """Share of communication that is exposed despite overlap, by data ranks and by tensor ranks
    with `hides_tensor`: 1 without overlap, else its slowdown of computation."""
    hides_in_pipeline: bool
    """Whether data ranks below ZeRO 3 overlap in a pipeline too."""
    hides_tensor: Literal["none", "backward", "all"]
    """What tensor ranks exchange beside matmuls: of column-parallel layers' backward passes, or all
    but a first part."""
    attention_share: float = 1.0
    """Speed of its fused attention relative to ours."""
    rest_kernels: int | None = None
    """Launched outside the blocks: embedding, head, loss, sums of gradients. None: like a block."""
    fp8_kernels: int = 0
    """Launched in addition by a block with fp8 matmuls."""
    matrix_kernels: int = 0
    """Launched in a step for each matrix with low-precision state: its gradient is encoded, its
    state decoded, updated and encoded."""


# Compiled: dropout, residual sum and norm are one kernel (reads two values, writes two, at 2 bytes,
# for each half of a block), GELU is another, heads are views. Logits: written, read for maximum and
# sum, read and written for the gradient, which both products read. fp8: an operand is read to find
# its scale, read again and written, 5 bytes; 4 such conversions serve the 6 operands of a layer's
# three products. Exchanges take up to 24 of 108 to 132 multiprocessors: an estimate. Kernels are
# counted, in tests/fake_cuda/launches.json and by `bench --roofline`: a bf16 block has 32 in both
# passes, an fp8 block 49 more, the rest 135, and a low-precision matrix 53 in a step.
OURS = Program(
    name="trainyard",
    stream_bytes=16,
    inner_bytes=4,
    score_bytes=0,
    logit_bytes=12,
    gradient_bytes=10,
    block_kernels=11,
    reduced_bytes=4,
    cast_bytes=3.3,
    shown_data=0.2,
    hides_in_pipeline=False,
    hides_tensor="backward",
    rest_kernels=45,
    fp8_kernels=16,
    matrix_kernels=53,
)
# Every operation of a block is a separate kernel; bytes are estimates, kernels are counted.
UNCOMPILED = replace(
    OURS,
    stream_bytes=24,
    inner_bytes=6,
    logit_bytes=24,
    block_kernels=47,
    fp8_kernels=129,
    matrix_kernels=336,
)


@dataclass(frozen=True)
class Matmul:
    """Equal matmuls: `rows x inner` times `inner x columns`."""

    rows: int
    inner: int
    columns: int
    count: float = 1
    in_fp8: bool = False


@dataclass(frozen=True)
class StagePass:
    """One pass of a micro batch through a stage."""

    products: tuple[Matmul, ...] = ()
    attention_flops: float = 0
    """Of fused attention."""
    memory_bytes: float = 0
    """Read and written by everything else."""
    kernels: float = 0

    def __add__(self, other: StagePass) -> StagePass:
        return StagePass(
            self.products + other.products,
            self.attention_flops + other.attention_flops,
            self.memory_bytes + other.memory_bytes,
            self.kernels + other.kernels,
        )

    def times(self, n: float, attention: float | None = None) -> StagePass:
        """Repeats it; by default, attention and the rest equally often."""
        return StagePass(
            tuple(replace(each, count=each.count * n) for each in self.products),
            self.attention_flops * (n if attention is None else attention),
            self.memory_bytes * n,
            self.kernels * n,
        )


@dataclass(frozen=True)
class Stage:
    """Work of one micro batch at one pipeline stage."""

    forward: StagePass
    backward: StagePass
    n_blocks: int
    n_parameters: int
    """On one of its tensor ranks."""


@dataclass(frozen=True)
class Work:
    """Work of a step."""

    run: Run
    program: Program
    stages: tuple[Stage, ...]
    """Stage s is on pipeline rank s % the number of ranks."""
    traffic: tuple[tuple[Traffic, ...], ...]
    """Of a whole step, by pipeline rank."""
    updated: tuple[int, ...]
    """Parameters of a rank's optimizer, by pipeline rank."""
    update_kernels: int
    """Launched by the update of low-precision state or by Muon, on the rank with most blocks."""
    update_products: tuple[Matmul, ...]
    """Muon's, on the rank with the largest matrices."""
    unpacked: tuple[int, ...]
    """Weights that arrive as fp8 in a step and are cast back to 16 bits, by pipeline rank."""
    n_micro_batches: int


def count_work(run: Run, plan: Plan, program: Program | None = None) -> Work:
    """Counts the work of a step of train.global_batch_size.

    Args:
        run: the run.
        plan: of the run.
        program: the training program; absent: this one, compiled unless train.compile is "never".
    """
    if program is None:
        program = UNCOMPILED if run.train.compile == "never" else OURS
    counter = _Counter(run, plan, program)
    topology = plan.topology
    kinds = [
        (end - first, count_fp8_blocks(run, (first, end)), first == 0, end == run.model.n_layers)
        for first, end in plan.stages
    ]
    # Most stages are alike, and so are most ranks.
    examples = dict(zip(kinds, plan.stages, strict=True))
    stages = {kind: counter.stage(blocks) for kind, blocks in examples.items()}
    traffic: dict[tuple[Kind, ...], tuple[Traffic, ...]] = {}
    ranks = [tuple(kinds[rank :: topology.pipeline]) for rank in range(topology.pipeline)]
    for rank, of_rank in enumerate(ranks):
        if of_rank not in traffic:
            traffic[of_rank] = tuple(rank_traffic(run, plan, rank))
    n_shards = topology.shard * topology.context if run.parallel.zero_stage else 1
    n_blocks = max(sum(n for n, *_ in each) for each in ranks)
    rounds = update_rounds(run, n_blocks, topology.n_ranks // topology.pipeline)
    return Work(
        run=run,
        program=program,
        stages=tuple(stages[kind] for kind in kinds),
        traffic=tuple(traffic[of_rank] for of_rank in ranks),
        updated=tuple(
            sum(stages[kind].n_parameters for kind in of_rank) // n_shards for of_rank in ranks
        ),
        update_kernels=counter.update_kernels(n_blocks, rounds),
        update_products=tuple(itertools.chain(*(newton_schulz(each[0]) for each in rounds))),
        unpacked=tuple(
            counter.unpacked_values(sum(kind[1] for kind in of_rank), block_gathers(run, topology))
            for of_rank in ranks
        ),
        n_micro_batches=run.train.global_batch_size // topology.data // run.train.micro_batch_size,
    )


def newton_schulz(layer: LayerSpec) -> list[Matmul]:
    """Lists the matmuls that orthogonalize a whole matrix, or each that is fused into it."""
    sides = []
    for short, long in map(sorted, layer.matrices):
        sides += [(short, long, short), (short, short, short), (short, short, long)]
    return [Matmul(*each, count=NEWTON_SCHULZ_ITERATIONS) for each in sides]


class _Counter:
    """Counts the work of stages for one micro batch."""

    def __init__(self, run: Run, plan: Plan, program: Program) -> None:
        self.run, self.model, self.program = run, run.model, program
        self.tensor = plan.topology.tensor
        self.block = block_layers(run.model, self.tensor)
        self.padded_vocabulary_size = plan.padded_vocabulary_size
        self.n_tokens = (
            run.train.micro_batch_size * run.model.sequence_length // plan.topology.context
        )
        self.wide = (
            run.precision.formats.compute.n_bytes // 2
        )  # bytes of values, in those of 16 bits

    def stage(self, blocks: tuple[int, int]) -> Stage:
        """Counts a stage, with embedding and head if it has them.

        Args:
            blocks: its first and one past its last.
        """
        n_blocks, n_fp8 = blocks[1] - blocks[0], count_fp8_blocks(self.run, blocks)
        forward, backward = self._blocks(n_blocks - n_fp8, in_fp8=False)
        if n_fp8:
            forward_fp8, backward_fp8 = self._blocks(n_fp8, in_fp8=True)
            forward, backward = forward + forward_fp8, backward + backward_fp8
        head = self._head() if blocks[1] == self.model.n_layers else StagePass()
        n_parameters = self._parameters(blocks)
        summing = StagePass(memory_bytes=n_parameters * self.program.gradient_bytes)
        return Stage(
            forward=forward + head,
            backward=backward + head.times(BACKWARD) + summing,
            n_blocks=n_blocks,
            n_parameters=n_parameters,
        )

    def _blocks(self, n: int, *, in_fp8: bool) -> tuple[StagePass, StagePass]:
        """Counts the forward and the backward pass of a number of equal blocks."""
        attention = self._half("attention", in_fp8) + self._scores()
        block = attention + self._half("mlp", in_fp8)
        again = {"none": StagePass(), "attention": attention, "block": block}
        backward = block.times(BACKWARD, ATTENTION_BACKWARD) + again[self.run.parallel.recompute]
        return block.times(n), backward.times(n)

    def _parameters(self, blocks: tuple[int, int]) -> int:
        """Counts them on one rank."""
        rest = rest_layers(self.model, self.padded_vocabulary_size, blocks, self.tensor)
        return (blocks[1] - blocks[0]) * count_values(self.block) + count_values(rest)

    def update_kernels(self, n_blocks: int, rounds: Sequence[Sequence[LayerSpec]]) -> int:
        """Counts launches of the update of low-precision state, or of Muon's rounds.

        Every data rank has a part of every matrix.
        """
        if rounds:
            n_matrices = sum(map(len, rounds))
            n_whole = sum(len(each[0].matrices) for each in rounds)
            return n_matrices * MUON_KERNELS + n_whole * NEWTON_SCHULZ_KERNELS
        if MASTER not in self.run.stored(True, 2).states:
            return 0
        return n_blocks * len(matmuls(self.model)) * self.program.matrix_kernels

    def unpacked_values(self, n_fp8_blocks: int, gathers: int) -> int:
        """Counts weights that arrive as fp8 in a step and are cast back to 16 bits."""
        matrices = sum(
            layer.n_inputs * layer.n_outputs for layer in matmuls(self.model, tensor=self.tensor)
        )
        return gathers * n_fp8_blocks * matrices * self.run.precision.fp8.all_gather

    def _half(self, part: str, in_fp8: bool) -> StagePass:
        """The attention or the MLP of a block, with norm and sum, but without scores."""
        n, layers = self.n_tokens, matmuls(self.model, part, self.tensor)
        products = (Matmul(n, each.n_inputs, each.n_outputs, in_fp8=in_fp8) for each in layers)
        inner = sum(each.n_outputs for each in layers if each.sharding == "column")
        memory_bytes = self._stream_bytes() / 2 + self.program.inner_bytes * n * inner
        kernels = self.program.block_kernels + self.program.fp8_kernels * in_fp8
        return StagePass(tuple(products), 0, memory_bytes * self.wide, kernels / 2)

    def _scores(self) -> StagePass:
        """Attention scores, and values weighted by them."""
        model, n, T = self.model, self.n_tokens, self.model.sequence_length
        if not self.program.score_bytes:
            return StagePass(
                attention_flops=2.0 * n * T * (model.n_heads * model.d_head // self.tensor)
            )
        # All of the square, head by head: scores, then values.
        n_heads = n / T * model.n_heads / self.tensor
        product = Matmul(T, model.d_head, T, count=2 * n_heads)
        memory_bytes = self.program.score_bytes * n_heads * T * T
        return StagePass((product,), memory_bytes=memory_bytes * self.wide)

    def _stream_bytes(self) -> float:
        shares = self.tensor if self.run.parallel.sequence else 1
        return self.program.stream_bytes * self.n_tokens * self.model.d_model / shares

    def _head(self) -> StagePass:
        """The output matrix and the loss."""
        n, head = self.n_tokens, head_layer(self.model, self.padded_vocabulary_size, self.tensor)
        product = Matmul(n, head.n_inputs, head.n_outputs)
        n_bytes = self.program.logit_bytes / (1 + BACKWARD) * n * head.n_outputs * self.wide
        rest_kernels = self.program.rest_kernels
        kernels = self.program.block_kernels if rest_kernels is None else rest_kernels
        return StagePass((product,), 0, n_bytes, kernels)
