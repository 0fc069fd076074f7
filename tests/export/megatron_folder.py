"""Folders as Megatron writes them, made from a GPT-2 of transformers by a mapping of its own."""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.export.models import random_model
from torch import Tensor

V, T, D, L, H = 259, 48, 32, 4, 4


@dataclass
class Theirs:
    """How a checkpoint is cut and spelt."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1
    version: float | None = 3.0
    rows: int = 384
    dtype: torch.dtype = torch.float32
    body: str = "encoder"
    attention: str = "self_attention"
    norms: tuple[str, str, str] = (
        "input_layernorm",
        "post_attention_layernorm",
        "final_layernorm",
    )
    arguments: dict[str, Any] = field(default_factory=dict)


def random_gpt2(**options: Any) -> Any:
    return random_model("GPT2", **{"num_hidden_layers": L} | options)


def query_key_value(fused: Tensor, theirs: Theirs, rank: int) -> Tensor:
    """Orders GPT-2's (3, H, K) rows as a version of Megatron does on one rank."""
    own = slice(rank * H // theirs.tensor, (rank + 1) * H // theirs.tensor)
    q, k, v = (part.unflatten(0, (H, -1))[own] for part in fused.chunk(3))
    if theirs.version in (None, 0):
        rows = torch.cat([part.flatten(0, 1) for part in (q, k, v)])
    elif theirs.version == 1:
        rows = torch.stack([q, k, v], dim=2).flatten(0, 2)
    else:
        rows = torch.stack([q, k, v], dim=1).flatten(0, 2)
    return rows.to(theirs.dtype)


def layer(weights: dict[str, Tensor], number: int, theirs: Theirs, rank: int) -> dict[str, Tensor]:
    h = f"transformer.h.{number}"

    def columns(name: str) -> Tensor:
        return weights[name].t().chunk(theirs.tensor, 1)[rank].clone()

    def rows(name: str) -> Tensor:
        value = weights[name]
        return (value.t() if value.dim() == 2 else value).chunk(theirs.tensor)[rank].clone()

    before, after, _ = theirs.norms
    found = {
        f"{before}.weight": weights[f"{h}.ln_1.weight"],
        f"{before}.bias": weights[f"{h}.ln_1.bias"],
        f"{theirs.attention}.query_key_value.weight": query_key_value(
            weights[f"{h}.attn.c_attn.weight"].t(), theirs, rank
        ),
        f"{theirs.attention}.query_key_value.bias": query_key_value(
            weights[f"{h}.attn.c_attn.bias"], theirs, rank
        ),
        f"{theirs.attention}.dense.weight": columns(f"{h}.attn.c_proj.weight"),
        f"{theirs.attention}.dense.bias": weights[f"{h}.attn.c_proj.bias"],
        f"{after}.weight": weights[f"{h}.ln_2.weight"],
        f"{after}.bias": weights[f"{h}.ln_2.bias"],
        "mlp.dense_h_to_4h.weight": rows(f"{h}.mlp.c_fc.weight"),
        "mlp.dense_h_to_4h.bias": rows(f"{h}.mlp.c_fc.bias"),
        "mlp.dense_4h_to_h.weight": columns(f"{h}.mlp.c_proj.weight"),
        "mlp.dense_4h_to_h.bias": weights[f"{h}.mlp.c_proj.bias"],
    }
    return {name: value.to(theirs.dtype) for name, value in found.items()}


def vocabulary_rows(value: Tensor, theirs: Theirs, rank: int) -> Tensor:
    """Pads with what would show if it were used."""
    padded = torch.cat([value, value.new_full((theirs.rows - len(value), value.shape[1]), 9.0)])
    return padded.chunk(theirs.tensor)[rank].to(theirs.dtype).clone()


def stage(model, theirs: Theirs, first: int, last: int, rank: int) -> dict[str, Any]:
    """Makes what a Megatron-LM stage with some of the layers saves."""
    weights = model.state_dict()
    tied = model.config.tie_word_embeddings
    body = OrderedDict()
    for index, number in enumerate(range(first, last)):
        for name, value in layer(weights, number, theirs, rank).items():
            body[f"layers.{index}.{name}"] = value
    language_model: dict[str, Any] = {theirs.body: body}
    state: dict[str, Any] = {"language_model": language_model}
    words = vocabulary_rows(weights["transformer.wte.weight"], theirs, rank)
    if first == 0:
        language_model["embedding"] = {
            "word_embeddings": OrderedDict(weight=words),
            "position_embeddings": OrderedDict(
                weight=weights["transformer.wpe.weight"].to(theirs.dtype)
            ),
        }
    if last == model.config.n_layer:
        for kind in ("weight", "bias"):
            value = weights[f"transformer.ln_f.{kind}"].to(theirs.dtype)
            body[f"{theirs.norms[2]}.{kind}"] = value
        if not tied:
            head = vocabulary_rows(weights["lm_head.weight"], theirs, rank)
            language_model["output_layer"] = OrderedDict(weight=head)
        elif first > 0:
            state["word_embeddings_for_head"] = OrderedDict(weight=words)
    return state


def arguments(model, theirs: Theirs) -> argparse.Namespace:
    return argparse.Namespace(
        **{
            "num_layers": model.config.n_layer,
            "hidden_size": model.config.n_embd,
            "num_attention_heads": H,
            "ffn_hidden_size": 4 * model.config.n_embd,
            "kv_channels": model.config.n_embd // H,
            "max_position_embeddings": model.config.n_positions,
            "seq_length": model.config.n_positions,
            "padded_vocab_size": theirs.rows,
            "vocab_size": model.config.vocab_size,
            "make_vocab_size_divisible_by": 128,
            "tokenizer_type": "GPT2BPETokenizer",
            "tensor_model_parallel_size": theirs.tensor,
            "layernorm_epsilon": 1e-5,
            "init_method_std": 0.006,
            "hidden_dropout": 0.0,
            "bias_gelu_fusion": True,
            "num_experts": [1],
            "params_dtype": torch.float16,
            "untie_embeddings_and_output_weights": not model.config.tie_word_embeddings,
            "data_path": ["a", "b"],
            **theirs.arguments,
        }
    )


def around_the_model(model, theirs: Theirs) -> dict[str, Any]:
    """Makes everything a real file has beside the weights."""
    found = {
        "args": arguments(model, theirs),
        "iteration": 1000,
        "optimizer": {
            "optimizer": {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": [{"lr": 1e-3}]}
        },
        "rng_state": [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
            }
        ],
    }
    if theirs.version is not None:
        found["checkpoint_version"] = theirs.version
    return found


def save_megatron(folder: Path, model, theirs: Theirs, **options) -> None:
    """Writes the folder of a Megatron-LM checkpoint."""
    per_piece = model.config.n_layer // (theirs.pipeline * theirs.virtual)
    for rank in range(theirs.tensor):
        for place in range(theirs.pipeline):
            of_stage = f"_{place:03d}" if theirs.pipeline > 1 else ""
            path = folder / "iter_0001000" / f"mp_rank_{rank:02d}{of_stage}"
            path.mkdir(parents=True)
            state = around_the_model(model, theirs)
            for chunk in range(theirs.virtual):
                first = (chunk * theirs.pipeline + place) * per_piece
                key = f"model{chunk}" if theirs.virtual > 1 else "model"
                state[key] = stage(model, theirs, first, first + per_piece, rank)
            torch.save(state, path / "model_optim_rng.pt", **options)
    (folder / "latest_checkpointed_iteration.txt").write_text("1000")


def core_names(state: dict[str, Any]) -> dict[str, Any]:
    """Spells the weights of a stage as Megatron Core does with Transformer Engine."""
    flat = {}
    for name, value in state["language_model"]["encoder"].items():
        for old, new in {
            "query_key_value": "linear_qkv",
            "self_attention.dense": "self_attention.linear_proj",
            "dense_h_to_4h": "linear_fc1",
            "dense_4h_to_h": "linear_fc2",
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "post_attention_layernorm.": "mlp.linear_fc1.layer_norm_",
        }.items():
            name = name.replace(old, new)
        flat[f"decoder.{name}"] = value
    flat["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    for part, tensors in state["language_model"].get("embedding", {}).items():
        flat[f"embedding.{part}.weight"] = tensors["weight"]
    if "word_embeddings_for_head" in state:
        flat["output_layer.weight"] = state["word_embeddings_for_head"]["weight"]
    return flat


def save_deepspeed(folder: Path, model, theirs: Theirs) -> Path:
    """Writes the folder of a Megatron-DeepSpeed checkpoint with pipeline stages."""
    inner = folder / "global_step1000"
    inner.mkdir(parents=True)
    weights = model.state_dict()
    for rank in range(theirs.tensor):
        layers: dict[int, dict[str, Tensor]] = {
            1: {
                "word_embeddings.weight": vocabulary_rows(
                    weights["transformer.wte.weight"], theirs, rank
                ),
                "position_embeddings.weight": weights["transformer.wpe.weight"],
            },
            **{3 + number: layer(weights, number, theirs, rank) for number in range(L)},
            4 + L: {kind: weights[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")},
        }
        if not model.config.tie_word_embeddings:
            head = vocabulary_rows(weights["lm_head.weight"], theirs, rank)
            layers[5 + L] = {"lm_head.weight": head}
        for index, tensors in layers.items():
            name = f"layer_{index:02d}-model_{rank:02d}-model_states.pt"
            torch.save(OrderedDict(tensors), inner / name)
    for rank in range(theirs.tensor * theirs.pipeline):
        state = {
            "module": None,
            "ds_version": "0.9",
            "param_shapes": [OrderedDict(a=torch.Size([1]))],
        }
        state |= around_the_model(model, theirs)
        torch.save(state, inner / f"mp_rank_{rank:02d}_model_states.pt")
    (folder / "latest").write_text("global_step1000")
    (folder / "latest_checkpointed_iteration.txt").write_text("1000")
    return inner
