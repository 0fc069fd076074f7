"""Formulas for a rank's communication in one optimizer step, axis by axis.

With A = B x T/context x D values, the residual stream of a micro batch, a block communicates:

    tensor            forward: all-reduce A twice; backward: the same
    tensor, sequence  forward: all-gather A and reduce-scatter A, twice each; backward: the same,
                      and all-gather A twice more; not with recompute block
    ulysses           forward: all-to-all 3 A/tensor and A/tensor; backward: the same
    ring of p         forward: send 2 A/tensor p - 1 times; backward: the same, and again in fp32

where queries, keys and values count with their own sizes, if these are not A. Tensor ranks exchange
each A in pieces. A norm of all queries or keys adds an all-reduce of one fp32 number for each
token, in each pass. Ranks above the number of key-value heads add an all-to-all in each pass.

Per stage and micro batch a pipeline sends A (A/tensor with sequence) on, and its gradient back.
With R = B x T/context x active experts x D values, those of each token for each of its experts, a
block with experts communicates besides:

    tensor            forward: all-gather A (sequence) and sum A; backward: the same
    expert            forward: all-to-all of counts and of R twice; backward: of R twice
    context           forward: all-reduce the load of sequences, if balance is "loss"
    shard, replicate  all-reduce the load of all blocks in a step

again in blocks that recompute, but for the last sum. R is exact for all ranks together, and that of
each rank if experts have equal load.

Data ranks gather weights and reduce gradients for each block, for the embeddings, and for final
norm and head, which are with the embeddings if tied; for n micro batches:

    ZeRO stage    all-gather              reduce-scatter    all-reduce
    0                                                       once
    1             once                    once              once, over replicas
    2             once                    n times           once, over replicas
    3             2 n times               n times           once, over replicas
    3, pipeline   n + 1 times             n times           once, over replicas

At stage 3 the last two are gathered only n times, and once in a pipeline. Gradients are fp32, or
bf16 by parallel.reduce_format; fp8_lowbit reduces those of blocks by an all-to-all of codes instead
of a reduce-scatter. An all-reduce of four numbers, the scales, precedes each fp8 gather of a block.
Experts that ranks share are a message of their own, between ranks with the same ones. Bytes are
those of the larger buffer of a call.
Muon sends its momentum to the ranks that orthogonalize it, and gets updates back: two all-to-alls
for each round of as many matrices as ranks at a pipeline rank. Counted is the first of these ranks,
which has the largest matrix of each round.

Not included: single numbers (loss, gradient norm), evaluation, and at stage 3 weights gathered
again for more than 3 chunks on a rank.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Literal

from trainyard.architecture import (
    Layers,
    LayerSpec,
    attention_values,
    count_logit_chunks,
    outer_messages,
    parameters_of,
)
from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.rank import FP32_BYTES, EqualBlocks, Rank, count_waiting

Axis = Literal[
    "tensor", "context", "pipeline", "shard", "replicate", "stage", "expert", "same experts"
]
Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


@dataclass(frozen=True)
class Traffic:
    """All calls of one kind by a rank in an optimizer step."""

    axis: Axis
    """The axis of the group; `shard` means shard x context, over which ZeRO shards, `same experts`
    those of them with the same ones, `expert` those that share them, and `stage` all ranks at a
    pipeline rank."""
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
    for blocks in counter.stages:
        padded, n_tensor = plan.padded_vocabulary_size, counter.topology.tensor
        for layers in outer_messages(run.model, padded, blocks, n_tensor):
            counter.count_data(layers, 1, in_block=False)
    for block in counter.blocks.values():
        apart = counter.experts_apart(block)
        rest = {name: layer for name, layer in block.layers.items() if name not in apart}
        counter.count_data(rest, block.number, in_block=True)
        counter.count_data(apart, block.number, in_block=True, of_experts=True)
    counter.count_experts()
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
        for kinds in self.kinds:
            for kind, n_blocks in kinds:
                self._count_blocks(*kind, n_blocks)
        self._count_in_attention()
        n = self.n_micro_batches
        if self.has_first:
            # One device reads embeddings in fp32, and FSDP gathers them in the compute precision.
            wide = 1 if self.is_shared else FP32_BYTES // self.value_bytes
            self._count_tensor_calls(n, n, wide)
        if self.has_last:
            self._count_tensor_calls(n, n)
            # The maximum, then the sum with the label's logit, of every token in a chunk.
            n_columns = self.head.n_outputs
            n_chunks = count_logit_chunks(self.n_tokens, n_columns, FP32_BYTES, on_gpu=True)
            self.add("tensor", "all-reduce", n * 2 * n_chunks, n * 3 * self.n_tokens * FP32_BYTES)
        # Replicated parameters, with gradients of this rank's tokens or heads.
        n_values = sum(b.number * self._partial_values(b.layers) for b in self.blocks.values())
        n_values += sum(map(self._partial_values, self.outer_layers))
        self.add("tensor", "all-reduce", bool(n_values), n_values * FP32_BYTES)

    def _count_blocks(self, recompute: str, in_fp8: bool, has_experts: bool, n_blocks: int) -> None:
        """Counts the messages of layers of blocks that recompute the same."""
        # Compiled, recomputation leaves out sums that the backward pass does not need: that after
        # attention, and that after the MLP unless for dropout or a norm.
        columns, rows = self._count_matmuls(has_experts)
        columns_again, rows_again = {
            "none": (0, 0),
            "attention": self._count_matmuls(has_experts, "attention"),
            "block": (columns, rows),
        }[recompute]
        is_compiled = self.run.train.compile != "never" and not (
            has_experts and recompute == "block"
        )
        if is_compiled and recompute != "none":
            last_is_unused = self.model.norm_place == "before" and not self.model.dropout
            rows_again -= last_is_unused or recompute == "attention"
        n = n_blocks * self.n_micro_batches
        waiting = count_waiting(self.run, self.topology, self.n_micro_batches, recompute, in_fp8)
        at_once = n * columns * (recompute != "block") + n_blocks * waiting * rows
        self._count_tensor_calls(at_once, n * (rows + rows_again + columns))
        if has_experts:  # which all tensor ranks have parts of
            again = n * (recompute == "block")
            self._count_tensor_calls(2 * n + again, 2 * n + again * self.collects_again)
        if self.parallel.sequence:
            in_pieces = n * (columns + columns_again + rows) - n_blocks * waiting * rows
            n_bytes = in_pieces * self.stream_bytes
            self.add("tensor", "all-gather", in_pieces * self.n_pieces, n_bytes)

    def _count_in_attention(self) -> None:
        """Counts heads that ranks share, and means of all queries or keys, in each pass of a block.

        Of ranks that share keys, the last one has most of them to send.
        """
        n_sharing = self.topology.tensor // self.model.n_key_value_heads
        if n_sharing > 1:
            n_features = self.block["attention.qkv"].n_outputs
            n_features += (n_sharing - 1) * min(n_features, 2 * self.model.d_head)
            calls = self.n_passes * self.n_micro_batches
            n_bytes = calls * self.n_tokens * n_features * self.value_bytes
            self.add("tensor", "all-to-all", calls, n_bytes)
        norms = sum(layer.sharding == "features" for layer in self.block.values())
        calls = norms * self.n_passes * self.n_micro_batches
        self.add("tensor", "all-reduce", calls, calls * self.n_tokens * FP32_BYTES)

    @property
    def collects_again(self) -> bool:
        """Whether a recomputed block sums the output of experts, which what follows needs."""
        return self.model.norm_place == "after" or self.model.dropout > 0

    def _count_matmuls(self, has_experts: bool, part: str = "") -> tuple[int, int]:
        """Counts column-parallel and row-parallel layers of a block, or of a part of it."""
        layers = self.blocks[has_experts].matmuls
        kinds = [each.sharding for each in layers if each.name.startswith(part)]
        return kinds.count("column"), kinds.count("row")

    def _count_tensor_calls(self, gathers: int, reductions: int, wide: int = 1) -> None:
        """Counts gathers of all tokens at once, and sums in pieces."""
        n_bytes = wide * self.stream_bytes
        kind: Collective = "reduce-scatter" if self.parallel.sequence else "all-reduce"
        self.add("tensor", kind, reductions * self.n_pieces, reductions * n_bytes)
        if self.parallel.sequence:
            self.add("tensor", "all-gather", gathers * self.n_gathers, gathers * n_bytes)

    def _partial_values(self, layers: Layers) -> int:
        return sum(
            self.share(each.shape)
            for each in parameters_of(layers).values()
            if each.dimension is None
            and each.is_trained
            and (self.parallel.sequence or each.is_partial)
        )

    def count_context(self) -> None:
        """Attention over a sharded sequence."""
        n = self.n_micro_batches
        queries, shared = attention_values(self.model, self.topology.tensor)
        if self.parallel.context_method == "ulysses":
            calls, n_values = n * self.n_passes, self.n_tokens * (2 * queries + shared)
            self.add("context", "all-to-all", 2 * calls, calls * n_values * self.value_bytes)
        else:
            # The backward pass also sends gradients, in fp32.
            shifts = n * (self.topology.context - 1)
            n_bytes = self.n_passes * self.value_bytes + self.n_blocks * FP32_BYTES
            n_calls = shifts * (self.n_passes + self.n_blocks)
            self.add("context", "send", n_calls, shifts * self.n_tokens * shared * n_bytes)

    def count_pipeline(self) -> None:
        """Hidden states to the next stage, gradients to the previous one, and tied embeddings."""
        n_borders = 2 * len(self.stages) - self.has_first - self.has_last
        calls = n_borders * self.n_micro_batches
        n_bytes = self.n_residual * self.model.d_model * self.value_bytes
        self.add("pipeline", "send", calls, calls * n_bytes)
        if self.model.tied_embeddings and (self.has_first or self.has_last):
            self.add("pipeline", "all-reduce", 1, self.share(self.head.weight) * FP32_BYTES)

    def experts_apart(self, block: EqualBlocks) -> Layers:
        """Returns the layers of a block in a message of their own: experts that ranks share."""
        shared = block.experts if self.topology.expert > 1 else ()
        return {layer.name: layer for layer in shared if layer.kind == "experts"}

    def count_experts(self) -> None:
        """Tokens for experts on other ranks, and the load of all experts."""
        model, topology, n = self.model, self.topology, self.n_micro_batches
        if True not in self.blocks:
            return
        kinds = [kind for kinds in self.kinds for kind in kinds if kind[0][2]]
        n_blocks = sum(n_blocks for _, n_blocks in kinds)
        again = sum(n_blocks for (recompute, *_), n_blocks in kinds if recompute == "block")
        n_passes = n * (n_blocks + again)
        id_bytes = 8 * model.n_experts
        if topology.expert > 1:
            calls = 2 * (n_passes + n * n_blocks)
            n_bytes = calls * self.n_rows * model.d_model * self.value_bytes
            self.add("expert", "all-to-all", calls + n_passes, n_bytes + n_passes * id_bytes)
        if topology.context > 1 and model.balance == "loss" and model.balance_coefficient:
            n_bytes = self.run.train.micro_batch_size * model.n_experts * FP32_BYTES
            self.add("context", "all-reduce", n_passes, n_passes * n_bytes)
        loads: dict[Axis, bool] = {"shard": self.n_copies > 1, "replicate": topology.replicate > 1}
        for axis, is_there in loads.items():
            n_bytes = n_blocks * model.n_experts * FP32_BYTES
            self.add(axis, "all-reduce", is_there, is_there * n_bytes)

    def count_data(
        self, layers: Layers, n_groups: int, *, in_block: bool, of_experts: bool = False
    ) -> None:
        """Weights and gradients of layers sent together, for a number of equal groups."""
        n, n_ranks, parallel = self.n_micro_batches, self.n_shards, self.parallel
        n_values, n_copies = self.count_shared(layers), self.n_copies
        axis: Axis = "same experts" if of_experts else "shard"
        if of_experts:
            n_ranks, n_copies = self.n_expert_shards, n_copies // self.topology.expert
        if not layers:
            return
        if not parallel.shards_state and n_copies > 1:
            self.add(axis, "all-reduce", n_groups, n_groups * n_values * FP32_BYTES)
        if n_ranks > 1:
            if in_block:
                self._count_gathers_of_blocks(axis, n_groups, n_values, n_ranks)
            else:
                gathers = n_groups * (n if parallel.shards_weights and not self.is_piped else 1)
                n_bytes = gathers * n_values * n_ranks * self.value_bytes
                self.add(axis, "all-gather", gathers, n_bytes)
            sums = n_groups * (n if parallel.shards_gradients else 1)
            reduced, sent_bytes = self.run.precision.formats.reduced, self.sent_gradient_bytes
            if in_block and reduced.is_scaled:
                n_scaled = math.ceil(n_values / SCALED_COLUMNS) * SCALED_COLUMNS
                n_bytes = n_ranks * reduced.bytes_of(n_scaled)
                self.add(axis, "all-to-all", sums, sums * n_bytes)
            else:
                self.add(axis, "reduce-scatter", sums, sums * n_values * n_ranks * sent_bytes)
        if parallel.shards_state and self.topology.replicate > 1:
            self.add("replicate", "all-reduce", n_groups, n_groups * n_values * FP32_BYTES)

    def _count_gathers_of_blocks(
        self, axis: Axis, n_blocks: int, n_values: int, n_ranks: int
    ) -> None:
        """Weights in the compute precision; matrices in fp8, if configured."""
        gathers = self.block_gathers()
        n_fp8 = self.n_fp8_blocks if self.run.precision.fp8.all_gather else 0
        n_saved = n_fp8 * sum(self.share(layer.weight) for layer in self.matmuls)
        n_bytes = n_blocks * n_values * self.value_bytes - n_saved * (self.value_bytes - 1)
        self.add(axis, "all-gather", gathers * n_blocks, gathers * n_bytes * n_ranks)
        if n_fp8:
            scales_bytes = len(self.matmuls) * FP32_BYTES
            self.add("shard", "all-reduce", gathers * n_fp8, gathers * n_fp8 * scales_bytes)

    def _tensor_copies(self, layer: LayerSpec) -> int:
        return self.topology.tensor if layer.sharding == "partial" else 1

    def count_update(self) -> None:
        """Momentum of whole matrices to their owners, and the owners' results to all ranks."""
        n_copies = self.topology.replicate if self.parallel.shards_state else self.n_copies
        for matrices in self.update_rounds():
            sent = held = 0
            copies = [n_copies * self._tensor_copies(layer) for layer in matrices]
            for layer, n in zip(matrices, copies, strict=True):
                rows, columns = layer.shard(self.topology.tensor).weight
                n_values = self.share((rows, columns))
                held += n_values
                sent += math.ceil(n_values // columns / n) * columns
            n_whole = math.prod(matrices[0].weight)
            n_values = max(n_whole, sent) + max(n_whole * copies[0], held)
            self.add("stage", "all-to-all", 2, n_values * self.value_bytes)
        n_tensor = self.topology.tensor
        for shape, n, _ in self.expert_updates() if n_tensor > 1 else ():
            n_bytes = n * math.prod(shape) * self.value_bytes
            self.add("tensor", "all-to-all", 2, 2 * n_bytes)
