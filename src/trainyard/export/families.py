"""Architectures of Hugging Face that we export and import: one table of keys and names.

    ours                           GPT2LMHeadModel                     Llama, Qwen3, Olmo2ForCausalLM
    embedding.weight               transformer.wte.weight              model.embed_tokens.weight
    blocks.N.attention.qkv.weight  transformer.h.N.attn.c_attn.weight  model.layers.N.self_attn.q_proj.weight,
                                                                       k_proj.weight, v_proj.weight
    blocks.N.mlp.up.weight         transformer.h.N.mlp.c_fc.weight     model.layers.N.mlp.gate_proj.weight,
                                                                       up_proj.weight

They store all queries, then all keys, then all values, in one matrix or three; our rows interleave
them by group, (S, H/S + 2, K), and gates and values of SwiGLU by feature, (F, 2). GPT-2 stores
matrices as (in, out), the others as (out, in), like ours. GPTNeoXForCausalLM stores rows of queries,
keys and values like ours. None has padding rows of the vocabulary.
"""  # noqa: E501

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import BaseModel, Field, ValidationError, computed_field, model_validator
from torch import Tensor

from trainyard.architecture import Shape, find_layer
from trainyard.checkpoint.format import first_problem
from trainyard.config.rules import NEAREST
from trainyard.config.run import Model
from trainyard.config.section import RotaryScaling
from trainyard.errors import CheckpointError, ConfigError
from trainyard.files import parse_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_OTHER_HEADS = {"d_head": "d_model / n_heads"}
_ONLY_FOR_TRAINING = (
    *("vocabulary_multiple", "dropout"),
    *("attention_within_documents", "end_of_document_id"),  # without effect on one document
)


_Size = Annotated[int, Field(ge=1)]


class Config(BaseModel):
    """The keys of a `config.json` that decide what the model computes, with their defaults."""

    vocab_size: _Size
    initializer_range: float = 0.02
    quantization_config: None = Field(default=None, exclude=True)
    is_causal: Literal[True] = Field(default=True, exclude=True)

    @model_validator(mode="after")
    def _has_one_dropout(self) -> Self:
        keys = [key for key in type(self).model_fields if _FIELDS.get(key) == "dropout"]
        if len({getattr(self, key) for key in keys}) > 1:
            *others, last = (f"{key}={getattr(self, key)}" for key in keys)
            raise ValueError(
                f"{', '.join(others)} and {last} differ; they only affect training: make them equal"
            )
        return self


def _read_rope(keys: dict[str, Any], **older: str) -> dict[str, Any]:
    """Moves what rotary positions have in their own table to the older keys beside it.

    As transformers 5 reads it: the table is `rope_scaling`, else `rope_parameters`; what it lacks
    is in the older keys.
    """
    rope = keys.get("rope_scaling") or keys.get("rope_parameters")
    if not isinstance(rope, dict):
        return keys
    rope = dict(rope)
    moved = {key: rope.pop(name) for name, key in older.items() if name in rope}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return keys | moved | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


_GPT2_SYNONYMS = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
}
"""Where both are given, transformers takes the second."""


class GPT2Config(Config):
    """The config.json of a `GPT2LMHeadModel`."""

    model_type: Literal["gpt2"] = "gpt2"
    n_positions: _Size
    n_embd: _Size
    n_layer: _Size
    n_head: _Size
    n_inner: int | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    tie_word_embeddings: bool = True
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    reorder_and_upcast_attn: Literal[False] = False
    add_cross_attention: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _read_synonyms(cls, keys: dict[str, Any]) -> dict[str, Any]:
        return keys | {key: keys[other] for key, other in _GPT2_SYNONYMS.items() if other in keys}

    @computed_field  # type: ignore[prop-decorator]
    @property
    def n_ctx(self) -> int:
        """An older name of `n_positions`, which llama.cpp reads."""
        return self.n_positions


class GPTNeoXConfig(Config):
    """The config.json of a `GPTNeoXForCausalLM`: MLP after attention, all features rotated."""

    model_type: Literal["gpt_neox"] = "gpt_neox"
    max_position_embeddings: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    hidden_act: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    layer_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: Literal[True] = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    use_parallel_residual: Literal[False] = False
    rotary_pct: float = Field(default=1.0, ge=1, le=1)
    rotary_emb_base: float = 10_000.0
    rope_scaling: None = None

    @model_validator(mode="before")
    @classmethod
    def _read_rope_parameters(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Reads `rope_parameters`, which has base and share of features since transformers 5."""
        return _read_rope(keys, rope_theta="rotary_emb_base", partial_rotary_factor="rotary_pct")


class _Llama3Scaling(BaseModel, extra="forbid"):
    """`rope_scaling`."""

    rope_type: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class _RotaryConfig(Config):
    """Keys that Llama, Qwen3 and OLMo 2 share."""

    max_position_embeddings: _Size
    hidden_size: _Size
    intermediate_size: _Size
    num_hidden_layers: _Size
    num_attention_heads: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    hidden_act: Literal["silu"] = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: Literal[False] = False
    attention_dropout: float = Field(default=0.0, ge=0, le=0)
    rope_theta: float = 10_000.0
    rope_scaling: _Llama3Scaling | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_rope_parameters(cls, keys: dict[str, Any]) -> dict[str, Any]:
        """Reads `rope_parameters`, which has both base and scaling since transformers 5."""
        return _read_rope(keys, rope_theta="rope_theta")


class _WholeHeadsConfig(_RotaryConfig):
    """Keys of a config whose heads divide its width."""

    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        if self.hidden_size % self.num_attention_heads:  # transformers refuses it too
            raise ValueError("hidden_size must be divisible by num_attention_heads")
        return self


class LlamaConfig(_WholeHeadsConfig):
    """The config.json of a `LlamaForCausalLM`."""

    model_type: Literal["llama"] = "llama"
    mlp_bias: Literal[False] = False


class Olmo2Config(_WholeHeadsConfig):
    """The config.json of an `Olmo2ForCausalLM`."""

    model_type: Literal["olmo2"] = "olmo2"
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = None
    """Transformers would take 1, and never train that token's embedding."""


class Qwen3Config(_RotaryConfig):
    """The config.json of a `Qwen3ForCausalLM`."""

    model_type: Literal["qwen3"] = "qwen3"
    num_key_value_heads: _Size | None = 32
    head_dim: _Size | None = 128
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = Field(default=None, exclude=True)


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face, in our names."""

    architecture: str
    """Its class in transformers."""
    config: type[Config]
    parts: Mapping[str, Any]
    """Fields that have one value in all its models, if not that of GPT-3."""
    names: Mapping[str, str]
    """Its layers, one or several, by our layer; N numbers a block."""
    transposes: bool = False
    """Whether it stores matrices as (in, out)."""
    interleaves: bool = False
    """Whether it interleaves rows of queries, keys and values as we do."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for absent keys, where we write others."""

    @property
    def keys(self) -> dict[str, str]:
        """Our field by key of its config."""
        keys = {theirs: _FIELDS[theirs] for theirs in self.config.model_fields if theirs in _FIELDS}
        return {theirs: ours for theirs, ours in keys.items() if ours not in self.parts}

    @property
    def prefix(self) -> str:
        """The start of all names but the head's; models without a head are saved without it."""
        return self.names["embedding"].partition(".")[0] + "."

    @property
    def head(self) -> str:
        """Its name of the output matrix."""
        return f"{self.names['head']}.weight"

    def model_of(self, keys: Mapping[str, Any]) -> Model:
        """Reads a config as the model section of a run.

        Raises:
            ValidationError: it has an option that our model lacks.
        """
        config = self.config.model_validate({**self.absent, **keys})
        values = {ours: getattr(config, theirs) for theirs, ours in self.keys.items()}
        fields = {ours: value for ours, value in values.items() if value is not None}
        fields.setdefault("d_ff", 4 * fields["d_model"])  # GPT-2's n_inner
        if scaling := fields.get("rotary_scaling"):
            scales = {ours: getattr(scaling, theirs) for theirs, ours in _SCALING_KEYS.items()}
            fields["rotary_scaling"] = scales
        return Model(**fields, **self.parts)

    def config_of(self, model: Model) -> dict[str, Any]:
        """Describes our model, which must fit, as a config.

        Raises:
            ValidationError: no model of this family has such heads.
        """
        fields = {theirs: getattr(model, ours) for theirs, ours in self.keys.items()}
        for key, value in fields.items():
            if isinstance(value, RotaryScaling):
                scales = {theirs: getattr(value, ours) for theirs, ours in _SCALING_KEYS.items()}
                fields[key] = scales | {"rope_type": "llama3"}
        return {"architectures": [self.architecture], **self.config(**fields).model_dump()}

    def misfits(self, model: Model) -> dict[str, Any]:
        """Maps the fields that no model of this family has so to the values that it would have."""
        try:
            again = self.model_of(self.config_of(model))
        except ValidationError:
            return _OTHER_HEADS
        unused = ("rotary_base",) if model.positions == "learned" else ()
        return {
            name: getattr(again, name)
            for name, value in model
            if name not in (*_ONLY_FOR_TRAINING, *unused) and value != getattr(again, name)
        }

    def their_names(self, name: str) -> list[str]:
        """Translates a parameter's name to those of its parts."""
        layer, _, kind = name.rpartition(".")
        number = re.match(r"blocks\.([0-9]+)", layer)
        theirs = self.names[re.sub(r"^blocks\.[0-9]+", "blocks.N", layer)]
        names = theirs.replace(".N.", f".{number[1]}.") if number else theirs
        return [f"{part}.{kind}" for part in names.split()]

    def their_shapes(self, name: str, shape: Shape, model: Model) -> dict[str, Shape]:
        """Maps the names of our parameter's parts to their shapes."""
        names = self.their_names(name)
        groups, sizes = self._row_parts(name, shape[0], model)
        n_rows = [groups * size for size in sizes]
        n_rows = n_rows if len(names) > 1 else [sum(n_rows)]
        step = -1 if self._is_transposed(name, model) else 1
        return {part: (n, *shape[1:])[::step] for part, n in zip(names, n_rows, strict=True)}

    def to_theirs(self, name: str, tensor: Tensor, model: Model) -> dict[str, Tensor]:
        """Converts our parameter to its parts; views if possible."""
        names = self.their_names(name)
        groups, sizes = self._row_parts(name, len(tensor), model)
        rows = _group(tensor[: groups * sum(sizes)], groups)
        parts = [part.flatten(0, 1) for part in torch.split_with_sizes(rows, sizes, 1)]
        if len(names) < len(parts):
            parts = [torch.cat(parts)]
        is_transposed = self._is_transposed(name, model)
        return {
            their_name: part.t() if is_transposed else part
            for their_name, part in zip(names, parts, strict=True)
        }

    def from_theirs(self, name: str, parts: Sequence[Tensor], model: Model, n_rows: int) -> Tensor:
        """Joins the parts of our parameter; a view if possible.

        Args:
            name: ours.
            parts: in the order of `their_names`.
            model: the shape.
            n_rows: of embedding and head; those above the vocabulary are zero.
        """
        layer = find_layer(model, name)
        if layer.sharding == "vocabulary":
            return F.pad(parts[0], (0, 0, 0, n_rows - len(parts[0])))
        if self._is_transposed(name, model):
            parts = [part.t() for part in parts]
        groups, sizes = self._row_parts(name, layer.weight[0], model)
        if len(parts) < len(sizes):
            parts = torch.split_with_sizes(parts[0], [groups * size for size in sizes])
        if len(parts) == 1:
            return parts[0]
        return torch.cat([_group(part, groups) for part in parts], 1).flatten(0, 1)

    def _is_transposed(self, name: str, model: Model) -> bool:
        return self.transposes and find_layer(model, name).kind == "linear"

    def _row_parts(self, name: str, n_rows: int, model: Model) -> tuple[int, list[int]]:
        """Returns the groups in the rows of our parameter, and the rows of each part in a group."""
        layer = find_layer(model, name)
        n_groups, rows = layer.fused
        if rows and not self.interleaves:
            return n_groups, [*rows]
        return 1, [model.vocabulary_size if layer.sharding == "vocabulary" else n_rows]


def _group(tensor: Tensor, groups: int) -> Tensor:
    return tensor.reshape(groups, -1, *tensor.shape[1:])


_SCALING_KEYS = {
    "factor": "factor",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "original_max_position_embeddings": "original_sequence_length",
}
_FIELDS = {
    **dict.fromkeys(("n_layer", "num_hidden_layers"), "n_layers"),
    **dict.fromkeys(("n_embd", "hidden_size"), "d_model"),
    **dict.fromkeys(("n_head", "num_attention_heads"), "n_heads"),
    **dict.fromkeys(("n_inner", "intermediate_size"), "d_ff"),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), "sequence_length"),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), "dropout"),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), "dropout"),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps"), "layer_norm_epsilon"),
    **dict.fromkeys(("rope_theta", "rotary_emb_base"), "rotary_base"),
    "head_dim": "d_head",
    "num_key_value_heads": "n_key_value_heads",
    "vocab_size": "vocabulary_size",
    "tie_word_embeddings": "tied_embeddings",
    "initializer_range": "init_std",
    "layer_norm_epsilon": "layer_norm_epsilon",
    "rope_scaling": "rotary_scaling",
}
"""Our field by key of a config, of any family."""
BUFFERS = re.compile(
    r"(transformer\.h|gpt_neox\.layers|model\.layers)\.[0-9]+\."
    r"(attn|attention|self_attn)\.((masked_)?bias|rotary_emb\.inv_freq)"
)
"""Names of buffers that old versions stored with the weights."""
LLAMA = Family(
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    parts={"positions": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False, "dropout": 0.0},
    names={
        "embedding": "model.embed_tokens",
        "blocks.N.attention_norm": "model.layers.N.input_layernorm",
        "blocks.N.attention.qkv": "model.layers.N.self_attn.q_proj "
        "model.layers.N.self_attn.k_proj model.layers.N.self_attn.v_proj",
        "blocks.N.attention.out": "model.layers.N.self_attn.o_proj",
        "blocks.N.mlp_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.mlp.up": "model.layers.N.mlp.gate_proj model.layers.N.mlp.up_proj",
        "blocks.N.mlp.down": "model.layers.N.mlp.down_proj",
        "final_norm": "model.norm",
        "head": "lm_head",
    },
)
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    config=GPT2Config,
    parts={},
    names={
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks.N.attention_norm": "transformer.h.N.ln_1",
        "blocks.N.attention.qkv": "transformer.h.N.attn.c_attn",
        "blocks.N.attention.out": "transformer.h.N.attn.c_proj",
        "blocks.N.mlp_norm": "transformer.h.N.ln_2",
        "blocks.N.mlp.up": "transformer.h.N.mlp.c_fc",
        "blocks.N.mlp.down": "transformer.h.N.mlp.c_proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
    transposes=True,
)
_GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    config=GPTNeoXConfig,
    parts={"positions": "rotary", "rotary_scaling": None},
    names={
        "embedding": "gpt_neox.embed_in",
        "blocks.N.attention_norm": "gpt_neox.layers.N.input_layernorm",
        "blocks.N.attention.qkv": "gpt_neox.layers.N.attention.query_key_value",
        "blocks.N.attention.out": "gpt_neox.layers.N.attention.dense",
        "blocks.N.mlp_norm": "gpt_neox.layers.N.post_attention_layernorm",
        "blocks.N.mlp.up": "gpt_neox.layers.N.mlp.dense_h_to_4h",
        "blocks.N.mlp.down": "gpt_neox.layers.N.mlp.dense_4h_to_h",
        "final_norm": "gpt_neox.final_layer_norm",
        "head": "embed_out",
    },
    interleaves=True,
    absent={"hidden_act": "gelu", "use_parallel_residual": True, "rotary_pct": 0.25},
)
_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    parts={**LLAMA.parts, "query_key_norm": "head"},
    names={
        **LLAMA.names,
        "blocks.N.attention.query_norm": "model.layers.N.self_attn.q_norm",
        "blocks.N.attention.key_norm": "model.layers.N.self_attn.k_norm",
    },
)
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    config=Olmo2Config,
    parts={**LLAMA.parts, "query_key_norm": "all", "norm_place": "after"},
    names={
        **_QWEN3.names,
        "blocks.N.attention_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.mlp_norm": "model.layers.N.post_feedforward_layernorm",
    },
)
FAMILIES = (GPT2, _GPT_NEOX, _QWEN3, _OLMO2, LLAMA)
SUPPORTED = ", ".join(sorted(family.architecture for family in FAMILIES))


def find_family(model: Model, families: Sequence[Family] = FAMILIES) -> Family:
    """Finds the family that computes what our model computes.

    Raises:
        ConfigError: there is none; it names the fields that the nearest one lacks.
    """
    pairs = [(family, family.misfits(model)) for family in families]
    family, misfits = min(pairs, key=lambda pair: (pair[1] == _OTHER_HEADS, len(pair[1])))
    if misfits:
        lacks = ", ".join(f"model.{name}={getattr(model, name)!r}" for name in misfits)
        other = f", the nearest of {SUPPORTED}," if len(families) > 1 else ""
        works = " ".join(f"model.{name}={_as_toml(value)}" for name, value in misfits.items())
        raise ConfigError(f"{family.architecture}{other} has no {lacks}", f"{NEAREST}{works}")
    return family


def _as_toml(value: object) -> str:
    return json.dumps("none" if value is None else value)


def read_config(text: bytes, place: str) -> tuple[Family, Model]:
    """Reads a `config.json`: its family and the model section of a run.

    Raises:
        CheckpointError: it has another architecture, or an option that our model lacks.
    """
    try:
        keys = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{place} is not JSON: {error}", "download it again") from None
    names = keys.get("architectures") if isinstance(keys, dict) else None
    family = next((one for one in FAMILIES if names == [one.architecture]), None)
    if family is None:
        raise CheckpointError(
            f"{place}: architectures={names!r:.200} cannot be imported", f"supported: {SUPPORTED}"
        )
    try:
        return family, family.model_of(keys)
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a {family.architecture} that can be imported: {first_problem(error)}",
            "our models have no other option of that key",
        ) from None
