"""The architecture of a model: every layer, its parameters, their shards and initial values.

Everything that depends on the model's layers reads this table: the model itself, its initial
weights, tensor parallelism, plans, imports and exports.

    layer                      weight    bias    sharding      initial weight
    embedding                  (V, D)            vocabulary    normal
    positions                  (T, D)            replicated    normal
    blocks.N.attention_norm    (D)       (D)     replicated    ones
    blocks.N.attention.qkv     (3D, D)   (3D)    column        normal
    blocks.N.attention.out     (D, D)    (D)     row           normal, of a residual output
    blocks.N.mlp_norm          (D)       (D)     replicated    ones
    blocks.N.mlp.up            (F, D)    (F)     column        normal
    blocks.N.mlp.down          (D, F)    (D)     row           normal, of a residual output
    final_norm                 (D)       (D)     replicated    ones
    head                       (V, D)            vocabulary    normal; the embedding, if tied

Of t tensor ranks, each holds 1/t of the rows of a vocabulary or column-parallel weight, with their
biases, and 1/t of the columns of a row-parallel one, with the whole bias. Outputs of a
column-parallel layer are inputs of the next, row-parallel one: between the two, ranks need no
communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal

from trainyard.config.run import Model

Shape = tuple[int, ...]
Blocks = tuple[int, int]
"""The first block of a pipeline stage and one past its last."""
Kind = Literal["embedding", "linear", "norm"]
Sharding = Literal["vocabulary", "column", "row", "replicated"]

_DIMENSIONS = {"vocabulary": 0, "column": 0, "row": 1, "replicated": None}
CPU_LOGIT_BYTES = 256 * 2**20
GPU_LOGIT_BYTES = 512 * 2**20
"""Most bytes of logits at a time: fewer need less memory, more update the weight's gradient less
often."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter."""

    shape: Shape
    dimension: int | None
    """The dimension that tensor ranks shard; None if they replicate it."""
    mean: float
    """Of its initial values."""
    std: float
    """Their standard deviation, of a normal distribution."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer, whole or as a tensor rank holds it."""

    name: str
    """In the whole model, or in its block."""
    kind: Kind
    """`linear` is a matmul in a block."""
    weight: Shape
    """(rows, D) of an embedding, (outputs, inputs) of a matmul, (D,) of a norm."""
    sharding: Sharding
    has_bias: bool
    std: float = 0.0
    """Standard deviation of the initial weight."""
    fused: Shape = ()
    """(groups, matrices, rows) of a whole weight that alternates the rows of several matrices."""

    @property
    def n_outputs(self) -> int:
        """Of a matmul, for a token."""
        return self.weight[0]

    @property
    def n_inputs(self) -> int:
        """Of a matmul, for a token."""
        return self.weight[1]

    @property
    def n_fused(self) -> int:
        """Matrices fused into the weight."""
        return self.fused[1] if self.fused else 1

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Its parameters by name."""
        dimension = _DIMENSIONS[self.sharding]
        mean = 1.0 if self.kind == "norm" else 0.0
        weight = ParameterSpec(self.weight, dimension, mean, self.std)
        if not self.has_bias:
            return {f"{self.name}.weight": weight}
        bias = ParameterSpec(self.weight[:1], 0 if dimension == 0 else None, 0.0, 0.0)
        return {f"{self.name}.weight": weight, f"{self.name}.bias": bias}

    def shard(self, n_ranks: int) -> LayerSpec:
        """Returns what each of a number of tensor ranks holds of it."""
        dimension = _DIMENSIONS[self.sharding]
        if dimension is None:
            return self
        weight = list(self.weight)
        weight[dimension] //= n_ranks
        return replace(self, weight=tuple(weight))


Layers = Mapping[str, LayerSpec]
"""By name."""


def padded_vocabulary_size(model: Model, tensor: int = 1) -> int:
    """Rounds the vocabulary up so that `tensor` ranks get equal, aligned shards.

    50257 becomes 50304, 50432, 50688 and 51200 for 1, 2, 4 and 8 ranks, as in Megatron-LM.
    """
    multiple = model.vocabulary_multiple * tensor
    return math.ceil(model.vocabulary_size / multiple) * multiple


@lru_cache(maxsize=1024)
def block_layers(model: Model, tensor: int = 1) -> Layers:
    """Maps the layers of a block, by their names in it, as one of `tensor` ranks holds them."""
    D, F, H = model.d_model, model.d_ff, model.n_heads
    std, residual_std = model.init_std, model.init_std / math.sqrt(2 * model.n_layers)
    fused = (H, 3, D // H)
    layers = (
        _norm("attention_norm", model),
        LayerSpec("attention.qkv", "linear", (3 * D, D), "column", True, std, fused),
        LayerSpec("attention.out", "linear", (D, D), "row", has_bias=True, std=residual_std),
        _norm("mlp_norm", model),
        LayerSpec("mlp.up", "linear", (F, D), "column", has_bias=True, std=std),
        LayerSpec("mlp.down", "linear", (D, F), "row", has_bias=True, std=residual_std),
    )
    return {layer.name: layer.shard(tensor) for layer in layers}


def matmuls(model: Model, part: str = "", tensor: int = 1) -> list[LayerSpec]:
    """Lists the matmuls of a block, or of its `attention` or `mlp`, in order."""
    layers = block_layers(model, tensor).values()
    return [each for each in layers if each.kind == "linear" and each.name.startswith(part)]


def in_rounds(shapes: Sequence[Shape], n_ranks: int) -> list[list[int]]:
    """Deals matrices to ranks in rounds, the largest first; lists the index of each rank's.

    So the first rank has the largest matrix of every round (`optim/muon.py`).
    """
    largest = sorted(range(len(shapes)), key=lambda number: -math.prod(shapes[number]))
    return [largest[start : start + n_ranks] for start in range(0, len(largest), n_ranks)]


def inner_values(model: Model, part: str, tensor: int = 1) -> int:
    """Counts the values of a token that a part of a block keeps between its matmuls."""
    layers = matmuls(model, part, tensor)
    return sum(each.n_outputs if each.sharding == "column" else each.n_inputs for each in layers)


def head_layer(model: Model, padded_vocabulary_size: int, tensor: int = 1) -> LayerSpec:
    """Returns the output matrix, (V, D): the embedding's, if tied."""
    name = "embedding" if model.tied_embeddings else "head"
    return _embedding(name, padded_vocabulary_size, model, "vocabulary").shard(tensor)


def stage_layers(
    model: Model, padded_vocabulary_size: int, blocks: Blocks | None = None, tensor: int = 1
) -> Layers:
    """Maps the layers of a pipeline stage, as one of its tensor ranks holds them.

    Args:
        model: the shape.
        padded_vocabulary_size: rows of the embedding.
        blocks: those of the stage; absent: all, which makes it the whole model.
        tensor: ranks that shard each layer.
    """
    blocks = blocks or (0, model.n_layers)
    before, after = _ends(model, padded_vocabulary_size, blocks, tensor)
    inside = itertools.chain(*_numbered_blocks(model, tensor)[slice(*blocks)])
    return {**before, **{layer.name: layer for layer in inside}, **after}


def rest_layers(
    model: Model, padded_vocabulary_size: int, blocks: Blocks, tensor: int = 1
) -> Layers:
    """Maps the layers of a stage outside its blocks, like `stage_layers`."""
    before, after = _ends(model, padded_vocabulary_size, blocks, tensor)
    return {**before, **after}


def find_layer(model: Model, parameter: str) -> LayerSpec:
    """Returns the layer of a parameter, given its global name."""
    name = parameter.rpartition(".")[0]
    if name.startswith("blocks."):
        return replace(block_layers(model)[name.split(".", 2)[2]], name=name)
    return rest_layers(model, padded_vocabulary_size(model), (0, model.n_layers))[name]


@lru_cache(maxsize=16)
def _numbered_blocks(model: Model, tensor: int) -> list[list[LayerSpec]]:
    """Lists the layers of every block, with their global names."""
    layers = block_layers(model, tensor).values()
    return [
        [replace(layer, name=f"blocks.{number}.{layer.name}") for layer in layers]
        for number in range(model.n_layers)
    ]


@lru_cache(maxsize=1024)
def _ends(
    model: Model, padded_vocabulary_size: int, blocks: Blocks, tensor: int
) -> tuple[Layers, Layers]:
    """Maps the layers before the first and after the last block of a stage."""
    before, after = [], []
    if blocks[0] == 0:
        embedding = _embedding("embedding", padded_vocabulary_size, model, "vocabulary")
        positions = _embedding("positions", model.sequence_length, model, "replicated")
        before = [embedding.shard(tensor), positions]
    if blocks[1] == model.n_layers:
        after = [_norm("final_norm", model), head_layer(model, padded_vocabulary_size, tensor)]
    return {layer.name: layer for layer in before}, {layer.name: layer for layer in after}


def _embedding(name: str, n_rows: int, model: Model, sharding: Sharding) -> LayerSpec:
    shape = (n_rows, model.d_model)
    return LayerSpec(name, "embedding", shape, sharding, has_bias=False, std=model.init_std)


def _norm(name: str, model: Model) -> LayerSpec:
    return LayerSpec(name, "norm", (model.d_model,), "replicated", has_bias=True)


def parameters_of(layers: Layers) -> dict[str, ParameterSpec]:
    """Maps the names of parameters to what they are."""
    return {name: each for layer in layers.values() for name, each in layer.parameters.items()}


def shapes_of(layers: Layers) -> dict[str, Shape]:
    """Maps the names of parameters to their shapes."""
    return {name: parameter.shape for name, parameter in parameters_of(layers).items()}


def parameter_shapes(model: Model, padded_vocabulary_size: int) -> dict[str, Shape]:
    """Maps every parameter's global name, as in `GPT.state_dict()`, to its shape."""
    return shapes_of(stage_layers(model, padded_vocabulary_size))


def count_values(layers: Layers) -> int:
    """Counts the values of all parameters."""
    return sum(math.prod(shape) for shape in shapes_of(layers).values())


def parameter_counts(model: Model, padded_vocabulary_size: int) -> dict[str, int]:
    """Counts a model's parameters by part, including padding rows; a tied matrix counts once.

    For GPT-3 shapes the sum is L(12 D^2 + 13 D) + V D + T D + 2 D.
    """
    ends = _ends(model, padded_vocabulary_size, (0, model.n_layers), 1)
    before, after = (
        {name: count_values({name: layer}) for name, layer in end.items()} for end in ends
    )
    return before | {"blocks": model.n_layers * count_values(block_layers(model))} | after


def parameter_count(model: Model, padded_vocabulary_size: int) -> int:
    """Counts a model's parameters, including padding rows."""
    return sum(parameter_counts(model, padded_vocabulary_size).values())


def count_logit_chunks(n_tokens: int, n_columns: int, value_bytes: int, *, on_gpu: bool) -> int:
    """Counts the chunks in which the loss computes logits, of `value_bytes`, (tokens, columns)."""
    most_bytes = GPU_LOGIT_BYTES if on_gpu else CPU_LOGIT_BYTES
    return math.ceil(n_tokens / max(1, most_bytes // (n_columns * value_bytes)))
