from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from trainyard.checkpoint.load import build_model_from_checkpoint, load_into, load_tensors
from trainyard.checkpoint.resume import find_checkpoint, newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.errors import CheckpointError

FILE = "model-00000-of-00001.safetensors"


@pytest.fixture
def checkpoint(tmp_path, make_facts, tensors) -> Path:
    return save_checkpoint(tmp_path / "checkpoints", make_facts(7), tensors)


def test_padding_rows_may_differ_vocabulary_rows_may_not(checkpoint, tensors):
    name = "optimizer.embedding.weight.exp_avg"
    larger = {name: torch.full((600, 16), 5.0)}
    load_into(checkpoint, larger, 512)
    assert torch.equal(larger[name][:512], tensors[name])
    assert torch.equal(larger[name][512:], torch.full((88, 16), 5.0))
    smaller = {name: torch.zeros(500, 16)}
    load_into(checkpoint, smaller, 500)
    assert torch.equal(smaller[name], tensors[name][:500])
    with pytest.raises(CheckpointError, match=r"has shape \[512, 16\]; this run needs \[600, 16\]"):
        load_into(checkpoint, larger, 513)
    positions = {"model.positions.weight": torch.zeros(65, 16)}
    with pytest.raises(CheckpointError, match=r"has shape \[64, 16\]; this run needs \[65, 16\]"):
        load_into(checkpoint, positions, 512)


def test_a_tensor_of_another_model_is_named(checkpoint):
    with pytest.raises(CheckpointError, match=r"has no tensor 'model\.blocks\.9\.mlp\.up\.bias'"):
        load_into(checkpoint, {"model.blocks.9.mlp.up.bias": torch.zeros(3)}, 512)
    wrong = {"model.final_norm.bias": torch.zeros(16, dtype=torch.float16)}
    with pytest.raises(CheckpointError, match="is float32; this run needs float16") as raised:
        load_into(checkpoint, wrong, 512)
    assert "'model.final_norm.bias'" in str(raised.value)


def test_the_newest_complete_checkpoint_is_taken(checkpoint, make_facts, tensors, caplog):
    folder = checkpoint.parent
    newer = save_checkpoint(folder, make_facts(8), tensors)
    assert newest_checkpoint(folder) == newer
    os.truncate(newer / FILE, 100)
    with caplog.at_level(logging.WARNING):
        assert newest_checkpoint(folder) == checkpoint
    assert f"skipping step-00000008: {newer / FILE} has 100 bytes instead of" in caplog.text
    (checkpoint / "manifest.json").unlink()
    assert newest_checkpoint(folder) is None
    assert newest_checkpoint(folder / "nowhere") is None


def test_a_user_names_a_run_folder_or_a_checkpoint(checkpoint, tmp_path):
    assert find_checkpoint(tmp_path) == checkpoint
    assert find_checkpoint(checkpoint.parent) == checkpoint
    assert find_checkpoint(checkpoint) == checkpoint
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .*empty") as raised:
        find_checkpoint(tmp_path / "empty")
    assert "give a run folder, or one of the step-... folders" in raised.value.hint
    with pytest.raises(CheckpointError, match=r"no folder .*nowhere"):
        find_checkpoint(tmp_path / "nowhere")


def test_a_manifest_that_contradicts_its_file_is_refused(checkpoint, edit_manifest):
    def halve(content):
        stored = content["tensors"]["model.final_norm.bias"]
        stored["shape"] = stored["chunks"][0]["shape"] = [8]

    edit_manifest(checkpoint, halve)
    with pytest.raises(CheckpointError, match=r"\[16\]; the manifest says float32 \[8\]"):
        load_tensors(checkpoint)


@pytest.mark.parametrize(
    "section, message",
    [
        ({"n_layers": 9999}, r"holds 84 tensors, too few for model\.n_layers=9999"),
        ({"n_layers": 3}, r"no tensor 'model\.blocks\.2\.attention_norm\.weight'"),
        ({"d_model": 10**9, "n_heads": 1, "n_key_value_heads": 1}, "this run needs"),
        ({"d_ff": 10**15}, "this run needs"),
        ({"sequence_length": 10**15}, "this run needs"),
        ({"vocabulary_size": 10**15}, "this run needs"),
        ({"tied_embeddings": False}, r"no tensor 'model\.head\.weight'"),
    ],
)
def test_a_run_that_contradicts_the_tensors_is_refused_before_allocation(
    checkpoint, edit_manifest, section, message
):
    edit_manifest(checkpoint, lambda content: content["run"]["model"].update(section))
    with pytest.raises(CheckpointError, match=message):
        build_model_from_checkpoint(checkpoint)
