from __future__ import annotations

import logging
import os
import re
from pathlib import Path

import pytest
import torch

from trainyard.checkpoint import shard
from trainyard.checkpoint.load import build_model_from_checkpoint, load_into, load_tensors
from trainyard.checkpoint.resume import find_checkpoint, newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.errors import CheckpointError
from trainyard.parallel.placement import whole

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


@pytest.mark.parametrize("piece_bytes", [4, 100, 1000])
def test_parts_are_read_a_few_rows_at_a_time(checkpoint, tensors, monkeypatch, piece_bytes):
    monkeypatch.setattr(shard, "_PIECE_BYTES", piece_bytes)
    for dimension in (0, 1):
        places = {
            name: whole(value.shape).cut(dimension, 1, 3)
            for name, value in tensors.items()
            if value.ndim > dimension and "embedding" not in name
        }
        parts = {name: torch.zeros(place.local_shape) for name, place in places.items()}
        load_into(checkpoint, parts, 512, places)
        assert all(torch.equal(parts[name], places[name].of(tensors[name])) for name in places)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures the peak")
def test_a_part_of_a_large_chunk_takes_little_memory(tmp_path, make_facts):
    """On a node whose ranks load what one rank has saved, each tensor by four threads."""

    def resident_bytes(what: str) -> int:
        (kib,) = re.findall(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return 1024 * int(kib)

    tensors = {f"model.{name}": torch.full((4096, 4096), 0.5) for name in "abcd"}
    saved = save_checkpoint(tmp_path / "checkpoints", make_facts(7), tensors)
    n_bytes = tensors.pop("model.a").nbytes
    place = whole((4096, 4096)).cut(1, 1, 2)
    parts = {name: torch.zeros(place.local_shape) for name in tensors}
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    load_into(saved, parts, 512, dict.fromkeys(parts, place))
    assert all(bool((part == 0.5).all()) for part in parts.values())
    assert resident_bytes("VmHWM") - before < n_bytes


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
        for stored in content["grids"]:
            stored["shape"] = [8] if "model.final_norm.bias" in stored["names"] else stored["shape"]

    edit_manifest(checkpoint, halve)
    with pytest.raises(
        CheckpointError,
        match=r"no 'model.*' of float32 \[8\], as the manifest says",
    ):
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
