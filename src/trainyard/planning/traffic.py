"""Formulas for a rank's communication in one optimizer step, axis by axis.

With A = B x T/context x D values, the residual stream of a micro batch, a block communicates:

    tensor            forward: all-reduce A twice; backward: the same
    tensor, sequence  forward: all-gather A and reduce-scatter A, twice each; backward: the same,
                      and all-gather A twice more; not with recompute block or a zero bubble
    ulysses           forward: all-to-all 3 A/tensor and A/tensor; backward: the same
    ring of p         forward: send 2 A/tensor p - 1 times; backward: the same, and again in fp32

where queries, keys and values count with their own sizes, if these are not A. A norm of all queries
or keys adds an all-reduce of one fp32 number for each token, in each pass.

Per stage and micro batch a pipeline sends A (A/tensor with sequence) on, and its gradient back.
Data ranks gather weights and reduce gradients for each block and for the rest; for n micro batches:

    ZeRO stage    all-gather              reduce-scatter    all-reduce
    0                                                       once
    1             once                    once              once, over replicas
    2             once                    n times           once, over replicas
    3             2 n times               n times           once, over replicas
    3, pipeline   n + 1 times             once              once, over replicas

At stage 3 the rest is gathered only n times, and once in a pipeline. Bytes are those of the larger
buffer of a call. An all-reduce of four numbers, the scales, precedes each fp8 gather of a block;
fp8_lowbit reduces the gradients of blocks by an all-to-all of codes instead of a reduce-scatter.
Muon sends its momentum to the ranks that orthogonalize it, and gets updates back: two all-to-alls
for each round of as many matrices as ranks at a pipeline rank. Counted is the first of these ranks,
which has the largest matrix of each round.

Not included: single numbers (loss, gradient norm), evaluation, and weights gathered again for more
than 3 chunks on a rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainyard.architecture import (
    Layers,
    LayerSpec,
    Shape,
    block_layers,
    count_logit_chunks,
    in_rounds,
    matmuls,
    parameters_of,
    rest_layers,
    shapes_of,
)
from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.config.rules import fp8_blocks
from trainyard.config.run import Run
from trainyard.planning.resolve import Plan
from trainyard.topology import Topology

Axis = Literal["tensor", "context", "pipeline", "shard", "replicate", "stage"]
Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]

FP32_BYTES = 4


@dataclass(frozen=True)
class Traffic:
    """All calls of one kind by a rank in an optimizer step."""

    axis: Axis
    """The axis of the group; `shard` means shard x context, over which ZeRO shards, and `stage` all
    ranks at a pipeline rank."""
    collective: Collective
    calls: int
    n_bytes: int
    """Sum over calls of the larger of input and output."""


def busiest_rank(run: Run, plan: Plan) -> list[Traffic]:
    """Returns the traffic of the pipeline rank that sends most, like `rank_traffic`."""
    ranks = [rank_traffic(run, plan, rank) for rank in range(plan.topology.pipeline)]
    return max(ranks, key=lambda traffic: sum(kind.n_bytes for kind in traffic))


def rank_traffic(run: Run, plan: Plan, pipeline_rank: int) -> list[Traffic]:
    """Returns the traffic of each rank at a pipeline rank in a step of train.global_batch_size.

    Kinds without calls are omitted.
    """
    counter = _Counter(run, plan, pipeline_rank)
    counter.count_tensor()
    counter.count_context()
    counter.count_pipeline()
    counter.count_data()
    counter.count_update()
    return [
        Traffic(axis, collective, calls, n_bytes)
        for (axis, collective), (calls, n_bytes) in counter.totals.items()
        if calls
    ]


def count_fp8_blocks(run: Run, blocks: tuple[int, int]) -> int:
    """Counts a stage's blocks with fp8 matmuls."""
    found = fp8_blocks(run)
    return max(0, min(blocks[1], found.stop) - max(blocks[0], found.start))


def block_gathers(run: Run, topology: Topology) -> int:
    """Returns how often the weights of a block are gathered in a step."""
    if run.parallel.zero_stage == 0 or topology.shard * topology.context == 1:
        return 0
    if run.parallel.zero_stage < 3:
        return 1
    n_micro_batches = run.train.global_batch_size // topology.data // run.train.micro_batch_size
    return n_micro_batches + 1 if topology.pipeline > 1 else 2 * n_micro_batches


def update_rounds(run: Run, n_blocks: int, n_ranks: int) -> list[list[LayerSpec]]:
    """Lists the whole matrices of blocks that ranks orthogonalize in each round; none by AdamW."""
    if run.optimizer.kind != "muon":
        return []
    layers = matmuls(run.model) * n_blocks
    rounds = in_rounds([layer.weight for layer in layers], n_ranks)
    return [[layers[number] for number in numbers] for numbers in rounds]


class _Counter:
    """Counts the calls of one rank."""

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int) -> None:
        self.totals: dict[tuple[Axis, Collective], tuple[int, int]] = {}
        self.run, self.topology = run, plan.topology
        self.n_shards = plan.topology.shard * plan.topology.context
        self.stages = plan.stages[pipeline_rank :: plan.topology.pipeline]
        self.padded_vocabulary_size = plan.padded_vocabulary_size
        train, model = run.train, run.model
        sequences = train.global_batch_size // plan.topology.data
        self.n_micro_batches = sequences // train.micro_batch_size
        self.n_tokens = train.micro_batch_size * model.sequence_length // plan.topology.context
        self.value_bytes = run.precision.formats.compute.n_bytes
        self.stream_bytes = self.n_tokens * model.d_model * self.value_bytes
        self.n_blocks = sum(end - first for first, end in self.stages)
        self.block = block_layers(model, plan.topology.tensor)
        self.rests = [
            rest_layers(model, plan.padded_vocabulary_size, blocks, plan.topology.tensor)
            for blocks in self.stages
        ]
        self.has_first = self.stages[0][0] == 0
        self.has_last = self.stages[-1][1] == model.n_layers

    def add(self, axis: Axis, collective: Collective, calls: int, n_bytes: int) -> None:
        """Counts calls with `n_bytes` in total."""
        old_calls, old_bytes = self.totals.get((axis, collective), (0, 0))
        self.totals[axis, collective] = old_calls + calls, old_bytes + n_bytes

    def count_tensor(self) -> None:
        """Tensor parallelism: gather before column-parallel layers, reduce after row-parallel."""
        if self.topology.tensor == 1:
            return
        # Recomputation stops at the last value that the backward pass needs: the sum after the MLP
        # is recomputed only for dropout or a norm, that after attention for the MLP.
        recompute = self.run.parallel.recompute
        columns, rows = self._count_matmuls()
        spread_again = {"none": 0, "attention": self._count_matmuls("attention")[0]}
        last_is_unused = self.run.model.norm_place == "before" and not self.run.model.dropout
        collect_again = rows - last_is_unused if recompute == "block" else 0
        spread, collect = columns + spread_again.get(recompute, columns), rows + collect_again
        n = self.n_blocks * self.n_micro_batches
        self._count_cut(n, (spread, columns), (collect, rows), self.stream_bytes)
        self._count_norms()
        if self.run.parallel.gathers_again:
            self.add("tensor", "all-gather", columns * n, columns * n * self.stream_bytes)
        if self.has_first:
            n_bytes = self.stream_bytes // self.value_bytes * FP32_BYTES
            self._count_cut(self.n_micro_batches, (0, 0), (1, 1), n_bytes)
        if self.has_last:
            self._count_cut(self.n_micro_batches, (1, 1), (0, 0), self.stream_bytes)
            self._count_loss()
        n_values = self.n_blocks * self._partial_values(self.block)
        n_values += sum(map(self._partial_values, self.rests))
        self.add("tensor", "all-reduce", bool(n_values), n_values * FP32_BYTES)

    def _count_norms(self) -> None:
        """Counts the means of all queries or keys, in each pass through a block.

        A zero bubble computes the gradients of weights after those of inputs, but for the first
        stage, which needs none of inputs: both need the mean.
        """
        parallel = self.run.parallel
        passes = self.n_blocks * (2 if parallel.recompute == "none" else 3)
        if parallel.schedule == "zero_bubble":
            passes += sum(end - first for first, end in self.stages if first > 0)
        norms = sum(layer.sharding == "features" for layer in self.block.values())
        calls = norms * passes * self.n_micro_batches
        self.add("tensor", "all-reduce", calls, calls * self.n_tokens * FP32_BYTES)

    def _count_matmuls(self, part: str = "") -> tuple[int, int]:
        """Counts column-parallel and row-parallel layers of a block, or of a part of it."""
        kinds = [layer.sharding for layer in matmuls(self.run.model, part, self.topology.tensor)]
        return kinds.count("column"), kinds.count("row")

    def _count_cut(
        self, n: int, spreads: tuple[int, int], collects: tuple[int, int], n_bytes: int
    ) -> None:
        """Counts `n` times the calls of forward and backward passes."""
        spread, collect = n * (spreads[0] + collects[1]), n * (collects[0] + spreads[1])
        if self.run.parallel.sequence:
            self.add("tensor", "all-gather", spread, spread * n_bytes)
            self.add("tensor", "reduce-scatter", collect, collect * n_bytes)
        else:
            self.add("tensor", "all-reduce", collect, collect * n_bytes)

    def _count_loss(self) -> None:
        """The maximum, then the sum with the label's logit, of every token in a chunk."""
        n_columns = self.padded_vocabulary_size // self.topology.tensor
        n_chunks = count_logit_chunks(self.n_tokens, n_columns, FP32_BYTES, on_gpu=True)
        n = self.n_micro_batches
        self.add("tensor", "all-reduce", n * 2 * n_chunks, n * 3 * self.n_tokens * FP32_BYTES)

    def count_context(self) -> None:
        """Attention over a sharded sequence."""
        n_ranks, parallel = self.topology.context, self.run.parallel
        if n_ranks == 1:
            return
        forwards = 1 if parallel.recompute == "none" else 2
        n = self.n_blocks * self.n_micro_batches
        qkv, out = matmuls(self.run.model, "attention", self.topology.tensor)
        if parallel.context_method == "ulysses":
            calls, n_values = n * (forwards + 1), self.n_tokens * (qkv.n_outputs + out.n_inputs)
            self.add("context", "all-to-all", 2 * calls, calls * n_values * self.value_bytes)
        else:
            shifts = n * (n_ranks - 1)
            n_values = self.n_tokens * (qkv.n_outputs - out.n_inputs)  # keys and values
            n_bytes = shifts * n_values * ((forwards + 1) * self.value_bytes + FP32_BYTES)
            self.add("context", "send", shifts * (forwards + 2), n_bytes)

    def count_pipeline(self) -> None:
        """Hidden states to the next stage, gradients to the previous one, and tied embeddings."""
        if self.topology.pipeline == 1:
            return
        n_borders = 2 * len(self.stages) - self.has_first - self.has_last
        n_bytes = self.stream_bytes
        if self.run.parallel.sequence:
            n_bytes //= self.topology.tensor
        calls = n_borders * self.n_micro_batches
        self.add("pipeline", "send", calls, calls * n_bytes)
        if self.run.model.tied_embeddings and (self.has_first or self.has_last):
            embedding = next(rest["embedding"].weight for rest in self.rests if rest)
            self.add("pipeline", "all-reduce", 1, self._share_of(embedding) * FP32_BYTES)

    def count_data(self) -> None:
        """Weights and gradients of each block, and of the rest of each stage."""
        rests = [list(shapes_of(rest).values()) for rest in self.rests if rest]
        block = list(shapes_of(self.block).values())
        groups = [(shapes, 1, False) for shapes in rests] + [(block, self.n_blocks, True)]
        for shapes, n_groups, in_block in groups:
            if self.run.parallel.zero_stage > 0:
                self._count_group(shapes, n_groups, in_block=in_block)
            elif self.n_shards > 1:
                n_bytes = sum(map(math.prod, shapes)) * FP32_BYTES
                self.add("shard", "all-reduce", n_groups, n_groups * n_bytes)

    def count_update(self) -> None:
        """Momentum of whole matrices to their owners, and the owners' results to all ranks."""
        n_ranks = self.topology.n_ranks // self.topology.pipeline
        n_copies = self.topology.replicate if self.run.parallel.zero_stage else self.n_shards
        rounds = update_rounds(self.run, self.n_blocks, n_ranks) if n_ranks > 1 else []
        for matrices in rounds:
            sent = held = 0
            for rows, columns in (each.shard(self.topology.tensor).weight for each in matrices):
                n_values = self._share_of((rows, columns))
                held += n_values
                sent += math.ceil(n_values // columns / n_copies) * columns
            n_whole = math.prod(matrices[0].weight)
            n_values = max(n_whole, sent) + max(n_whole * n_copies, held)
            self.add("stage", "all-to-all", 2, n_values * self.value_bytes)

    def _count_group(self, shapes: list[Shape], n_groups: int, *, in_block: bool) -> None:
        """Counts parameters sent together, for a number of equal groups."""
        n, stage, n_ranks = self.n_micro_batches, self.run.parallel.zero_stage, self.n_shards
        is_piped = self.topology.pipeline > 1
        n_padded = sum(map(self._padded_share_of, shapes))
        if n_ranks > 1:
            if in_block:
                self._count_gathers_of_blocks(n_padded)
            else:
                gathers = n_groups * (n if stage == 3 and not is_piped else 1)
                self.add("shard", "all-gather", gathers, gathers * n_padded * n_ranks * FP32_BYTES)
            sums = n_groups * (n if stage >= 2 and not is_piped else 1)
            reduced = self.run.precision.formats.reduced
            if in_block and reduced.is_scaled:
                n_scaled = math.ceil(n_padded / SCALED_COLUMNS) * SCALED_COLUMNS
                n_bytes = n_ranks * reduced.bytes_of(n_scaled)
                self.add("shard", "all-to-all", sums, sums * n_bytes)
            else:
                n_bytes = n_padded * n_ranks * FP32_BYTES
                self.add("shard", "reduce-scatter", sums, sums * n_bytes)
        if self.topology.replicate > 1:
            self.add("replicate", "all-reduce", n_groups, n_groups * n_padded * FP32_BYTES)

    def _count_gathers_of_blocks(self, n_padded: int) -> None:
        """Weights in the compute precision; matrices in fp8, if configured."""
        gathers, n_bytes = block_gathers(self.run, self.topology), n_padded * self.value_bytes
        n_fp8 = 0
        if self.run.precision.fp8.all_gather:
            n_fp8 = sum(count_fp8_blocks(self.run, blocks) for blocks in self.stages)
        matrices = [layer.weight for layer in matmuls(self.run.model, tensor=self.topology.tensor)]
        saved = n_fp8 * sum(map(self._padded_share_of, matrices)) * (self.value_bytes - 1)
        sent = (self.n_blocks * n_bytes - saved) * self.n_shards
        self.add("shard", "all-gather", gathers * self.n_blocks, gathers * sent)
        if n_fp8:
            scales_bytes = len(matrices) * FP32_BYTES
            self.add("shard", "all-reduce", gathers * n_fp8, gathers * n_fp8 * scales_bytes)

    def _partial_values(self, layers: Layers) -> int:
        """Counts values that tensor ranks replicate, with gradients of their tokens or heads."""
        return sum(
            self._share_of(each.shape)
            for each in parameters_of(layers).values()
            if each.dimension is None and (self.run.parallel.sequence or each.of_heads)
        )

    def _share_of(self, shape: Shape) -> int:
        """Values of a parameter on the first of its data ranks."""
        if self.run.parallel.zero_stage == 0:
            return math.prod(shape)
        return self._padded_share_of(shape)

    def _padded_share_of(self, shape: Shape) -> int:
        """Values of a parameter's equal shards by rows, with the last ones padded."""
        return math.ceil(shape[0] / self.n_shards) * math.prod(shape[1:])
