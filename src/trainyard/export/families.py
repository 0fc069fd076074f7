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
keys and values like ours. None has padding rows of the vocabulary. Olmoe, Qwen3Moe and
MixtralForCausalLM store each matrix of each expert:

    blocks.N.mlp.experts.up.weight, (E, 2, F, D)    model.layers.N.mlp.experts.E.gate_proj.weight,
                                                    up_proj.weight; of Mixtral w1, w3
"""  # noqa: E501

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import Annotated, Any, Literal, Self

import torch
import torch.nn.functional as F
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from torch import Tensor

from trainyard.architecture import Shape, find_layer
from trainyard.checkpoint.format import first_problem
from trainyard.config.rules import NEAREST
from trainyard.config.run import Model
from trainyard.config.section import as_toml
from trainyard.errors import CheckpointError, ConfigError
from trainyard.files import parse_json

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
BUFFERS = re.compile(
    r"(transformer\.h|gpt_neox\.layers|model\.layers)\.[0-9]+\."
    r"(attn|attention|self_attn)\.((masked_)?bias|rotary_emb\.inv_freq)"
)
"""Names of buffers that old versions stored with the weights."""

_OTHER_HEADS = {"d_head": "d_model / n_heads"}
_ONLY_FOR_TRAINING = (
    *("vocabulary_multiple", "dropout"),
    *("attention_within_documents", "end_of_document_id"),  # without effect on one document
    *("balance_coefficient", "router_z_loss"),
    *("parametrization", "base_d_model", "base_n_layers", "base_d_expert"),  # in the weights
)
_OF_EXPERTS = (
    *("n_active_experts", "d_expert", "n_shared_experts", "n_dense_blocks", "balance"),
    *("router", "router_normalized", "router_scale", "n_expert_groups", "n_active_groups"),
)


class Config(BaseModel):
    """The keys of a `config.json` that decide what the model computes; a field for each."""

    @model_validator(mode="after")
    def _fits_our_model(self, info: ValidationInfo) -> Self:
        family: Family = info.context  # type: ignore[assignment]
        drops = {k: getattr(self, k) for k, ours in family.fields.items() if ours == "dropout"}
        if len(set(drops.values())) > 1:
            *others, last = (f"{key}={value}" for key, value in drops.items())
            raise ValueError(
                f"{', '.join(others)} and {last} differ; they only affect training: make them equal"
            )
        keys = dict(self)
        if family.needs_whole_heads and keys["hidden_size"] % keys["num_attention_heads"]:
            raise ValueError("hidden_size must be divisible by num_attention_heads")
        return self


class _Scaling(BaseModel):
    """`rope_scaling`, in our names."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    rope_type: Literal["llama3"] = "llama3"
    factor: float
    low_frequency_factor: float = Field(alias="low_freq_factor")
    high_frequency_factor: float = Field(alias="high_freq_factor")
    original_sequence_length: int = Field(alias="original_max_position_embeddings")


def _read_rope(keys: dict[str, Any], older: Mapping[str, str]) -> dict[str, Any]:
    """Moves what rotary positions have in their own table to the older keys beside it.

    As transformers 5 reads it: the table is `rope_scaling`, else `rope_parameters`; what it lacks
    is in the older keys.
    """
    rope = keys.get("rope_scaling") or keys.get("rope_parameters")
    if not isinstance(rope, dict):
        return keys
    rope = dict(rope)
    moved = {key: rope.pop(name) for key, name in older.items() if name in rope}
    rope.setdefault("rope_type", rope.pop("type", "default"))
    return keys | moved | {"rope_scaling": None if rope == {"rope_type": "default"} else rope}


@dataclass(frozen=True)
class Family:
    """An architecture of Hugging Face: a table of config/huggingface_families.toml."""

    architecture: str
    """Its class in transformers."""
    keys: Mapping[str, Any]
    names: Mapping[str, str]
    parts: Mapping[str, Any] = field(default_factory=dict)
    newer: Mapping[str, str] = field(default_factory=dict)
    in_rope_table: Mapping[str, str] = field(default_factory=dict)
    assumed: Mapping[str, Any] = field(default_factory=dict)
    transposes: bool = False
    interleaves: bool = False
    needs_whole_heads: bool = False

    @cached_property
    def fields(self) -> dict[str, str]:
        """Our field by key of its config."""
        keys = {k: key if isinstance(key, str) else key.get("ours") for k, key in self.keys.items()}
        return {theirs: ours for theirs, ours in keys.items() if ours}

    @cached_property
    def config(self) -> type[Config]:
        """The type of its config."""
        types: dict[str, Any] = {name: _type_of(key) for name, key in self.keys.items()}
        return create_model(f"{self.architecture}Config", __base__=Config, **types)

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
        given = {**self.assumed, **keys}
        given |= {old: keys[new] for old, new in self.newer.items() if new in keys}
        given = _read_rope(given, self.in_rope_table)
        config = dict(self.config.model_validate(given, context=self))
        fields: dict[str, Any] = {}
        for theirs, ours in self.fields.items():
            if config[theirs] is not None:
                fields.setdefault(ours, config[theirs])
        fields.setdefault("d_ff", fields.get("d_expert", 4 * fields["d_model"]))  # GPT-2's n_inner
        if "n_dense_blocks" in fields:
            fields["n_dense_blocks"] = len(fields["n_dense_blocks"])
        if scaling := fields.get("rotary_scaling"):
            fields["rotary_scaling"] = scaling.model_dump(exclude={"rope_type"})
        return Model(**fields, **self.parts)

    def config_of(self, model: Model) -> dict[str, Any]:
        """Describes our model, which must fit, as a config.

        Raises:
            ValidationError: no model of this family has such heads.
        """
        values = model.model_dump()
        values["n_dense_blocks"] = list(range(values["n_dense_blocks"]))
        fields = {theirs: values[ours] for theirs, ours in self.fields.items()}
        config = self.config.model_validate(fields, context=self)
        return {"architectures": [self.architecture], **config.model_dump(by_alias=True)}

    def misfits(self, model: Model) -> dict[str, Any]:
        """Maps the fields that no model of this family has so to the values that it would have."""
        try:
            again = self.model_of(self.config_of(model))
        except ValidationError:
            return _OTHER_HEADS
        unused = {
            "rotary_base": model.positions == "learned",
            "d_ff": model.n_experts and not model.n_dense_blocks,
            "balance": model.balance != "bias",
            **dict.fromkeys(_OF_EXPERTS * (not model.n_experts), True),
        }
        return {
            name: getattr(again, name)
            for name, value in model
            if name not in _ONLY_FOR_TRAINING
            and not unused.get(name)
            and value != getattr(again, name)
        }

    def their_names(self, name: str, n_experts: int = 0) -> list[str]:
        """Translates a parameter's name to those of its parts: all of an expert, then the next."""
        layer, _, kind = name.rpartition(".")
        number = re.match(r"blocks\.([0-9]+)", layer)
        theirs = self.names[re.sub(r"^blocks\.[0-9]+", "blocks.N", layer)]
        names = theirs.replace(".N.", f".{number[1]}.") if number else theirs
        if ".E." in names:
            names = " ".join(names.replace(".E.", f".{each}.") for each in range(n_experts))
        return [f"{part}.{kind}" for part in names.split()]

    def their_shapes(self, name: str, shape: Shape, model: Model) -> dict[str, Shape]:
        """Maps the names of our parameter's parts to their shapes."""
        names = self.their_names(name, model.n_experts)
        if find_layer(model, name).kind == "experts":
            return dict.fromkeys(names, shape[-2:])
        groups, sizes = self._row_parts(name, shape[0], model)
        n_rows = [groups * size for size in sizes]
        n_rows = n_rows if len(names) > 1 else [sum(n_rows)]
        step = -1 if self._is_transposed(name, model) else 1
        return {part: (n, *shape[1:])[::step] for part, n in zip(names, n_rows, strict=True)}

    def to_theirs(self, name: str, tensor: Tensor, model: Model) -> dict[str, Tensor]:
        """Converts our parameter to its parts; views if possible."""
        names = self.their_names(name, model.n_experts)
        if find_layer(model, name).kind == "experts":
            return dict(zip(names, tensor.flatten(0, -3), strict=True))
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
        if layer.kind == "experts":
            return torch.stack([*parts]).view(layer.weight)
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


def _require_first(blocks: list[int]) -> list[int]:
    if sorted({*blocks}) != [*range(len(blocks))]:
        raise ValueError("only the first blocks can be without experts: [0, 1, ..]")
    return blocks


def _type_of(key: Any) -> Any:
    """Returns the type and the default of a key, as pydantic takes them."""
    if isinstance(key, str):
        key = {"ours": key}
    default = key.get("default", None if "ours" not in key or "absent" in key else ...)
    kind: Any = Any
    if allowed := key.get("only", key.get("each")):
        kind = Literal[tuple(allowed)]
        kind, default = (list[kind] | None, None) if "each" in key else (kind, allowed[0])
    elif "only" in key:
        kind = None
    elif key.get("ours") == "rotary_scaling":
        kind = _Scaling | None
    elif key.get("ours") == "n_dense_blocks":
        kind = Annotated[list[int], AfterValidator(_require_first)] | None
    elif "ours" in key:
        ours = Model.model_fields[key["ours"]]
        kind = Annotated[ours.annotation, *ours.metadata, Field(ge=key.get("least"))]
        kind = kind | None if "absent" in key else kind
    return kind, Field(default=default, exclude="unwritten" in key)


def _read_families() -> dict[str, Family]:
    path = resources.files("trainyard.config") / "huggingface_families.toml"
    tables = tomllib.loads(path.read_text(encoding="utf-8"))
    for table in tables.values():
        for part, values in tables.get(table.pop("extends", ""), {}).items():
            table[part] = values | table.get(part, {})
    return {name: Family(name, **table) for name, table in tables.items() if name != "shared"}


_BY_NAME = _read_families()
FAMILIES = tuple(_BY_NAME.values())
GPT2, LLAMA = _BY_NAME["GPT2LMHeadModel"], _BY_NAME["LlamaForCausalLM"]
SUPPORTED = ", ".join(sorted(_BY_NAME))


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
        works = " ".join(f"model.{name}={as_toml(value)}" for name, value in misfits.items())
        raise ConfigError(f"{family.architecture}{other} has no {lacks}", f"{NEAREST}{works}")
    return family


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
