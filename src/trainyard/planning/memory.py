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

With sequence parallelism, the residual stream and the inputs of both are D / t; the backward pass
gathers the inputs again. Zero bubble and recomputed blocks keep them gathered.

A compiled block keeps other values (torch 2.13): with dropout also a byte for each value of the
MLP's output; recomputing attention, no stream between attention and MLP; no inputs of attention and
MLP where they would be gathered again, or in fp8, and there not the MLP's last F / t either; but
one of these inputs where norms follow attention and MLP. The compiled loss keeps no fp32 copy of
the logits. tests/fake_cuda/test_memory.py compares all of this with CUDA's allocator.

The simulation (simulate/simulation.py) runs the real step without compilation and agrees within 10
per cent, never above these.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from trainyard.architecture import (
    count_logit_chunks,
    count_rotary_values,
    inner_values,
    rotation_values,
    shapes_of,
)
from trainyard.config.precisions import FP16
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan
from trainyard.planning.rank import FP32_BYTES, Rank, count_fp8_blocks
from trainyard.planning.saving import host_bytes
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
    return RankMemory(pipeline_rank, moment, items, host_bytes(run, plan))


def busiest_memory(run: Run, plan: Plan, on_gpu: bool = True) -> RankMemory:
    """Returns the memory of the rank that needs most."""
    ranks = [rank_memory(run, plan, rank, on_gpu) for rank in range(plan.topology.pipeline)]
    return max(ranks, key=lambda memory: memory.peak_bytes)


Items = dict[str, float]


class _Memory(Rank):
    """Bytes of what one rank holds.

    Attributes:
        compiles: whether blocks and the loss are compiled.
        stream: bytes of the residual stream between two blocks, of a micro batch.
        hidden: bytes of the head's input.
        head_gradient: bytes of the gradient of the head's weight.
        shares_head: whether micro batches share the head's cast.
        adds_ends: whether they add to the gradients of embedding and head.
        is_shared: whether other ranks have the same parameters, or ZeRO shards them.
    """

    def __init__(self, run: Run, plan: Plan, pipeline_rank: int, on_gpu: bool) -> None:
        super().__init__(run, plan, pipeline_rank)
        self.on_gpu, value, d_model = on_gpu, self.value_bytes, run.model.d_model
        self.is_shared = self.topology.data * self.topology.context > 1
        compile = run.train.compile
        self.compiles = compile == "always" or (compile == "gpu" and on_gpu)
        self.stream = value * self.n_residual * d_model
        self.hidden = value * self.n_tokens * d_model
        self.head_gradient = FP32_BYTES * self.head.n_outputs * d_model
        self.shares_head = on_gpu and not self.is_shared and value < FP32_BYTES
        self.adds_ends = on_gpu and not self.is_shared and not self.is_piped
        self.waits = self.has_first and self.has_last and run.model.tied_embeddings
        self._count_parameters()
        # Without FSDP, micro batches share one cast of each weight, except in recomputed blocks.
        self.casts = run.precision.formats.matrices.weight != run.precision.formats.compute
        self.shares_casts = self.casts and not self.is_shared
        self.shares_casts &= run.parallel.recompute != "block"

    def _count_parameters(self) -> None:
        """Counts values before ZeRO shards them, and the bytes that the rank holds."""
        whole, held = Counter[tuple[bool, int]](), Counter[tuple[bool, int]]()
        layers = [(True, self.block, self.n_blocks)]
        layers += [(False, outer, 1) for outer in self.outer_layers]
        for in_block, group, n in layers:
            for shape in shapes_of(group).values():
                whole[in_block, len(shape)] += n * math.prod(shape)
                held[in_block, len(shape)] += n * self.share(shape)
        self.block_values = sum(n for (in_block, _), n in whole.items() if in_block)
        self.outer_values = whole.total() - self.block_values
        self.one_block = self.block_values // self.n_blocks
        self.held_gradient_bytes = FP32_BYTES * held.total()
        stored = [(self.run.stored(*kind), n) for kind, n in held.items()]
        # FSDP sums in fp32; without it a gradient has the format of its weight.
        formats = [(self.run.stored(*kind).weight.n_bytes, n) for kind, n in whole.items()]
        self.gradient_bytes = sum(n * (FP32_BYTES if self.is_shared else b) for b, n in formats)
        self.weight_bytes = sum(each.weight.bytes_of(n) for each, n in stored)
        self.state_bytes = sum(each.state_bytes(n) for each, n in stored)

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
        is_before_all_backward = self.is_piped and self.parallel.schedule == "gpipe"
        return {
            "gradients": 0 if is_before_all_backward else self._gradients(),
            "gathered weights": self._gathered(n_at_once=1),
            "activations": self._activations(self._in_flight()),
            "logits and loss": (self._loss() if self.has_last else 0) + self._other_losses(),
            "buffers": self._batch() + self._last_message(),
        }

    def in_backward(self) -> Items:
        """The backward pass of the last block of a stage."""
        waiting = self.head_gradient if self.waits and not self.adds_ends else 0
        last = self.stages[-1][1]
        in_fp8 = count_fp8_blocks(self.run, (last - 1, last)) > 0
        recomputed = self._block("none", in_fp8) - self._block("block", in_fp8)
        return {
            "gradients": self._gradients() + self._gradients_of_a_block(),
            "gathered weights": self._gathered(n_at_once=3),
            "activations": self._activations(self._in_flight()),
            "logits and loss": waiting + self._other_losses(),
            "recomputing": recomputed if self.parallel.recompute == "block" else 0,
            "buffers": self._batch() + self._activation_gradients() + self._last_message(),
        }

    def at_end_of_backward(self) -> Items:
        """The backward pass of the embedding, with activations only of other micro batches."""
        n_heads = 1 if not self.waits else 2 if self.n_micro_batches == 1 else 3
        of_embedding = n_heads * self.head_gradient if self.has_first and not self.adds_ends else 0
        first, *others = self._in_flight()
        buffers = FP32_BYTES * (self.outer_values + self.one_block) if self.is_shared else 0
        return {
            "gradients": self._gradients(at_end=True) + of_embedding,
            "gathered weights": self._gathered(n_at_once=1),
            "activations": self._activations([max(0, first - 1), *others]) + self._embedding(),
            "buffers": self._batch() + buffers + FP32_BYTES * self.n_residual * self.model.d_model,
        }

    def at_reduction(self) -> Items:
        """The end of a step, when gradients are reduced."""
        largest = max(self.one_block, self.outer_values // len(self.stages))
        is_whole = self.is_piped or not self.is_shared
        return {
            "gradients": self.gradient_bytes if is_whole else self.held_gradient_bytes,
            "gathered weights": self._gathered(n_at_once=1) if self.is_piped else 0,
            "buffers": self._batch() + (2 * largest * FP32_BYTES if self.is_shared else 0),
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
        is_whole = self.n_shards == 1
        return {
            "gradients": self.gradient_bytes if is_whole else self.held_gradient_bytes,
            "buffers": self._batch() + n_bytes,
        }

    # ---- weights and gradients

    def _gradients(self, *, at_end: bool = False) -> float:
        """Gradients of earlier micro batches, or, at the end of the first, of this one."""
        is_whole = not self.parallel.shards_gradients or self.is_piped or not self.is_shared
        if self.n_micro_batches == 1 and not self.is_piped:
            if not at_end:
                n_ends = 1 if self.model.tied_embeddings else 2
                return self.head_gradient * n_ends if self.adds_ends else 0
            is_whole = not self.is_shared
        return self.gradient_bytes if is_whole else self.held_gradient_bytes

    def _gradients_of_a_block(self) -> float:
        """Gradient of the largest matrix, before accumulation; of all when sharded."""
        largest, value = max(math.prod(layer.weight) for layer in self.matmuls), self.value_bytes
        if self.shares_casts and not self.is_piped:  # its matmul adds to the sum, if there is one
            return largest * (FP32_BYTES if self.n_micro_batches == 1 else value)
        if not self.is_shared:
            return largest * (value + (FP32_BYTES if value < FP32_BYTES else 0))
        return self.one_block * (value + FP32_BYTES)

    def _gathered(self, n_at_once: int) -> float:
        """Weights in the compute precision, besides the stored ones.

        Args:
            n_at_once: blocks gathered at the same time with ZeRO 3; below it, all stay.
        """
        if not self.is_shared:
            shares_head = self.has_last and self.shares_head
            n_values = self.head_gradient // FP32_BYTES if shares_head else 0
            if self.casts:
                n_values += self.block_values if self.shares_casts else self.one_block
            return self.value_bytes * n_values
        n_blocks = self.n_blocks
        if self.parallel.shards_weights:
            n_blocks = min(n_blocks, n_at_once)
        return FP32_BYTES * self.outer_values + self.value_bytes * self.one_block * n_blocks

    def _last_message(self) -> float:
        """The last gradients sent with ZeRO 2 and 3, which FSDP2 keeps for a while."""
        sends_each = self.parallel.shards_gradients and self.is_shared and not self.is_piped
        return FP32_BYTES * self.outer_values if sends_each and self.n_micro_batches > 1 else 0

    # ---- activations

    def _in_flight(self) -> list[int]:
        """Micro batches in flight, for each stage of this rank."""
        n_ranks, n_chunks = self.topology.pipeline, len(self.stages)
        return micro_batches_in_flight(
            self.parallel.schedule, self.pipeline_rank, n_ranks, n_chunks, self.n_micro_batches
        )

    def _activations(self, in_flight: list[int]) -> float:
        total, recompute = 0.0, self.parallel.recompute
        is_split = self.is_piped and self.parallel.schedule == "zero_bubble"
        for n, (first, end) in zip(in_flight, self.stages, strict=True):
            n_fp8 = count_fp8_blocks(self.run, (first, end))
            total += n * (end - first - n_fp8) * self._block(recompute, in_fp8=False)
            total += n * n_fp8 * self._block(recompute, in_fp8=True)
            total += n * self._embedding() if first == 0 else 0
            total += n * (self.stream + self._documents())  # the stage's output
            if is_split and self.pipeline_rank > 0:
                # Kept for the gradients of weights, computed that many micro batches later.
                n_blocks = (self.pipeline_rank + 1) * (end - first) / len(self.stages)
                inputs = sum(each.n_inputs for each in self.matmuls if each.sharding == "column")
                outputs = sum(each.n_outputs for each in self.matmuls)
                total += n_blocks * self.value_bytes * self.n_tokens * (inputs + outputs)
            if end == self.model.n_layers:
                total += n * self.stream + (self.hidden if self.parallel.sequence else 0)
        return total

    def _block(self, recompute: str, in_fp8: bool) -> float:
        """What a block keeps of a micro batch."""
        if recompute == "block":
            return self.stream
        parallel, norms_after = self.parallel, self.model.norm_place == "after"
        are_whole = parallel.sequence and not parallel.gathers_again
        inputs = self.hidden if are_whole else self.stream
        # Not compiled, SwiGLU keeps its gates after SiLU too.
        inner = 2 * self.block["mlp.up"].n_outputs
        statistics = 2 * FP32_BYTES * self.n_residual
        kept: float = 2 * (self.stream + statistics + self._dropout_keys())
        if self.compiles:
            kept += self.stream / self.value_bytes if self.model.dropout else 0
            kept -= self.stream if recompute == "attention" else 0
            inputs = 0 if in_fp8 or parallel.gathers_again else inputs
            kept += self.stream if norms_after and not inputs else 0
            inner = inner_values(self.model, "mlp", self.topology.tensor)
            inner = self.block["mlp.up"].n_outputs if in_fp8 else inner
        kept += self.value_bytes * self.n_tokens * inner
        if recompute == "attention":
            return kept + inputs + (self.stream if inputs else 0)
        return kept + 2 * inputs + self._attention()

    def _attention(self) -> float:
        """Queries, keys, values and what attention itself keeps."""
        model, t = self.model, self.topology.tensor
        n_out, n_qkv = self.block["attention.out"].n_inputs, self.block["attention.qkv"].n_outputs
        part = self.value_bytes * self.n_tokens * n_out
        shared = self.value_bytes * self.n_tokens * (n_qkv - n_out) // 2
        inside = self.value_bytes * self.n_tokens * inner_values(model, "attention", t)
        inside += part if self.topology.context > 1 else 0
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
        if not self.model.dropout:
            return 0
        return ID_BYTES * self.n_residual + FP32_BYTES * self.model.d_model

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

    def _activation_gradients(self) -> float:
        """Gradients of the values of a block, and those of its MLP."""
        stream = self.n_residual * self.model.d_model
        n_bytes = 2 * self.value_bytes * stream
        if self.parallel.sequence:
            n_bytes += self.hidden * (2 if self.parallel.gathers_again else 1)
        inner = inner_values(self.model, "mlp", self.topology.tensor)
        wide: float = self.value_bytes * self.n_tokens * inner
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
        kept = self.hidden + (0 if self.shares_head else matrix)
        gradient = 0 if self.adds_ends else self.head_gradient
        has_copy = is_cast and not (self.compiles and self.topology.tensor == 1)
        logits = n_rows * n_columns * (value + has_copy * FP32_BYTES)
        rows = value * n_rows * self.model.d_model
        forward = kept + logits + (gradient + rows if n_chunks > 1 else 0)
        backward = kept + gradient + product + n_rows * n_columns * value + 2 * rows
        return max(forward, backward) + TOKEN_BYTES * self.n_tokens

    def _other_losses(self) -> float:
        """Memory of losses whose backward pass, or half of it, comes later."""
        if not (self.has_last and self.is_piped):
            return 0
        schedule, gradient = self.parallel.schedule, self.head_gradient
        if schedule == "gpipe":
            return (self.n_micro_batches - 1) * (gradient + self.hidden)
        return self.pipeline_rank * gradient if schedule == "zero_bubble" else 0

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
        sizes += [self.n_copies, topology.replicate]
        if self.run.optimizer.kind == "muon":
            sizes.append(topology.n_ranks // topology.pipeline)
        if self.is_piped and (self.has_first or self.has_last):
            sizes.append(2)
        groups = [PAIR_BYTES if size == 2 else GROUP_BYTES for size in sizes if size > 1]
        return CONTEXT_BYTES + sum(groups)
