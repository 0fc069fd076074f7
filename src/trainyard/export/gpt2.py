"""Maps GPT-2 between Hugging Face's layout and ours.

    ours                                      theirs                                     values
    embedding.weight             (V, D)       transformer.wte.weight      (V', D)        V' unpadded
    blocks.0.attention.qkv.weight (3D, D)     transformer.h.0.attn.c_attn.weight (D, 3D) transposed
    blocks.0.mlp.up.bias         (F,)         transformer.h.0.mlp.c_fc.bias      (F,)    equal
    head.weight                  (V, D)       lm_head.weight              (V', D)        when untied

They store matrices as (in, out), we as (out, in). Their queries, keys and values are consecutive,
(3, H, K); ours are interleaved by head, (H, 3, K), so that shards keep heads whole.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from pydantic import BaseModel, Field, ValidationError
from torch import Tensor

from trainyard.architecture import find_layer
from trainyard.checkpoint.format import first_problem
from trainyard.config.run import Model
from trainyard.errors import CheckpointError, ConfigError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"

_PARTS = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_BLOCK_PARTS = {
    "attention_norm": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}

_FIELDS = {
    "n_layers": "n_layer",
    "d_model": "n_embd",
    "n_heads": "n_head",
    "d_ff": "n_inner",
    "sequence_length": "n_positions",
    "vocabulary_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "dropout": "resid_pdrop",
    "init_std": "initializer_range",
    "layer_norm_epsilon": "layer_norm_epsilon",
}
_ONLY_FOR_TRAINING = {"vocabulary_multiple"}


class GPT2Config(BaseModel):
    """The fields of a GPT-2 `config.json` that decide what the model computes."""

    model_type: Literal["gpt2"]
    architectures: list[str] = ["GPT2LMHeadModel"]
    vocab_size: int = Field(ge=2)
    n_positions: int = Field(ge=1)
    n_embd: int = Field(ge=1)
    n_layer: int = Field(ge=1)
    n_head: int = Field(ge=1)
    n_inner: int | None = None
    activation_function: Literal["gelu_new", "gelu_pytorch_tanh"] = "gelu_new"
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    resid_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    torch_dtype: str = "float32"
    scale_attn_weights: Literal[True] = True
    scale_attn_by_inverse_layer_idx: Literal[False] = False
    reorder_and_upcast_attn: Literal[False] = False
    add_cross_attention: Literal[False] = False


def config_of(model: Model, end_of_document: int | None, dtype: str) -> GPT2Config:
    """Describes our model as a Hugging Face config.

    Raises:
        ConfigError: GPT-2 lacks an option of the model.
    """
    gpt2 = Model(**{ours: getattr(model, ours) for ours in _FIELDS})
    for name, value in model:
        if name not in _ONLY_FOR_TRAINING and value != getattr(gpt2, name, None):
            raise ConfigError(
                f"model.{name}={value!r} does not exist in GPT-2", "only GPT-2 has this format"
            )
    fields = {theirs: getattr(model, ours) for ours, theirs in _FIELDS.items()}
    if model.d_ff == 4 * model.d_model:
        fields["n_inner"] = None
    return GPT2Config(
        model_type="gpt2",
        embd_pdrop=model.dropout,
        attn_pdrop=model.dropout,
        bos_token_id=end_of_document,
        eos_token_id=end_of_document,
        torch_dtype=dtype,
        **fields,
    )


def model_of(config_text: bytes, place: str) -> Model:
    """Reads a `config.json` as the model section of a run.

    Raises:
        CheckpointError: it is not a GPT-2, or has an option that our model lacks.
    """
    try:
        config = GPT2Config.model_validate_json(config_text)
        dropouts = {config.embd_pdrop, config.attn_pdrop, config.resid_pdrop}
        if len(dropouts) > 1:
            raise CheckpointError(
                f"{place}: embd_pdrop={config.embd_pdrop}, attn_pdrop={config.attn_pdrop} and "
                f"resid_pdrop={config.resid_pdrop} differ; our models have one dropout",
                "make them equal in that file; they only affect training",
            )
        fields = {ours: getattr(config, theirs) for ours, theirs in _FIELDS.items()}
        if config.n_inner is None:
            fields["d_ff"] = 4 * config.n_embd
        return Model(**fields)
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a GPT-2 that can be imported: {first_problem(error)}",
            "only GPT2LMHeadModel with its usual options computes what our models compute",
        ) from None


def their_name(name: str) -> str:
    """Translates a parameter's name: `blocks.0.mlp.up.bias` is `transformer.h.0.mlp.c_fc.bias`."""
    part, _, kind = name.rpartition(".")
    if part in _PARTS:
        return f"{_PARTS[part]}.{kind}"
    _, index, inner = part.split(".", 2)
    return f"transformer.h.{index}.{_BLOCK_PARTS[inner]}.{kind}"


def their_shape(name: str, shape: tuple[int, ...], model: Model) -> tuple[int, ...]:
    """Returns the shape that our parameter has in their layout."""
    layer = find_layer(model, name)
    if layer.sharding == "vocabulary":
        return (model.vocabulary_size, *shape[1:])
    return shape[::-1] if layer.kind == "linear" else shape


def to_theirs(name: str, tensor: Tensor, model: Model) -> Tensor:
    """Converts our parameter to their layout; a view if possible."""
    layer = find_layer(model, name)
    if layer.sharding == "vocabulary":
        return tensor[: model.vocabulary_size]
    if ".attention.qkv." in name:
        tensor = _swap_rows(tensor, model.n_heads, 3)
    return tensor.t() if layer.kind == "linear" else tensor  # of a bias it is the same


def from_theirs(name: str, tensor: Tensor, model: Model, n_rows: int) -> Tensor:
    """Converts their parameter to our layout; a view if possible.

    Args:
        name: ours.
        tensor: theirs.
        model: the shape.
        n_rows: of embedding and head; those above the vocabulary are zero.
    """
    layer = find_layer(model, name)
    if layer.sharding == "vocabulary":
        return F.pad(tensor, (0, 0, 0, n_rows - tensor.shape[0]))
    tensor = tensor.t() if layer.kind == "linear" else tensor
    if ".attention.qkv." in name:
        return _swap_rows(tensor, 3, model.n_heads)
    return tensor


def _swap_rows(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Reorders rows from (outer, inner, K) to (inner, outer, K)."""
    K = tensor.shape[0] // (outer * inner)
    grouped = tensor.reshape(outer, inner, K, *tensor.shape[1:])
    return grouped.transpose(0, 1).reshape(tensor.shape)
