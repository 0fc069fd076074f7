"""Formulas for the device memory of a rank in training, item by item.

Weights and moments are constant; everything else varies, so the peak is the largest of a few
points in a step, each with its own items:

    point in a step          memory in use
    loss                     activations of all micro batches in flight, logits of a chunk
    backward of a block      the same, a recomputed block, its gradients
    end of a backward pass   activations of one micro batch less, gradients of the embedding
    reduction                whole gradients, and the buffers to reduce them
    update by Muon           gradients, and matrices that are exchanged and orthogonalized

In a pipeline, micro batches are in flight between their forward and backward passes. For each
token, a block keeps these values for its backward pass, in the compute precision, with D and F as
in the model and t tensor ranks:

    recompute none         residual stream 2 D, inputs of attention and MLP 2 D,
                           queries, keys, values and attention output 4 D / t, MLP 2 F / t
    recompute attention    the same without the 4 D / t
    recompute block        residual stream D

Values inside attention and MLP are outputs of column-parallel and inputs of row-parallel matmuls
(architecture.py), for the parts of GPT-3. SwiGLU keeps 4 F / t, compiled 3; a query-key norm its
inputs.

A block with E experts of F features, A of them active for a token, keeps in place of the inputs and
values of its MLP, never compiled,

    router                 its input D, and 4 bytes for each of E scores
    rows for experts       A times: their inputs D, gates, values and activations 4 F / t (SwiGLU;
                           GELU 2 F / t), outputs D, and 40 bytes of numbers, 56 if shared

and, with shared experts, inputs and values of that MLP. Rows are those of an equal load: a rank
whose experts get more keeps more.

With sequence parallelism, the residual stream and the inputs of both are D / t; the backward pass
gathers the inputs again. Recomputed blocks keep them gathered.

A compiled block keeps other values (torch 2.13): with dropout also a byte for each value of the
MLP's output; recomputing attention, no stream between attention and MLP; no inputs of attention and
MLP where they would be gathered again, or in fp8, and there not the MLP's last F / t either; but
one of these inputs where norms follow attention and MLP. The compiled loss keeps no fp32 copy of
the logits. tests/fake_cuda/test_memory.py compares all of this with CUDA's allocator.

The simulation (simulate/simulation.py) runs the real step without compilation and agrees within 10
per cent, never above these.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainyard.architecture import (
    MOST_DRAWN_BYTES,
    attention_values,
    block_layers,
    count_logit_chunks,
    count_rotary_values,
    count_values,
    rotation_values,
)
from trainyard.config.precisions import FP16
from trainyard.config.rules import fp8_blocks
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.rank import FP32_BYTES, EqualBlocks, Rank, likeness, sums_each
from trainyard.planning.timeline import micro_batches_in_flight

ID_BYTES = 8
TOKEN_BYTES = 64
"""Bytes of a row's label, largest logit, loss and similar values."""
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
PROCESS_BYTES = 288 * 2**20
"""Host memory of Python and torch 2.13 in a training process, before any tensor; measured."""
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
    host_bytes: int = 0
    """Host memory for background saves, of the rank that writes most."""
    drawn_bytes: int = 0
    """Host memory at the start, for whole parameters of which a rank keeps its part."""

    @property
    def peak_bytes(self) -> int:
        """All items."""
        return sum(self.items.values())

    def process_bytes(self, *, on_gpu: bool) -> int:
        """Host memory of its process, to which a CPU adds all items.

        Without gaps: one rank on a CPU grows by up to a third (`keep_freed_memory`).
        """
        at_start, later = self.drawn_bytes, self.host_bytes
        if not on_gpu:
            at_start, later = at_start + self.items["weights"], later + self.peak_bytes
        return PROCESS_BYTES + max(at_start, later)


def rank_memory(run: Run, plan: Plan, pipeline_rank: int, on_gpu: bool = True) -> RankMemory:
    """Returns the memory of the largest rank at one pipeline rank."""
    rank = _Memory(run, plan, pipeline_rank, on_gpu)
    by_point = {
        "loss": rank.at_loss(),
        "backward of a block": rank.in_backward(),
        "end of a backward pass": rank.at_end_of_backward(),
        "reduction of gradients": rank.at_reduction(),
        "update": rank.at_update(),
    }
    moment = max(by_point, key=lambda name: sum(by_point[name].values()))
    n_bytes = {**rank.always(), **by_point[moment]}
    n_bytes["buffers"] += SMALL_BYTES
    items = {name: math.ceil(n_bytes.get(name, 0)) for name in ITEMS}
    saved_bytes = rank.saved_bytes() if run.checkpoint.background else 0
    return RankMemory(pipeline_rank, moment, items, saved_bytes, rank.drawn_bytes())


def busiest_memory(run: Run, plan: Plan, on_gpu: bool = True) -> RankMemory:
    """Returns the memory of the rank that needs most, with the most host memory of all.

    Of ranks with equal stages, the first has most micro batches in flight; with a zero bubble, all
    differ.
    """
    n_ranks, all_differ = plan.topology.pipeline, run.parallel.schedule == "zero_bubble"
    different: dict[object, int] = {}
    for rank in range(n_ranks):
        likes = [likeness(run, blocks) for blocks in plan.stages[rank::n_ranks]]
        different.setdefault(rank if all_differ else tuple(likes), rank)
    return largest_of([rank_memory(run, plan, rank, on_gpu) for rank in different.values()])


def largest_of(memories: Sequence[RankMemory]) -> RankMemory:
    """Returns the largest memory, with the most host memory of all."""
    return replace(
        max(memories, key=lambda memory: memory.peak_bytes),
        host_bytes=max(memory.host_bytes for memory in memories),
        drawn_bytes=max(memory.drawn_bytes for memory in memories),
    )


Items = dict[str, float]


class _Memory(Rank):
    """Bytes of what one rank holds.

    Attributes:
        compiles: whether blocks and the loss are compiled.
        stream: bytes of the residual stream between two blocks, of a micro batch.
        hidden: bytes of the head's input.
        head_gradient: bytes of the gradient of the head's weight, in fp32.
        held_head_gradient: the same, from the loss until it is summed.
        copied: bytes of a gradient that gloo, on a CPU, copies to reduce it to a shard.
        sends_each: whether ranks reduce the gradients of each micro batch.
        shares_head: whether micro batches share the head's cast.
        adds_ends: whether they add to the gradients of embedding and head.
    """

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int, on_gpu: bool) -> None:
        super().__init__(run, plan, pipeline_rank)
        self.on_gpu, value, d_model = on_gpu, self.value_bytes, run.model.d_model
        compile = run.train.compile
        self.compiles = compile == "always" or (compile == "gpu" and on_gpu)
        self.stream = value * self.n_residual * d_model
        self.hidden = value * self.n_tokens * d_model
        self.head_gradient = FP32_BYTES * self.head.n_outputs * d_model
        held_bytes = value if self.is_shared else FP32_BYTES
        self.held_head_gradient = held_bytes * self.head.n_outputs * d_model
        self.copied = 0 if on_gpu or self.n_shards == 1 else FP32_BYTES
        self.sends_each = sums_each(run, plan.topology)
        self.adds_ends = on_gpu and not self.is_shared
        self.shares_head = self.adds_ends and value < FP32_BYTES
        self.waits = self.has_first and self.has_last and run.model.tied_embeddings
        self._count_parameters()
        # Without FSDP, micro batches share one cast of each weight, except in recomputed blocks.
        self.casts = run.precision.formats.matrices.weight != run.precision.formats.compute
        self.shares_casts = self.casts and not self.is_shared
        self.shares_casts &= run.parallel.recompute != "block"

    def _count_parameters(self) -> None:
        """Counts values before ZeRO shards them, and the bytes that the rank holds."""
        counts = self.parameter_counts
        self.block_values = sum(whole for in_block, _, whole, _ in counts if in_block)
        self.outer_values = sum(whole for in_block, _, whole, _ in counts if not in_block)
        self.one_block = max(count_values(block.layers) for block in self.blocks.values())
        experts = self.blocks[max(self.blocks)].experts if self.topology.expert > 1 else ()
        self.apart = sum(math.prod(e.weight) for e in experts if e.kind == "experts")
        self.held_gradient_bytes = FP32_BYTES * sum(held for *_, held in counts)
        # FSDP sums in fp32; without it a gradient has the format of its weight.
        formats = [(stored.weight.n_bytes, whole) for _, stored, whole, _ in counts]
        self.gradient_bytes = sum(n * (FP32_BYTES if self.is_shared else b) for b, n in formats)
        self.weight_bytes = sum(stored.weight.bytes_of(held) for _, stored, _, held in counts)
        self.state_bytes = sum(stored.state_bytes(held) for _, stored, _, held in counts)

    def drawn_bytes(self) -> int:
        """Host memory of the whole parameters that are drawn at a time."""
        tensor = self.topology.tensor
        whole = [(block_layers(b.model, tensor), b.number) for b in self.blocks.values()]
        sizes = [FP32_BYTES * count_values({"": e}) for each, _ in whole for e in each.values()]
        total = FP32_BYTES * (self.outer_values + sum(n * count_values(e) for e, n in whole))
        return min(tensor * total, max(MOST_DRAWN_BYTES, tensor * max(self.head_gradient, *sizes)))

    # ---- points in a step

    def always(self) -> Items:
        """Constant memory within a step."""
        model = self.model
        n_ranks = 1 if model.attention_within_documents else self.topology.context
        rotations = FP32_BYTES * rotation_values(model) * model.sequence_length // n_ranks
        return {
            "weights": self.weight_bytes + len(self.stages) * rotations,
            "optimizer": self.state_bytes,
            "exchanged activations": self._exchanged(),
            "context and libraries": self._libraries() if self.on_gpu else 0,
        }

    def at_loss(self) -> Items:
        """The loss of a micro batch, or, on a stage without it, the end of a forward pass."""
        # Gradients that stay between micro batches exist from the start.
        is_before_all_backward = self.sends_each and self.parallel.schedule == "gpipe"
        is_before_all_backward &= self.is_piped
        return {
            "gradients": 0 if is_before_all_backward else self._gradients(),
            "gathered weights": self._gathered(n_at_once=1),
            "activations": self._activations(self.in_flight),
            "logits and loss": (self._loss() if self.has_last else 0) + self._other_losses(),
            "buffers": self._batch() + self._last_message(),
        }

    def in_backward(self) -> Items:
        """The backward pass of the last block of a stage."""
        waiting = self.held_head_gradient if self.waits and not self.adds_ends else 0
        in_fp8 = self.stages[-1][1] - 1 in fp8_blocks(self.run)
        has_experts = any(kind[2] for kind, _ in self.kinds[-1])
        recomputed = self._block("none", in_fp8, has_experts, is_again=True)
        recomputed -= self._block("block", in_fp8, has_experts)
        # FSDP2 frees it before it makes that of the block.
        waiting_message = max(0, self._last_message() - FP32_BYTES * self.one_block)
        return {
            "gradients": self._gradients() + self._gradients_of_a_block(),
            "gathered weights": self._gathered(n_at_once=3),
            "activations": self._activations(self.in_flight),
            "logits and loss": waiting + self._other_losses(),
            "recomputing": recomputed if self.parallel.recompute == "block" else 0,
            "buffers": self._batch() + self._activation_gradients(has_experts) + waiting_message,
        }

    def at_end_of_backward(self) -> Items:
        """The backward pass of the embedding, with activations only of other micro batches."""
        n_waiting = 0 if not self.waits else 1 if self.n_micro_batches == 1 else 2
        of_embedding = self.head_gradient + n_waiting * self.held_head_gradient
        of_embedding = of_embedding if self.has_first and not self.adds_ends else 0
        first, *others = self.in_flight
        outer = FP32_BYTES * self.outer_values if self.is_shared else 0
        buffers = self.is_shared * FP32_BYTES * self.one_block + self.copied * self.outer_values
        return {
            "gradients": self._gradients(at_end=True) + max(of_embedding, outer),
            "gathered weights": self._gathered(n_at_once=1),
            "activations": self._activations([max(0, first - 1), *others]) + self._embedding(),
            "buffers": self._batch() + buffers + FP32_BYTES * self.n_residual * self.model.d_model,
        }

    def at_reduction(self) -> Items:
        """The end of a step, when gradients are reduced."""
        largest = max(self.one_block, self.outer_values // len(self.stages))
        is_late = self.is_piped and not self.sends_each
        is_whole = is_late or not self.is_shared
        return {
            "gradients": self.gradient_bytes if is_whole else self.held_gradient_bytes,
            "gathered weights": self._gathered(n_at_once=1) if self.is_piped else 0,
            "buffers": self._batch() + self.is_shared * largest * (2 * FP32_BYTES + self.copied),
        }

    def at_update(self) -> Items:
        """The first round of Muon's update, or AdamW's update in place."""
        topology, n_bytes = self.topology, 0
        for matrices in self.update_rounds()[:1]:
            n_whole, shortest = math.prod(matrices[0].weight), min(matrices[0].weight)
            parts = [self.share(each.shard(topology.tensor).weight) for each in matrices]
            n_values = 3 * n_whole + 2 * shortest**2
            if topology.n_ranks > topology.pipeline:
                n_copies = topology.replicate if self.parallel.shards_state else self.n_copies
                n_values = max(n_values, (1 + n_copies) * n_whole + 3 * sum(parts))
            n_bytes = max(self.value_bytes * n_values, 2 * FP32_BYTES * parts[0])
        for shape, n, held in self.expert_updates():
            n_values = (3 + (topology.tensor > 1)) * n * math.prod(shape) + 2 * n * min(shape) ** 2
            n_bytes = max(n_bytes, self.value_bytes * n_values, 2 * FP32_BYTES * held)
        is_whole = self.n_shards == 1
        return {
            "gradients": self.gradient_bytes if is_whole else self.held_gradient_bytes,
            "buffers": self._batch() + n_bytes,
        }

    # ---- weights and gradients

    def _gradients(self, *, at_end: bool = False) -> float:
        """Gradients of earlier micro batches, or, at the end of the first, of this one."""
        is_whole = not self.sends_each
        if self.n_micro_batches == 1 and not self.is_piped:
            if not at_end:
                n_ends = 1 if self.model.tied_embeddings else 2
                return self.head_gradient * n_ends if self.adds_ends else 0
            is_whole = not self.is_shared
        return self.gradient_bytes if is_whole else self.held_gradient_bytes

    def _gradients_of_a_block(self) -> float:
        """Gradient of the largest matrix, before accumulation; of all when sharded."""
        largest, value = max(math.prod(layer.weight) for layer in self.matmuls), self.value_bytes
        experts = max(
            (math.prod(e.weight) for e in self.blocks[max(self.blocks)].experts), default=0
        )
        if self.shares_casts or (self.is_piped and not self.is_shared):  # its matmul adds to it
            has_sum = self.is_piped or self.n_micro_batches > 1
            largest *= value if has_sum else FP32_BYTES
            return max(largest, experts * (value + FP32_BYTES * (value < FP32_BYTES)))
        if not self.is_shared:
            return max(largest, experts) * (value + FP32_BYTES * (value < FP32_BYTES))
        n_values = max(self.apart, self.one_block - self.apart)
        return n_values * (value + FP32_BYTES + self.copied)

    def _gathered(self, n_at_once: int) -> float:
        """Weights in the compute precision, besides the stored ones.

        Args:
            n_at_once: blocks gathered at the same time with ZeRO 3; below it, all stay.
        """
        if not self.is_shared:
            shares_head = self.has_last and self.shares_head
            n_values = self.head_gradient // FP32_BYTES if shares_head else 0
            if self.casts:
                n_recast = self.n_recomputed if self.parallel.recompute == "block" else 0
                n_kept = self.block_values - self.one_block * (n_recast - (n_recast > 0))
                n_values += max(n_kept, self.one_block)
            return self.value_bytes * n_values
        n_values = self.block_values
        if self.parallel.shards_weights:
            # Experts in messages of their own come one by one.
            n_values = min(n_values, n_at_once * self.one_block - (n_at_once > 1) * self.apart)
        return self.value_bytes * (self.outer_values + n_values)

    def _last_message(self) -> float:
        """The last gradients sent with ZeRO 2 and 3, which FSDP2 keeps for a while."""
        if not self.sends_each or self.n_micro_batches == 1:
            return 0
        n_values = self.outer_values if self.has_first else self.one_block
        if self.has_first and self.has_last and not self.waits:  # an untied head is sent before
            n_values -= self.head_gradient // FP32_BYTES
        return FP32_BYTES * n_values

    # ---- activations

    @cached_property
    def in_flight(self) -> list[int]:
        """Micro batches in flight, for each stage of this rank."""
        n_ranks, n_chunks = self.topology.pipeline, len(self.stages)
        return micro_batches_in_flight(
            self.parallel.schedule, self.pipeline_rank, n_ranks, n_chunks, self.n_micro_batches
        )

    def _activations(self, in_flight: list[int]) -> float:
        """What the stages keep of their micro batches in flight."""
        of_stages, total = self.kept
        return total + sum(n * each for n, each in zip(in_flight, of_stages, strict=True))

    @cached_property
    def kept(self) -> tuple[list[float], float]:
        """What each stage keeps of a micro batch, and what all keep besides."""
        kept = {kind: self._block(*kind) for kinds in set(self.kinds) for kind, _ in kinds}
        output = self.stream + self._documents()
        of_stages = [output + sum(n * kept[kind] for kind, n in kinds) for kinds in self.kinds]
        of_stages[0] += self._embedding() if self.has_first else 0
        of_stages[-1] += self.stream if self.has_last else 0
        total: float = self.hidden if self.has_last and self.parallel.sequence else 0
        if self.is_piped and self.parallel.schedule == "zero_bubble":
            # Kept for the gradients of weights, computed that many micro batches later.
            for kind, n in itertools.chain.from_iterable(self.kinds):
                factors = self.value_bytes * self._factors(self.blocks[kind[2]])
                waiting = self.pipeline_rank * factors + max(0, factors - kept[kind])
                total += n / len(self.stages) * waiting
        return of_stages, total

    def _factors(self, block: EqualBlocks) -> int:
        """Counts the inputs and outputs of a block's matmuls, for a micro batch."""
        n_values = self.n_tokens * sum(each.n_inputs + each.n_outputs for each in block.matmuls)
        experts = (e.weight for e in block.experts if e.kind == "experts")
        return n_values + self.n_rows * sum(math.prod(w[1:-1]) + w[-1] for w in experts)

    def _block(
        self, recompute: str, in_fp8: bool, has_experts: bool, *, is_again: bool = False
    ) -> float:
        """What a block keeps of a micro batch, or a block that is recomputed."""
        if recompute == "block":
            return self.stream
        norms_after = self.model.norm_place == "after"
        inputs = self.hidden if is_again else self.stream
        # Not compiled, SwiGLU keeps its gates after SiLU too.
        n_outputs, n_inputs = self._mlp(has_experts)
        inner = 2 * n_outputs
        statistics = 2 * FP32_BYTES * self.n_residual
        kept: float = 2 * (self.stream + statistics + self._dropout_keys())
        if has_experts:
            kept += self.value_bytes * self.n_tokens * inner + self._experts(inputs)
            kept += self.stream * norms_after
            return kept + inputs + (self._attention() if recompute == "none" else 0)
        if self.compiles:
            kept += self.stream / self.value_bytes if self.model.dropout else 0
            kept -= self.stream if recompute == "attention" else 0
            sends_again = self.parallel.sequence and self.topology.tensor > 1 and not is_again
            inputs *= sends_again or not in_fp8  # what is sent again is kept as it is
            kept += self.stream if norms_after and not inputs else 0
            inner = n_outputs if in_fp8 else n_outputs + n_inputs
        kept += self.value_bytes * self.n_tokens * inner
        if recompute == "attention":
            return kept + inputs + (self.stream if inputs else 0)
        return kept + 2 * inputs + self._attention()

    def _mlp(self, has_experts: bool) -> tuple[int, int]:
        """Outputs of the first and inputs of the last matmul of the MLP, or the shared expert."""
        layers, name = self.blocks[has_experts].layers, "mlp.shared" if has_experts else "mlp"
        if f"{name}.up" not in layers:
            return 0, 0
        return layers[f"{name}.up"].n_outputs, layers[f"{name}.down"].n_inputs

    def _experts(self, inputs: float) -> float:
        """What router and experts keep, and the input of shared ones."""
        model, layers, value = self.model, self.blocks[True].layers, self.value_bytes
        score_bytes = model.n_experts * FP32_BYTES * (1 + (model.router_z_loss > 0))
        kept: float = self.n_tokens * (value * model.d_model + score_bytes)
        kept += inputs * (model.n_shared_experts > 0 and self.parallel.sequence)
        n_outputs = math.prod(layers["mlp.experts.up"].weight[1:-1])
        numbers = ID_BYTES + 2 * ID_BYTES * (1 + (self.topology.expert > 1)) + 4 * FP32_BYTES
        return kept + self.n_rows * (value * 2 * (model.d_model + n_outputs) + numbers)

    def _attention(self) -> float:
        """Queries, keys, values and what attention itself keeps."""
        model, t = self.model, self.topology.tensor
        values = attention_values(model, t)
        part, both = (self.value_bytes * self.n_tokens * each for each in values)
        shared = both // 2
        inside = (3 if self.topology.context > 1 else 2) * part + both
        for name, n_bytes in (("query", part), ("key", shared)):
            norm = self.block.get(f"attention.{name}_norm")
            if norm:  # keeps its input too, and a number of all that it normalizes together
                inside += int(n_bytes + FP32_BYTES * n_bytes / self.value_bytes / norm.weight[0])
        lse = FP32_BYTES * self.n_tokens * model.n_heads / t
        if self.on_gpu or not model.dropout:
            return inside + lse
        # On a CPU attention weights are kept in fp32, before and after dropout.
        heads = model.n_heads / t / self.topology.context
        weights = FP32_BYTES * heads * model.sequence_length**2 * self.run.train.micro_batch_size
        precise = 3 * FP32_BYTES * part / self.value_bytes
        return inside - part - 2 * shared + 2 * weights + precise

    def _embedding(self) -> float:
        return self._dropout_keys() + (self.n_tokens if self.topology.tensor > 1 else 0)

    def _dropout_keys(self) -> float:
        """Random bits of rows and columns, to recompute masks from."""
        n_bytes = ID_BYTES * self.n_residual + FP32_BYTES * self.model.d_model
        return n_bytes if self.model.dropout else 0

    def _documents(self) -> float:
        """What tells the documents of a micro batch apart, for all blocks of a stage.

        Positions turn queries and keys by sequence; flash attention takes lengths, others a mask.
        """
        if not self.model.attention_within_documents:
            return 0
        turned = FP32_BYTES * rotation_values(self.model)
        is_ring = self.parallel.context_method == "ring"
        n_queries = self.n_tokens * (1 if is_ring else self.topology.context)
        has_mask = not (self.on_gpu and self.value_bytes < FP32_BYTES)
        mask = has_mask * self.value_bytes * n_queries * self.model.sequence_length
        return self.n_tokens * turned + mask

    def _activation_gradients(self, has_experts: bool) -> float:
        """Gradients of the values of a block, and those of its MLP."""
        stream = self.n_residual * self.model.d_model
        n_bytes = 2 * self.value_bytes * stream
        if self.parallel.sequence:
            n_bytes += self.hidden * (1 if self.parallel.recompute == "block" else 2)
        wide: float = self.value_bytes * self.n_tokens * sum(self._mlp(has_experts))
        if has_experts:
            up, down = (e.weight for e in self.blocks[True].experts if e.kind == "experts")
            n_values = math.prod(up[1:-1]) + down[-1] + self.model.d_model
            return n_bytes + max(wide, self.value_bytes * self.n_rows * n_values)
        if self.compiles:  # in one kernel each
            return n_bytes + wide / 2
        return n_bytes + max(wide, 2 * FP32_BYTES * stream if self.model.dropout else 0)

    # ---- loss

    def _loss(self) -> float:
        """The loss in its chunks, and the gradients of hidden states and of the head."""
        n_columns, value = self.head.n_outputs, self.value_bytes
        n_chunks = count_logit_chunks(self.n_tokens, n_columns, FP32_BYTES, on_gpu=self.on_gpu)
        n_rows = math.ceil(self.n_tokens / n_chunks)
        is_cast = value < FP32_BYTES
        matrix = value * n_columns * self.model.d_model if is_cast else 0
        # A GPU's matmul gives fp32, but for the loss scale of fp16.
        is_fp16 = self.run.precision.formats.compute == FP16
        product = matrix if is_fp16 or not self.on_gpu else 0
        product += self.head_gradient if self.adds_ends and is_fp16 else 0
        kept = self.hidden + (0 if self.shares_head or self.is_shared else matrix)  # FSDP gathers
        gradient = 0 if self.adds_ends else self.head_gradient
        has_copy = is_cast and not (self.compiles and self.topology.tensor == 1)
        logits = n_rows * n_columns * (value + has_copy * FP32_BYTES)
        rows = value * n_rows * self.model.d_model
        forward = kept + logits + (gradient + rows if n_chunks > 1 else 0)
        errors = n_rows * n_columns * value
        backward = kept + gradient + max(product + errors, matrix * self.is_shared) + 2 * rows
        return max(forward, backward) + TOKEN_BYTES * self.n_tokens

    def _other_losses(self) -> float:
        """Memory of losses whose backward pass comes later."""
        is_late = self.has_last and self.is_piped and self.parallel.schedule == "gpipe"
        gradient = 0 if self.adds_ends else self.head_gradient
        return (self.n_micro_batches - 1) * (gradient + self.hidden) if is_late else 0

    # ---- messages and the rest

    def _exchanged(self) -> float:
        """Messages in a pipeline: two received, one sent, and the last of each stage.

        Only gpipe and 1f1b stages let their schedule send, which waits for each message.
        """
        if not self.is_piped:
            return 0
        sends = self.parallel.schedule in ("interleaved", "zero_bubble")
        return (3 + (len(self.stages) if sends else 0)) * self.stream

    def _batch(self) -> float:
        """Tokens and labels of a step, and the table of rotary positions."""
        train, model = self.run.train, self.model
        n_tokens = train.micro_batch_size * model.sequence_length * self.n_micro_batches
        table = FP32_BYTES * count_rotary_values(model) / self.topology.context
        return 2 * ID_BYTES * n_tokens + table

    def _libraries(self) -> float:
        """CUDA's context, and NCCL's buffers of every group."""
        topology = self.topology
        sizes = [topology.tensor, topology.context, topology.pipeline, topology.n_ranks]
        sizes += [self.n_copies, topology.replicate, topology.expert]
        sizes += [self.n_copies // topology.expert] * (topology.expert > 1)
        if self.run.optimizer.kind == "muon":
            sizes.append(topology.n_ranks // topology.pipeline)
        if self.is_piped and (self.has_first or self.has_last):
            sizes.append(2)
        groups = [PAIR_BYTES if size == 2 else GROUP_BYTES for size in sizes if size > 1]
        return CONTEXT_BYTES + sum(groups)
