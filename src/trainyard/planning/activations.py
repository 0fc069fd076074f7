"""Activation memory of a micro batch on one rank, layer by layer.

For each token, a block keeps these values for its backward pass, in the compute precision, with D
and F as in the model and t tensor ranks:

    recompute none         residual stream 2 D, inputs of attention and MLP 2 D,
                           queries, keys, values and attention output 4 D / t, MLP 2 F / t
    recompute attention    the same without the 4 D / t
    recompute block        residual stream D

Values inside attention and MLP are outputs of column-parallel and inputs of row-parallel matmuls
(architecture.py), for the parts of GPT-3. SwiGLU keeps 3 F / t; a query-key norm its inputs.

With sequence parallelism, the residual stream and the inputs of both are D / t; the backward pass
gathers the inputs again. Zero bubble and recomputed blocks keep them gathered.

A compiled block keeps other values (torch 2.13): with dropout also a byte for each value of the
MLP's output; recomputing attention, no stream between attention and MLP; no inputs of attention and
MLP where they would be gathered again, or in fp8, and there not the MLP's last F / t either; but
one of these inputs where norms follow attention and MLP. The compiled loss keeps no fp32 copy of
the logits. tests/fake_cuda/test_memory.py compares all of this with CUDA's allocator.
"""

from __future__ import annotations

import math

from trainyard.architecture import (
    block_layers,
    count_logit_chunks,
    head_layer,
    inner_values,
    matmuls,
    rotation_values,
)
from trainyard.config.precisions import FP16
from trainyard.config.rules import fp8_blocks
from trainyard.config.run import Run
from trainyard.planning.resolve import Plan

FP32_BYTES = 4
ID_BYTES = 8
NUMBERS_OF_A_TOKEN = 64
"""Bytes of a row's label, largest logit, loss and similar values."""


class MicroBatch:
    """Bytes of one micro batch on a rank.

    Attributes:
        value: of a number in the compute precision.
        compiles: whether blocks and the loss are compiled.
        n_tokens: on a rank.
        n_residual: of those, tokens in the residual stream.
        vocabulary: rows of the head on a rank.
        stream: the residual stream between two blocks.
        hidden: the head's input.
        head_gradient: of the head's weight.
        shares_head: whether micro batches share the head's cast.
        adds_ends: whether they add to the gradients of embedding and head.
    """

    def __init__(self, run: Run, plan: Plan, on_gpu: bool) -> None:
        self.run, self.topology, self.on_gpu = run, plan.topology, on_gpu
        model, train, topology = run.model, run.train, plan.topology
        self.value = run.precision.formats.compute.n_bytes
        self.compiles = train.compile == "always" or (train.compile == "gpu" and on_gpu)
        self.n_tokens = train.micro_batch_size * model.sequence_length // topology.context
        self.n_residual = self.n_tokens // (topology.tensor if run.parallel.sequence else 1)
        head = head_layer(model, plan.padded_vocabulary_size, topology.tensor)
        self.vocabulary = head.n_outputs
        self.stream = self.value * self.n_residual * model.d_model
        self.hidden = self.value * self.n_tokens * model.d_model
        self.head_gradient = FP32_BYTES * self.vocabulary * model.d_model
        is_whole = on_gpu and topology.data * topology.context == 1
        self.shares_head = is_whole and self.value < FP32_BYTES
        self.adds_ends = is_whole and topology.pipeline == 1

    def block(self, recompute: str, number: int) -> float:
        """Bytes that the block of a number keeps of a micro batch."""
        statistics = 2 * FP32_BYTES * self.n_residual
        if recompute == "block":
            return self.stream
        parallel = self.run.parallel
        are_whole = parallel.sequence and not parallel.gathers_again
        inputs = self.hidden if are_whole else self.stream
        up, _ = matmuls(self.run.model, "mlp", self.topology.tensor)
        inner = inner_values(self.run.model, "mlp", self.topology.tensor)
        mlp: float = self.value * self.n_tokens * inner
        kept = 2 * (self.stream + statistics + self._dropout_keys())
        if self.compiles:
            kept += self.stream / self.value if self.run.model.dropout else 0
            kept -= self.stream if recompute == "attention" else 0
            is_fp8 = number in fp8_blocks(self.run)
            inputs = 0 if is_fp8 or parallel.gathers_again else inputs
            if self.run.model.norm_place == "after" and not inputs:
                kept += self.stream
            mlp = self.value * self.n_tokens * up.n_outputs if is_fp8 else mlp
        if recompute == "attention":
            return kept + inputs + mlp + (self.stream if inputs else 0)
        return kept + 2 * inputs + mlp + self._attention()

    def _attention(self) -> float:
        model, t = self.run.model, self.topology.tensor
        qkv, out = matmuls(model, "attention", t)
        part = self.value * self.n_tokens * out.n_inputs
        shared = self.value * self.n_tokens * (qkv.n_outputs - out.n_inputs) // 2
        inside = self.value * self.n_tokens * inner_values(model, "attention", t)
        inside += part if self.topology.context > 1 else 0
        for name, n_bytes in (("query", part), ("key", shared)):
            norm = block_layers(model, t).get(f"attention.{name}_norm")
            if norm:  # keeps its input too, and a number of all that it normalizes together
                inside += int(n_bytes + FP32_BYTES * n_bytes / self.value / norm.weight[0])
        lse = FP32_BYTES * self.n_tokens * model.n_heads / t
        if self.on_gpu or not model.dropout:
            return inside + lse
        # On a CPU attention weights are kept in fp32, before and after dropout.
        heads = model.n_heads / t / self.topology.context
        weights = FP32_BYTES * heads * model.sequence_length**2 * self.run.train.micro_batch_size
        precise = 3 * FP32_BYTES * part / self.value
        return inside - part - 2 * shared + 2 * weights + precise

    def embedding(self) -> float:
        """Bytes the embedding keeps."""
        masks = self.n_tokens if self.topology.tensor > 1 else 0
        return masks + self._dropout_keys()

    def rotations(self) -> int:
        """A stage's table that turns queries and keys, by the positions of the rank's tokens."""
        model = self.run.model
        n_ranks = 1 if model.attention_within_documents else self.topology.context
        return FP32_BYTES * rotation_values(model) * model.sequence_length // n_ranks

    def documents(self) -> float:
        """What tells the documents of a micro batch apart, for all blocks of a stage.

        Positions turn queries and keys by sequence; flash attention takes lengths, others a mask.
        """
        model, is_half = self.run.model, self.value < FP32_BYTES
        if not model.attention_within_documents:
            return 0
        turned = FP32_BYTES * rotation_values(model)
        is_ring = self.run.parallel.context_method == "ring"
        n_queries = self.n_tokens * (1 if is_ring else self.topology.context)
        has_mask = not (self.on_gpu and is_half)
        return self.n_tokens * turned + has_mask * self.value * n_queries * model.sequence_length

    def _dropout_keys(self) -> float:
        """Random bits of rows and columns, to recompute masks from."""
        if not self.run.model.dropout:
            return 0
        return ID_BYTES * self.n_residual + FP32_BYTES * self.run.model.d_model

    def flowing(self) -> float:
        """Gradients of the values of a block, and those of its MLP."""
        stream, t = self.n_residual * self.run.model.d_model, self.topology.tensor
        flowing = 2 * self.value * stream
        if self.run.parallel.sequence:
            flowing += self.hidden * (2 if self.run.parallel.gathers_again else 1)
        wide: float = self.value * self.n_tokens * inner_values(self.run.model, "mlp", t)
        dropout = 2 * FP32_BYTES * stream if self.run.model.dropout else 0
        if self.compiles:  # in one kernel each
            wide, dropout = wide / 2, 0
        return flowing + max(wide, dropout)

    def between_layers(self) -> float:
        """Gradients of the values of a block, of its layers' inputs and outputs."""
        layers = matmuls(self.run.model, tensor=self.topology.tensor)
        inputs = sum(layer.n_inputs for layer in layers if layer.sharding == "column")
        outputs = sum(layer.n_outputs for layer in layers)
        return self.value * self.n_tokens * (inputs + outputs)

    def loss(self) -> float:
        """The loss in its chunks, and the gradients of hidden states and of the head."""
        V, value = self.vocabulary, self.value
        n_chunks = count_logit_chunks(self.n_tokens, V, FP32_BYTES, on_gpu=self.on_gpu)
        n_rows = math.ceil(self.n_tokens / n_chunks)
        is_cast = value < FP32_BYTES
        matrix = value * V * self.run.model.d_model if is_cast else 0
        # A GPU's matmul gives fp32, but for the loss scale of fp16.
        is_fp16 = self.run.precision.formats.compute == FP16
        product = matrix if is_fp16 or not self.on_gpu else 0
        matrix = 0 if self.shares_head else matrix
        hidden, weight = self.hidden, 0 if self.adds_ends else self.head_gradient
        if self.adds_ends and is_fp16:
            product += self.head_gradient
        has_copy = is_cast and not (self.compiles and self.topology.tensor == 1)
        logits = n_rows * V * (value + has_copy * FP32_BYTES)
        rows = value * n_rows * self.run.model.d_model
        forward = matrix + hidden + logits + (weight + rows if n_chunks > 1 else 0)
        products = matrix + hidden + weight + product + n_rows * V * value + 2 * rows
        return max(forward, products) + NUMBERS_OF_A_TOKEN * self.n_tokens
