from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from tests.export.models import random_model
from typer.testing import CliRunner

from trainyard.checkpoint.load import build_model_from_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.cli.import_ import import_
from trainyard.config.load import load_run
from trainyard.errors import CheckpointError, ConfigError, DataError
from trainyard.export.huggingface import export_huggingface, import_huggingface

transformers = pytest.importorskip("transformers")


@pytest.fixture
def theirs(tmp_path) -> Path:
    random_model("GPT2", num_hidden_layers=3).save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


def refused(theirs: Path, problem: str) -> str:
    """Imports what cannot be imported; gives the hint."""
    with pytest.raises(CheckpointError, match=problem) as raised:
        import_huggingface(theirs, theirs.parent / "mine")
    assert {path.name for path in theirs.parent.iterdir()} == {"theirs"}
    return raised.value.hint


def test_the_run_can_be_trained_on(theirs, tmp_path, tokenizer_folder):
    for name in ("vocab.json", "merges.txt"):
        (tokenizer_folder / name).rename(theirs / name)
    output = tmp_path / "runs" / "mine"
    checkpoint = import_huggingface(theirs, output)
    assert sorted(path.name for path in output.iterdir()) == [
        "checkpoints",
        "run.toml",
        "tokenizer",
    ]
    run = load_run(str(output / "run.toml")).run
    model, saved, _ = build_model_from_checkpoint(checkpoint)
    assert run == saved
    assert run.name == "mine"
    assert run.tokenizer.path == str(output / "tokenizer")
    assert (checkpoint / "tokenizer.json").read_bytes() == (
        output / "tokenizer" / "tokenizer.json"
    ).read_bytes()
    check_checkpoint(checkpoint)
    assert run.model.vocabulary_size == 259
    assert model.embedding.weight.shape == (384, 32)
    assert torch.count_nonzero(model.embedding.weight[259:]) == 0
    assert not list(output.parent.glob(".*"))
    export_huggingface(checkpoint, tmp_path / "back")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    assert tokenizer("<|endoftext|>")["input_ids"] == [258]


def test_a_tokenizer_of_another_model_is_refused(theirs, tmp_path):
    with pytest.raises(DataError, match="gpt2 has 50257 tokens, the model's vocabulary 259"):
        import_huggingface(theirs, tmp_path / "mine", "gpt2")
    assert not (tmp_path / "mine").exists()


def test_old_names_masks_and_half_precision_are_read(theirs, tmp_path):
    weights = load_file(theirs / "model.safetensors")
    old = {name.removeprefix("transformer."): t.half() for name, t in weights.items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 48, 48)
    old["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, theirs / "model.safetensors")
    model, _, _ = build_model_from_checkpoint(import_huggingface(theirs, tmp_path / "mine"))
    assert torch.equal(model.positions.weight, old["wpe.weight"].float())


def test_pickles_are_refused_with_a_way_out(theirs, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "marker"),)

    payload = pickle.dumps(Bomb())
    (theirs / "model.safetensors").unlink()
    refused(theirs, r"has no model\.safetensors; it has no weights")
    (theirs / "pytorch_model.bin").write_bytes(payload)
    hint = refused(theirs, r"only pytorch_model\.bin, and pickles")
    assert "from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)" in hint
    (theirs / "model.safetensors").write_bytes(payload)
    refused(theirs, r"theirs/model\.safetensors is not a safetensors file: ")
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "index, message",
    [
        ({"weight_map": {"a": "../theirs/model.safetensors"}}, "only files beside it can be read"),
        ({"weight_map": {"a": 7}}, "only files beside it can be read"),
        ({"weight_map": {"a": "a\0b"}}, "only files beside it can be read"),
        ({"weight_map": {"a": "\x1b[2J"}}, "only files beside it can be read"),
        ({"weight_map": {"a": ".."}}, "cannot be read"),
        ({"weight_map": {"a": "a" * 300}}, "File name too long"),
        ({"weight_map": {"a": "gone.safetensors"}}, "gone.safetensors cannot be read"),
        ({"weight_map": [1]}, "is malformed"),
        ({}, "is malformed: KeyError"),
    ],
)
def test_a_hostile_index_is_refused(theirs, tmp_path, index, message):
    (theirs / "model.safetensors").unlink()
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(theirs, message)


def test_pipes_do_not_block(theirs, tmp_path):
    (theirs / "model.safetensors").unlink()
    os.mkfifo(theirs / "weights.pipe")
    index = {"weight_map": {"a": "weights.pipe"}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    hint = refused(theirs, "pipe cannot be read: not an ordinary file")
    assert "copy or download the file again" in hint
    (theirs / "config.json").unlink()
    os.mkfifo(theirs / "config.json")
    refused(theirs, r"config\.json: not an ordinary file")


def test_files_that_an_earlier_save_left_are_not_mixed_in(theirs, tmp_path):
    moved, names = "transformer.wpe.weight", ["a.safetensors", "b.safetensors"]
    weights = load_file(theirs / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, theirs / names[0])
    save_file({moved: weights[moved]}, theirs / names[1])
    index = {"weight_map": {**dict.fromkeys(weights, names[0]), moved: names[1]}}
    (theirs / "model.safetensors").rename(tmp_path.with_suffix(".whole"))
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(theirs, rf"tensor '{moved}' is in .*b\.safetensors and in a\.safetensors")
    tmp_path.with_suffix(".whole").rename(theirs / "model.safetensors")
    model, _, _ = build_model_from_checkpoint(import_huggingface(theirs, tmp_path / "mine"))
    expected = transformers.GPT2LMHeadModel.from_pretrained(theirs).transformer.wpe.weight
    assert torch.equal(model.positions.weight, expected)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e5])
def test_weights_that_are_not_finite_are_refused(theirs, tmp_path, value):
    weights = load_file(theirs / "model.safetensors")
    weights["transformer.wpe.weight"][3, 5] = value
    save_file(weights, theirs / "model.safetensors")
    if value != 1e5:
        refused(theirs, "'model.positions.weight' has values that are not finite in float32")
        return
    checkpoint = import_huggingface(theirs, tmp_path / "mine")
    with pytest.raises(CheckpointError, match=r"wpe\.weight' .* in float16") as raised:
        export_huggingface(checkpoint, tmp_path / "half", torch.float16)
    assert "--dtype bfloat16" in raised.value.hint
    assert not (tmp_path / "half").exists()


def test_quantized_weights_are_refused(theirs):
    weights = load_file(theirs / "model.safetensors")
    name = "transformer.wpe.weight"
    save_file(weights | {name: weights[name].to(torch.int8)}, theirs / "model.safetensors")
    refused(theirs, "tensor 'transformer.wpe.weight' in .* is quantized, to torch.int8")


def test_missing_and_unknown_tensors_are_named(theirs, tmp_path):
    weights = load_file(theirs / "model.safetensors")
    save_file(weights | {"adapter.a": torch.ones(1)}, theirs / "model.safetensors")
    refused(theirs, r"1 tensors that no GPT2LMHeadModel has: adapter\.a")
    del weights["transformer.ln_f.bias"]
    save_file(weights, theirs / "model.safetensors")
    refused(theirs, r"tensor 'transformer\.ln_f\.bias' in .* is missing")


def test_the_command_makes_a_run_folder_once(theirs, tmp_path):
    app = typer.Typer()
    app.command()(import_)
    arguments = [str(theirs), "--output", str(tmp_path / "mine")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "fill in data, batches and schedule" in " ".join(result.output.split())
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, ConfigError)
    assert f"{tmp_path / 'mine'} already exists" in str(again.exception)
    assert "Example: trainyard import gpt2" in CliRunner().invoke(app, ["--help"]).output
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere/config\.json"):
        import_huggingface(tmp_path / "nowhere", tmp_path / "other")
