from __future__ import annotations

import json
import logging
import re
import runpy
from pathlib import Path

import pytest
import torch
import typer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from trainyard.checkpoint.format import read_manifest, render_manifest
from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.cli.export import export
from trainyard.data.vocabulary import byte_symbols
from trainyard.errors import CheckpointError, MachineError
from trainyard.evaluation.generate import Sampling
from trainyard.export.huggingface import (
    compare_logits,
    export_huggingface,
    import_huggingface,
    require_equal_logits,
)

transformers = pytest.importorskip("transformers")

VARIANTS = {
    "as usual": [],
    "untied": ["model.tied_embeddings=false"],
    "narrow": ["model.d_ff=96"],
    "padded": ["model.vocabulary_size=500"],
    "one head": ["model.n_heads=1"],
    "other epsilon": ["model.layer_norm_epsilon=1e-3", "model.dropout=0.0"],
}


@pytest.mark.parametrize("overrides", VARIANTS.values(), ids=VARIANTS)
def test_transformers_gives_the_same_logits(make_checkpoint, tmp_path, overrides):
    checkpoint, model = make_checkpoint(*overrides)
    export_huggingface(checkpoint, tmp_path / "out")
    theirs, loading = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    tokens = torch.randint(500, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.logits(model(tokens))
        found = theirs.eval()(tokens).logits
    assert found.shape == expected.shape
    largest = expected.abs().max()
    assert largest > 0.5
    assert (found - expected).abs().max() <= 2e-6 * largest


COMPLETE_P = "parametrization=complete_p base_d_model=48 base_n_layers=5"
OLMO = "positions=rotary norm=rms mlp=swiglu bias=false query_key_norm=all norm_place=after"
MIXTRAL = "positions=rotary norm=rms mlp=swiglu bias=false dropout=0.0 n_experts=4 d_expert=32"


@pytest.mark.parametrize(
    "fields",
    ["tied_embeddings=false", OLMO, f"{MIXTRAL} tied_embeddings=false base_d_expert=8"],
    ids=["GPT-2", "OLMo 2", "Mixtral"],
)
def test_multipliers_of_complete_p_are_in_the_weights(make_checkpoint, tmp_path, fields):
    words = f"{COMPLETE_P} {fields}".split()
    checkpoint, model = make_checkpoint(*(f"model.{word}" for word in words))
    export_huggingface(checkpoint, tmp_path / "out")
    assert compare_logits(checkpoint, tmp_path / "out") <= 2e-6
    again = import_huggingface(tmp_path / "out", tmp_path / "again")
    ours, run, _ = build_model_from_checkpoint(again)
    assert run.model.parametrization == "standard"
    tokens = torch.arange(64)[None] % 500
    with torch.no_grad():
        expected, found = (each.eval().logits(each(tokens)) for each in (model, ours))
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_the_config_says_what_the_run_says(make_checkpoint, tmp_path, tokenizer_folder):
    checkpoint, _ = make_checkpoint(
        f"tokenizer.path={tokenizer_folder}", "model.vocabulary_size=259", "model.d_ff=96"
    )
    names = export_huggingface(checkpoint, tmp_path / "out")
    assert names == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    of_run = {
        "n_positions": 64,
        "n_ctx": 64,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_inner": 96,
    }
    of_run |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.1)
    of_run |= {"layer_norm_epsilon": 1e-5, "initializer_range": 0.02, "tie_word_embeddings": True}
    fixed = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32"}
    fixed |= {"activation_function": "gelu_new", "scale_attn_weights": True}
    no = ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention")
    ids = {"vocab_size": 259, "bos_token_id": 258, "eos_token_id": 258}
    assert config == of_run | fixed | dict.fromkeys(no, False) | ids


def test_auto_tokenizer_opens_the_folder(make_checkpoint, tmp_path, tokenizer_folder):
    checkpoint, _ = make_checkpoint(
        f"tokenizer.path={tokenizer_folder}", "model.vocabulary_size=259"
    )
    export_huggingface(checkpoint, tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("hello<|endoftext|>")["input_ids"]
    assert ids == [256, 257, byte_symbols().index("o"), 258]
    assert tokenizer.decode(ids) == "hello<|endoftext|>"
    assert tokenizer.eos_token_id == 258
    assert tokenizer.model_max_length == 64
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    written = model.generate(torch.tensor([ids[:2]]), max_new_tokens=3, do_sample=False)
    assert written.shape[1] <= 5


def test_without_a_tokenizer_there_is_a_warning(make_checkpoint, tmp_path, caplog):
    checkpoint, _ = make_checkpoint("tokenizer.path=gone")
    with caplog.at_level(logging.WARNING):
        names = export_huggingface(checkpoint, tmp_path / "out")
    assert "exporting without a tokenizer: gone was not found" in caplog.text
    assert "tokenizer.json" not in names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] is None


def test_documents_are_not_told_apart_elsewhere(make_checkpoint, tmp_path, caplog):
    within = ("model.attention_within_documents=true", "model.end_of_document_id=3")
    checkpoint, _ = make_checkpoint(*within, "model.vocabulary_size=8")
    with caplog.at_level(logging.WARNING):
        export_huggingface(checkpoint, tmp_path / "out")
    assert "config.json cannot say model.attention_within_documents=true" in caplog.text
    assert compare_logits(checkpoint, tmp_path / "out") <= 2e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_may_be_rounded(make_checkpoint, tmp_path, dtype):
    checkpoint, model = make_checkpoint()
    export_huggingface(checkpoint, tmp_path / "out", dtype)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {dtype}
    expected = model.blocks["1"].mlp.up.weight.t().to(dtype)
    assert torch.equal(weights["transformer.h.1.mlp.c_fc.weight"], expected)
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert theirs.dtype == dtype
    assert 1e-5 < compare_logits(checkpoint, tmp_path / "out") < 0.03


def test_large_models_are_sharded_with_an_index(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint()
    names = export_huggingface(checkpoint, tmp_path / "out", shard_limit_bytes=200_000)
    assert "model-00001-of-00003.safetensors" in names
    assert "model.safetensors.index.json" in names
    assert compare_logits(checkpoint, tmp_path / "out") < 2e-6


def test_a_damaged_checkpoint_is_not_exported(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint()
    (file,) = checkpoint.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"safetensors is damaged: the checksum of 'model\."):
        export_huggingface(checkpoint, tmp_path / "out")
    file.write_bytes(content[:8] + b" " * (len(content) - 8))
    with pytest.raises(CheckpointError, match="is damaged: the sha256 of its header is"):
        export_huggingface(checkpoint, tmp_path / "out")
    manifest = read_manifest(checkpoint)
    for name, problem in {"model.blocks.1.mlp.up.bias": "is missing", None: "is missing"}.items():
        kept = tuple(
            grid.model_copy(update={"names": names})
            for grid in manifest.grids
            if (names := tuple(each for each in grid.names if name and each != name))
        )
        (checkpoint / "manifest.json").write_bytes(
            render_manifest(manifest.model_copy(update={"grids": kept}))
        )
        with pytest.raises(CheckpointError, match=problem):
            export_huggingface(checkpoint, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


@pytest.mark.parametrize(
    ("value", "dtype", "problem"),
    [
        (float("nan"), "float32", r"h\.1\.mlp\.c_fc\.bias' has values"),
        (float("-inf"), "float32", "not finite in float32"),
        (1e5, "float16", "not finite in float16"),
    ],
)
def test_weights_that_are_not_finite_are_refused(make_checkpoint, tmp_path, value, dtype, problem):
    checkpoint, _ = make_checkpoint(spoilt=("blocks.1.mlp.up.bias", value))
    with pytest.raises(CheckpointError, match=problem):
        export_huggingface(checkpoint, tmp_path / "out", getattr(torch, dtype))
    assert {path.name for path in tmp_path.iterdir()} == {"run"}
    if dtype == "float16":
        export_huggingface(checkpoint, tmp_path / "out", torch.bfloat16)


def test_logits_that_are_not_finite_are_named(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint(spoilt=("blocks.1.mlp.up.weight", 3e38))
    export_huggingface(checkpoint, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"the logits of .* are not finite"):
        require_equal_logits(checkpoint, tmp_path / "out", torch.float32)


def test_the_example_of_the_card_samples(
    make_checkpoint, tmp_path, tokenizer_folder, monkeypatch, capsys
):
    make_checkpoint(f"tokenizer.path={tokenizer_folder}", "model.vocabulary_size=259")
    monkeypatch.chdir(tmp_path)
    export(Path("run"), Path("out"), "huggingface", "float32", False, "", False, "")
    config = json.loads(Path("out/generation_config.json").read_text())
    usual = Sampling()
    assert [config[key] for key in ("do_sample", "temperature", "top_k", "top_p")] == [
        *(True, usual.temperature, usual.top_k, usual.top_p)
    ]
    code = re.search(r"```python\n(.*?)```", Path("out/README.md").read_text(), re.DOTALL)
    assert code and "generate(**tokens, max_new_tokens=50)" in code[1]
    Path("example.py").write_text(code[1])
    capsys.readouterr()
    texts = set()
    for _ in range(2):
        runpy.run_path("example.py")
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2 and all(text.startswith("Once") for text in texts)


def test_an_output_that_exists_is_left_alone(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint()
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="out already exists\nhint: name another --output"):
        export_huggingface(checkpoint, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write .*file/out"):
        export_huggingface(checkpoint, tmp_path / "file" / "out")
    assert not list(tmp_path.glob(".*"))


def test_a_wrong_export_is_noticed(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint()
    export_huggingface(checkpoint, tmp_path / "out")
    assert require_equal_logits(checkpoint, tmp_path / "out", torch.float32) <= 2e-6
    path = tmp_path / "out" / "model.safetensors"
    weights = load_file(path)
    weights["transformer.h.0.attn.c_attn.weight"] *= 1.1
    save_file(weights, path)
    with pytest.raises(RuntimeError, match=r"the logits of .* and .* differ by"):
        require_equal_logits(checkpoint, tmp_path / "out", torch.float32)


def test_the_command_exports_the_newest_checkpoint_and_verifies(make_checkpoint, tmp_path):
    checkpoint, _ = make_checkpoint()
    app = typer.Typer()
    app.command()(export)
    result = CliRunner().invoke(app, [str(tmp_path / "run"), "--output", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    flat = " ".join(result.output.split())
    assert f"exported {checkpoint} to {tmp_path / 'out'}: README.md, config.json, gen" in flat
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as weights:
        assert weights.metadata()["format"] == "pt"
    assert "transformers loads it; its logits differ by at most" in flat
    help_text = CliRunner().invoke(app, ["--help"]).output
    assert "Example: trainyard export runs/demo --output demo-hf" in help_text
