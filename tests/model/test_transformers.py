"""Llama, Qwen3 and OLMo 2 of Hugging Face's transformers, with our weights, give our logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.config.run import Model
from trainyard.config.section import RotaryScaling
from trainyard.model.gpt import GPT, initialize

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 32,
    "n_heads": 4,
    "n_key_value_heads": 2,
    "d_ff": 48,
    "mlp": "swiglu",
    "norm": "rms",
    "bias": False,
    "positions": "rotary",
    "sequence_length": 64,
    "vocabulary_size": 96,
    "vocabulary_multiple": 8,
    "dropout": 0.0,
    "init_std": 0.2,
}
SCALING = RotaryScaling(factor=4.0, original_sequence_length=16)
MODELS = {
    "Llama": Model(**SMALL, rotary_base=500.0, rotary_scaling=SCALING, tied_embeddings=False),
    "Qwen3": Model(**SMALL, d_head=12, query_key_norm="head", layer_norm_epsilon=1e-6),
    "Olmo2": Model(**SMALL, query_key_norm="all", norm_place="after", tied_embeddings=False),
}


def build_theirs(name: str, model: Model) -> Any:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rotary_base}
    if model.rotary_scaling:
        rope |= {
            "rope_type": "llama3",
            "factor": model.rotary_scaling.factor,
            "low_freq_factor": model.rotary_scaling.low_frequency_factor,
            "high_freq_factor": model.rotary_scaling.high_frequency_factor,
            "original_max_position_embeddings": model.rotary_scaling.original_sequence_length,
        }
    config = getattr(transformers, f"{name}Config")(
        num_hidden_layers=model.n_layers,
        hidden_size=model.d_model,
        num_attention_heads=model.n_heads,
        num_key_value_heads=model.n_key_value_heads,
        head_dim=model.d_head,
        intermediate_size=model.d_ff,
        max_position_embeddings=model.sequence_length,
        vocab_size=model.vocabulary_size,
        tie_word_embeddings=model.tied_embeddings,
        rms_norm_eps=model.layer_norm_epsilon,
        rope_parameters=rope,
    )
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def map_weights(ours: dict[str, Tensor], model: Model) -> dict[str, Tensor]:
    """Maps our weights to their names and shapes."""
    theirs = {
        "model.embed_tokens.weight": ours["embedding.weight"],
        "model.norm.weight": ours["final_norm.weight"],
        "lm_head.weight": ours.get("head.weight", ours["embedding.weight"]),
    }
    per_group = model.n_heads // model.n_key_value_heads
    for number in range(model.n_layers):
        block, layer = f"blocks.{number}.", f"model.layers.{number}."
        qkv = ours[block + "attention.qkv.weight"].view(-1, per_group + 2, model.d_head, 32)
        gate, up = ours[block + "mlp.up.weight"].view(-1, 2, 32).unbind(1)
        named = {
            "input_layernorm": ours[block + "attention_norm.weight"],
            "self_attn.q_proj": qkv[:, :per_group].reshape(-1, 32),
            "self_attn.k_proj": qkv[:, -2].reshape(-1, 32),
            "self_attn.v_proj": qkv[:, -1].reshape(-1, 32),
            "self_attn.o_proj": ours[block + "attention.out.weight"],
            "post_attention_layernorm": ours[block + "mlp_norm.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": ours[block + "mlp.down.weight"],
        }
        if model.norm_place == "after":
            named["post_feedforward_layernorm"] = named["post_attention_layernorm"]
            named["post_attention_layernorm"] = named.pop("input_layernorm")
        if model.query_key_norm != "none":
            named["self_attn.q_norm"] = ours[block + "attention.query_norm.weight"]
            named["self_attn.k_norm"] = ours[block + "attention.key_norm.weight"]
        theirs |= {f"{layer}{name}.weight": value for name, value in named.items()}
    return theirs


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name: str) -> None:
    model = MODELS[name]
    ours = GPT(model, model.vocabulary_size)
    initialize(ours, seed=1)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, parameter in ours.named_parameters():
        if "norm" in parameter_name:  # ones would hide a norm that is left out
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
    theirs = build_theirs(name, model)
    theirs.load_state_dict(map_weights(ours.state_dict(), model))
    ids = torch.randint(0, model.vocabulary_size, (2, 64), generator=generator)
    expected = theirs(ids).logits
    found = ours.logits(ours(ids))
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    theirs(ids, labels=ids).loss.backward()
    ours.summed_loss(ours(ids[:, :-1]), ids[:, 1:], 1 / 126).backward()
    gradients = {n: p.grad for n, p in ours.named_parameters() if p.grad is not None}
    expected_gradients = dict(theirs.named_parameters())
    for their_name, gradient in map_weights(gradients, model).items():
        their_gradient = expected_gradients.get(their_name)
        if their_gradient is not None:  # a tied head is no parameter of theirs
            torch.testing.assert_close(gradient, their_gradient.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_a_cache_continues_positions_and_shared_keys(name: str) -> None:
    model = MODELS[name]
    gpt = GPT(model, model.vocabulary_size).eval()
    initialize(gpt, seed=1)
    ids = torch.randint(0, model.vocabulary_size, (2, 20), generator=torch.Generator())
    caches = gpt.build_caches(20)
    with torch.no_grad():
        pieces = [gpt(ids[:, a:b], caches=caches) for a, b in ((0, 9), (9, 10), (10, 17), (17, 20))]
        torch.testing.assert_close(torch.cat(pieces, 1), gpt(ids), atol=1e-5, rtol=1e-5)
