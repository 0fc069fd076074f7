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
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from trainyard.architecture import (
    Layers,
    count_logit_chunks,
    parameters_of,
    shapes_of,
)
from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.rank import FP32_BYTES, Rank

Axis = Literal["tensor", "context", "pipeline", "shard", "replicate", "stage"]
Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


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
    if counter.topology.tensor > 1:
        counter.count_tensor()
    if counter.topology.context > 1:
        counter.count_context()
    if counter.is_piped:
        counter.count_pipeline()
    for layers in filter(None, counter.outer_layers):
        counter.count_data(layers, 1, in_block=False)
    counter.count_data(counter.block, counter.n_blocks, in_block=True)
    if counter.topology.n_ranks > counter.topology.pipeline:
        counter.count_update()
    return [Traffic(*key, n, counter.n_bytes[key]) for key, n in counter.calls.items() if n]


class _Counter(Rank):
    """Counts the calls of one rank, and their bytes."""

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int) -> None:
        super().__init__(run, plan, pipeline_rank)
        self.calls, self.n_bytes = Counter[tuple[Axis, Collective]](), Counter[object]()
        self.stream_bytes = self.n_tokens * run.model.d_model * self.value_bytes

    def add(self, axis: Axis, collective: Collective, calls: int, n_bytes: int) -> None:
        """Counts calls with `n_bytes` in total."""
        self.calls[axis, collective] += calls
        self.n_bytes[axis, collective] += n_bytes

    def count_tensor(self) -> None:
        """Tensor parallelism: gather before column-parallel layers, reduce after row-parallel."""
        # Recomputation stops at the last value that the backward pass needs: the sum after the MLP
        # is recomputed only for dropout or a norm, that after attention for the MLP.
        recompute = self.parallel.recompute
        columns, rows = self._count_matmuls()
        again = {"none": 0, "attention": self._count_matmuls("attention")[0], "block": columns}
        last_is_unused = self.model.norm_place == "before" and not self.model.dropout
        rows_again = rows - last_is_unused if recompute == "block" else 0
        n = self.n_blocks * self.n_micro_batches
        self._count_tensor_calls(
            n * (columns + again[recompute] + rows),
            n * (rows + rows_again + columns),
            self.stream_bytes,
        )
        self._count_norms()
        if self.parallel.gathers_again:
            self.add("tensor", "all-gather", columns * n, columns * n * self.stream_bytes)
        n = self.n_micro_batches
        if self.has_first:
            n_bytes = self.stream_bytes // self.value_bytes * FP32_BYTES
            self._count_tensor_calls(n, n, n_bytes)
        if self.has_last:
            self._count_tensor_calls(n, n, self.stream_bytes)
            # The maximum, then the sum with the label's logit, of every token in a chunk.
            n_columns = self.head.n_outputs
            n_chunks = count_logit_chunks(self.n_tokens, n_columns, FP32_BYTES, on_gpu=True)
            self.add("tensor", "all-reduce", n * 2 * n_chunks, n * 3 * self.n_tokens * FP32_BYTES)
        # Replicated parameters, with gradients of this rank's tokens or heads.
        n_values = self.n_blocks * self._partial_values(self.block)
        n_values += sum(map(self._partial_values, self.outer_layers))
        self.add("tensor", "all-reduce", bool(n_values), n_values * FP32_BYTES)

    def _count_norms(self) -> None:
        """Counts the means of all queries or keys, in each pass through a block.

        A zero bubble computes the gradients of weights after those of inputs, but for the first
        stage, which needs none of inputs: both need the mean.
        """
        passes = self.n_blocks * (2 if self.parallel.recompute == "none" else 3)
        if self.parallel.schedule == "zero_bubble":
            passes += sum(end - first for first, end in self.stages if first > 0)
        norms = sum(layer.sharding == "features" for layer in self.block.values())
        calls = norms * passes * self.n_micro_batches
        self.add("tensor", "all-reduce", calls, calls * self.n_tokens * FP32_BYTES)

    def _count_matmuls(self, part: str = "") -> tuple[int, int]:
        """Counts column-parallel and row-parallel layers of a block, or of a part of it."""
        kinds = [each.sharding for each in self.matmuls if each.name.startswith(part)]
        return kinds.count("column"), kinds.count("row")

    def _count_tensor_calls(self, gathers: int, reductions: int, n_bytes: int) -> None:
        """Counts calls before column-parallel and after row-parallel layers, or their gradients."""
        if self.parallel.sequence:
            self.add("tensor", "all-gather", gathers, gathers * n_bytes)
            self.add("tensor", "reduce-scatter", reductions, reductions * n_bytes)
        else:
            self.add("tensor", "all-reduce", reductions, reductions * n_bytes)

    def _partial_values(self, layers: Layers) -> int:
        return sum(
            self.share(each.shape)
            for each in parameters_of(layers).values()
            if each.dimension is None and (self.parallel.sequence or each.of_heads)
        )

    def count_context(self) -> None:
        """Attention over a sharded sequence."""
        forwards = 1 if self.parallel.recompute == "none" else 2
        n = self.n_blocks * self.n_micro_batches
        qkv, out = (each for each in self.matmuls if each.name.startswith("attention"))
        if self.parallel.context_method == "ulysses":
            calls, n_values = n * (forwards + 1), self.n_tokens * (qkv.n_outputs + out.n_inputs)
            self.add("context", "all-to-all", 2 * calls, calls * n_values * self.value_bytes)
        else:
            shifts = n * (self.topology.context - 1)
            n_values = self.n_tokens * (qkv.n_outputs - out.n_inputs)  # keys and values
            n_bytes = shifts * n_values * ((forwards + 1) * self.value_bytes + FP32_BYTES)
            self.add("context", "send", shifts * (forwards + 2), n_bytes)

    def count_pipeline(self) -> None:
        """Hidden states to the next stage, gradients to the previous one, and tied embeddings."""
        n_borders = 2 * len(self.stages) - self.has_first - self.has_last
        calls = n_borders * self.n_micro_batches
        n_bytes = self.n_residual * self.model.d_model * self.value_bytes
        self.add("pipeline", "send", calls, calls * n_bytes)
        if self.model.tied_embeddings and (self.has_first or self.has_last):
            self.add("pipeline", "all-reduce", 1, self.share(self.head.weight) * FP32_BYTES)

    def count_data(self, layers: Layers, n_groups: int, *, in_block: bool) -> None:
        """Weights and gradients of layers sent together, for a number of equal groups."""
        n, n_ranks, parallel = self.n_micro_batches, self.n_shards, self.parallel
        n_values = sum(map(self.share, shapes_of(layers).values()))
        if not parallel.shards_state and self.n_copies > 1:
            self.add("shard", "all-reduce", n_groups, n_groups * n_values * FP32_BYTES)
        if n_ranks > 1:
            if in_block:
                self._count_gathers_of_blocks(n_values)
            else:
                gathers = n_groups * (n if parallel.shards_weights and not self.is_piped else 1)
                self.add("shard", "all-gather", gathers, gathers * n_values * n_ranks * FP32_BYTES)
            sums = n_groups * (n if parallel.shards_gradients and not self.is_piped else 1)
            reduced = self.run.precision.formats.reduced
            if in_block and reduced.is_scaled:
                n_scaled = math.ceil(n_values / SCALED_COLUMNS) * SCALED_COLUMNS
                n_bytes = n_ranks * reduced.bytes_of(n_scaled)
                self.add("shard", "all-to-all", sums, sums * n_bytes)
            else:
                n_bytes = n_values * n_ranks * FP32_BYTES
                self.add("shard", "reduce-scatter", sums, sums * n_bytes)
        if parallel.shards_state and self.topology.replicate > 1:
            self.add("replicate", "all-reduce", n_groups, n_groups * n_values * FP32_BYTES)

    def _count_gathers_of_blocks(self, n_values: int) -> None:
        """Weights in the compute precision; matrices in fp8, if configured."""
        gathers = self.block_gathers()
        n_fp8 = self.n_fp8_blocks if self.run.precision.fp8.all_gather else 0
        n_saved = n_fp8 * sum(self.share(layer.weight) for layer in self.matmuls)
        n_bytes = self.n_blocks * n_values * self.value_bytes - n_saved * (self.value_bytes - 1)
        self.add("shard", "all-gather", gathers * self.n_blocks, gathers * n_bytes * self.n_shards)
        if n_fp8:
            scales_bytes = len(self.matmuls) * FP32_BYTES
            self.add("shard", "all-reduce", gathers * n_fp8, gathers * n_fp8 * scales_bytes)

    def count_update(self) -> None:
        """Momentum of whole matrices to their owners, and the owners' results to all ranks."""
        n_copies = self.topology.replicate if self.parallel.shards_state else self.n_copies
        for matrices in self.update_rounds():
            sent = held = 0
            for layer in matrices:
                rows, columns = layer.shard(self.topology.tensor).weight
                n_values = self.share((rows, columns))
                held += n_values
                sent += math.ceil(n_values // columns / n_copies) * columns
            n_whole = math.prod(matrices[0].weight)
            n_values = max(n_whole, sent) + max(n_whole * n_copies, held)
            self.add("stage", "all-to-all", 2, n_values * self.value_bytes)
