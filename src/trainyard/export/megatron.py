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
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from trainyard.architecture import LayerSpec
from trainyard.checkpoint.format import first_problem
from trainyard.config.run import Model
from trainyard.errors import CheckpointError, ConfigError
from trainyard.export.megatron_flags import Conversion, classify, flag_table, nest, refusal

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


# Saved arguments whose flag has another name, and those that have a flag, but are not read as it.
_FLAGS = {
    "add_bias_linear": "disable-bias-linear",
    "add_position_embedding": "no-position-embedding",
    "max_position_embeddings": "seq-length",
    "rope_theta": "rotary-position-embeddings-theta",
}
_NOT_READ = {"seq_length", "vocab_size", "make_vocab_size_divisible_by"}
_NOT_READ |= {"attention_dropout", "num_key_value_heads"}
_SWITCHES = {"add_bias_linear", "add_position_embedding", "use_rope_scaling"}
_SWITCHES |= {"bias_gelu_fusion", "openai_gelu"}
_ENUMERATION = re.compile(r"PositionEmbeddingType(\(2\)|\.absolute)")


def flag_of(argument: str) -> str:
    """Returns the flag as which a saved argument is read; empty if it is not read."""
    flag = _FLAGS.get(argument, argument.replace("_", "-"))
    kind, target = classify(flag)
    is_read = argument in _FLAGS or (kind in ("field", "rule") and target.startswith("model."))
    return flag if is_read and argument not in _NOT_READ else ""


def read_arguments(given: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """Reads `args` of a checkpoint as fields of the model, and notes for the user.

    Raises:
        CheckpointError: there are none, or they describe a model that ours cannot match.
    """
    if not given:
        raise CheckpointError(
            f"{place} has no 'args', so the number of heads is unknown",
            "load and save it once with a Megatron-LM that stores its arguments",
        )
    try:
        flags = {
            flag_of(name): words
            for name, value in given.items()
            if (words := _words(name, value)) is not None
        }
        _check_together(given)
        flags["attention-dropout"] = flags.setdefault("hidden-dropout", ["0.1"])
        conversion = Conversion(flags, {})
        fields = conversion.read_model()
    except ConfigError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {error.problem}", error.hint
        ) from None
    if "model.positions" not in fields:
        fields.pop("model.rotary_base", None)
    dropout, of_attention = fields["model.dropout"], given.get("attention_dropout")
    if of_attention not in (None, dropout):
        conversion.notes.append(
            f"attention_dropout is {of_attention}; model.dropout is hidden_dropout, {dropout}"
        )
    return fields, conversion.notes


def _words(name: str, value: Any) -> list[str] | None:
    """Returns the words after the flag of a saved argument; None if the flag is absent."""
    flag = flag_of(name)
    reason = "" if flag else refusal(name, value)
    text = _ENUMERATION.sub("absolute", str(value))
    accepted = flag_table()["value"].get(flag)
    is_switch = isinstance(flag_table()["set"].get(flag), bool | str)
    if (is_switch or name in _SWITCHES) and value not in (None, False, True):
        reason = "it is on or off"
    elif accepted and value is not None and text not in accepted:
        reason = f"supported: {', '.join(accepted)}"
    if reason:
        problem = f"args.{name}: {reason} (got {value!r:.200})"
        raise ConfigError(problem, "docs/megatron-flags.md lists all arguments")
    if is_switch or name in _SWITCHES:
        value = value == 0 if name.startswith("add_") else bool(value)
    return None if value is None or value is False else [] if value is True else [text]


def _check_together(given: Mapping[str, Any]) -> None:
    """Checks arguments that depend on others, beside those of `Conversion`."""
    experts, heads = given.get("num_experts"), given.get("num_attention_heads")
    bases = [given[name] for name in ("rotary_base", "rope_theta") if given.get(name)]
    has_other_gelu = not given.get("bias_gelu_fusion", True) and not given.get("openai_gelu")
    counts = experts if isinstance(experts, list) else [experts]
    key_heads = given.get("num_key_value_heads")
    problems = {
        "group_query_attention without num_query_groups": given.get("group_query_attention")
        and not given.get("num_query_groups"),
        "bias_gelu_fusion and openai_gelu are off, so its GELU is exact; ours is the tanh "
        "approximation, as with either option": has_other_gelu and not given.get("swiglu"),
        f"rotary_base and rope_theta are {bases}": bases[1:] not in ([], bases[:1]),
        f"num_key_value_heads={key_heads} are not {heads}": key_heads not in (None, heads),
        f"num_experts={experts}; our models have no experts": any(
            count not in (None, 0, 1) for count in counts
        ),
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ConfigError(f"args.{problem}", "our models have no other option of that name")


def build_model(fields: Mapping[str, Any], vocabulary_size: int, place: str) -> Model:
    """Builds the model section of a run.

    Raises:
        CheckpointError: the values are invalid.
    """
    tables = nest({**fields, "model.vocabulary_size": vocabulary_size})
    try:
        return Model(**tables["model"])
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {first_problem(error)}",
            "its arguments and its weights must belong together",
        ) from None


def vocabulary_size_of(arguments: Mapping[str, Any], n_rows: int, tensor: int) -> int | None:
    """Finds the number of embedding rows with tokens; None if unknown.

    Args:
        arguments: theirs.
        n_rows: of the whole embedding.
        tensor: tensor ranks that it was padded for.
    """
    size, tokenizer = arguments.get("vocab_size"), arguments.get("tokenizer_type")
    multiple = arguments.get("make_vocab_size_divisible_by", 128)
    if size is None and tokenizer == "GPT2BPETokenizer":
        size = _GPT2_VOCABULARY_SIZE
    if not isinstance(size, int) or not isinstance(multiple, int):
        return None
    size += tokenizer == "NullTokenizer"  # that tokenizer adds an end-of-document token
    return size if n_rows - multiple * tensor < size <= n_rows else None


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
