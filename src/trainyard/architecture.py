"""The architecture of a model: every layer, its parameters, their shards and initial values.

Everything that depends on the model's layers reads this table: the model itself, its initial
weights, tensor parallelism, plans, imports and exports.

    layer                      weight          bias    sharding      initial weight
    embedding                  (V, D)                  vocabulary    normal
    positions                  (T, D)                  replicated    normal; absent, if rotary
    blocks.N.attention_norm    (D)             (D)     replicated    ones
    blocks.N.attention.qkv     ((H + 2S)K, D)  (..)    column        normal
    blocks.N.attention.query_norm, key_norm
                               (K)                     partial       ones; if query_key_norm "head"
                               (HK), (SK)              features      ones; if it is "all"
    blocks.N.attention.out     (D, HK)         (D)     row           normal, of a residual output
    blocks.N.mlp_norm          (D)             (D)     replicated    ones
    blocks.N.mlp.up            (F, D)          (F)     column        normal; (2F, D), if SwiGLU
    blocks.N.mlp.down          (D, F)          (D)     row           normal, of a residual output
      or, with E experts of F features:
    blocks.N.mlp.router        (E, D)          (E)     partial       normal; `balance` for a bias
    blocks.N.mlp.experts.up    (E, 2, F, D)            column        normal; (E, F, D), if GELU
    blocks.N.mlp.experts.down  (E, D, F)               row           normal, of a residual output
    blocks.N.mlp.shared.up, .down                                    as mlp.up, mlp.down
    final_norm                 (D)             (D)     replicated    ones
    head                       (V, D)                  vocabulary    normal; the embedding, if tied

H heads of K features share S heads of keys and values; in GPT-3, S = H and HK = D. RMSNorm has no
bias, nor have linear layers without `model.bias`, nor norms of heads: adding the same to all keys
changes no attention weight. Rows of `qkv` are ordered (S, H/S + 2, K): the queries of a group, its
key and its value; those of SwiGLU (F, 2): gate and value of a feature. So equal shards keep both
whole, but for more ranks than S, which exchange outputs of `qkv`.

Of t tensor ranks, each holds 1/t of the rows of a vocabulary or column-parallel weight, with their
biases, and 1/t of the columns of a row-parallel one, with the whole bias; so of each expert.
Outputs of a column-parallel layer are inputs of the next, row-parallel one: between the two, ranks
need no communication, except a norm of all features of queries or of keys, whose weight they shard:
they reduce the mean of the squares. A norm of heads is replicated, but each rank has gradients of
its heads only, as it has of a router from its features. Ranks of `parallel.expert` hold whole
experts. The balance of a router has no gradient: the load of experts changes it.

With `model.parametrization = "complete_p"`, a model N = d_model / base_d_model times as wide as the
base, and L = n_layers / base_n_layers times as deep, multiplies (arXiv:2505.01618, table 1 with
alpha = 1; I is the growth of a matrix's inputs: N, but of outputs of experts d_expert's):

                             initial std   AdamW's rate   decay   epsilon     output
    embedding, head          1             1              1       1 / N
    matrices of blocks       I^-1/2        1 / I          I       1 / (N L)
    their biases, norms                    1                      1 / (N L)
    final norm                             1                      1 / N       1 / N, of logits
    attention, MLP                                                            1 / L, of each branch

Deviations of residual outputs keep the sqrt(2 base_n_layers) of the base. Epsilon follows the size
of gradients. Muon's rates: `_muon_rate`; its rate x decay stays. Vectors have no decay.
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
Kind = Literal["embedding", "linear", "norm", "router", "experts"]
Sharding = Literal["vocabulary", "column", "row", "replicated", "partial", "features"]

_DIMENSIONS = {"vocabulary": -2, "column": -2, "row": -1, "features": -1}
CPU_LOGIT_BYTES = 256 * 2**20
GPU_LOGIT_BYTES = 512 * 2**20
"""Most bytes of logits at a time: fewer need less memory, more update the weight's gradient less
often."""
MOST_DRAWN_BYTES = 4 * 2**30
"""Limit on the whole parameters that a rank draws at a time; a larger one is drawn alone."""
PIECE_TOKENS = 2048
"""Fewest tokens that tensor ranks exchange at a time: less takes longer to begin than to send."""


@dataclass(frozen=True)
class Multipliers:
    """What `model.parametrization` multiplies for a parameter; all 1 for the base shape.

    Attributes:
        rate: AdamW's learning rate.
        muon_rate: Muon's.
        decay: AdamW's weight decay.
        epsilon: AdamW's epsilon.
        output: the output of its layer: of a branch on the residual stream, or of the final norm.
    """

    rate: float = 1.0
    muon_rate: float = 1.0
    decay: float = 1.0
    epsilon: float = 1.0
    output: float = 1.0


UNSCALED = Multipliers()  # those of `standard`


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
    is_partial: bool = False
    """Whether tensor ranks replicate it, but each has a part of its gradient."""
    of_experts: bool = False
    """Whether ranks of `parallel.expert` shard its first dimension."""
    is_trained: bool = True
    """Whether it has a gradient."""
    multipliers: Multipliers = UNSCALED
    """What multiplies its learning rate and more."""


@dataclass(frozen=True)
class LayerSpec:
    """One layer, whole or as a tensor rank holds it."""

    name: str
    """In the whole model, or in its block."""
    kind: Kind
    """`linear` is a matmul in a block, of all its tokens."""
    weight: Shape
    """(rows, D) of an embedding, (outputs, inputs) of a matmul, (features,) of a norm; of experts
    (E, .., outputs, inputs)."""
    sharding: Sharding
    has_bias: bool
    std: float = 0.0
    """Standard deviation of the initial weight."""
    fused: Fused = (1, ())
    """How a whole weight alternates the rows of several matrices."""
    n_active: int = 0
    """Experts that a token uses."""
    multipliers: Multipliers = UNSCALED
    """Those of its weight; a bias has the weight's epsilon and output."""

    @property
    def values_per_token(self) -> int:
        """Values of the weight that each token is multiplied by."""
        return math.prod(self.weight[1:]) * (self.n_active or self.weight[0])

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
        dimension = self._dimension
        mean = 1.0 if self.kind == "norm" else 0.0
        partial, of_experts = self.sharding == "partial", self.kind == "experts"
        m = self.multipliers
        weight = ParameterSpec(
            self.weight, dimension, mean, self.std, partial, of_experts, multipliers=m
        )
        if not self.has_bias:
            return {f"{self.name}.weight": weight}
        m = Multipliers(epsilon=m.epsilon, output=m.output)
        dimension = 0 if dimension == 0 else None
        bias = ParameterSpec(self.weight[:1], dimension, 0.0, 0.0, multipliers=m)
        if self.kind == "router":
            balance = replace(bias, is_trained=False)
            return {f"{self.name}.weight": weight, f"{self.name}.balance": balance}
        return {f"{self.name}.weight": weight, f"{self.name}.bias": bias}

    def shard(self, n_ranks: int, n_expert_ranks: int = 1) -> LayerSpec:
        """Returns what each of a number of tensor ranks, and of expert ranks, holds of it."""
        weight, dimension = list(self.weight), self._dimension
        if dimension is not None:
            weight[dimension] //= n_ranks
        if self.kind == "experts":
            weight[0] //= n_expert_ranks
        return replace(self, weight=tuple(weight))

    @property
    def _dimension(self) -> int | None:
        if self.sharding not in _DIMENSIONS:
            return None
        return len(self.weight) + _DIMENSIONS[self.sharding]


Layers = Mapping[str, LayerSpec]
"""By name."""


def padded_vocabulary_size(model: Model, tensor: int = 1) -> int:
    """Rounds the vocabulary up so that `tensor` ranks get equal, aligned shards.

    50257 becomes 50304, 50432, 50688 and 51200 for 1, 2, 4 and 8 ranks, as in Megatron-LM.
    """
    multiple = model.vocabulary_multiple * tensor
    return math.ceil(model.vocabulary_size / multiple) * multiple


@lru_cache(maxsize=1024)
def model_of_block(model: Model, number: int) -> Model:
    """Returns the shape of a block: the model's, or one without experts for the first blocks."""
    is_dense = model.n_experts and number < model.n_dense_blocks
    return model.model_copy(update={"n_experts": 0}) if is_dense else model


def block_groups(model: Model, blocks: Blocks) -> list[tuple[Model, int]]:
    """Lists the kinds of blocks of a stage, by `model_of_block`, and how many there are of each."""
    first, end = blocks
    n_dense = min(max(0, model.n_dense_blocks * bool(model.n_experts) - first), end - first)
    groups = [(model_of_block(model, 0), n_dense), (model, end - first - n_dense)]
    return [(kind, n) for kind, n in groups if n]


@lru_cache(maxsize=1024)
def block_layers(model: Model, tensor: int = 1, expert: int = 1) -> Layers:
    """Maps the layers of a block, by their names in it, as a rank holds them.

    Args:
        model: the shape of the block: see `model_of_block`.
        tensor: ranks that shard each layer.
        expert: ranks that share the experts.
    """
    D, K = model.d_model, model.d_head
    n_queries, n_qkv = model.n_heads * K, (model.n_heads + 2 * model.n_key_value_heads) * K
    n_groups = model.n_key_value_heads
    qkv = n_groups, (model.n_heads // n_groups * K, K, K)
    layers = (
        _norm("attention_norm", model),
        replace(_linear("attention.qkv", (n_qkv, D), "column", model), fused=qkv),
        *_query_key_norms(model),
        _linear("attention.out", (D, n_queries), "row", model),
        _norm("mlp_norm", model),
        *(_experts(model) if model.n_experts else _mlp("mlp", model.d_ff, model)),
    )
    scaled = (_scale(layer, model, in_block=True) for layer in layers)
    return {layer.name: layer.shard(tensor, expert) for layer in scaled}


def _scale(layer: LayerSpec, model: Model, *, in_block: bool = False) -> LayerSpec:
    """Returns a layer as `model.parametrization` has it: see the table above."""
    if model.parametrization == "standard":
        return layer
    width, depth = model.d_model / model.base_d_model, model.n_layers / model.base_n_layers
    m = Multipliers(epsilon=1 / width)
    if not in_block:
        is_last = layer.name == "final_norm"
        return replace(layer, multipliers=replace(m, output=1 / width) if is_last else m)
    is_down = layer.sharding == "row"
    ends = ("attention_norm", "mlp_norm") if model.norm_place == "after" else ()
    is_end = layer.name in ends if ends else is_down
    m = Multipliers(epsilon=1 / width / depth, output=1 / depth if is_end else 1.0)
    if layer.kind == "norm":
        return replace(layer, multipliers=m)
    n_in = n_out = width
    if layer.kind == "router":
        n_out = 1.0
    elif model.base_d_expert and layer.name.startswith(("mlp.experts", "mlp.shared")):
        features = model.d_expert / model.base_d_expert
        n_in, n_out = (features, width) if is_down else (width, features)
    m = replace(m, rate=1 / n_in, decay=n_in, muon_rate=_muon_rate(layer, n_in, n_out))
    std = layer.std * math.sqrt((depth if is_down else 1.0) / n_in)
    return replace(layer, std=std, multipliers=m)


def _muon_rate(layer: LayerSpec, n_in: float, n_out: float) -> float:
    """Returns the multiplier of Muon's rate for a matrix whose sides have grown.

    Features stay of one size if the spectral norm of an update follows sqrt(outputs / inputs)
    (arXiv:2310.17813). That of an orthogonalized one is 1, times Muon's sqrt(max(rows, columns)).
    So the rate is multiplied by the growth of the first over the growth of the second: N^-1/2 if
    both sides grow by N; 1 / N for a router of fewer experts than inputs. Branches count 1 / L,
    and there are L times as many: depth changes nothing.
    """
    rows, columns = layer.matrices[0][-2:]
    size = max(rows, columns) / max(rows / n_out, columns / n_in)
    return math.sqrt(n_out / n_in / size)


def _mlp(name: str, n_features: int, model: Model) -> list[LayerSpec]:
    D, F, is_gated = model.d_model, n_features, model.mlp == "swiglu"
    up = _linear(f"{name}.up", (2 * F if is_gated else F, D), "column", model)
    down = _linear(f"{name}.down", (D, F), "row", model)
    return [replace(up, fused=(F, (1, 1))) if is_gated else up, down]


def _experts(model: Model) -> list[LayerSpec]:
    E, D, F = model.n_experts, model.d_model, model.d_expert
    router = _linear("mlp.router", (E, D), "partial", model)
    up = (E, 2, F, D) if model.mlp == "swiglu" else (E, F, D)
    experts = (
        _linear("mlp.experts.up", up, "column", model),
        _linear("mlp.experts.down", (E, D, F), "row", model),
    )
    n_shared = model.n_shared_experts * F
    return [
        replace(router, kind="router", has_bias=model.balance == "bias"),
        *(replace(each, kind="experts", n_active=model.n_active_experts) for each in experts),
        *(_mlp("mlp.shared", n_shared, model) if n_shared else ()),
    ]


@lru_cache(maxsize=1024)
def matmuls(model: Model, part: str = "", tensor: int = 1) -> tuple[LayerSpec, ...]:
    """Lists the matmuls of a block, or of its `attention` or `mlp`, in order; not of experts."""
    layers = block_layers(model, tensor).values()
    return tuple(each for each in layers if each.kind == "linear" and each.name.startswith(part))


@lru_cache(maxsize=1024)
def expert_layers(model: Model, tensor: int = 1, expert: int = 1) -> tuple[LayerSpec, ...]:
    """Lists the router and the experts of a block."""
    layers = block_layers(model, tensor, expert).values()
    return tuple(each for each in layers if each.kind in ("router", "experts"))


def in_rounds(shapes: Sequence[Shape], n_ranks: int) -> list[list[int]]:
    """Deals matrices to ranks in rounds, the largest first; lists the index of each rank's.

    So the first rank has the largest matrix of every round (`optim/muon.py`).
    """
    largest = sorted(range(len(shapes)), key=lambda number: -math.prod(shapes[number]))
    return [largest[start : start + n_ranks] for start in range(0, len(largest), n_ranks)]


def shard_dimension(shape: Shape, n_ranks: int) -> int:
    """Returns the dimension along which ZeRO shards a parameter: rows.

    Experts may be fewer than ranks: of their weights it is the first that divides evenly.
    """
    even = (d for d, n in enumerate(shape) if len(shape) > 2 and n % n_ranks == 0)
    return next(even, 0)


def attention_values(model: Model, tensor: int = 1) -> tuple[int, int]:
    """Counts the values of a token's queries, and of its keys and values, on a tensor rank."""
    n_shared = max(1, model.n_key_value_heads // tensor)
    return model.n_heads // tensor * model.d_head, 2 * n_shared * model.d_head


def rotation_values(model: Model) -> int:
    """Counts the cosines and sines that turn a head's features of a token; 0 if none does."""
    return 2 * model.d_head if model.positions == "rotary" else 0


@lru_cache(maxsize=1024)
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


def outer_messages(
    model: Model, padded_vocabulary_size: int, blocks: Blocks, tensor: int = 1
) -> list[Layers]:
    """Lists the layers of a stage outside its blocks, by the message of data ranks they are in.

    Embeddings, and final norm with head, or both together if the stage ties them.
    """
    before, after = _ends(model, padded_vocabulary_size, blocks, tensor)
    messages = [{**before, **after}] if before.keys() & after.keys() else [before, after]
    return [message for message in messages if message]


def find_layer(model: Model, parameter: str) -> LayerSpec:
    """Returns the layer of a parameter, given its global name."""
    name = parameter.rpartition(".")[0]
    if name.startswith("blocks."):
        _, number, in_block = name.split(".", 2)
        return replace(block_layers(model_of_block(model, int(number)))[in_block], name=name)
    return rest_layers(model, padded_vocabulary_size(model), (0, model.n_layers))[name]


@lru_cache(maxsize=16)
def _numbered_blocks(model: Model, tensor: int) -> list[list[LayerSpec]]:
    """Lists the layers of every block, with their global names."""
    return [
        [
            replace(layer, name=f"blocks.{number}.{layer.name}")
            for layer in block_layers(model_of_block(model, number), tensor).values()
        ]
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
        norm = _scale(_norm("final_norm", model), model)
        after = [norm, head_layer(model, padded_vocabulary_size, tensor)]
    return {layer.name: layer for layer in before}, {layer.name: layer for layer in after}


def _embedding(name: str, n_rows: int, model: Model, sharding: Sharding) -> LayerSpec:
    shape = (n_rows, model.d_model)
    layer = LayerSpec(name, "embedding", shape, sharding, has_bias=False, std=model.init_std)
    return _scale(layer, model)


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
    sharding: Sharding = "features" if model.query_key_norm == "all" else "partial"
    return [_norm(name, model, size, sharding) for name, size in zip(names, sizes, strict=True)]


def describe_parts(model: Model) -> list[str]:
    """Lists the parts of a model that GPT-3 does not have."""
    shared, scaling = model.n_key_value_heads, model.rotary_scaling
    parts = {
        f"{shared:,} key and value heads": shared != model.n_heads,
        "query-key norm": model.query_key_norm == "head",
        "query-key norm of all heads together": model.query_key_norm == "all",
        "SwiGLU": model.mlp == "swiglu",
        _describe_experts(model): model.n_experts > 0,
        "RMSNorm": model.norm == "rms",
        "norm after attention and MLP": model.norm_place == "after",
        "no biases": not model.bias,
        f"rotary positions of base {model.rotary_base:,.0f}": model.positions == "rotary",
        f"scaled by {scaling.factor:g}" if scaling else "": scaling is not None,
        "attention within documents": model.attention_within_documents,
    }
    return [part for part, is_there in parts.items() if is_there]


def _describe_experts(model: Model) -> str:
    shared = f", {model.n_shared_experts} shared" if model.n_shared_experts else ""
    dense = f", dense blocks first: {model.n_dense_blocks}" if model.n_dense_blocks else ""
    text = f"{model.n_experts} experts of {model.d_expert:,}, {model.n_active_experts} active"
    return f"{text}{shared}{dense}"


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
    groups = block_groups(model, (0, model.n_layers))
    return before | {"blocks": sum(n * count_values(block_layers(m)) for m, n in groups)} | after


def parameter_count(model: Model, padded_vocabulary_size: int) -> int:
    """Counts a model's parameters, including padding rows."""
    return sum(parameter_counts(model, padded_vocabulary_size).values())


def count_idle(model: Model) -> int:
    """Counts the parameters that a token does not use: those of its inactive experts."""
    return sum(
        n_blocks * (math.prod(layer.weight) - layer.values_per_token)
        for kind, n_blocks in block_groups(model, (0, model.n_layers))
        for layer in expert_layers(kind)
    )


def count_rotary_values(model: Model) -> int:
    """Counts the cosines and sines of rotary positions."""
    return model.sequence_length * model.d_head if model.positions == "rotary" else 0


def count_logit_chunks(n_tokens: int, n_columns: int, value_bytes: int, *, on_gpu: bool) -> int:
    """Counts the chunks in which the loss computes logits, of `value_bytes`, (tokens, columns)."""
    most_bytes = GPU_LOGIT_BYTES if on_gpu else CPU_LOGIT_BYTES
    return math.ceil(n_tokens / max(1, most_bytes // (n_columns * value_bytes)))


def size_of_pieces(n_tokens: int, n_sequences: int, tensor: int) -> tuple[int, int]:
    """Returns what tensor ranks exchange at a time: so many sequences, or one's equal part.

    Messages of one sequence need no copy, and the last of two is hidden by a matmul of the first.

    Args:
        n_tokens: of a sequence on a rank.
        n_sequences: of a micro batch.
        tensor: the ranks.

    Returns:
        sequences in a piece, and pieces of a sequence; one of them is 1.
    """
    least, multiple = PIECE_TOKENS, 16  # rows of matmuls in fp8
    divisors = (n for n in range(1, n_sequences) if n_sequences % n == 0)
    several = (n for n in divisors if n * n_tokens >= least and n * n_tokens % multiple == 0)
    halves = n_sequences == 1 and n_tokens >= 2 * least and n_tokens % math.lcm(least, tensor) == 0
    return next(several, n_sequences), 2 if halves and n_tokens // 2 % tensor == 0 else 1


def count_pieces(n_tokens: int, n_sequences: int, tensor: int) -> int:
    """Counts the pieces of a micro batch, like `size_of_pieces`."""
    in_piece, pieces = size_of_pieces(n_tokens, n_sequences, tensor)
    return n_sequences // in_piece * pieces
