from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainyard.checkpoint import format as checkpoint_format
from trainyard.checkpoint.format import MANIFEST, read_manifest, render_manifest
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.save import save_checkpoint
from trainyard.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path, make_facts, tensors) -> Path:
    return save_checkpoint(tmp_path, make_facts(7), tensors)


def test_a_manifest_holds_what_was_saved_and_is_plain_json(checkpoint, make_facts, run):
    manifest = read_manifest(checkpoint)
    facts = make_facts(7)
    assert {name: getattr(manifest, name) for name in type(facts).model_fields} == dict(facts)
    assert manifest.build_run() == run
    raw = (checkpoint / MANIFEST).read_bytes()
    assert render_manifest(manifest) == raw
    content = json.loads(raw)
    stored = content["tensors"]["model.blocks.1.attention.qkv.weight"]
    assert stored == {
        "dtype": "float32",
        "shape": [48, 16],
        "chunks": [
            {"offset": [0, 0], "shape": [48, 16], "file": "model-00000-of-00001.safetensors"}
        ],
    }


def test_a_folder_without_manifest_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint folder .*nowhere"):
        read_manifest(tmp_path / "nowhere")


def test_a_shard_that_is_missing_or_truncated_is_named(checkpoint):
    shard = checkpoint / "optimizer-00000-of-00001.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError) as raised:
        read_manifest(checkpoint)
    assert f"{shard} has {len(whole) - 1} bytes instead of {len(whole)}" in str(raised.value)
    assert "hint: remove or move that folder" in str(raised.value)
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"optimizer-00000-of-00001\.safetensors is missing"):
        read_manifest(checkpoint)


def test_a_newer_format_is_refused_before_its_fields_are_looked_at(checkpoint, edit_manifest):
    edit_manifest(checkpoint, lambda content: content.update(format=2, tensors="other"))
    with pytest.raises(CheckpointError) as raised:
        read_manifest(checkpoint)
    assert "has format 2; this version of Trainyard reads format 1" in str(raised.value)
    assert "upgrade Trainyard" in str(raised.value)


def test_a_run_of_another_version_is_refused(checkpoint, edit_manifest):
    edit_manifest(checkpoint, lambda content: content["run"]["train"].update(turbo=True))
    with pytest.raises(CheckpointError, match=r"step 7 is not valid: train\.turbo"):
        read_manifest(checkpoint).build_run()


NAME = "model.final_norm.bias"
FILE = "model-00000-of-00001.safetensors"


def _chunk(content):
    return content["tensors"][NAME]["chunks"][0]


def _rename_file(name):
    def change(content):
        content["files"][name] = content["files"].pop(FILE)
        for tensor in content["tensors"].values():
            for chunk in tensor["chunks"]:
                if chunk["file"] == FILE:
                    chunk["file"] = name

    return change


def _set_shape(shape):
    def change(content):
        content["tensors"][NAME]["shape"] = shape
        _chunk(content).update(shape=shape, offset=[0] * len(shape))

    return change


HOSTILE = {
    "path upwards": (_rename_file("../../secret"), "malformed: .*should match pattern"),
    "absolute path": (_rename_file("/etc/passwd"), "malformed: .*should match pattern"),
    "hidden file": (_rename_file(".ssh"), "malformed: .*should match pattern"),
    "manifest as data": (_rename_file("manifest.json"), "bytes instead of"),
    "unlisted file": (lambda c: _chunk(c).update(file="other"), "not among the files"),
    "shape beyond the file": (_set_shape([10**6]), "does not fit in"),
    "absurd shape": (_set_shape([2**62, 2**62]), "does not fit in"),
    "too large a number": (_set_shape([2**63]), "less than 9223372036854775808"),
    "negative shape": (_set_shape([-16]), "greater than or equal to 0"),
    "shape of text": (_set_shape(["16"]), "valid integer"),
    "shape of truth": (_set_shape([True]), "valid integer"),
    "unknown dtype": (
        lambda c: c["tensors"][NAME].update(dtype="object"),
        "unknown dtype 'object'; known: float64, float32",
    ),
    "two chunks": (
        lambda c: c["tensors"][NAME]["chunks"].append(dict(_chunk(c))),
        "one chunk of its whole shape",
    ),
    "chunk elsewhere": (lambda c: _chunk(c).update(offset=[1]), "one chunk of its whole shape"),
    "no chunk": (lambda c: c["tensors"][NAME]["chunks"].clear(), "one chunk of its whole shape"),
    "step of text": (lambda c: c.update(step="7"), "malformed: step"),
    "negative step": (lambda c: c.update(step=-1), "malformed: step"),
    "checksum of text": (lambda c: c["files"][FILE].update(sha256="x"), "malformed: files"),
    "field missing": (lambda c: c.pop("tensors"), "malformed: tensors: Field required"),
    "field unknown": (lambda c: c.update(exec="rm"), "malformed: exec"),
    "size beyond": (lambda c: c["files"][FILE].update(n_bytes=2**62), "bytes instead of"),
}


@pytest.mark.parametrize("change, message", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_manifest_is_refused(checkpoint, edit_manifest, change, message):
    edit_manifest(checkpoint, change)
    with pytest.raises(CheckpointError, match=message):
        read_manifest(checkpoint)
    with pytest.raises(CheckpointError):
        load_tensors(checkpoint)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"\x80\x04cos\nsystem", b"[" * 10**6, b'{"a":' * 10**5]
)
def test_what_is_no_manifest_is_refused(checkpoint, body):
    (checkpoint / MANIFEST).write_bytes(body)
    with pytest.raises(CheckpointError, match="is damaged: its first line must give its checksum"):
        read_manifest(checkpoint)


@pytest.mark.parametrize("body", [b"}", b"nonsense", b'"a":' + b"[" * 10**6, b'"a":[[1]]'])
def test_what_is_sealed_but_no_manifest_is_refused(checkpoint, body):
    seal = b'{"sha256": "' + checkpoint_format.hashlib.sha256(body).hexdigest().encode() + b'",'
    (checkpoint / MANIFEST).write_bytes(seal + body)
    with pytest.raises(CheckpointError, match="is malformed"):
        read_manifest(checkpoint)


def test_a_manifest_of_absurd_size_is_not_read(checkpoint):
    os.truncate(checkpoint / MANIFEST, 2**40)
    with pytest.raises(CheckpointError, match=r"has 1\.0 TiB; no manifest is above 256\.0 MiB"):
        read_manifest(checkpoint)


def test_a_file_that_is_no_file_is_not_opened(checkpoint):
    shard = checkpoint / FILE
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="is missing"):
        read_manifest(checkpoint)
