"""Counts the work of an optimizer step on each rank; `planning/time.py` converts it to time.

For one micro batch of n tokens, a block of width D and MLP width F on t tensor ranks has

    products    n x inputs x outputs of each matmul in architecture.py; twice in the backward pass
    attention   2 n T D/t FLOP if causal, 2.5 times that in the backward pass
    bytes       norms, dropout and sums read and write the residual stream, n x D values, a number
                of times; GELU and head transposes those inside the layers, n x (F + 3D)/t

The number of reads, writes and kernels depends on the training program. `own_program` describes
this one, from a table by parts of a model (`config/kernels.toml`); a test compares it with the
kernels that `simulate/kernels.py` counts. benchmarks/planning_tables.py describes others.
"""

from __future__ import annotations

import math
import operator
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from trainyard.architecture import (
    Blocks,
    LayerSpec,
    Shape,
    attention_values,
    count_logit_chunks,
    count_values,
    matmuls,
    outer_messages,
    parameters_of,
)
from trainyard.config.precisions import MASTER, Scaling
from trainyard.config.run import Model, Run
from trainyard.layout.resolve import Plan
from trainyard.planning.rank import FP32_BYTES, EqualBlocks, Kinds, Rank, count_waiting
from trainyard.planning.traffic import Traffic, rank_traffic
from trainyard.topology import Topology

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
    gathered_bytes: float = 4
    """Moved per parameter of a block and gather to copy it out of the message."""
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
    hides_data: bool = True
    """Whether what data ranks exchange overlaps with computation."""
    exposed_tensor_share: float | None = None
    """Share of what tensor ranks exchange that is exposed; None: all but that beside matmuls, in
    pieces (`architecture.count_pieces`)."""
    copies_tokens: bool = True
    """Whether gathered tokens of several sequences are copied into one block of memory."""
    shared_speed: float = 0.95
    """Speed of matmuls and attention on several devices, relative to a device alone: all wait for
    the slowest, and devices of one node differ by 5 per cent (stas00/ml-engineering)."""
    sharded_speed: float = 0.9
    """As `shared_speed`, on top of it, beside exchanges of ZeRO 2 and 3, which take multiprocessors
    and bandwidth of the memory. Fitted to published steps of FSDP with flash attention."""
    reduced_bytes: int = 4
    """Bytes of a gradient in data-parallel reductions."""
    score_bytes: float = 0
    """Moved per attention score and forward pass; 0 if attention is fused."""
    attention_speed: float | None = None
    """Speed of its fused attention relative to flash; None: of the kernel that a run takes."""


_FILE = resources.files("trainyard.config") / "kernels.toml"
_TABLE: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
_FP8_WEIGHT_BYTES = 2.6
_VALUE_BYTES = 2


@cache
def own_program(model: Model, scaling: Scaling, *, is_compiled: bool) -> Program:
    """Describes this program; where blocks are not compiled, bytes are estimates."""
    optional = ["bias"] * model.bias, ["dropout"] * (model.dropout > 0)
    names = ["matmuls", "attention", "norms", model.positions, model.mlp, *optional[0]]
    block = [_TABLE["block"][name] for name in names + optional[1]]
    rest = [_TABLE["rest"][name] for name in [model.norm, *optional[1]]]
    fp8 = _TABLE["fp8"][scaling]
    program = Program(
        stream_bytes=_sum(block, "stream", _VALUE_BYTES),
        heads_bytes=_sum(block, "heads", _VALUE_BYTES),
        mlp_bytes=_sum(block, "mlp", _VALUE_BYTES),
        rest_bytes=_sum(rest, "stream"),
        cast_bytes=(fp8[model.mlp], _FP8_WEIGHT_BYTES),
        block_kernels=_sum(block, "kernels"),
        fp8_kernels=_sum([fp8], "kernels"),
        rest_kernels=_sum(rest, "kernels"),
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


def _sum(parts: list[dict[str, Any]], figure: str, factor: float = 1) -> Passes:
    """Adds up a figure of parts of the table."""
    figures = [part.get(figure, (0, 0)) for part in parts]
    forward, backward = (factor * sum(each) for each in zip(*figures, strict=True))
    return forward, backward


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
    in_fp32: bool = False

    @property
    def flops(self) -> float:
        """FLOP of all of them."""
        return 2.0 * self.rows * self.inner * self.columns * self.count

    def n_bytes(self, value_bytes: int, cast_bytes: tuple[float, ...]) -> float:
        """Bytes that all read and write.

        Args:
            value_bytes: of a number in the compute precision.
            cast_bytes: as in `Program`.
        """
        value_bytes = FP32_BYTES if self.in_fp32 else value_bytes
        factors = self.rows * self.inner, self.inner * self.columns
        moved = [1 + n for n in cast_bytes] if self.in_fp8 else [value_bytes] * 2
        operands = sum(size * n for size, n in zip(factors, moved, strict=True))
        return self.count * (operands + value_bytes * self.rows * self.columns)


@dataclass(frozen=True, eq=False)
class StagePass:
    """One pass of a micro batch through a stage."""

    products: tuple[Matmul, ...] = ()
    attention_flops: float = 0
    """FLOP of fused attention."""
    memory_bytes: float = 0
    """Read and written by everything else."""
    kernels: float = 0
    n_blocks: int = 0
    n_waits: int = 0
    """How often the host waits for the device."""

    def __add__(self, other: StagePass) -> StagePass:
        return StagePass(*map(operator.add, vars(self).values(), vars(other).values()))

    def times(self, n: int) -> StagePass:
        """Repeats it."""
        return StagePass(
            tuple(replace(product, count=product.count * n) for product in self.products),
            self.attention_flops * n,
            self.memory_bytes * n,
            self.kernels * n,
            self.n_blocks * n,
            self.n_waits * n,
        )


BothPasses = tuple[StagePass, StagePass]
"""Forward and backward pass of a micro batch."""


@dataclass(frozen=True, eq=False)
class RankWork:
    """Work of a rank; ranks that are alike share it."""

    stages: tuple[BothPasses, ...]
    """One micro batch through each of its pipeline stages."""
    traffic: tuple[Traffic, ...]
    """Messages of a step."""
    n_parameters: int
    """Parameters before ZeRO shards them."""
    n_first: int
    """Those of the embedding, which come and go in a message of their own."""
    n_updated: int
    """Parameters of its optimizer."""
    n_from_fp8: int
    """Weights that arrive as fp8 in a step and are cast back to 16 bits."""


@dataclass(frozen=True)
class Work:
    """Work of a step."""

    run: Run
    topology: Topology
    program: Program
    ranks: tuple[RankWork, ...]
    """By pipeline rank."""
    update_kernels: float
    """Launched by the update, on the rank with most blocks."""
    update_products: tuple[Matmul, ...]
    """Muon's, on the rank with the largest matrices."""
    n_micro_batches: int


def count_work(run: Run, plan: Plan, program: Program | None = None) -> Work:
    """Counts the work of a step of train.global_batch_size.

    Args:
        run: the run.
        plan: of the run.
        program: the training program; absent: this one, compiled unless train.compile is "never".
    """
    if program is None:
        is_compiled = run.train.compile != "never"
        program = own_program(run.model, run.precision.fp8.scaling, is_compiled=is_compiled)
    counters = [_Counter(run, plan, rank, program) for rank in range(plan.topology.pipeline)]
    # Most ranks are alike.
    works = {kind: counter.count(plan) for kind, counter in {c.kind: c for c in counters}.items()}
    ranks = tuple(works[counter.kind] for counter in counters)
    busiest = max(counters, key=lambda counter: counter.n_blocks)
    rounds, experts = busiest.update_rounds(), busiest.expert_updates()
    return Work(
        run=run,
        topology=plan.topology,
        program=program,
        ranks=ranks,
        update_kernels=busiest.update_kernels(rounds, max(rank.n_updated for rank in ranks)),
        update_products=(
            *(product for each in rounds for product in newton_schulz(each[0].matrices)),
            *(product for shape, n, _ in experts for product in newton_schulz([shape], n)),
        ),
        n_micro_batches=busiest.n_micro_batches,
    )


def newton_schulz(matrices: Sequence[Shape], n: int = 1) -> list[Matmul]:
    """Lists the matmuls that orthogonalize `n` matrices of each shape."""
    sides = []
    for short, long in map(sorted, matrices):
        sides += [(short, long, short), (short, short, short), (short, short, long)]
    return [Matmul(*each, count=n * NEWTON_SCHULZ_ITERATIONS) for each in sides]


class _Counter(Rank):
    """Counts the work of a rank; most of it for one micro batch.

    Attributes:
        kind: of each stage; ranks of the same kinds have the same work.
        wide: bytes of a value, relative to 16 bits.
        n_stream: values of the residual stream.
    """

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int, program: Program) -> None:
        super().__init__(run, plan, pipeline_rank)
        self.program = program
        outer = map(tuple, self.outer_layers)
        self.kind = tuple(zip(self.kinds, outer, strict=True))
        self.wide = self.value_bytes // 2
        self.n_stream = self.n_residual * run.model.d_model

    def count(self, plan: Plan) -> RankWork:
        """Counts all of it."""
        n_outer = list(map(count_values, self.outer_layers))
        n_experts = sum(self._expert_values(b) * b.number for b in self.blocks.values())
        n_parameters = sum(b.number * count_values(b.layers) for b in self.blocks.values())
        n_parameters += sum(n_outer)
        examples = dict(zip(self.kind, zip(self.stages, n_outer, strict=True), strict=True))
        stages = {kind: self._stage(kind[0], *example) for kind, example in examples.items()}
        padded = plan.padded_vocabulary_size
        ends = outer_messages(self.model, padded, self.stages[0], self.topology.tensor)
        n_sent_blocks = self.n_fp8_blocks if self.run.precision.fp8.all_gather else 0
        matrices = sum(layer.n_inputs * layer.n_outputs for layer in self.matmuls)
        return RankWork(
            stages=tuple(stages[kind] for kind in self.kind),
            traffic=tuple(rank_traffic(self.run, plan, self.pipeline_rank)),
            n_parameters=n_parameters,
            n_first=count_values(ends[0]) if self.has_first else 0,
            n_updated=(n_parameters - n_experts) // self.n_shards
            + n_experts // self.n_expert_shards,
            n_from_fp8=self.block_gathers() * n_sent_blocks * matrices,
        )

    def update_kernels(self, rounds: Sequence[Sequence[LayerSpec]], n_updated: int) -> float:
        """Counts launches of the update.

        Every data rank has a part of every matrix, of low-precision state or in Muon's rounds.
        """
        kernels = self.program.step_kernels + n_updated * self.program.list_kernels
        if rounds:
            n_matrices = sum(map(len, rounds))
            n_whole = sum(len(each[0].matrices) for each in rounds)
            kernels += n_matrices * MUON_KERNELS + n_whole * NEWTON_SCHULZ_KERNELS
        kernels += len(self.expert_updates()) * (MUON_KERNELS + NEWTON_SCHULZ_KERNELS)
        if MASTER in self.run.stored(True, 2).states:
            kernels += self.n_blocks * len(self.matmuls) * self.program.matrix_kernels
        return kernels

    def _stage(self, kinds: Kinds, blocks: Blocks, n_outer: int) -> BothPasses:
        """Counts a stage, with embedding and head if it has them.

        Args:
            kinds: of its blocks.
            blocks: its first and one past its last.
            n_outer: values of parameters outside the blocks.
        """
        forward = backward = StagePass()
        for kind, n in kinds:
            more = self._blocks(n, *kind)
            forward, backward = forward + more[0], backward + more[1]
        if blocks[1] == self.model.n_layers:
            head = self._head()
            forward, backward = forward + head[0], backward + head[1]
        return forward, backward + StagePass(memory_bytes=n_outer * self.program.table_bytes)

    def _blocks(self, n: int, recompute: str, in_fp8: bool, has_experts: bool) -> BothPasses:
        """Counts a number of equal blocks."""
        block = self.blocks[has_experts]
        attention, scores = self._half("attention", in_fp8, block), self._scores()
        mlp = self._half("mlp", in_fp8, block)
        forward, backward = (attention[i] + scores[i] + mlp[i] for i in (0, 1))
        if has_experts:
            experts = self._experts(block)
            forward, backward = forward + experts[0], backward + experts[1]
        if recompute == "block":
            backward += self._recomputed(forward, in_fp8, block)
        elif recompute == "attention":
            backward += attention[0] + scores[0]
        per_parameter = self.block_gathers() / self.n_micro_batches * self.program.gathered_bytes
        n_experts = self._expert_values(block)
        n_bytes = (count_values(block.layers) - n_experts) * self._gradient_bytes(recompute, in_fp8)
        # Their matmuls do not add to gradients; the first one is written, not added.
        first = 0 if self.is_shared else 1 / self.n_micro_batches
        n_bytes += n_experts * self._gradient_bytes(recompute, in_fp8=True)
        n_bytes -= (
            n_experts * first * (self.program.gradient_bytes - self.program.fused_gradient_bytes)
        )
        n_bytes += count_values(block.layers) * per_parameter
        backward += StagePass(memory_bytes=n_bytes)
        return replace(forward, n_blocks=1).times(n), replace(backward, n_blocks=1).times(n)

    @staticmethod
    def _expert_values(block: EqualBlocks) -> int:
        return sum(math.prod(e.weight) for e in block.experts if e.kind == "experts")

    def _experts(self, block: EqualBlocks) -> BothPasses:
        """Router, experts and the moves of rows between, which are not compiled."""
        D, E, wide = self.model.d_model, self.model.n_experts, self.wide
        products, n_outputs = [], 0
        for layer in block.experts:
            *rest, n_inner = layer.weight
            if layer.kind == "router":
                products += [Matmul(self.n_tokens, n_inner, E, in_fp32=True)]
            else:
                rows = self.n_rows / rest[0]  # of an equal load
                products += [Matmul(rows, n_inner, math.prod(rest[1:]), count=rest[0])]
                n_outputs += math.prod(rest[1:]) * (layer.sharding == "column")
        values = {
            "tokens": self.n_tokens * D,
            "rows": self.n_rows * D,
            "inner": self.n_rows * n_outputs,
            "scores": self.n_tokens * E,
            "sent": self.n_rows * D * (self.topology.expert > 1),
        }
        figures = _TABLE["experts"]
        forward, backward = (
            StagePass(
                tuple(products),
                0,
                wide * sum(figures[name]["bytes"][i] * n for name, n in values.items()),
                sum(figures[name]["kernels"][i] * (n > 0) for name, n in values.items()),
                0,
                (1 - i) * (self.topology.expert > 1),
            )
            for i in (0, 1)
        )
        return forward, replace(backward, products=_backward(forward.products))

    def _recomputed(self, forward: StagePass, in_fp8: bool, block: EqualBlocks) -> StagePass:
        """The forward pass of a block as its backward pass recomputes it."""
        program = self.program
        if not program.is_compiled:
            return forward
        # Nothing needs the last matmul and sum; weights are cast at each use.
        recasts = program.recast_kernels[in_fp8] * len(parameters_of(block.layers))
        if block.experts:
            return replace(forward, kernels=forward.kernels + recasts)
        return replace(
            forward,
            products=forward.products[:-1],
            memory_bytes=forward.memory_bytes - program.unneeded_bytes * self.wide * self.n_stream,
            kernels=forward.kernels - 2 + recasts,
        )

    def _gradient_bytes(self, recompute: str, in_fp8: bool) -> float:
        """Bytes moved per parameter of a block and micro batch, beside its products."""
        program, n = self.program, self.n_micro_batches
        adding = count_waiting(self.run, self.topology, n, recompute, in_fp8) / n
        if self.topology.n_ranks == self.topology.tensor and recompute != "block":
            adding = float(not in_fp8)  # those of a single micro batch do not wait
        n_bytes = program.gradient_bytes * (1 - adding) + program.fused_gradient_bytes * adding
        return n_bytes + program.recast_bytes * (recompute == "block")

    def _half(self, part: str, in_fp8: bool, block: EqualBlocks) -> BothPasses:
        """The attention or the MLP of a block, with norm and sum, but without scores."""
        n, program = self.n_tokens, self.program
        layers = matmuls(block.model, part, self.topology.tensor)
        products = tuple(Matmul(n, each.n_inputs, each.n_outputs, in_fp8=in_fp8) for each in layers)
        inner, inner_bytes = n * (layers[0].n_outputs if layers else 0), program.mlp_bytes
        if part == "attention":
            heads = attention_values(self.model, self.topology.tensor)
            inner, inner_bytes = n * sum(heads), program.heads_bytes
        forward, backward = (
            StagePass(
                products,
                0,
                self.wide * (program.stream_bytes[i] / 2 * self.n_stream + inner_bytes[i] * inner),
                (program.block_kernels[i] + program.fp8_kernels[i] * in_fp8) / 2,
            )
            for i in (0, 1)
        )
        return forward, replace(backward, products=_backward(products))

    def _scores(self) -> BothPasses:
        """Attention scores, and values weighted by them."""
        model, n, T = self.model, self.n_tokens, self.model.sequence_length
        if not self.program.score_bytes:
            flops = 2.0 * n * T * (model.n_heads * model.d_head // self.topology.tensor)
            forward = StagePass(attention_flops=flops)
            return forward, replace(forward, attention_flops=ATTENTION_BACKWARD * flops)
        # All of the square, head by head: scores, then values.
        n_heads = n / T * model.n_heads / self.topology.tensor
        product = Matmul(T, model.d_head, T, count=2 * n_heads)
        memory_bytes = self.program.score_bytes * n_heads * T * T
        scores = StagePass((product,), memory_bytes=memory_bytes * self.wide)
        return scores, scores.times(BACKWARD)

    def _head(self) -> BothPasses:
        """The output matrix and the loss, and what else is outside the blocks."""
        n, head, program, n_chunks, sums = self.n_tokens, self.head, self.program, 1, 0.0
        if program.chunk_kernels:
            n_chunks = count_logit_chunks(n, head.n_outputs, FP32_BYTES, on_gpu=True)
            # The first writes the sum in fp32, where products are counted in 16 bits; others add.
            sums = (8 * n_chunks - 4 - 2 * n_chunks) * head.n_inputs * head.n_outputs
        products = (Matmul(n / n_chunks, head.n_inputs, head.n_outputs, n_chunks),)
        n_bytes = program.logit_bytes / (1 + BACKWARD) * n * head.n_outputs * self.wide
        kernels = n_chunks * program.chunk_kernels / (1 + BACKWARD)
        forward = StagePass(products, 0, n_bytes, kernels)
        backward = StagePass(_backward(products), 0, BACKWARD * n_bytes, BACKWARD * kernels)
        rest = [
            StagePass((), 0, n * self.n_stream, kernels)
            for n, kernels in zip(program.rest_bytes, program.rest_kernels, strict=True)
        ]
        return forward + rest[0], backward + rest[1] + StagePass(memory_bytes=sums)


def _backward(products: tuple[Matmul, ...]) -> tuple[Matmul, ...]:
    """Products of the backward pass: for each, one of equal size for either factor."""
    return tuple(replace(each, count=BACKWARD * each.count) for each in products)
