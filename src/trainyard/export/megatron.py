"""Maps GPT from the layout of Megatron-LM and Megatron-DeepSpeed to ours.

    ours                         theirs, on one of t tensor ranks                       cut
    embedding.weight   (V, D)    embedding.word_embeddings.weight            (V'/t, D)  rows
    positions.weight   (T, D)    embedding.position_embeddings.weight        (T, D)     no
    blocks.0.attention.qkv.weight   layers.0.self_attention.query_key_value  (3D/t, D)  rows
    blocks.0.attention.query_norm.weight   layers.0.self_attention.q_layernorm  (K)     no
    blocks.0.attention.out.weight   layers.0.self_attention.dense            (D, D/t)   columns
    blocks.0.mlp.up.weight          layers.0.mlp.dense_h_to_4h               (F/t, D)   rows
    blocks.0.mlp.down.weight        layers.0.mlp.dense_4h_to_h               (D, F/t)   columns
    head.weight        (V, D)    output_layer.weight, when untied            (V'/t, D)  rows

V' is the padded vocabulary. Layers are numbered from 0 on each pipeline stage. Names changed over
the years, as did the order of rows of queries, keys and values on a tensor rank, with H/t heads of
K features each:

    checkpoint_version 0      (3, H/t, K)
                       1.0    (H/t, K, 3)
                       2.0 on (H/t, 3, K), as ours; of groups (S/t, H/S + 2, K), as ours

SwiGLU has (2, F/t) rows on a tensor rank, all its gates and then its values; ours are (F/t, 2).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator
from torch import Tensor

from trainyard.architecture import LayerSpec
from trainyard.checkpoint.format import first_problem
from trainyard.config.run import Model
from trainyard.errors import CheckpointError
from trainyard.export.megatron_fields import refusal, rope_factor_notes

CORE_BLOCK_PARTS = {
    "input_layernorm": "attention_norm",
    "self_attention.linear_qkv": "attention.qkv",
    "self_attention.q_layernorm": "attention.query_norm",
    "self_attention.k_layernorm": "attention.key_norm",
    "self_attention.linear_proj": "attention.out",
    "pre_mlp_layernorm": "mlp_norm",
    "mlp.linear_fc1": "mlp.up",
    "mlp.linear_fc2": "mlp.down",
}
"""Megatron-Core's names of a block's layers; the names before it follow."""
_BLOCK_PARTS = CORE_BLOCK_PARTS | {
    "input_norm": "attention_norm",
    "attention.query_key_value": "attention.qkv",
    "self_attention.query_key_value": "attention.qkv",
    "attention.dense": "attention.out",
    "self_attention.dense": "attention.out",
    "post_attention_layernorm": "mlp_norm",
    "post_attention_norm": "mlp_norm",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
}
_PARTS = {
    "word_embeddings": "embedding",
    "position_embeddings": "positions",
    "final_layernorm": "final_norm",
    "final_norm": "final_norm",
    "output_layer": "head",
    "word_embeddings_for_head": "head",
}
# Transformer Engine stores a norm with the following matrix.
_NORM_INSIDE = {
    "self_attention.linear_qkv.layer_norm": "attention_norm",
    "mlp.linear_fc1.layer_norm": "mlp_norm",
}
_WRAPPERS = re.compile(
    r"((model[0-9]*|module|language_model|embedding|encoder|transformer|decoder)\.)*"
)
_LAYER = re.compile(r"layers\.([0-9]{1,6})\.(.+)[._](weight|bias)")
_OTHER = re.compile(r"([a-z_]+)\.(weight|bias)")
_GPT2_VOCABULARY_SIZE = 50257


class Arguments(BaseModel, allow_inf_nan=False):
    """The training arguments that define the model's computation."""

    num_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    ffn_hidden_size: int | None = None
    vocab_size: int | None = None
    tokenizer_type: str | None = None
    make_vocab_size_divisible_by: int = 128
    layernorm_epsilon: float | None = None
    norm_epsilon: float | None = None
    init_method_std: float = 0.02
    hidden_dropout: float = 0.1
    attention_dropout: float | None = None
    untie_embeddings_and_output_weights: bool = False

    bias_gelu_fusion: bool | None = True
    openai_gelu: bool | None = False
    kv_channels: int | None = None
    num_key_value_heads: int | None = None
    num_experts: int | list[int] | None = None
    reset_position_ids: bool | None = False
    reset_attention_mask: bool | None = False
    position_embedding_type: Literal[
        "learned_absolute",
        "absolute",
        "PositionEmbeddingType(2)",
        "PositionEmbeddingType.absolute",
        "rope",
    ] = "learned_absolute"
    use_rotary_position_embeddings: bool | None = False
    add_position_embedding: bool = True
    rotary_base: float | None = None
    rope_theta: float | None = None
    use_rope_scaling: bool | None = False
    rope_scaling_factor: float = 8.0
    normalization: Literal["LayerNorm", "layernorm", "RMSNorm", "rmsnorm"] = "LayerNorm"
    qk_layernorm: bool | None = False
    add_bias_linear: bool = True
    swiglu: bool | None = False
    group_query_attention: bool | None = False
    num_query_groups: int | None = None

    @property
    def is_rotary(self) -> bool:
        """Whether it has rotary positions instead of learned ones."""
        return self.position_embedding_type == "rope" or bool(self.use_rotary_position_embeddings)

    @property
    def norm(self) -> Literal["layer", "rms"]:
        """Our kind of norm."""
        return "rms" if self.normalization.lower() == "rmsnorm" else "layer"

    def notes(self) -> list[str]:
        """Returns what else the user should know of the model."""
        found = rope_factor_notes(self.rope_scaling_factor) if self.use_rope_scaling else []
        if self.attention_dropout not in (None, self.hidden_dropout):
            found.append(
                f"attention_dropout is {self.attention_dropout}; model.dropout is hidden_dropout, "
                f"{self.hidden_dropout}"
            )
        return found

    @model_validator(mode="after")
    def _computes_what_ours_does(self) -> Self:
        if not self.add_position_embedding and not self.is_rotary:
            raise ValueError("add_position_embedding is off; our models have positions")
        if self.qk_layernorm and self.norm == "layer":
            raise ValueError("qk_layernorm of LayerNorm has biases; ours has none")
        if self.group_query_attention and not self.num_query_groups:
            raise ValueError("group_query_attention without num_query_groups")
        if not self.swiglu and not self.bias_gelu_fusion and not self.openai_gelu:
            raise ValueError(
                "bias_gelu_fusion and openai_gelu are off, so its GELU is exact; "
                "ours is the tanh approximation, as with either option"
            )
        if self.reset_position_ids != self.reset_attention_mask:
            raise ValueError("reset_position_ids and reset_attention_mask differ")
        if self.rotary_base and self.rope_theta and self.rotary_base != self.rope_theta:
            raise ValueError(f"rotary_base={self.rotary_base} and rope_theta={self.rope_theta}")
        heads = self.num_attention_heads
        if self.num_key_value_heads not in (None, heads):
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} are not {heads}")
        experts = self.num_experts if isinstance(self.num_experts, list) else [self.num_experts]
        if any(count is not None and count > 1 for count in experts):
            raise ValueError(f"num_experts={self.num_experts}; our models have no experts")
        return self


def read_arguments(given: Mapping[str, Any], place: str) -> Arguments:
    """Reads `args` of a checkpoint.

    Raises:
        CheckpointError: there are none, or they describe a model that ours cannot match.
    """
    if not given:
        raise CheckpointError(
            f"{place} has no 'args', so the number of heads is unknown",
            "load and save it once with a Megatron-LM that stores its arguments",
        )
    for name, value in given.items():
        if name not in Arguments.model_fields and (reason := refusal(name, value)):
            raise CheckpointError(
                f"{place} is not a GPT that can be imported: args.{name}: {reason} (got {value!r})",
                "docs/megatron-flags.md lists all arguments",
            )
    try:
        return Arguments.model_validate(given)
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: args.{first_problem(error)}",
            "our models have no other option of that name",
        ) from None


def model_of(arguments: Arguments, vocabulary_size: int, place: str) -> Model:
    """Builds the model section of a run.

    Raises:
        CheckpointError: the values are invalid.
    """
    D = arguments.hidden_size
    fields: dict[str, Any] = {
        "n_layers": arguments.num_layers,
        "d_model": D,
        "n_heads": arguments.num_attention_heads,
        "query_key_norm": "head" if arguments.qk_layernorm else "none",
        "d_ff": arguments.ffn_hidden_size or 4 * D,
        "mlp": "swiglu" if arguments.swiglu else "gelu",
        "norm": arguments.norm,
        "bias": arguments.add_bias_linear,
        "sequence_length": arguments.max_position_embeddings,
        "vocabulary_size": vocabulary_size,
        "attention_within_documents": bool(arguments.reset_attention_mask),
        "tied_embeddings": not arguments.untie_embeddings_and_output_weights,
        "dropout": arguments.hidden_dropout,
        "init_std": arguments.init_method_std,
        "layer_norm_epsilon": arguments.layernorm_epsilon or arguments.norm_epsilon or 1e-5,
    }
    if arguments.kv_channels is not None:
        fields["d_head"] = arguments.kv_channels
    if arguments.group_query_attention:
        fields["n_key_value_heads"] = arguments.num_query_groups
    if arguments.is_rotary:
        fields |= {
            "positions": "rotary",
            "rotary_base": arguments.rotary_base or arguments.rope_theta or 10_000.0,
        }
        if arguments.use_rope_scaling:
            fields["rotary_scaling"] = {"factor": arguments.rope_scaling_factor}
    try:
        return Model(**fields)
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {first_problem(error)}",
            "its arguments and its weights must belong together",
        ) from None


def vocabulary_size_of(arguments: Arguments, n_rows: int, tensor: int) -> int | None:
    """Finds the number of embedding rows with tokens; None if unknown.

    Args:
        arguments: theirs.
        n_rows: of the whole embedding.
        tensor: tensor ranks that it was padded for.
    """
    size = arguments.vocab_size
    if size is not None and arguments.tokenizer_type == "NullTokenizer":
        size += 1  # that tokenizer adds an end-of-document token
    if size is None and arguments.tokenizer_type == "GPT2BPETokenizer":
        size = _GPT2_VOCABULARY_SIZE
    padding = arguments.make_vocab_size_divisible_by * tensor
    return size if size is not None and n_rows - padding < size <= n_rows else None


def our_name(name: str) -> str | None:
    """Translates a parameter's name, `layers.0.mlp.dense_h_to_4h.bias` is `blocks.0.mlp.up.bias`.

    Keeps the layer number. None if our models lack the parameter.
    """
    name = name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # it matches ""
    if match := _LAYER.fullmatch(name):
        number, part, kind = match.groups()
        ours = (_NORM_INSIDE if part.endswith(".layer_norm") else _BLOCK_PARTS).get(part)
        return f"blocks.{int(number)}.{ours}.{kind}" if ours else None
    match = _OTHER.fullmatch(name)
    ours = _PARTS.get(match[1]) if match else None
    return f"{ours}.{match[2]}" if match and ours else None


def our_row_order(part: Tensor, layer: LayerSpec, version: float, tensor: int) -> Tensor:
    """Reorders the rows of a fused layer, from one of some tensor ranks, as ours are.

    Args:
        part: weight or bias.
        layer: ours, whole.
        version: the checkpoint_version.
        tensor: ranks.
    """
    n_groups, rows = layer.fused
    sizes = n_groups // tensor, rows[0]
    if version == 0 or layer.name.endswith("mlp.up"):
        return part.reshape(len(rows), *sizes, -1).transpose(0, 1).reshape(part.shape)
    if version == 1:
        return part.reshape(*sizes, len(rows), -1).transpose(1, 2).reshape(part.shape)
    return part
