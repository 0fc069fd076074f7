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
from typing import Any

import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from trainyard.architecture import Shape, find_layer
from trainyard.checkpoint.format import first_problem
from trainyard.config.rules import NEAREST
from trainyard.config.run import Model
from trainyard.config.section import RotaryScaling
from trainyard.errors import CheckpointError, ConfigError
from trainyard.export.huggingface_config import (
    Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
)
from trainyard.files import parse_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_OTHER_HEADS = {"d_head": "d_model / n_heads"}
_ONLY_FOR_TRAINING = (
    *("vocabulary_multiple", "dropout"),
    *("attention_within_documents", "end_of_document_id"),  # without effect on one document
)


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face, in our names."""

    architecture: str
    """Its class in transformers."""
    config: type[Config]
    keys: Mapping[str, str]
    """Our field by key of its config; of scaling, by key in there."""
    parts: Mapping[str, Any]
    """Fields that have one value in all its models, if not that of GPT-3."""
    names: Mapping[str, str]
    """Its layers, one or several, by our layer; N numbers a block."""
    prefix: str
    """Of all names but the head's; models without a head are saved without it."""
    no_weight: str
    """Pattern of buffers that old versions stored with the weights."""
    transposes: bool = False
    """Whether it stores matrices as (in, out)."""
    interleaves: bool = False
    """Whether it interleaves rows of queries, keys and values as we do."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """What transformers takes for absent keys, where we write others."""

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
        return [f"{each}.{kind}" for each in names.split()]

    def their_shapes(self, name: str, shape: Shape, model: Model) -> dict[str, Shape]:
        """Maps the names of our parameter's parts to their shapes."""
        names = self.their_names(name)
        groups, sizes = self._row_parts(name, shape[0], model)
        n_rows = [groups * size for size in sizes]
        n_rows = n_rows if len(names) > 1 else [sum(n_rows)]
        step = -1 if self._is_transposed(name, model) else 1
        return {each: (n, *shape[1:])[::step] for each, n in zip(names, n_rows, strict=True)}

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
            each: part.t() if is_transposed else part
            for each, part in zip(names, parts, strict=True)
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
_ROTARY_KEYS = {
    "num_hidden_layers": "n_layers",
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "head_dim": "d_head",
    "num_key_value_heads": "n_key_value_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "sequence_length",
    "vocab_size": "vocabulary_size",
    "tie_word_embeddings": "tied_embeddings",
    "initializer_range": "init_std",
    "rms_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_base",
    "rope_scaling": "rotary_scaling",
}
LLAMA = Family(
    architecture="LlamaForCausalLM",
    config=LlamaConfig,
    keys=_ROTARY_KEYS,
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
    prefix="model.",
    no_weight=r"model\.layers\.[0-9]+\.self_attn\.rotary_emb\.inv_freq",
)
GPT2 = Family(
    architecture="GPT2LMHeadModel",
    config=GPT2Config,
    keys={
        "n_layer": "n_layers",
        "n_embd": "d_model",
        "n_head": "n_heads",
        "n_inner": "d_ff",
        "n_positions": "sequence_length",
        "vocab_size": "vocabulary_size",
        "tie_word_embeddings": "tied_embeddings",
        "embd_pdrop": "dropout",
        "attn_pdrop": "dropout",
        "resid_pdrop": "dropout",
        "initializer_range": "init_std",
        "layer_norm_epsilon": "layer_norm_epsilon",
    },
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
    prefix="transformer.",
    no_weight=r"transformer\.h\.[0-9]+\.attn\.(masked_)?bias",
    transposes=True,
)
_GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    config=GPTNeoXConfig,
    keys={
        "num_hidden_layers": "n_layers",
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff",
        "max_position_embeddings": "sequence_length",
        "vocab_size": "vocabulary_size",
        "tie_word_embeddings": "tied_embeddings",
        "attention_dropout": "dropout",
        "hidden_dropout": "dropout",
        "initializer_range": "init_std",
        "layer_norm_eps": "layer_norm_epsilon",
        "rotary_emb_base": "rotary_base",
    },
    parts={"positions": "rotary"},
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
    prefix="gpt_neox.",
    no_weight=r"gpt_neox\.layers\.[0-9]+\.attention\.(masked_)?bias"
    r"|gpt_neox\.layers\.[0-9]+\.attention\.rotary_emb\.inv_freq",
    interleaves=True,
    absent={"hidden_act": "gelu", "use_parallel_residual": True, "rotary_pct": 0.25},
)
_QWEN3 = Family(
    architecture="Qwen3ForCausalLM",
    config=Qwen3Config,
    keys=_ROTARY_KEYS,
    parts={**LLAMA.parts, "query_key_norm": "head"},
    names={
        **LLAMA.names,
        "blocks.N.attention.query_norm": "model.layers.N.self_attn.q_norm",
        "blocks.N.attention.key_norm": "model.layers.N.self_attn.k_norm",
    },
    prefix="model.",
    no_weight=LLAMA.no_weight,
)
_OLMO2 = Family(
    architecture="Olmo2ForCausalLM",
    config=Olmo2Config,
    keys=_ROTARY_KEYS,
    parts={**LLAMA.parts, "query_key_norm": "all", "norm_place": "after"},
    names={
        **_QWEN3.names,
        "blocks.N.attention_norm": "model.layers.N.post_attention_layernorm",
        "blocks.N.mlp_norm": "model.layers.N.post_feedforward_layernorm",
    },
    prefix="model.",
    no_weight=LLAMA.no_weight,
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
    family = next((each for each in FAMILIES if names == [each.architecture]), None)
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
