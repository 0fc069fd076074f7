"""Checkpoints of Megatron-Core with rotary positions, RMSNorm, SwiGLU and query groups.

The layout is written here again, row by row, from a Llama or a Qwen3 of transformers, whose logits
the imported model must have.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.export.models import random_model, require_equal_logits_of
from torch import Tensor

from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.errors import CheckpointError
from trainyard.export.from_megatron import import_megatron

transformers = pytest.importorskip("transformers")

D, F, L, H, G, V, T = 32, 48, 4, 8, 4, 259, 64
BASE, FACTOR = 500_000.0, 16.0
SCALING = {"rope_type": "llama3", "rope_theta": BASE, "factor": FACTOR}
SCALING |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 8192}
PLAIN = {"rope_type": "default", "rope_theta": BASE}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"rope_parameters": SCALING, "head_dim": D // H, "rms_norm_eps": 1e-5},
    "Qwen3": {"rope_parameters": PLAIN, "head_dim": 12, "rms_norm_eps": 1e-6}
    | {"tie_word_embeddings": True},
}


SIZES = {"num_hidden_layers": L, "num_attention_heads": H, "max_position_embeddings": T}


def random_theirs(family: str, **changes: Any) -> Any:
    return random_model(family, **SIZES | FAMILIES[family] | {"num_key_value_heads": G} | changes)


def linear_qkv(layer: Any, rank: int, n_ranks: int) -> Tensor:
    """Stacks each group's queries, key and value: the groups of this rank in turn."""
    attention = layer.self_attn
    K, n_groups = attention.head_dim, attention.k_proj.out_features // attention.head_dim
    rows = []
    for group in range(rank * n_groups // n_ranks, (rank + 1) * n_groups // n_ranks):
        for head in range(group * H // n_groups, (group + 1) * H // n_groups):
            rows += list(attention.q_proj.weight[head * K : (head + 1) * K])
        rows += list(attention.k_proj.weight[group * K : (group + 1) * K])
        rows += list(attention.v_proj.weight[group * K : (group + 1) * K])
    return torch.stack(rows)


def linear_fc1(layer: Any, rank: int, n_ranks: int) -> Tensor:
    """Stacks this rank's gates upon its values."""
    own = slice(rank * F // n_ranks, (rank + 1) * F // n_ranks)
    return torch.cat([layer.mlp.gate_proj.weight[own], layer.mlp.up_proj.weight[own]])


def vocabulary(weight: Tensor, rank: int, n_ranks: int) -> Tensor:
    """Pads to a multiple of 128 on each rank, with what would show if it were used."""
    n_rows = -(-V // (128 * n_ranks)) * 128
    padded = torch.full((n_rows * n_ranks, D), 9.0)
    padded[:V] = weight
    return padded[rank * n_rows : (rank + 1) * n_rows]


def stage(model: Any, blocks: range, rank: int, n_ranks: int, *, fused: bool) -> dict[str, Tensor]:
    """Makes the tensors of a pipeline stage; with Transformer Engine norms are `fused`."""
    names = ["input_layernorm", "pre_mlp_layernorm"]
    norms = ["self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm"]
    found: dict[str, Tensor] = {}
    for index, number in enumerate(blocks):
        layer, place = model.model.layers[number], f"decoder.layers.{index}"
        for name, inside, norm in zip(
            names, norms, (layer.input_layernorm, layer.post_attention_layernorm), strict=True
        ):
            found[f"{place}.{f'{inside}_' if fused else f'{name}.'}weight"] = norm.weight
        found[f"{place}.self_attention.linear_qkv.weight"] = linear_qkv(layer, rank, n_ranks)
        for kind in "qk":
            if norm := getattr(layer.self_attn, f"{kind}_norm", None):
                found[f"{place}.self_attention.{kind}_layernorm.weight"] = norm.weight
        for name, matrix in (
            ("self_attention.linear_proj", layer.self_attn.o_proj.weight),
            ("mlp.linear_fc2", layer.mlp.down_proj.weight),
        ):
            width = matrix.shape[1] // n_ranks
            found[f"{place}.{name}.weight"] = matrix[:, rank * width : (rank + 1) * width]
        found[f"{place}.mlp.linear_fc1.weight"] = linear_fc1(layer, rank, n_ranks)
        found[f"{place}.mlp.linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    embedding = vocabulary(model.model.embed_tokens.weight, rank, n_ranks)
    if blocks.start == 0:
        found["embedding.word_embeddings.weight"] = embedding
        found["rotary_pos_emb.inv_freq"] = torch.ones(2)
    if blocks.stop == L:
        found["decoder.final_layernorm.weight"] = model.model.norm.weight
        if not model.config.tie_word_embeddings or blocks.start:
            found["output_layer.weight"] = vocabulary(model.lm_head.weight, rank, n_ranks)
    return {name: tensor.detach().clone() for name, tensor in found.items()}


def arguments(model: Any, **changes: Any) -> argparse.Namespace:
    config = model.config
    rope = config.rope_parameters
    values = {
        "num_layers": L, "hidden_size": D, "num_attention_heads": H, "ffn_hidden_size": F,
        "kv_channels": config.head_dim, "group_query_attention": config.num_key_value_heads < H,
        "num_query_groups": config.num_key_value_heads if config.num_key_value_heads < H else 1,
        "max_position_embeddings": T, "position_embedding_type": "rope",
        "add_position_embedding": True, "rotary_base": BASE, "rotary_percent": 1.0,
        "rotary_interleaved": False, "use_rope_scaling": "factor" in rope,
        "rope_scaling_factor": rope.get("factor", 8.0), "normalization": "RMSNorm",
        "norm_epsilon": config.rms_norm_eps, "qk_layernorm": config.model_type == "qwen3",
        "swiglu": True, "bias_gelu_fusion": False, "add_bias_linear": False, "add_qkv_bias": False,
        "hidden_dropout": 0.0, "vocab_size": V, "make_vocab_size_divisible_by": 128,
        "untie_embeddings_and_output_weights": not config.tie_word_embeddings,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


def save(
    folder: Path, model: Any, tensor: int = 1, pipeline: int = 1, *, fused: bool = True,
    version: float = 3.0, **changes: Any,
) -> None:  # fmt: skip
    for rank in range(tensor):
        for place in range(pipeline):
            of_stage = f"_{place:03d}" if pipeline > 1 else ""
            path = folder / "iter_0000007" / f"mp_rank_{rank:02d}{of_stage}" / "model_optim_rng.pt"
            path.parent.mkdir(parents=True)
            blocks = range(place * L // pipeline, (place + 1) * L // pipeline)
            weights = stage(model, blocks, rank, tensor, fused=fused)
            state = {"args": arguments(model, **changes), "iteration": 7, "model": weights}
            torch.save(state | {"checkpoint_version": version}, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Llama": ("Llama", {}, {}),
    "Llama, norms apart": ("Llama", {}, {"fused": False}),
    "Llama, tp 2": ("Llama", {}, {"tensor": 2}),
    "Llama, tp 4, pp 2": ("Llama", {}, {"tensor": 4, "pipeline": 2}),
    "Llama, one group": ("Llama", {"num_key_value_heads": 1}, {}),
    "Llama, every head its own keys, tp 2": ("Llama", {"num_key_value_heads": H}, {"tensor": 2}),
    "Llama, the older flag": (
        "Llama",
        {},
        {"position_embedding_type": "learned_absolute", "use_rotary_position_embeddings": True},
    ),
    "Llama, documents apart": (
        "Llama",
        {},
        {"reset_position_ids": True, "reset_attention_mask": True},
    ),
    "Llama, DeepSpeed's base": ("Llama", {}, {"rotary_base": None, "rope_theta": BASE}),
    "Qwen3, tp 2": ("Qwen3", {}, {"tensor": 2}),
    "Qwen3, tp 2, pp 2, norms apart": ("Qwen3", {}, {"tensor": 2, "pipeline": 2, "fused": False}),
}


@pytest.mark.parametrize("name", CASES)
def test_it_computes_what_transformers_computes(tmp_path: Path, name: str) -> None:
    family, options, layout = CASES[name]
    model = random_theirs(family, **options)
    save(tmp_path / "theirs", model, **layout)
    checkpoint = import_megatron(tmp_path / "theirs", tmp_path / "mine")
    check_checkpoint(checkpoint)
    ours, run, _ = build_model_from_checkpoint(checkpoint)
    found = run.model
    assert (found.positions, found.norm, found.mlp, found.bias) == (
        "rotary",
        "rms",
        "swiglu",
        False,
    )
    assert (found.d_head, found.rotary_base) == (model.config.head_dim, BASE)
    assert found.n_key_value_heads == model.config.num_key_value_heads
    assert found.query_key_norm == ("head" if family == "Qwen3" else "none")
    assert found.attention_within_documents == ("documents" in name)
    scaling = found.rotary_scaling
    assert (scaling and scaling.factor) == (FACTOR if family == "Llama" else None)
    require_equal_logits_of(model, ours, 1e-5)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "interleaved": ({"rotary_interleaved": True}, "rotary_interleaved: .*got True"),
    "part of a head": ({"rotary_percent": 0.25}, "rotary_percent: .*got 0.25"),
    "other positions": ({"position_embedding_type": "mrope"}, "position_embedding_type: .*'mrope'"),
    "biases of queries": ({"add_qkv_bias": True}, "add_qkv_bias: .*got True"),
    "norm without weights": ({"qk_l2_norm": True}, "qk_l2_norm: .*got True"),
    "sliding window": ({"window_size": [128, 0]}, "window_size: attention is causal"),
    **{
        name: ({name: value}, f"{name}: .*got ")
        for name, value in {
            "softmax_type": "off-by-one",
            "softmax_scale": 1.0,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "quick_geglu": True,
            "use_mup": True,
            "layernorm_zero_centered_gamma": True,
            "enable_mhc_connections": True,
            "experimental_attention_variant": "dsa",
            "window_attn_skip_freq": 2,
            "rotary_scaling_factor": 40,
            "rope_type": "yarn",
            "mtp_num_layers": 1,
            "made_up_argument": 3,
            "no_rope_freq": [0, 1] * 20,
            "mrope_section": "[1,0]" * 200,
            "rope_made_up": 2**70,
            "window_made_up": {1},
            "yarn_made_up": [(1, 2)],
            "glu_activation": torch.ones(2).numpy(),
        }.items()
    },
    "one reset": (
        {"reset_position_ids": True},
        "--reset-position-ids without --reset-attention-mask",
    ),
    "two bases": ({"rope_theta": 10_000}, r"rotary_base and rope_theta are \[500000\.0, 10000\]"),
    "other groups": ({"num_query_groups": 2}, r"qkv\.weight in .* has shape \[64, 32\]"),
    "norms of heads": ({"qk_layernorm": True}, "no tensor for blocks.0.attention.query_norm"),
    "old version": ({"version": 1.0}, "checkpoint_version 1.0 and args.group_query_attention"),
    "too many ranks": (
        {"tensor": 6, "group_query_attention": True, "num_query_groups": 4},
        "6 tensor ranks, which cannot split its heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ours_does_not_compute_is_refused(tmp_path: Path, name: str) -> None:
    changes, message = REFUSED[name]
    n_groups = H if name == "too many ranks" else G
    save(tmp_path / "theirs", random_theirs("Llama", num_key_value_heads=n_groups), **changes)
    with pytest.raises(CheckpointError, match=message):
        import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert not (tmp_path / "mine").exists()


def test_what_the_arguments_leave_open_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path / "theirs", random_theirs("Llama"), attention_dropout=0.1)
    import_megatron(tmp_path / "theirs", tmp_path / "mine")
    assert "rope-scaling-factor 16: Megatron-LM before August 2026 ignored it" in caplog.text
    assert "attention_dropout is 0.1; model.dropout is hidden_dropout, 0.0" in caplog.text
    caplog.clear()
    save(tmp_path / "plain", random_theirs("Llama"), rope_scaling_factor=8.0, attention_dropout=0.0)
    import_megatron(tmp_path / "plain", tmp_path / "me")
    assert not caplog.text
