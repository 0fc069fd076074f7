"""Models of other projects with our weights, by the table of architectures of `export/`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from trainyard.config.run import Model
from trainyard.export.families import LLAMA, Family, find_family
from trainyard.model.gpt import GPT

HEAD = "lm_head"
"""In memory; a GPT-NeoX of transformers has another name in files."""
LITGPT = replace(
    LLAMA,
    names={
        "embedding": "transformer.wte",
        "blocks.N.attention_norm": "transformer.h.N.norm_1",
        "blocks.N.attention.qkv": "transformer.h.N.attn.qkv",
        "blocks.N.attention.out": "transformer.h.N.attn.proj",
        "blocks.N.mlp_norm": "transformer.h.N.norm_2",
        "blocks.N.mlp.up": "transformer.h.N.mlp.fc_1 transformer.h.N.mlp.fc_2",
        "blocks.N.mlp.down": "transformer.h.N.mlp.proj",
        "final_norm": "transformer.ln_f",
        "head": "lm_head",
    },
)
"""A Llama of litgpt."""


def build_transformers(model: Model, ours: GPT) -> nn.Module:
    """Builds the model of transformers that computes the same, in its fastest form."""
    import transformers

    family = find_family(model)
    keys = family.config_of(model)
    for key, value in keys.items():
        keys[key] = "gelu_pytorch_tanh" if value == "gelu_new" else value
    architecture = getattr(transformers, keys.pop("architectures")[0])
    config = architecture.config_class.from_dict(keys | {"use_cache": False})
    if model.n_experts:  # transformers joins the matrices of all experts, and multiplies as torch
        options = {"dtype": torch.float32, "experts_implementation": "grouped_mm"}
        weights = _their_weights(family, model, ours)
        theirs: nn.Module
        theirs = architecture.from_pretrained(None, config=config, state_dict=weights, **options)
        return theirs
    return _load(architecture(config), family, model, ours)


def build_litgpt(model: Model, ours: GPT) -> nn.Module:
    """Builds litgpt's model of a Llama."""
    import litgpt

    keys = LLAMA.config_of(model)
    scaling = keys["rope_scaling"]
    config = litgpt.Config(
        block_size=keys["max_position_embeddings"],
        padded_vocab_size=keys["vocab_size"],
        n_layer=keys["num_hidden_layers"],
        n_embd=keys["hidden_size"],
        n_head=keys["num_attention_heads"],
        n_query_groups=keys["num_key_value_heads"],
        head_size=keys["head_dim"],
        intermediate_size=keys["intermediate_size"],
        rotary_percentage=1.0,
        rope_base=keys["rope_theta"],
        rope_adjustments=scaling
        and {
            "factor": scaling["factor"],
            "low_freq_factor": scaling["low_freq_factor"],
            "high_freq_factor": scaling["high_freq_factor"],
            "original_max_seq_len": scaling["original_max_position_embeddings"],
        },
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=keys["rms_norm_eps"],
        mlp_class_name="LLaMAMLP",
    )
    return _load(litgpt.GPT(config), LITGPT, model, ours)


def _their_weights(family: Family, model: Model, ours: GPT) -> dict[str, Tensor]:
    weights: dict[str, Tensor] = {}
    for name, parameter in ours.named_parameters():
        weights |= family.to_theirs(name, parameter.detach(), model)
    return weights


def _load(theirs: nn.Module, family: Family, model: Model, ours: GPT) -> nn.Module:
    weights = _their_weights(family, model, ours)
    head = f"{HEAD}.weight"
    if model.tied_embeddings:
        (embedding,) = family.their_names("embedding.weight")
        weights[head] = weights[embedding]
        theirs.get_submodule(HEAD).weight = theirs.get_parameter(embedding)
    else:
        weights[head] = weights.pop(family.head)
    theirs.load_state_dict(weights)
    return theirs
