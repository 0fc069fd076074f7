from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest
import xxhash
from tests.checkpoint.conftest import flip_bit

from trainyard.checkpoint.format import (
    MANIFEST,
    TOKENIZER,
    Chunk,
    StoredTensor,
    grid_problem,
    read_manifest,
    render_manifest,
)
from trainyard.checkpoint.load import load_tensors, load_tokenizer_copy
from trainyard.checkpoint.save import save_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.data.vocabulary import save_vocabulary
from trainyard.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path, make_facts, tensors) -> Path:
    return save_checkpoint(tmp_path, make_facts(7), tensors)


def test_a_manifest_holds_what_was_saved_and_is_plain_json(checkpoint, make_facts, run, tensors):
    manifest = read_manifest(checkpoint)
    facts = make_facts(7)
    assert {name: getattr(manifest, name) for name in type(facts).model_fields} == dict(facts)
    assert manifest.build_run() == run
    raw = (checkpoint / MANIFEST).read_bytes()
    assert render_manifest(manifest) == raw
    content = json.loads(raw)
    name = "model.blocks.1.attention.qkv.weight"
    stored = content["tensors"][name]
    checksum = xxhash.xxh3_128_hexdigest(tensors[name].numpy().tobytes())
    file = "model-00000-of-00001.safetensors"
    assert stored == {
        "dtype": "float32",
        "shape": [48, 16],
        "chunks": [{"offset": [0, 0], "shape": [48, 16], "file": file, "checksum": checksum}],
    }


def test_a_folder_without_manifest_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint folder .*nowhere"):
        read_manifest(tmp_path / "nowhere")


def test_checksums_of_older_formats_are_compared(checkpoint, edit_manifest, tensors):
    """What the golden checkpoints of test_older_formats.py cannot show: damage."""

    def as_written_then(content):
        content["format"] = 1
        del content["tokenizer"]
        for name, stored in content["tensors"].items():
            for chunk in stored["chunks"]:
                del chunk["checksum"]
                chunk["sha256"] = hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest()

    edit_manifest(checkpoint, as_written_then)
    check_checkpoint(checkpoint)
    flip_bit(checkpoint / "model-00000-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"is damaged: the checksum of .* is [0-9a-f]{64},"):
        load_tensors(checkpoint)


def test_a_tokenizer_belongs_to_the_files(tmp_path, make_facts, tensors, vocabulary):
    path = save_checkpoint(tmp_path, make_facts(7), tensors, vocabulary=vocabulary)
    manifest = read_manifest(path)
    assert load_tokenizer_copy(path, manifest) == vocabulary
    tokens = [*vocabulary.tokens[1:256], vocabulary.tokens[0], vocabulary.tokens[256]]
    save_vocabulary(dataclasses.replace(vocabulary, tokens=tokens), path / TOKENIZER)
    with pytest.raises(CheckpointError, match=rf"{TOKENIZER} is damaged: its fingerprint is "):
        load_tokenizer_copy(path, read_manifest(path))
    with pytest.raises(CheckpointError, match=rf"{TOKENIZER} is damaged: its sha256 is "):
        check_checkpoint(path)
    (path / TOKENIZER).unlink()
    with pytest.raises(CheckpointError, match=rf"{TOKENIZER} is missing"):
        read_manifest(path)


def test_a_newer_format_is_refused_before_its_fields_are_looked_at(checkpoint, edit_manifest):
    edit_manifest(checkpoint, lambda content: content.update(format=4, tensors="other"))
    with pytest.raises(CheckpointError) as raised:
        read_manifest(checkpoint)
    assert "has format 4; this version of Trainyard reads formats 1 to 3" in str(raised.value)
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


def _set_chunks(shape, *chunks):
    """Gives the tensor of 16 values another shape, in chunks of an offset and a shape each."""

    def change(content):
        stored, first = content["tensors"][NAME], _chunk(content)
        stored["shape"] = shape
        stored["chunks"] = [{**first, "offset": offset, "shape": size} for offset, size in chunks]

    return change


PATTERN = "malformed: .*should match pattern"
ABSURD = "less than 9223372036854775808"
HOSTILE = {
    "path upwards": (_rename_file("../../secret"), PATTERN),
    "absolute path": (_rename_file("/etc/passwd"), PATTERN),
    "hidden file": (_rename_file(".ssh"), PATTERN),
    "manifest as data": (_rename_file("manifest.json"), "bytes instead of"),
    "unlisted file": (lambda c: _chunk(c).update(file="other"), "which is not listed"),
    "absurd shape": (_set_chunks([2**62, 2**62], ([0, 0], [2**62, 2**62])), "does not fit in"),
    "too large a number": (_set_chunks([2**63], ([0], [2**63])), ABSURD),
    "negative shape": (_set_chunks([-16], ([0], [-16])), "greater than or equal to 0"),
    "shape of text": (_set_chunks(["16"], ([0], ["16"])), "valid integer"),
    "shape of truth": (_set_chunks([True], ([0], [True])), "valid integer"),
    "unknown dtype": (
        lambda c: c["tensors"][NAME].update(dtype="object"),
        "unknown dtype 'object'; known: float64, float32",
    ),
    "negative offset": (_set_chunks([16], ([-1], [17])), "greater than or equal to 0"),
    "the same chunk twice": (_set_chunks([4], ([0], [4]), ([0], [4])), "two chunks overlap"),
    "chunks overlap": (_set_chunks([6], ([0], [4]), ([2], [4])), "beyond, 2:4 of dimension 0"),
    "a hole": (_set_chunks([6], ([0], [2]), ([4], [2])), "no chunk holds 2:4 of dimension 0"),
    "a hole within": (
        _set_chunks([4, 4], ([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 2])),
        r"no chunk covers offset \[2, 2\]",
    ),
    "a hole of petabytes": (_set_chunks([2**62], ([0], [16])), "no chunk holds 16:4611686"),
    "empty chunk": (_set_chunks([4], ([0], [4]), ([4], [0])), "a chunk is empty"),
    "other dimensions": (_set_chunks([16], ([0, 0], [4, 4])), "a different number of dimensions"),
    "empty in chunks": (
        _set_chunks([0, 4], ([0, 0], [0, 4]), ([0, 0], [0, 4])),
        "must be one chunk of its whole shape",
    ),
    "no chunk": (lambda c: c["tensors"][NAME]["chunks"].clear(), "no chunk holds 0:16"),
    "step of text": (lambda c: c.update(step="7"), "malformed: step"),
    "checksum of text": (lambda c: c["files"][FILE].update(header_sha256="x"), "malformed: files"),
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


BODIES = (b"", b"}", b"{}", b"[]", b"\x80\x04cos\nsystem", b"[" * 10**6, b'"a":[[1]]')


@pytest.mark.parametrize("body", BODIES)
def test_what_is_no_manifest_is_refused_sealed_or_not(checkpoint, body):
    (checkpoint / MANIFEST).write_bytes(body)
    with pytest.raises(CheckpointError, match="is damaged: its first line must be its checksum"):
        read_manifest(checkpoint)
    seal = b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",'
    (checkpoint / MANIFEST).write_bytes(seal + body)
    with pytest.raises(CheckpointError, match="is malformed"):
        read_manifest(checkpoint)


def test_chunks_are_accepted_just_when_they_hold_every_value_once():
    """Grids, and grids with a chunk moved, resized, added or lost, against counting."""
    draw, n_accepted = random.Random(0), 0
    for _ in range(2000):
        shape = (draw.randint(1, 5), draw.randint(1, 5))
        cuts = [sorted([0, n, *draw.sample(range(1, n), draw.randrange(n))]) for n in shape]
        boxes = [
            [a, c, b - a, d - c]
            for (a, b), (c, d) in itertools.product(*map(itertools.pairwise, cuts))
        ]
        for _ in range(draw.choice([0, 0, 1, 2])):
            box = draw.choice(boxes)
            change = draw.choice(["move", "resize", "add", "lose"])
            if change == "add":
                boxes.append(list(box))
            elif change == "lose" and len(boxes) > 1:
                boxes.remove(box)
            else:
                at = draw.randrange(2) + 2 * (change == "resize")
                box[at] = max(0, box[at] + draw.choice([-1, 1]))
        counts = np.zeros((12, 12), int)
        for row, column, n_rows, n_columns in boxes:
            counts[row : row + n_rows, column : column + n_columns] += 1
        expected = np.zeros((12, 12), int)
        expected[: shape[0], : shape[1]] = 1
        chunks = tuple(
            Chunk(offset=(a, b), shape=(c, d), file="f", sha256="0" * 64) for a, b, c, d in boxes
        )
        problem = grid_problem(StoredTensor(dtype="uint8", shape=shape, chunks=chunks))
        is_exact = np.array_equal(counts, expected) and not any(0 in c.shape for c in chunks)
        # Bricks hold every value once too, and are no grid; no layout makes them.
        is_grid = len(chunks) == math.prod(len({c.offset[i] for c in chunks}) for i in range(2))
        assert (problem == "") == (is_exact and is_grid), (shape, boxes, problem)
        n_accepted += problem == ""
    assert 500 < n_accepted < 1500


def test_a_manifest_of_absurd_size_is_not_read(checkpoint):
    os.truncate(checkpoint / MANIFEST, 2**40)
    with pytest.raises(CheckpointError, match=r"has 1\.0 TiB; no manifest is above 16\.0 GiB"):
        read_manifest(checkpoint)


def test_a_file_that_is_no_file_is_not_opened(checkpoint):
    shard = checkpoint / FILE
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="is missing"):
        read_manifest(checkpoint)
