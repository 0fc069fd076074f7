"""Models of transformers, dense and of experts, imported, trained and exported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.data.families import ENDS, TEXTS, build_content, load_reference, write_folder
from tests.e2e.test_layouts import losses, said, train
from tests.export.models import random_model, require_equal_logits_of
from tests.faults.small_run import write_tokens

import trainyard
from trainyard.api.running import convert_start
from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.checkpoint.resume import find_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.config.load import load_run
from trainyard.config.run import Model, Run
from trainyard.data.loader import Loader, build_orders
from trainyard.errors import CheckpointError, ConfigError
from trainyard.evaluation.generate import Sampling, generate
from trainyard.export.families import find_family
from trainyard.export.huggingface import (
    export_huggingface,
    import_huggingface,
    require_equal_logits,
)
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import learning_rate, resolve

transformers = pytest.importorskip("transformers")

SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 24}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0}
NEOX = {"use_parallel_residual": False, "hidden_act": "gelu_new", "rope_parameters": ROPE}
OF_OLMOE = {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": None, "eos_token_id": None}
OF_QWEN3 = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
OF_QWEN3 |= {"num_key_value_heads": 2, "head_dim": 16}
OF_MIXTRAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
CASES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "rms_norm_eps": 1e-5},
    "Llama tied, llama3 scaling": {
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
        "rope_parameters": SCALING | {"rope_theta": 500_000.0},
        "head_dim": 12,
    },
    "Llama, every head its own keys": {"num_key_value_heads": 4},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 24},
    "Qwen3 tied, uneven": {"num_key_value_heads": 3, "num_attention_heads": 3, "head_dim": 16}
    | {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "GPTNeoX": NEOX,
    "GPTNeoX tied, another base": NEOX
    | {"tie_word_embeddings": True, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    | {"rope_parameters": ROPE | {"rope_theta": 50_000.0}},
    "Olmo2": {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "pad_token_id": None},
    "Olmo2 tied, every head its own keys": {"tie_word_embeddings": True, "pad_token_id": None},
    "Olmoe": OF_OLMOE | {"num_key_value_heads": 2},
    "Olmoe normalized, tied": OF_OLMOE
    | {"norm_topk_prob": True, "tie_word_embeddings": True, "intermediate_size": 20},
    "Qwen3Moe": OF_QWEN3 | {"norm_topk_prob": True},
    "Qwen3Moe dense first": OF_QWEN3
    | {"num_hidden_layers": 3, "mlp_only_layers": [1, 0], "head_dim": 12},
    "Mixtral": OF_MIXTRAL,
    "Mixtral all active, other base": OF_MIXTRAL
    | {"num_experts_per_tok": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
}


GPT2: dict[str, dict[str, Any]] = {
    "GPT2": {"num_hidden_layers": 3},
    "GPT2 untied": {"tie_word_embeddings": False},
    "GPT2 narrow, another epsilon": {"n_inner": 80, "layer_norm_epsilon": 1e-3},
    "GPT2 no dropout": dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0),
    "GPT2 another spelling": {"activation_function": "gelu_pytorch_tanh"},
}
CASES |= GPT2


def save_random(folder: Path, case: str = "Llama", dtype: str = "float32", **options: Any) -> Any:
    """Saves a model of `CASES`; options named `max_shard_size` and `vocab_size` change that."""
    shard = {key: options.pop(key) for key in ("max_shard_size",) if key in options}
    model = random_model(case.split()[0].rstrip(","), **CASES[case] | options)
    model.to(getattr(torch, dtype)).save_pretrained(folder, **shard)
    return model.float()


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for path in files for name, tensor in load_file(path).items()}


def require_same_tensors(one: Path, other: Path) -> None:
    before, after = tensors(one), tensors(other)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def set_keys(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | keys))


def model_in(run_folder: Path) -> Model:
    return load_run(str(run_folder / "run.toml")).run.model


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bitwise_with_equal_logits(tmp_path, case):
    model = save_random(tmp_path / "theirs", case)
    checkpoint = import_huggingface(tmp_path / "theirs", tmp_path / "runs" / "mine")
    assert checkpoint == tmp_path / "runs" / "mine" / "checkpoints" / "step-00000000"
    check_checkpoint(checkpoint)
    ours, _, manifest = build_model_from_checkpoint(checkpoint)
    assert manifest.step == 0
    require_equal_logits_of(model, ours, 2e-6 if case in GPT2 else 1e-5)
    export_huggingface(checkpoint, tmp_path / "back")
    require_same_tensors(tmp_path / "theirs", tmp_path / "back")
    assert require_equal_logits(checkpoint, tmp_path / "back", torch.float32) <= 1e-5
    import_huggingface(tmp_path / "back", tmp_path / "again")
    assert model_in(tmp_path / "again") == model_in(tmp_path / "runs" / "mine")


@pytest.mark.parametrize(
    ("case", "dtype"), [("Llama", "bfloat16"), ("Llama", "float16"), ("Mixtral", "bfloat16")]
)
def test_half_precision_and_shards_are_read_and_written(tmp_path, case, dtype):
    save_random(tmp_path / "theirs", case, dtype=dtype, max_shard_size="30KB")
    assert len(list((tmp_path / "theirs").glob("model-*.safetensors"))) > 1
    checkpoint = import_huggingface(tmp_path / "theirs", tmp_path / "mine")
    export_huggingface(checkpoint, tmp_path / "back", getattr(torch, dtype), 20_000)
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 1
    require_same_tensors(tmp_path / "theirs", tmp_path / "back")
    assert require_equal_logits(checkpoint, tmp_path / "back", torch.float32) <= 1e-5


def test_other_spellings_of_the_same_model_are_read(tmp_path):
    theirs = tmp_path / "theirs"
    save_random(theirs, "Llama tied, llama3 scaling")
    import_huggingface(theirs, tmp_path / "mine")
    expected = model_in(tmp_path / "mine")
    assert (expected.rotary_base, expected.rotary_scaling.factor) == (500_000, 4)
    assert (expected.d_head, expected.n_key_value_heads, expected.tied_embeddings) == (12, 1, True)
    weights = tensors(theirs)
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    head = {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    before_version_5 = {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": SCALING}
    for number, stored in enumerate((weights | inverse | head, bare)):
        save_file(stored, theirs / "model.safetensors")
        set_keys(theirs, **before_version_5)
        import_huggingface(theirs, tmp_path / str(number))
        assert model_in(tmp_path / str(number)) == expected


SLIDING = ["full_attention", "sliding_attention"]
YARN = ROPE | {"rope_type": "yarn", "factor": 2.0}
ABSENT = object()
"""transformers then assumes a value that our models lack."""
REFUSED: list[tuple[str, str, Any, str]] = [
    ("Llama", "architectures", ["MistralForCausalLM"], r"\['MistralForCausalLM'\] cannot be"),
    ("Llama", "attention_bias", True, "attention_bias: .*got True"),
    ("Llama", "mlp_bias", True, "mlp_bias: .*got True"),
    ("Llama", "hidden_act", "gelu", "hidden_act: .*got 'gelu'"),
    ("Llama", "attention_dropout", 0.1, "attention_dropout: .*got 0.1"),
    ("Llama", "quantization_config", {"quant_method": "awq"}, "quantization_config: .*None"),
    ("Llama", "rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type: .*got 'linear'"),
    ("Llama", "rope_parameters", {"rope_type": "yarn"}, "rope_scaling.rope_type: .*got 'yarn'"),
    ("Llama", "num_key_value_heads", 3, "n_heads=4 must be divisible by n_key_value_heads=3"),
    ("Llama", "num_attention_heads", 5, "hidden_size must be divisible by num_attention_heads"),
    ("Llama", "head_dim", 10**12, r"q_proj\.weight' in .* has shape \[32, 32\]; .* says \[4000"),
    ("Llama", "intermediate_size", 10**18, r"gate_proj\.weight' in .* has shape"),
    ("Llama", "vocab_size", 10**18, r"embed_tokens\.weight' in .* has shape"),
    (
        "Llama",
        "num_hidden_layers",
        9999,
        r"model\.layers\.2\.input_layernorm\.weight' in .* is missing",
    ),
    ("Llama", "tie_word_embeddings", True, r"'lm_head\.weight' in .* is not the embedding"),
    ("Qwen3", "use_sliding_window", True, "is not a Qwen3ForCausalLM .*: use_sliding_window"),
    ("Qwen3", "layer_types", SLIDING, "is not a Qwen3ForCausalLM .*: layer_types"),
    ("Olmoe", "clip_qkv", 8.0, "is not a OlmoeForCausalLM .*: clip_qkv: .*got 8.0"),
    ("Olmoe", "head_dim", 16, "head_dim: .*got 16"),
    ("Olmoe", "num_experts", 7, r"mlp\.gate\.weight' in .* has shape \[6, 32\]; .* says \[7, 32\]"),
    ("Olmoe", "num_experts", 10**12, r"mlp\.gate\.weight' in .* has shape"),
    ("Olmoe", "num_experts", 0, "num_experts: .*greater than or equal to 1"),
    ("Olmoe", "num_experts_per_tok", 7, "n_active_experts=7 is more than the 6 experts"),
    ("Qwen3Moe", "use_sliding_window", True, "use_sliding_window: .*got True"),
    ("Qwen3Moe", "decoder_sparse_step", 2, "decoder_sparse_step: .*got 2"),
    ("Qwen3Moe", "mlp_only_layers", [1], "mlp_only_layers: only the first blocks can be without"),
    ("Qwen3Moe", "mlp_only_layers", [0, 1], "n_dense_blocks=2 leaves none of n_layers=2 blocks"),
    ("Qwen3Moe", "mlp_only_layers", [0], r"layers\.0\.mlp\.gate_proj\.weight' in .* is missing"),
    (
        "Qwen3Moe",
        "moe_intermediate_size",
        24,
        r"experts\.0\.gate_proj\.weight' .* \[20, 32\]; .*24",
    ),
    ("Mixtral", "sliding_window", 4096, "sliding_window: .*got 4096"),
    ("Mixtral", "router_jitter_noise", 0.1, "router_jitter_noise: .*got 0.1"),
    ("Mixtral", "architectures", ["DeepseekV3ForCausalLM"], r"\['DeepseekV3.* cannot be imported"),
    ("Mixtral", "architectures", ["Qwen2MoeForCausalLM"], "supported: .*Qwen3MoeForCausalLM"),
    ("GPTNeoX", "use_parallel_residual", True, "use_parallel_residual: .*got True"),
    ("GPTNeoX", "use_parallel_residual", ABSENT, "use_parallel_residual: .*got True"),
    ("GPTNeoX", "hidden_act", "gelu", "hidden_act: .*got 'gelu'"),
    ("GPTNeoX", "hidden_act", ABSENT, "hidden_act: .*got 'gelu'"),
    ("GPTNeoX", "attention_bias", False, "attention_bias: .*got False"),
    ("GPTNeoX", "hidden_dropout", 0.1, "attention_dropout=0.0 and hidden_dropout=0.1 differ"),
    ("GPTNeoX", "rope_parameters", ROPE | {"partial_rotary_factor": 0.25}, "rotary_pct: .*0.25"),
    ("GPTNeoX", "rope_parameters", {"rope_type": "default"}, "rotary_pct: .*got 0.25"),
    ("GPTNeoX", "rope_parameters", ABSENT, "rotary_pct: .*got 0.25"),
    ("GPTNeoX", "rope_parameters", YARN, "is not a GPTNeoXForCausalLM .*rope_scaling: "),
    ("GPT2", "scale_attn_by_inverse_layer_idx", True, "_by_inverse_layer_idx: .*got True"),
    ("GPT2", "reorder_and_upcast_attn", True, "reorder_and_upcast_attn: .*got True"),
    ("GPT2", "scale_attn_weights", False, "scale_attn_weights: .*got False"),
    ("GPT2", "is_causal", False, "is_causal: .*got False"),
    ("GPT2", "add_cross_attention", True, "add_cross_attention: .*got True"),
    ("GPT2", "activation_function", "relu", "activation_function: .*got 'relu'"),
    ("GPT2", "model_type", "llama", "model_type: .*got 'llama'"),
    ("GPT2", "n_head", 5, "d_model=32 must be divisible by n_heads=5"),
    ("GPT2", "n_embd", "32; rm", "n_embd: .*valid integer"),
    ("GPT2", "attn_pdrop", 0.2, "attn_pdrop=0.2 and resid_pdrop=0.1 differ"),
    ("GPT2", "n_layer", 9999, r"h\.3\.ln_1\.weight' in .* is missing"),
    ("GPT2", "n_inner", 10**12, r"c_fc.weight' in .* has shape \[32, 128\]; .* says \[32, 10000"),
    ("GPT2", "n_positions", 10**12, "transformer.wpe.weight' in .* has shape"),
]


@pytest.mark.parametrize(("case", "key", "value", "message"), REFUSED)
def test_what_our_model_does_not_compute_is_refused(tmp_path, case, key, value, message):
    save_random(tmp_path / "theirs", case)
    path = tmp_path / "theirs" / "config.json"
    config = json.loads(path.read_text()) | {key: value}
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ABSENT}))
    with pytest.raises(CheckpointError, match=message):
        import_huggingface(tmp_path / "theirs", tmp_path / "mine")
    assert {path.name for path in tmp_path.iterdir()} == {"theirs"}


def test_biases_among_the_weights_are_refused(tmp_path):
    save_random(tmp_path / "theirs")
    bias = {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}
    save_file(tensors(tmp_path / "theirs") | bias, tmp_path / "theirs" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors that no LlamaForCausalLM has: model\.la"):
        import_huggingface(tmp_path / "theirs", tmp_path / "mine")


@pytest.mark.parametrize(
    ("case", "family"),
    [("Llama", "llama3"), ("Qwen3", "qwen3"), ("Llama", "smollm2"), ("Olmo2", "olmo2")],
)
def test_the_tokenizer_comes_along_there_and_back(tmp_path, case, family):
    save_random(tmp_path / "theirs", case, vocab_size=1000)
    content = build_content(family)
    write_folder(tmp_path / "theirs", family, content)
    checkpoint = import_huggingface(tmp_path / "theirs", tmp_path / "mine")
    saved = trainyard.Checkpoint(checkpoint)
    prompt = f"2026: e\u0301té, it's {ENDS[family]}"
    ids = load_reference(content).encode(prompt, add_special_tokens=False).ids
    assert saved.tokenizer.encode(prompt) == ids
    assert trainyard.generate(saved, prompt, tokens=3).startswith(prompt)
    (tmp_path / "text.txt").write_text(prompt, encoding="utf-8")
    found = trainyard.evaluate(saved, data=str(tmp_path / "text.txt"))
    assert (found.n_tokens, found.n_bytes) == (
        len(ids), len(saved.tokenizer.decode(ids).encode())
    )  # fmt: skip
    export_huggingface(checkpoint, tmp_path / "back")
    theirs, back = (
        transformers.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("theirs", "back")
    )
    for text in (*TEXTS, prompt, f"{ENDS[family]}<|im_end|> ½"):
        assert back(text)["input_ids"] == theirs(text, add_special_tokens=False)["input_ids"]
        assert back.decode(back(text)["input_ids"]) == theirs.decode(back(text)["input_ids"])
    assert (back.eos_token, back.eos_token_id) == (ENDS[family], saved.tokenizer.eod_id)
    config = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert config["eos_token_id"] == saved.tokenizer.eod_id
    again = import_huggingface(tmp_path / "back", tmp_path / "again")
    assert trainyard.Checkpoint(again).tokenizer.fingerprint == saved.tokenizer.fingerprint


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("byte_fallback", {"model": {"type": "BPE", "byte_fallback": True}}, "byte_fallback is"),
        ("normalizer", {"model": {"type": "BPE"}, "normalizer": {"type": "NFKC"}}, "'NFKC'"),
    ],
)
def test_weights_are_imported_without_a_tokenizer_that_cannot_be_read(
    tmp_path, caplog, tokenizer_folder, name, change, problem
):
    save_random(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(json.dumps(change))
    import_huggingface(tmp_path / "theirs", tmp_path / "mine")
    assert "importing without the tokenizer: " in caplog.text
    assert problem in caplog.text
    assert load_run(str(tmp_path / "mine" / "run.toml")).run.tokenizer.path == ""
    import_huggingface(tmp_path / "theirs", tmp_path / "other", str(tokenizer_folder))
    assert (tmp_path / "other" / "tokenizer" / "tokenizer.json").exists()


LLAMA = ["positions=rotary", "norm=rms", "mlp=swiglu", "bias=false", "n_key_value_heads=2"]
EXPERTS = [*LLAMA, "n_experts=4"]


@pytest.mark.parametrize(
    ("fields", "architecture"),
    [
        ([], "GPT2LMHeadModel"),
        (["rotary_base=5e5", "dropout=0"], "GPT2LMHeadModel"),
        (["positions=rotary", "rotary_base=5e5"], "GPTNeoXForCausalLM"),
        (LLAMA, "LlamaForCausalLM"),
        ([*LLAMA, "d_head=32", "rotary_base=5e5"], "LlamaForCausalLM"),
        ([*LLAMA, "query_key_norm=true"], "Qwen3ForCausalLM"),
        ([*LLAMA, "query_key_norm=all", "norm_place=after"], "Olmo2ForCausalLM"),
        ([*LLAMA, "query_key_norm=true", "d_model=62", "d_head=16"], "Qwen3ForCausalLM"),
        ([*EXPERTS, "d_expert=40", "balance=none"], "MixtralForCausalLM"),
        ([*EXPERTS, "query_key_norm=head", "n_dense_blocks=1"], "Qwen3MoeForCausalLM"),
        ([*EXPERTS, "query_key_norm=all", "router_z_loss=1e-3"], "OlmoeForCausalLM"),
        ([*EXPERTS, "query_key_norm=all", "router_normalized=false"], "OlmoeForCausalLM"),
    ],
)
def test_the_fields_of_a_run_choose_the_architecture(
    make_checkpoint, tmp_path, fields, architecture
):
    checkpoint, model = make_checkpoint(*(f"model.{field}" for field in fields))
    export_huggingface(checkpoint, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == [architecture]
    assert require_equal_logits(checkpoint, tmp_path / "out", torch.float32) <= 1e-5
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(theirs).__name__ == architecture
    n_padding = (len(model.embedding.weight) - 512) * model.embedding.weight.shape[1]
    n_ours = sum(parameter.numel() for parameter in model.parameters()) - n_padding
    assert sum(parameter.numel() for parameter in theirs.parameters()) == n_ours


@pytest.mark.parametrize(
    ("fields", "lacks", "works"),
    [
        (["n_key_value_heads=2"], "GPT2LMHeadModel, .*, has no model.n_key_value_heads=2", "=4"),
        (["d_head=32"], "GPT2LMHeadModel, .*, has no model.d_head=32\n", "model.d_head=16"),
        ([*LLAMA, "norm=layer"], "has no model.norm='layer'\n", 'model.norm="rms"'),
        (
            [*LLAMA, "query_key_norm=true", "bias=true"],
            "Qwen3ForCausalLM, the nearest of GPT2LMHeadModel, GPTNeoXForCausalLM, "
            "LlamaForCausalLM, MixtralForCausalLM, Olmo2ForCausalLM, OlmoeForCausalLM, "
            "Qwen3ForCausalLM, Qwen3MoeForCausalLM, has no model.bias=True\n",
            "nearest that works: model.bias=false",
        ),
        ([*LLAMA, "d_model=62", "d_head=16"], "query_key_norm='none'\n", 'query_key_norm="head"'),
        ([*LLAMA, "norm_place=after"], "Olmo2.* has no model.query_key_norm='none'\n", '="all"'),
        ([*EXPERTS, "balance=bias"], "Mixtral.* has no model.balance='bias'\n", '="loss"'),
        ([*EXPERTS, "router=sigmoid"], "Mixtral.* has no model.router='sigmoid'\n", '="softmax"'),
        ([*EXPERTS, "router_scale=2"], "Mixtral.* has no model.router_scale=2.0\n", "=1.0"),
        ([*EXPERTS, "n_shared_experts=1"], "Mixtral.* no model.n_shared_experts=1\n", "_experts=0"),
        ([*EXPERTS, "n_dense_blocks=1"], "Qwen3Moe.* no model.query_key_norm='none'\n", '="head"'),
        (
            [*EXPERTS, "query_key_norm=all", "n_dense_blocks=1"],
            "Olmoe.* has no model.n_dense_blocks=1\n",
            "model.n_dense_blocks=0",
        ),
        (
            [*EXPERTS, "query_key_norm=all", "n_expert_groups=2", "n_active_groups=1"],
            "Olmoe.* has no model.n_expert_groups=2\n",
            "model.n_expert_groups=1",
        ),
        ([*EXPERTS, "query_key_norm=all", "d_head=32"], "Olmoe.* no model.d_head=32\n", "=16"),
        ([*EXPERTS, "mlp=gelu"], "Mixtral.* has no model.mlp='gelu'\n", '="swiglu"'),
        (
            [*EXPERTS, "router_normalized=false"],
            "Olmoe.* no model.query_key_norm='none'\n",
            '="all"',
        ),
    ],
)
def test_a_model_of_no_family_is_refused_with_the_nearest(fields, lacks, works):
    run = load_run("tiny", [f"model.{field}" for field in fields]).run
    with pytest.raises(ConfigError, match=lacks) as raised:
        find_family(run.model)
    assert raised.value.hint.endswith(works)
    (fix,) = re.findall(r"nearest that works: (.*)", raised.value.hint)
    find_family(load_run("tiny", [*(f"model.{field}" for field in fields), *fix.split()]).run.model)


def losses_of_transformers(folder: Path, run: Run) -> list[float]:
    """Trains the model in a folder, in a loop of plain PyTorch, on the sequences of a run."""
    plan, batches, settings = resolve(run), BatchSchedule(run), run.optimizer
    order = build_orders(run, plan, ("train", "valid"))["train"]
    data = Loader(order, batches, run.model.vocabulary_size)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.ndim > 1]
    norms = {"params": [each for each in parameters if each.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, norms],
        betas=settings.betas,
        eps=settings.epsilon,
    )
    found = []
    for step in range(plan.n_steps):
        tokens, labels = data.batch(step)
        loss = F.cross_entropy(model(tokens).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(run, plan, batches.consumed(step + 1))
        optimizer.step()
        found.append(loss.item())
    return found


def run_from(folder: Path, tokens: Path, work: Path) -> Run:
    """Returns a run of 20 steps on shorter sequences that starts from a folder of Hugging Face."""
    import_huggingface(folder, work / f"shape of {folder.name}")
    fields = [
        *(f"data.blend.prefixes=['{tokens}']", "data.split='80,10,10'", "evaluate.batches=1"),
        *(f"data.cache_folder='{tokens.parent / 'cache'}'", "log.interval=1"),
        *("train.length='20 steps'", "schedule.decay='20 steps'", "schedule.warmup='2 steps'"),
        *("train.micro_batch_size=8", "train.global_batch_size=16", "model.sequence_length=32"),
        *("optimizer.learning_rate=1e-2", "schedule.minimum_learning_rate=1e-4"),
        *("optimizer.epsilon=1e-6", "log.tensorboard=false", f"train.start_from={folder}"),
        *("precision.kind=fp32", "model.balance_coefficient=0"),
    ]
    return load_run(str(work / f"shape of {folder.name}" / "run.toml"), fields).run


@pytest.mark.parametrize(
    "case",
    [
        "Llama tied, llama3 scaling",
        "Qwen3Moe dense first",
        *(
            pytest.param(case, marks=pytest.mark.exhaustive)
            for case in ("Llama", "Qwen3", "Olmo2", "GPTNeoX", "Olmoe", "Mixtral", "Qwen3Moe")
        ),
    ],
)
def test_training_goes_on_as_in_transformers(tmp_path, case):
    """Of a random model, then of the export of what it has become, with moments from zero.

    Without the loss of balance, which transformers has for all blocks and tokens together. All
    experts are active: of tens of thousands of choices some are so close that rounding decides.
    """
    tokens = write_tokens(tmp_path)
    folder = tmp_path / "theirs"
    numbers = [CASES[case].get(key, 0) for key in ("num_experts", "num_local_experts")]
    active = {"num_experts_per_tok": max(numbers)} if any(numbers) else {}
    save_random(folder, case, vocab_size=512, **active)
    for number in range(2):
        run = run_from(folder, tokens, tmp_path)
        trained = tmp_path / f"trained-{number}"
        convert_start(run, trained)
        assert train(trained, run) == [0], said(trained, 0)
        found, expected = losses(trained), losses_of_transformers(folder, run)
        assert found[-1] < found[0] - 0.1
        assert found == pytest.approx(expected, rel=2e-6)
        folder = tmp_path / f"exported-{number}"
        checkpoint = find_checkpoint(trained)
        export_huggingface(checkpoint, folder)
        assert require_equal_logits(checkpoint, folder, torch.float32) <= 1e-5
        ours, _, _ = build_model_from_checkpoint(checkpoint)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        prompt = [3, 4, 5, 6]
        written = theirs.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        (text,) = generate(ours, [prompt], 20, Sampling(temperature=0))
        assert text == written[0, 4:].tolist()
