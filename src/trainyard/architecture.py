"""The architecture of a model: every layer, its parameters, their shards and initial values.

Everything that depends on the model's layers reads this table: the model itself, its initial
weights, tensor parallelism, plans, imports and exports.

    layer                      weight          bias    sharding      initial weight
    embedding                  (V, D)                  vocabulary    normal
    positions                  (T, D)                  replicated    normal; absent, if rotary
    blocks.N.attention_norm    (D)             (D)     replicated    ones
    blocks.N.attention.qkv     ((H + 2S)K, D)  (..)    column        normal
    blocks.N.attention.query_norm, key_norm
                               (K)                     heads         ones; if query_key_norm "head"
                               (HK), (SK)              features      ones; if it is "all"
    blocks.N.attention.out     (D, HK)         (D)     row           normal, of a residual output
    blocks.N.mlp_norm          (D)             (D)     replicated    ones
    blocks.N.mlp.up            (F, D)          (F)     column        normal; (2F, D), if SwiGLU
    blocks.N.mlp.down          (D, F)          (D)     row           normal, of a residual output
    final_norm                 (D)             (D)     replicated    ones
    head                       (V, D)                  vocabulary    normal; the embedding, if tied

H heads of K features share S heads of keys and values; in GPT-3, S = H and HK = D. RMSNorm has no
bias, nor have linear layers without `model.bias`, nor norms of heads: adding the same to all keys
changes no attention weight. Rows of `qkv` are ordered (S, H/S + 2, K): the queries of a group, its
key and its value; those of SwiGLU (F, 2): gate and value of a feature. So equal shards keep both
whole.

Of t tensor ranks, each holds 1/t of the rows of a vocabulary or column-parallel weight, with their
biases, and 1/t of the columns of a row-parallel one, with the whole bias. Outputs of a
column-parallel layer are inputs of the next, row-parallel one: between the two, ranks need no
communication, except a norm of all features of queries or of keys, whose weight they shard: they
reduce the mean of the squares. A norm of heads is replicated, but each rank has gradients of its
heads only.
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
Fused = tuple[int, tuple[int, ...]]
"""Groups of rows, and the rows of each matrix in a group; (1, ()) for a single matrix."""
Kind = Literal["embedding", "linear", "norm"]
Sharding = Literal["vocabulary", "column", "row", "replicated", "heads", "features"]

_DIMENSIONS = {"vocabulary": 0, "column": 0, "row": 1, "features": 0}
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
    """Mean of its initial values."""
    std: float
    """Their standard deviation, of a normal distribution."""
    of_heads: bool = False
    """Whether tensor ranks replicate it, but each has the gradient of its heads only."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer, whole or as a tensor rank holds it."""

    name: str
    """In the whole model, or in its block."""
    kind: Kind
    """`linear` is a matmul in a block."""
    weight: Shape
    """(rows, D) of an embedding, (outputs, inputs) of a matmul, (features,) of a norm."""
    sharding: Sharding
    has_bias: bool
    std: float = 0.0
    """Standard deviation of the initial weight."""
    fused: Fused = (1, ())
    """How a whole weight alternates the rows of several matrices."""

    @property
    def n_outputs(self) -> int:
        """Outputs of a matmul for one token."""
        return self.weight[0]

    @property
    def n_inputs(self) -> int:
        """Inputs of a matmul for one token."""
        return self.weight[1]

    @property
    def matrices(self) -> list[Shape]:
        """Shapes of the matrices fused into a whole weight, or the weight's own shape."""
        n_groups, rows = self.fused
        return [(n_groups * n, self.n_inputs) for n in rows] or [self.weight]

    @cached_property
    def parameters(self) -> dict[str, ParameterSpec]:
        """Its parameters by name."""
        dimension = _DIMENSIONS.get(self.sharding)
        mean = 1.0 if self.kind == "norm" else 0.0
        weight = ParameterSpec(self.weight, dimension, mean, self.std, self.sharding == "heads")
        if not self.has_bias:
            return {f"{self.name}.weight": weight}
        bias = ParameterSpec(self.weight[:1], 0 if dimension == 0 else None, 0.0, 0.0)
        return {f"{self.name}.weight": weight, f"{self.name}.bias": bias}

    def shard(self, n_ranks: int) -> LayerSpec:
        """Returns what each of a number of tensor ranks holds of it."""
        dimension = _DIMENSIONS.get(self.sharding)
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
    D, F, K = model.d_model, model.d_ff, model.d_head
    n_queries, n_qkv = model.n_heads * K, (model.n_heads + 2 * model.n_key_value_heads) * K
    is_gated, n_groups = model.mlp == "swiglu", model.n_key_value_heads
    qkv = n_groups, (model.n_heads // n_groups * K, K, K)
    up = _linear("mlp.up", (2 * F if is_gated else F, D), "column", model)
    layers = (
        _norm("attention_norm", model),
        replace(_linear("attention.qkv", (n_qkv, D), "column", model), fused=qkv),
        *_query_key_norms(model),
        _linear("attention.out", (D, n_queries), "row", model),
        _norm("mlp_norm", model),
        replace(up, fused=(F, (1, 1))) if is_gated else up,
        _linear("mlp.down", (D, F), "row", model),
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


def rotation_values(model: Model) -> int:
    """Counts the cosines and sines that turn a head's features of a token; 0 if none does."""
    return 2 * model.d_head if model.positions == "rotary" else 0


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
        before = [embedding.shard(tensor)]
        if model.positions == "learned":
            before += [_embedding("positions", model.sequence_length, model, "replicated")]
    if blocks[1] == model.n_layers:
        after = [_norm("final_norm", model), head_layer(model, padded_vocabulary_size, tensor)]
    return {layer.name: layer for layer in before}, {layer.name: layer for layer in after}


def _embedding(name: str, n_rows: int, model: Model, sharding: Sharding) -> LayerSpec:
    shape = (n_rows, model.d_model)
    return LayerSpec(name, "embedding", shape, sharding, has_bias=False, std=model.init_std)


def _linear(name: str, shape: Shape, sharding: Sharding, model: Model) -> LayerSpec:
    std = model.init_std / (math.sqrt(2 * model.n_layers) if sharding == "row" else 1)
    return LayerSpec(name, "linear", shape, sharding, has_bias=model.bias, std=std)


def _norm(
    name: str, model: Model, size: int | None = None, sharding: Sharding = "replicated"
) -> LayerSpec:
    has_bias = model.norm == "layer" and sharding == "replicated"
    return LayerSpec(name, "norm", (size or model.d_model,), sharding, has_bias=has_bias)


def _query_key_norms(model: Model) -> list[LayerSpec]:
    """Lists those of each head, or of all heads together."""
    n_heads = {"none": (), "head": (1, 1), "all": (model.n_heads, model.n_key_value_heads)}
    sizes = [n * model.d_head for n in n_heads[model.query_key_norm]]
    names = ("attention.query_norm", "attention.key_norm")[: len(sizes)]
    sharding: Sharding = "features" if model.query_key_norm == "all" else "heads"
    return [_norm(name, model, size, sharding) for name, size in zip(names, sizes, strict=True)]


def describe_parts(model: Model) -> list[str]:
    """Lists the parts of a model that GPT-3 does not have."""
    shared, scaling = model.n_key_value_heads, model.rotary_scaling
    parts = {
        f"{shared:,} key and value heads": shared != model.n_heads,
        "query-key norm": model.query_key_norm == "head",
        "query-key norm of all heads together": model.query_key_norm == "all",
        "SwiGLU": model.mlp == "swiglu",
        "RMSNorm": model.norm == "rms",
        "norm after attention and MLP": model.norm_place == "after",
        "no biases": not model.bias,
        f"rotary positions of base {model.rotary_base:,.0f}": model.positions == "rotary",
        f"scaled by {scaling.factor:g}" if scaling else "": scaling is not None,
        "attention within documents": model.attention_within_documents,
    }
    return [part for part, is_there in parts.items() if is_there]


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

    For GPT-3 the sum is L(12 D^2 + 13 D) + V D + T D + 2 D.
    """
    ends = _ends(model, padded_vocabulary_size, (0, model.n_layers), 1)
    before, after = (
        {name: count_values({name: layer}) for name, layer in end.items()} for end in ends
    )
    return before | {"blocks": model.n_layers * count_values(block_layers(model))} | after


def parameter_count(model: Model, padded_vocabulary_size: int) -> int:
    """Counts a model's parameters, including padding rows."""
    return sum(parameter_counts(model, padded_vocabulary_size).values())


def count_rotary_values(model: Model) -> int:
    """Counts the cosines and sines of rotary positions."""
    return model.sequence_length * model.d_head if model.positions == "rotary" else 0


def count_logit_chunks(n_tokens: int, n_columns: int, value_bytes: int, *, on_gpu: bool) -> int:
    """Counts the chunks in which the loss computes logits, of `value_bytes`, (tokens, columns)."""
    most_bytes = GPU_LOGIT_BYTES if on_gpu else CPU_LOGIT_BYTES
    return math.ceil(n_tokens / max(1, most_bytes // (n_columns * value_bytes)))
