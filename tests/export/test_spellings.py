"""A `config.json` with keys of several versions of transformers is read as it reads them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainyard.errors import CheckpointError
from trainyard.export.families import read_config
from trainyard.model.positions import rotary_table

transformers = pytest.importorskip("transformers")

T = 32
SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
SHAPE |= {"num_attention_heads": 4, "max_position_embeddings": T}
NEOX = {"model_type": "gpt_neox", "hidden_act": "gelu_new", "use_parallel_residual": False}
FAMILIES = {
    "LlamaForCausalLM": SHAPE | {"model_type": "llama"},
    "Qwen3ForCausalLM": SHAPE | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 12},
    "Olmo2ForCausalLM": SHAPE | {"model_type": "olmo2", "pad_token_id": None},
    "GPTNeoXForCausalLM": SHAPE | NEOX,
    "OlmoeForCausalLM": SHAPE | {"model_type": "olmoe", "num_experts": 8, "pad_token_id": None},
    "Qwen3MoeForCausalLM": SHAPE | {"model_type": "qwen3_moe", "head_dim": 12, "num_experts": 9},
    "MixtralForCausalLM": SHAPE | {"model_type": "mixtral", "num_key_value_heads": 2},
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
DEFAULT = {"rope_type": "default"}
ABSENT = object()
KEYS: dict[str, list[Any]] = {
    "rope_theta": [ABSENT, 500.0],
    "rotary_emb_base": [ABSENT, 50_000],
    "rotary_pct": [ABSENT, 1.0],
    "rope_scaling": [ABSENT, None, DEFAULT, LLAMA3 | {"rope_theta": 700.0}, {"rope_theta": 700.0}],
    "rope_parameters": [
        *(ABSENT, {}, DEFAULT, LLAMA3, {"rope_theta": 900.0}),
        DEFAULT | {"partial_rotary_factor": 1.0},
    ],
}
UNUSED = {"GPTNeoXForCausalLM": ("rope_theta",)}


@pytest.mark.parametrize("family", FAMILIES)
def test_any_mixture_of_rotary_keys_is_read_as_transformers_does(
    tmp_path: Path, family: str
) -> None:
    n_read = 0
    unused = UNUSED.get(family, ("rotary_emb_base", "rotary_pct"))
    keys = {key: values for key, values in KEYS.items() if key not in unused}
    for values in itertools.product(*keys.values()):
        mixed = {k: value for k, value in zip(keys, values, strict=True) if value is not ABSENT}
        config = FAMILIES[family] | mixed | {"architectures": [family]}
        (tmp_path / "config.json").write_text(json.dumps(config))
        try:
            _, model = read_config((tmp_path / "config.json").read_bytes(), "config.json")
        except CheckpointError:
            continue
        n_read += 1
        theirs = transformers.AutoConfig.from_pretrained(tmp_path)
        whole = getattr(transformers, family)(theirs)
        rotary = getattr(whole, "gpt_neox" if "NeoX" in family else "model").rotary_emb
        expected = torch.stack(rotary(torch.zeros(1), torch.arange(T)[None]))[:, 0]
        found = rotary_table(model)
        assert found is not None
        torch.testing.assert_close(found[:, :, 0].float(), expected, rtol=0, atol=1e-5)
    assert n_read > 30


@pytest.mark.parametrize("given", ["num_experts", "num_local_experts", "both"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if "oe" in name or "Mix" in name])
def test_synonyms_of_experts_are_read_as_transformers_does(
    tmp_path: Path, family: str, given: str
) -> None:
    numbers = {"num_experts": 10, "num_local_experts": 12}
    keys = {key: number for key, number in numbers.items() if given in (key, "both")}
    config = {k: value for k, value in FAMILIES[family].items() if k not in numbers} | keys
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [family]}))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    _, ours = read_config((tmp_path / "config.json").read_bytes(), "config.json")
    assert ours.n_experts == theirs.num_experts
    assert ours.n_active_experts == theirs.num_experts_per_tok


@pytest.mark.parametrize("given", ["n_head", "num_attention_heads", "both"])
def test_synonyms_of_gpt2_are_read_as_transformers_does(tmp_path: Path, given: str) -> None:
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers"}
    names |= {"n_head": "num_attention_heads", "n_positions": "max_position_embeddings"}
    older = dict(zip(names, (32, 1, 4, T), strict=True))
    newer = dict(zip(names.values(), (64, 2, 8, 2 * T), strict=True))
    keys = {"n_head": older, "num_attention_heads": newer, "both": older | newer}[given]
    config = {"model_type": "gpt2", "vocab_size": 64, "architectures": ["GPT2LMHeadModel"], **keys}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    _, ours = read_config((tmp_path / "config.json").read_bytes(), "config.json")
    assert (ours.d_model, ours.n_layers, ours.n_heads, ours.sequence_length) == (
        theirs.n_embd,
        theirs.n_layer,
        theirs.n_head,
        theirs.n_positions,
    )
