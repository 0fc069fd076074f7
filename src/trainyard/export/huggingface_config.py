"""Keys of Hugging Face's `config.json` that decide what a model computes.

A key with one value stands for an option that our models lack. Other keys are ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, computed_field, model_validator

_Size = Annotated[int, Field(ge=1)]


class Config(BaseModel):
    """The keys of a `config.json` that decide what the model computes, with their defaults."""

    vocab_size: _Size
    initializer_range: float = 0.02
    quantization_config: None = Field(default=None, exclude=True)
    is_causal: Literal[True] = Field(default=True, exclude=True)


_AnyConfig = TypeVar("_AnyConfig", bound=Config)


def _require_one_dropout(config: _AnyConfig, *keys: str) -> _AnyConfig:
    rates = {key: getattr(config, key) for key in keys}
    if len(set(rates.values())) > 1:
        *others, last = (f"{key}={rate}" for key, rate in rates.items())
        raise ValueError(
            f"{', '.join(others)} and {last} differ; they only affect training: make them equal"
        )
    return config


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
    """Of a `GPT2LMHeadModel`."""

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

    @model_validator(mode="after")
    def _has_one_dropout(self) -> Self:
        return _require_one_dropout(self, "embd_pdrop", "attn_pdrop", "resid_pdrop")


class GPTNeoXConfig(Config):
    """Of a `GPTNeoXForCausalLM` whose MLP follows attention, with all features of heads rotated."""

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

    @model_validator(mode="after")
    def _has_one_dropout(self) -> Self:
        return _require_one_dropout(self, "attention_dropout", "hidden_dropout")


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
    @model_validator(mode="after")
    def _has_whole_heads(self) -> Self:
        if self.hidden_size % self.num_attention_heads:  # transformers refuses it too
            raise ValueError("hidden_size must be divisible by num_attention_heads")
        return self


class LlamaConfig(_WholeHeadsConfig):
    """Of a `LlamaForCausalLM`."""

    model_type: Literal["llama"] = "llama"
    mlp_bias: Literal[False] = False


class Olmo2Config(_WholeHeadsConfig):
    """Of an `Olmo2ForCausalLM`."""

    model_type: Literal["olmo2"] = "olmo2"
    rms_norm_eps: float = 1e-5
    pad_token_id: int | None = None
    """Transformers would take 1, and never train that token's embedding."""


class Qwen3Config(_RotaryConfig):
    """Of a `Qwen3ForCausalLM`."""

    model_type: Literal["qwen3"] = "qwen3"
    num_key_value_heads: _Size | None = 32
    head_dim: _Size | None = 128
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] | None = Field(default=None, exclude=True)
