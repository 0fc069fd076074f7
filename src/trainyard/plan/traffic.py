"""What a rank sends in one optimizer step, axis by axis, as formulas.

With A = B x T/context x D values, the residual stream of a micro batch, a block makes of each one:

    tensor            forward: all-reduce A twice; backward: the same
    tensor, sequence  forward: all-gather A and reduce-scatter A, twice each; backward: the same
    ulysses           forward: all-to-all 3 A/tensor and A/tensor; backward: the same
    ring of p         forward: send 2 A/tensor p - 1 times; backward: the same, and again in fp32

Per stage and micro batch a pipeline sends A (A/tensor with sequence) on, and its gradient back.
Data ranks gather weights and add up gradients for each block and for the rest; of n micro batches:

    ZeRO stage    all-gather              reduce-scatter    all-reduce
    0                                                       once
    1             once                    once              once, over replicas
    2             once                    n times           once, over replicas
    3             2 n times               n times           once, over replicas
    3, pipeline   n + 1 times             once              once, over replicas

At stage 3 the rest is gathered n times only, and once in a pipeline. Bytes are those of the larger
buffer of a call. Left out are single numbers (loss, gradient norm), evaluation, and weights that
are gathered again for more than 3 chunks on a rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from trainyard.config.run import Run
from trainyard.plan.resolve import Plan
from trainyard.plan.size import Shape, is_cut, stage_shapes

Axis = Literal["tensor", "context", "pipeline", "shard", "replica"]
Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]

FP32_BYTES = 4
# Logits are made in chunks of so many bytes on a GPU (model/loss.py); a small all-reduce for each.
CHUNK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Traffic:
    """All calls of one kind that a rank makes in an optimizer step."""

    axis: Axis
    """The ranks it talks to; `shard` stands for shard x context, over which ZeRO cuts."""
    collective: Collective
    calls: int
    n_bytes: int
    """Sum over calls of the larger of what goes in and what comes out."""


def busiest_rank(run: Run, plan: Plan) -> list[Traffic]:
    """Gives what the ranks at the place of the pipeline that has most send, as `rank_traffic`."""
    ranks = [rank_traffic(run, plan, rank) for rank in range(plan.topology.pipeline)]
    return max(ranks, key=lambda traffic: sum(kind.n_bytes for kind in traffic))


def rank_traffic(run: Run, plan: Plan, pipeline_rank: int) -> list[Traffic]:
    """Gives what each rank at one place of the pipeline sends in a step of train.global_batch_size.

    Kinds of calls that are not made are left out.
    """
    counter = _Counter(run, plan, pipeline_rank)
    counter.count_tensor()
    counter.count_context()
    counter.count_pipeline()
    counter.count_data()
    return [
        Traffic(axis, collective, calls, n_bytes)
        for (axis, collective), (calls, n_bytes) in counter.totals.items()
        if calls
    ]


class _Counter:
    """Adds up the calls of one rank."""

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int) -> None:
        self.totals: dict[tuple[Axis, Collective], tuple[int, int]] = {}
        self.run, self.topology = run, plan.topology
        self.stages = plan.stages[pipeline_rank :: plan.topology.pipeline]
        self.padded_vocabulary_size = plan.padded_vocabulary_size
        train, model = run.train, run.model
        sequences = train.global_batch_size // plan.topology.data
        self.n_micro_batches = sequences // train.micro_batch_size
        self.n_tokens = train.micro_batch_size * model.sequence_length // plan.topology.context
        self.value_bytes = FP32_BYTES if run.precision.kind == "fp32" else 2
        self.stream_bytes = self.n_tokens * model.d_model * self.value_bytes
        self.n_blocks = sum(end - first for first, end in self.stages)
        self.has_first = self.stages[0][0] == 0
        self.has_last = self.stages[-1][1] == model.n_layers

    def add(self, axis: Axis, collective: Collective, calls: int, n_bytes: int) -> None:
        """Counts calls that have `n_bytes` together."""
        old_calls, old_bytes = self.totals.get((axis, collective), (0, 0))
        self.totals[axis, collective] = old_calls + calls, old_bytes + n_bytes

    def count_tensor(self) -> None:
        """Layers that ranks share: spread before columns are cut, collect after rows are."""
        if self.topology.tensor == 1:
            return
        # Recomputing stops at the last value that the backward pass needs: the sum after the MLP
        # is made again for dropout alone, that after attention for the MLP.
        once_more = {"none": (0, 0), "attention": (1, 0), "block": (2, 1)}
        spread_again, collect_again = once_more[self.run.parallel.recompute]
        if self.run.parallel.recompute == "block" and self.run.model.dropout:
            collect_again += 1
        n = self.n_blocks * self.n_micro_batches
        self._count_cut(n, (2 + spread_again, 2), (2 + collect_again, 2), self.stream_bytes)
        if self.has_first:
            n_bytes = self.stream_bytes // self.value_bytes * FP32_BYTES
            self._count_cut(self.n_micro_batches, (0, 0), (1, 1), n_bytes)
        if self.has_last:
            self._count_cut(self.n_micro_batches, (1, 1), (0, 0), self.stream_bytes)
            self._count_loss()
        if self.run.parallel.sequence:
            whole = [shape for name, shape in self._shapes() if not is_cut(name)]
            n_bytes = sum(map(self._share_of, whole)) * FP32_BYTES
            self.add("tensor", "all-reduce", 1, n_bytes)

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
        row_bytes = self.padded_vocabulary_size // self.topology.tensor * FP32_BYTES
        n_chunks = math.ceil(self.n_tokens / max(1, CHUNK_BYTES // row_bytes))
        n = self.n_micro_batches
        self.add("tensor", "all-reduce", n * 2 * n_chunks, n * 3 * self.n_tokens * FP32_BYTES)

    def count_context(self) -> None:
        """Attention over a shared sequence."""
        n_ranks, parallel = self.topology.context, self.run.parallel
        if n_ranks == 1:
            return
        forwards = 1 if parallel.recompute == "none" else 2
        n = self.n_blocks * self.n_micro_batches
        part = self.stream_bytes // self.topology.tensor  # of queries, say
        if parallel.context_method == "ulysses":
            calls = n * (forwards + 1)
            self.add("context", "all-to-all", 2 * calls, calls * (3 + 1) * part)
        else:
            shifts = n * (n_ranks - 1)
            precise = part // self.value_bytes * FP32_BYTES
            n_bytes = shifts * ((forwards + 1) * 2 * part + 2 * precise)
            self.add("context", "send", shifts * (forwards + 2), n_bytes)

    def count_pipeline(self) -> None:
        """Hidden states to the next stage, gradients to the one before, and tied embeddings."""
        if self.topology.pipeline == 1:
            return
        n_borders = 2 * len(self.stages) - self.has_first - self.has_last
        n_bytes = self.stream_bytes
        if self.run.parallel.sequence:
            n_bytes //= self.topology.tensor
        calls = n_borders * self.n_micro_batches
        self.add("pipeline", "send", calls, calls * n_bytes)
        if self.run.model.tied_embeddings and (self.has_first or self.has_last):
            embedding = dict(self._shapes())["embedding.weight"]
            self.add("pipeline", "all-reduce", 1, self._share_of(embedding) * FP32_BYTES)

    def count_data(self) -> None:
        """Weights and gradients of each block, and of the rest of each stage."""
        for blocks in self.stages:
            groups: dict[str, list[Shape]] = {}
            for name, shape in self._stage(blocks).items():
                group = ".".join(name.split(".")[:2]) if name.startswith("blocks.") else ""
                groups.setdefault(group, []).append(shape)
            for name, shapes in groups.items():
                self._count_group(shapes, in_block=name != "")

    def _count_group(self, shapes: list[Shape], *, in_block: bool) -> None:
        n_ranks = self.topology.shard * self.topology.context
        n, stage = self.n_micro_batches, self.run.parallel.zero_stage
        is_piped = self.topology.pipeline > 1
        if stage == 0:
            if n_ranks > 1:
                n_bytes = sum(map(math.prod, shapes)) * FP32_BYTES
                self.add("shard", "all-reduce", 1, n_bytes)
            return
        n_padded = sum(map(self._padded_share_of, shapes))
        if n_ranks > 1:
            gathers = 1
            if stage == 3 and in_block:
                gathers = n + 1 if is_piped else 2 * n
            elif stage == 3 and not is_piped:
                gathers = n
            value_bytes = self.value_bytes if in_block else FP32_BYTES
            self.add("shard", "all-gather", gathers, gathers * n_padded * n_ranks * value_bytes)
            scatters = n if stage >= 2 and not is_piped else 1
            self.add(
                "shard", "reduce-scatter", scatters, scatters * n_padded * n_ranks * FP32_BYTES
            )
        if self.topology.replica > 1:
            self.add("replica", "all-reduce", 1, n_padded * FP32_BYTES)

    def _shapes(self) -> list[tuple[str, Shape]]:
        """Parameters of this rank by name, all stages together."""
        return [pair for blocks in self.stages for pair in self._stage(blocks).items()]

    def _stage(self, blocks: tuple[int, int]) -> dict[str, Shape]:
        model, tensor = self.run.model, self.topology.tensor
        return stage_shapes(model, self.padded_vocabulary_size, blocks, tensor)

    def _share_of(self, shape: Shape) -> int:
        """Values of a parameter that the first of its data ranks keeps."""
        if self.run.parallel.zero_stage == 0:
            return math.prod(shape)
        return self._padded_share_of(shape)

    def _padded_share_of(self, shape: Shape) -> int:
        """Values of a parameter's equal parts by rows, the last ones filled up."""
        n_ranks = self.topology.shard * self.topology.context
        return math.ceil(shape[0] / n_ranks) * math.prod(shape[1:])
