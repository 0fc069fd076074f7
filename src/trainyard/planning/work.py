"""Counts the work of an optimizer step on each rank; `planning/time.py` converts it to time.

For one micro batch of n tokens, a block of width D and MLP width F on t tensor ranks has

    products    n x inputs x outputs of each matmul in architecture.py; twice in the backward pass
    attention   2 n T D/t FLOP if causal, 2.5 times that in the backward pass
    bytes       norms, dropout and sums read and write the residual stream, n x D values, a number
                of times; GELU and head transposes those inside the layers, n x (F + 3D)/t

The number of reads, writes and kernels depends on the training program (`planning/program.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trainyard.architecture import (
    LayerSpec,
    block_layers,
    count_logit_chunks,
    count_values,
    head_layer,
    matmuls,
    parameters_of,
    rest_layers,
)
from trainyard.config.precisions import MASTER
from trainyard.config.run import Run
from trainyard.planning.program import Passes, Program, own_program
from trainyard.planning.resolve import Plan
from trainyard.planning.traffic import (
    FP32_BYTES,
    Traffic,
    block_gathers,
    count_fp8_blocks,
    rank_traffic,
    update_rounds,
)

Kind = tuple[int, int, bool, bool]
"""A stage's blocks, its fp8 blocks, and whether it is the first and the last."""
BACKWARD = 2
"""Matmuls of a backward pass, relative to a forward pass."""
NEWTON_SCHULZ_ITERATIONS = 5
NEWTON_SCHULZ_KERNELS, MUON_KERNELS = 20, 10
"""Launched for each matrix that is orthogonalized, and for each that is updated."""
ATTENTION_BACKWARD = 2.5
"""Matmuls of fused attention there: five for two, since it recomputes the scores."""


@dataclass(frozen=True)
class Matmul:
    """Equal matmuls: `rows x inner` times `inner x columns`."""

    rows: float
    inner: int
    columns: int
    count: float = 1
    in_fp8: bool = False

    @property
    def flops(self) -> float:
        """FLOP of all of them."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    def n_bytes(self, value_bytes: int, cast_bytes: tuple[float, float]) -> float:
        """Bytes that all read and write.

        Args:
            value_bytes: of a number in the compute precision.
            cast_bytes: as in `Program`.
        """
        factors = self.rows * self.inner, self.inner * self.columns
        moved = [1 + n for n in cast_bytes] if self.in_fp8 else [value_bytes] * 2
        operands = sum(size * n for size, n in zip(factors, moved, strict=True))
        return self.count * (operands + value_bytes * self.rows * self.columns)


@dataclass(frozen=True)
class StagePass:
    """One pass of a micro batch through a stage."""

    products: tuple[Matmul, ...] = ()
    attention_flops: float = 0
    """Of fused attention."""
    memory_bytes: float = 0
    """Read and written by everything else."""
    kernels: float = 0
    blocks: float = 0
    """Compiled blocks that it passes through."""

    def __add__(self, other: StagePass) -> StagePass:
        return StagePass(
            self.products + other.products,
            self.attention_flops + other.attention_flops,
            self.memory_bytes + other.memory_bytes,
            self.kernels + other.kernels,
            self.blocks + other.blocks,
        )

    def times(self, n: float) -> StagePass:
        """Repeats it."""
        return StagePass(
            tuple(replace(each, count=each.count * n) for each in self.products),
            self.attention_flops * n,
            self.memory_bytes * n,
            self.kernels * n,
            self.blocks * n,
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
    update_kernels: float
    """Launched by the update, on the rank with most blocks."""
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
        program = own_program(
            run.model, run.precision.fp8.scaling, is_compiled=run.train.compile != "never"
        )
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
    updated = [sum(stages[kind].n_parameters for kind in each) // n_shards for each in ranks]
    return Work(
        run=run,
        program=program,
        stages=tuple(stages[kind] for kind in kinds),
        traffic=tuple(traffic[of_rank] for of_rank in ranks),
        updated=tuple(updated),
        update_kernels=counter.update_kernels(n_blocks, rounds, max(updated)),
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
        self.topology, self.tensor = plan.topology, plan.topology.tensor
        self.block = block_layers(run.model, self.tensor)
        self.padded_vocabulary_size = plan.padded_vocabulary_size
        n_tokens = run.train.micro_batch_size * run.model.sequence_length
        self.n_tokens = n_tokens // plan.topology.context
        # Bytes of values, in those of 16 bits.
        self.wide = run.precision.formats.compute.n_bytes // 2

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
        rest = rest_layers(self.model, self.padded_vocabulary_size, blocks, self.tensor)
        n_rest = count_values(rest)
        if blocks[1] == self.model.n_layers:
            forward_head, backward_head = self._head()
            forward, backward = forward + forward_head, backward + backward_head
        table_bytes = self.program.table_bytes
        if table_bytes is None:
            table_bytes = self.program.gradient_bytes
        return Stage(
            forward=forward,
            backward=backward + StagePass(memory_bytes=n_rest * table_bytes),
            n_blocks=n_blocks,
            n_parameters=n_blocks * count_values(self.block) + n_rest,
        )

    def _blocks(self, n: int, *, in_fp8: bool) -> tuple[StagePass, StagePass]:
        """Counts the forward and the backward pass of a number of equal blocks."""
        attention = self._half("attention", in_fp8), self._scores()
        mlp = self._half("mlp", in_fp8), (StagePass(), StagePass())
        forward, backward = (
            sum((half[part] for half in (*attention, *mlp)), start=StagePass()) for part in (0, 1)
        )
        if self.run.parallel.recompute == "block":
            backward += self._again(forward, in_fp8)
        elif self.run.parallel.recompute == "attention":
            backward += attention[0][0] + attention[1][0]
        n_values = count_values(self.block)
        backward += StagePass(memory_bytes=n_values * self._gradient_bytes(in_fp8))
        blocks = float(self.program.is_compiled)
        return replace(forward, blocks=blocks).times(n), replace(backward, blocks=blocks).times(n)

    def _again(self, forward: StagePass, in_fp8: bool) -> StagePass:
        """The forward pass of a block as its backward pass recomputes it."""
        program = self.program
        if not program.is_compiled:
            return forward
        # Nothing needs the last matmul and sum; weights are cast at each use.
        unneeded = program.unneeded_bytes * self.wide * self._stream
        recasts = program.recast_kernels[in_fp8] * len(parameters_of(self.block))
        return replace(
            forward,
            products=forward.products[:-1],
            memory_bytes=forward.memory_bytes - unneeded,
            kernels=forward.kernels - 2 + recasts,
        )

    def _gradient_bytes(self, in_fp8: bool) -> float:
        """Bytes moved per parameter of a block and micro batch, beside its products."""
        program, topology = self.program, self.topology
        if self.run.parallel.recompute == "block":
            return program.gradient_bytes + program.recast_bytes
        is_alone = topology.n_ranks == topology.tensor
        if program.fused_gradient_bytes is None or in_fp8 or not is_alone:
            return program.gradient_bytes
        return program.fused_gradient_bytes

    def update_kernels(
        self, n_blocks: int, rounds: Sequence[Sequence[LayerSpec]], n_updated: int
    ) -> float:
        """Counts launches of the update.

        Every data rank has a part of every matrix, of low-precision state or in Muon's rounds.
        """
        kernels = self.program.step_kernels + n_updated * self.program.list_kernels
        if rounds:
            n_matrices = sum(map(len, rounds))
            n_whole = sum(len(each[0].matrices) for each in rounds)
            kernels += n_matrices * MUON_KERNELS + n_whole * NEWTON_SCHULZ_KERNELS
        if MASTER in self.run.stored(True, 2).states:
            kernels += n_blocks * len(matmuls(self.model)) * self.program.matrix_kernels
        return kernels

    def unpacked_values(self, n_fp8_blocks: int, gathers: int) -> int:
        """Counts weights that arrive as fp8 in a step and are cast back to 16 bits."""
        matrices = sum(
            layer.n_inputs * layer.n_outputs for layer in matmuls(self.model, tensor=self.tensor)
        )
        return gathers * n_fp8_blocks * matrices * self.run.precision.fp8.all_gather

    def _half(self, part: str, in_fp8: bool) -> tuple[StagePass, StagePass]:
        """The attention or the MLP of a block, with norm and sum, but without scores."""
        n, layers, program = self.n_tokens, matmuls(self.model, part, self.tensor), self.program
        products = tuple(Matmul(n, each.n_inputs, each.n_outputs, in_fp8=in_fp8) for each in layers)
        inner = n * sum(each.n_outputs for each in layers if each.sharding == "column")
        inner_bytes = program.heads_bytes if part == "attention" else program.mlp_bytes
        forward, backward = (
            StagePass(
                products,
                0,
                self.wide * (program.stream_bytes[i] / 2 * self._stream + inner_bytes[i] * inner),
                (program.block_kernels[i] + program.fp8_kernels[i] * in_fp8) / 2,
            )
            for i in (0, 1)
        )
        return forward, replace(backward, products=_twice(products))

    def _scores(self) -> tuple[StagePass, StagePass]:
        """Attention scores, and values weighted by them."""
        model, n, T = self.model, self.n_tokens, self.model.sequence_length
        if not self.program.score_bytes:
            flops = 2.0 * n * T * (model.n_heads * model.d_head // self.tensor)
            return (
                StagePass(attention_flops=flops),
                StagePass(attention_flops=ATTENTION_BACKWARD * flops),
            )
        # All of the square, head by head: scores, then values.
        n_heads = n / T * model.n_heads / self.tensor
        product = Matmul(T, model.d_head, T, count=2 * n_heads)
        memory_bytes = self.program.score_bytes * n_heads * T * T
        scores = StagePass((product,), memory_bytes=memory_bytes * self.wide)
        return scores, scores.times(BACKWARD)

    @property
    def _stream(self) -> float:
        """Values of the residual stream on a rank."""
        shares = self.tensor if self.run.parallel.sequence else 1
        return self.n_tokens * self.model.d_model / shares

    def _head(self) -> tuple[StagePass, StagePass]:
        """The output matrix and the loss, and what else is outside the blocks."""
        n, head = self.n_tokens, head_layer(self.model, self.padded_vocabulary_size, self.tensor)
        program, n_chunks, sums = self.program, 1, 0.0
        if program.chunk_kernels is not None:
            n_chunks = count_logit_chunks(n, head.n_outputs, FP32_BYTES, on_gpu=True)
            # The first writes the sum in fp32, where products are counted in 16 bits; others add.
            sums = (8 * n_chunks - 4 - 2 * n_chunks) * head.n_inputs * head.n_outputs
        products = (Matmul(n / n_chunks, head.n_inputs, head.n_outputs, n_chunks),)
        n_bytes = program.logit_bytes / (1 + BACKWARD) * n * head.n_outputs * self.wide
        rest: Passes = tuple(each * self._stream for each in program.rest_bytes)  # type: ignore[assignment]
        kernels = n_chunks * (program.chunk_kernels or 0) / (1 + BACKWARD)
        others = program.rest_kernels or program.block_kernels
        return (
            StagePass(products, 0, n_bytes + rest[0], kernels + others[0]),
            StagePass(
                _twice(products),
                0,
                BACKWARD * n_bytes + rest[1] + sums,
                BACKWARD * kernels + others[1],
            ),
        )


def _twice(products: tuple[Matmul, ...]) -> tuple[Matmul, ...]:
    """Products of the backward pass: for each, one of equal size for either factor."""
    return tuple(replace(each, count=BACKWARD * each.count) for each in products)
