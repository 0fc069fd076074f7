"""Formulas for the device memory of a rank in training, item by item.

Weights and moments are constant; everything else varies, so the peak is the largest of a few
moments, each with its own items:

    moment                   memory in use
    loss                     activations of all micro batches in flight, logits of a chunk
    backward of a block      the same, a recomputed block, its gradients
    end of a backward pass   activations of one micro batch less, gradients of the embedding
    reduction                whole gradients, and the buffers to reduce them
    update by Muon           gradients, and matrices that are exchanged and orthogonalized

In a pipeline, micro batches are in flight between their forward and backward passes;
`activations.py` has the memory of each.

The figures are for blocks without compilation. The simulation (simulate/simulation.py) runs the
real step and agrees within 10 per cent, never above these.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from trainyard.architecture import (
    Shape,
    count_rotary_values,
    matmuls,
    shapes_of,
    stage_layers,
)
from trainyard.config.run import Run
from trainyard.planning.activations import FP32_BYTES, ID_BYTES, MicroBatch
from trainyard.planning.resolve import Plan
from trainyard.planning.saving import host_bytes
from trainyard.planning.traffic import update_rounds

SMALL_BYTES = 128 * 2**10
"""Norms of gradients, statistics and other small tensors."""
ITEMS = (
    "weights",
    "gradients",
    "optimizer",
    "gathered weights",
    "activations",
    "logits and loss",
    "recomputing",
    "exchanged activations",
    "buffers",
    "context and libraries",
)
CONTEXT_BYTES = 512 * 2**20
"""CUDA context and kernels: 300 MB and more after the first tensor (PyTorch issue 107667), and the
workspace of matmuls."""
PAIR_BYTES, GROUP_BYTES = 544 * 10**6, 688 * 10**6
"""NCCL buffers for a group of two ranks, and of more: measured on four A100 (NCCL issue 964)."""


@dataclass(frozen=True)
class RankMemory:
    """The peak of a rank."""

    pipeline_rank: int
    moment: str
    """When it is."""
    items: dict[str, int]
    """Bytes by name, in the order of `ITEMS`."""
    host_bytes: int
    """Host memory, for background saves."""

    @property
    def peak_bytes(self) -> int:
        """All items."""
        return sum(self.items.values())


def rank_memory(run: Run, plan: Plan, pipeline_rank: int, on_gpu: bool = True) -> RankMemory:
    """Returns the memory of the largest rank at one pipeline rank."""
    rank = _Rank(run, plan, pipeline_rank, on_gpu)
    moments = {
        "loss": rank.at_loss(),
        "backward of a block": rank.in_backward(),
        "end of a backward pass": rank.at_end_of_backward(),
        "reduction of gradients": rank.at_reduction(),
        "update": rank.at_update(),
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    found = {**rank.always(), **moments[moment]}
    found["buffers"] += SMALL_BYTES
    items = {name: math.ceil(found.get(name, 0)) for name in ITEMS}
    return RankMemory(pipeline_rank, moment, items, host_bytes(run, plan))


def busiest_memory(run: Run, plan: Plan, on_gpu: bool = True) -> RankMemory:
    """Returns the memory of the rank that needs most."""
    ranks = [rank_memory(run, plan, rank, on_gpu) for rank in range(plan.topology.pipeline)]
    return max(ranks, key=lambda memory: memory.peak_bytes)


Items = dict[str, float]


class _Rank:
    """Sizes of what one rank holds."""

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int, on_gpu: bool) -> None:
        self.run, self.topology, self.on_gpu = run, plan.topology, on_gpu
        self.micro = MicroBatch(run, plan, on_gpu)
        self.value = self.micro.value
        self.pipeline_rank = pipeline_rank
        model, train, topology = run.model, run.train, plan.topology
        self.stages = plan.stages[pipeline_rank :: topology.pipeline]
        self.has_first = self.stages[0][0] == 0
        self.has_last = self.stages[-1][1] == model.n_layers
        self.n_micro_batches = train.global_batch_size // topology.data // train.micro_batch_size
        self.zero = run.parallel.zero_stage
        self.n_shards = topology.shard * topology.context if self.zero else 1
        self.is_shared = topology.data * topology.context > 1
        self.is_piped = topology.pipeline > 1
        shapes = [
            shapes_of(stage_layers(model, plan.padded_vocabulary_size, blocks, topology.tensor))
            for blocks in self.stages
        ]
        named = [pair for stage in shapes for pair in stage.items()]
        whole, held = Counter[tuple[bool, int]](), Counter[tuple[bool, int]]()
        for name, shape in named:
            kind = name.startswith("blocks."), len(shape)
            whole[kind] += math.prod(shape)
            held[kind] += self._share(shape)
        self.block_values = sum(n for (in_block, _), n in whole.items() if in_block)
        self.rest_values = whole.total() - self.block_values
        self.held_values = held.total()
        stored = [(run.stored(*kind), n) for kind, n in held.items()]
        # FSDP sums in fp32; without it a gradient has the format of its weight.
        formats = [(run.stored(*kind).weight.n_bytes, n) for kind, n in whole.items()]
        self.gradient_bytes = sum(n * (FP32_BYTES if self.is_shared else b) for b, n in formats)
        self.weight_bytes = sum(each.weight.bytes_of(n) for each, n in stored)
        self.state_bytes = sum(each.state_bytes(n) for each, n in stored)
        self.n_blocks = sum(end - first for first, end in self.stages)
        self.one_block = self.block_values // self.n_blocks
        # Without FSDP, micro batches share one cast of each weight, except in recomputed blocks.
        self.casts = run.precision.formats.matrices.weight != run.precision.formats.compute
        self.shares_casts = self.casts and not self.is_shared
        self.shares_casts &= run.parallel.recompute != "block"

    def _share(self, shape: Shape) -> int:
        return math.ceil(shape[0] / self.n_shards) * math.prod(shape[1:])

    def always(self) -> Items:
        """Constant memory within a step."""
        return {
            "weights": self.weight_bytes + len(self.stages) * self.micro.rotations(),
            "optimizer": self.state_bytes,
            "exchanged activations": self._exchanged(),
            "context and libraries": self._libraries(),
        }

    # ---- moments

    def at_loss(self) -> Items:
        """The loss of a micro batch, or, on a stage without it, the end of a forward pass."""
        is_before_all_backward = self.is_piped and self.run.parallel.schedule == "gpipe"
        return {
            "gradients": 0 if is_before_all_backward else self._gradients(),
            "gathered weights": self._gathered(n_at_once=1),
            "activations": self._activations(self._in_flight()),
            "logits and loss": (self.micro.loss() if self.has_last else 0) + self._other_losses(),
            "buffers": self._batch() + self._last_message(),
        }

    def in_backward(self) -> Items:
        """The backward pass of the last block of a stage."""
        return {
            "gradients": self._gradients() + self._gradients_of_a_block(),
            "gathered weights": self._gathered(n_at_once=3),
            "activations": self._activations(self._in_flight()),
            "logits and loss": self._waiting_gradient() + self._other_losses(),
            "recomputing": self._recomputed() if self.run.parallel.recompute == "block" else 0,
            "buffers": self._batch() + self.micro.flowing() + self._last_message(),
        }

    def at_end_of_backward(self) -> Items:
        """The backward pass of the embedding, with activations only of other micro batches."""
        head = self.micro.head_gradient
        both = self.has_first and self.has_last and self.run.model.tied_embeddings
        n_heads = 1 if not both else 2 if self.n_micro_batches == 1 else 3
        first, *others = self._in_flight()
        of_rest = self.rest_values * FP32_BYTES if self.is_shared else 0
        n_buffers = 1 if self.is_shared else 0
        return {
            "gradients": self._gradients(at_end=True)
            + (head * n_heads if self.has_first and not self.micro.adds_ends else 0),
            "gathered weights": self._gathered(n_at_once=1),
            "activations": self._activations([max(0, first - 1), *others]) + self.micro.embedding(),
            "buffers": self._batch()
            + n_buffers * (of_rest + FP32_BYTES * self.one_block)
            + FP32_BYTES * self.micro.n_residual * self.run.model.d_model,
        }

    def at_reduction(self) -> Items:
        """The end of a step, when gradients are reduced."""
        largest = max(self.one_block, self.rest_values // len(self.stages))
        buffers = 2 * largest * FP32_BYTES if self.is_shared else 0
        return {
            "gradients": self.gradient_bytes
            if self.is_piped or not self.is_shared
            else FP32_BYTES * self.held_values,
            "gathered weights": self._gathered(n_at_once=1) if self.is_piped else 0,
            "buffers": self._batch() + buffers,
        }

    def at_update(self) -> Items:
        """The first round of Muon's update, or AdamW's update in place."""
        topology = self.topology
        n_ranks = topology.n_ranks // topology.pipeline
        n_bytes = 0
        for matrices in update_rounds(self.run, self.n_blocks, n_ranks)[:1]:
            n_whole, shortest = math.prod(matrices[0].weight), min(matrices[0].weight)
            parts = [each.shard(topology.tensor).weight for each in matrices]
            n_copies = topology.replicate if self.zero else topology.shard * topology.context
            exchanged = (1 + n_copies) * n_whole + 3 * sum(map(self._share, parts))
            n_values = max(3 * n_whole + 2 * shortest**2, exchanged if n_ranks > 1 else 0)
            n_bytes = max(self.value * n_values, 2 * FP32_BYTES * self._share(parts[0]))
        return {
            "gradients": self.gradient_bytes
            if self.n_shards == 1
            else FP32_BYTES * self.held_values,
            "buffers": self._batch() + n_bytes,
        }

    # ---- items

    def _gradients(self, *, at_end: bool = False) -> float:
        """Gradients of earlier micro batches, or, at the end of the first, of this one."""
        is_whole = self.zero <= 1 or self.is_piped or not self.is_shared
        if self.n_micro_batches == 1 and not self.is_piped:
            if not at_end:
                n_ends = 1 if self.run.model.tied_embeddings else 2
                return self.micro.head_gradient * n_ends if self.micro.adds_ends else 0
            is_whole = not self.is_shared
        return self.gradient_bytes if is_whole else FP32_BYTES * self.held_values

    def _gradients_of_a_block(self) -> float:
        """Of the largest matrix, before accumulation; of all when sharded."""
        layers = matmuls(self.run.model, tensor=self.topology.tensor)
        largest = max(math.prod(layer.weight) for layer in layers)
        if self.shares_casts and not self.is_piped:  # its matmul adds to the sum, if there is one
            return largest * (FP32_BYTES if self.n_micro_batches == 1 else self.value)
        if not self.is_shared:
            return largest * (self.value + (FP32_BYTES if self.value < FP32_BYTES else 0))
        return self.one_block * (self.value + FP32_BYTES)

    def _gathered(self, n_at_once: int) -> float:
        """Weights in the compute precision, besides the stored ones.

        Args:
            n_at_once: blocks gathered at the same time with ZeRO 3; below it, all stay.
        """
        if not self.is_shared:
            head = self.micro.head_gradient / FP32_BYTES
            n_values = head if self.has_last and self.micro.shares_head else 0
            if self.casts:
                n_values += self.block_values if self.shares_casts else self.one_block
            return self.value * n_values
        n_blocks = self.n_blocks if self.zero < 3 else min(self.n_blocks, n_at_once)
        rest = FP32_BYTES * self.rest_values
        return rest + self.value * self.one_block * n_blocks

    def _in_flight(self) -> list[int]:
        """Micro batches in flight, for each stage of this rank."""
        parallel, n = self.run.parallel, self.n_micro_batches
        p, rank = self.topology.pipeline, self.pipeline_rank
        if p == 1:
            return [1]
        if parallel.schedule == "gpipe":
            return [n]
        if parallel.schedule == "1f1b":
            return [min(n, p - rank)]
        chunks = len(self.stages)
        in_a_round = n // max(1, n // p)
        if parallel.schedule == "interleaved":
            begun = (chunks - 1) * in_a_round + 2 * (p - 1 - rank) + 1
        else:
            begun = (chunks - 1) * in_a_round + (p - 1 - rank) + 1 + rank
        begun = min(n * chunks, begun)
        counts = [0] * chunks
        for step in range(begun):
            counts[step // in_a_round % chunks] += 1
        return counts

    def _recomputed(self) -> float:
        last = self.stages[-1][1] - 1
        return self.micro.block("none", last) - self.micro.block("block", last)

    def _activations(self, in_flight: list[int]) -> float:
        total = 0.0
        for n, (first, end) in zip(in_flight, self.stages, strict=True):
            recompute = self.run.parallel.recompute
            total += n * sum(self.micro.block(recompute, number) for number in range(first, end))
            total += n * (self.micro.embedding() if first == 0 else 0)
            total += n * (self.micro.stream + self.micro.documents())  # the stage's output
            is_split = self.is_piped and self.run.parallel.schedule == "zero_bubble"
            if is_split and self.pipeline_rank > 0:
                # Kept for the gradients of weights, computed that many micro batches later.
                n_blocks = (self.pipeline_rank + 1) * (end - first) / len(self.stages)
                total += n_blocks * self.micro.between_layers()
            if end == self.run.model.n_layers:
                total += n * self.micro.stream
                total += self.micro.hidden if self.run.parallel.sequence else 0
        return total

    def _other_losses(self) -> float:
        """Memory of losses whose backward pass, or half of it, comes later."""
        if not (self.has_last and self.is_piped):
            return 0
        schedule, weight = self.run.parallel.schedule, self.micro.head_gradient
        if schedule == "gpipe":
            return (self.n_micro_batches - 1) * (weight + self.micro.hidden)
        return self.pipeline_rank * weight if schedule == "zero_bubble" else 0

    def _waiting_gradient(self) -> float:
        """Of a tied head, which waits for that of the embedding."""
        both = self.has_first and self.has_last and self.run.model.tied_embeddings
        return self.micro.head_gradient if both and not self.micro.adds_ends else 0

    def _exchanged(self) -> float:
        """Messages in a pipeline: two received, one sent, and the last of each stage.

        Only gpipe and 1f1b stages let their schedule send, which waits for each message.
        """
        if not self.is_piped:
            return 0
        sends = self.run.parallel.schedule in ("interleaved", "zero_bubble")
        return (3 + (len(self.stages) if sends else 0)) * self.micro.stream

    def _batch(self) -> float:
        """Tokens and labels of a step, and the table of rotary positions."""
        train, model = self.run.train, self.run.model
        n_tokens = train.micro_batch_size * model.sequence_length * self.n_micro_batches
        table = FP32_BYTES * count_rotary_values(model) / self.topology.context
        return 2 * ID_BYTES * n_tokens + table

    def _last_message(self) -> float:
        """The last gradients sent with ZeRO 2 and 3, which FSDP2 keeps for a while."""
        sends_each = self.zero >= 2 and self.is_shared and not self.is_piped
        return FP32_BYTES * self.rest_values if sends_each and self.n_micro_batches > 1 else 0

    def _libraries(self) -> float:
        if not self.on_gpu:
            return 0
        topology = self.topology
        sizes = [topology.tensor, topology.context, topology.pipeline, topology.n_ranks]
        sizes += [topology.shard * topology.context, topology.replicate]
        if self.run.optimizer.kind == "muon":
            sizes.append(topology.n_ranks // topology.pipeline)
        if self.is_piped and (self.has_first or self.has_last):
            sizes.append(2)
        groups = [PAIR_BYTES if size == 2 else GROUP_BYTES for size in sizes if size > 1]
        return CONTEXT_BYTES + sum(groups)
