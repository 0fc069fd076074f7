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
    make_grid,
    read_manifest,
    render_manifest,
)
from trainyard.checkpoint.load import load_tensors, load_tokenizer_copy
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.checkpoint.shard import read_header
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.data.vocabulary import save_vocabulary
from trainyard.errors import CheckpointError, NewerFormatError


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
    parts = ("attention.qkv", "mlp.up")  # of the same shape
    (stored,) = (grid for grid in content["grids"] if name in grid["names"])
    assert stored == {
        "names": [f"model.blocks.{n}.{part}.weight" for n in (0, 1) for part in parts],
        "dtype": "float32",
        "shape": [48, 16],
        "starts": [[0], [0]],
        "files": [0],
    }
    file = next(iter(content["files"]))
    assert file == FILE
    header = read_header(checkpoint / file, content["files"][file][1])
    expected = xxhash.xxh3_128_hexdigest(tensors[name].numpy().tobytes())
    assert header[name].checksum == expected


def test_a_folder_without_manifest_is_not_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a checkpoint: it has no manifest\.json"):
        read_manifest(tmp_path)
    with pytest.raises(CheckpointError, match=r"no checkpoint folder .*nowhere"):
        read_manifest(tmp_path / "nowhere")


def test_checksums_of_older_formats_are_compared(checkpoint, edit_manifest, tensors):
    """What the golden checkpoints of test_older_formats.py cannot show: damage."""

    def with_sha256(content):
        content["format"] = 1
        for name, stored in content["tensors"].items():
            for chunk in stored["chunks"]:
                del chunk["checksum"]
                chunk["sha256"] = hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest()

    edit_manifest(checkpoint, as_format_3)
    edit_manifest(checkpoint, with_sha256)
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
    edit_manifest(checkpoint, lambda content: content.update(format=5, grids="other"))
    with pytest.raises(CheckpointError) as raised:
        read_manifest(checkpoint)
    assert "has format 5; this version of Trainyard reads formats 1 to 4" in str(raised.value)
    assert "upgrade Trainyard" in str(raised.value)
    with pytest.raises(NewerFormatError):  # not passed over, as a damaged one is
        newest_checkpoint(checkpoint.parent)


def test_a_run_of_another_version_is_refused(checkpoint, edit_manifest):
    edit_manifest(checkpoint, lambda content: content["run"]["train"].update(turbo=True))
    with pytest.raises(CheckpointError, match=r"step 7 is not valid: train\.turbo"):
        read_manifest(checkpoint).build_run()


NAME = "model.final_norm.bias"
FILE = "model-00000-of-00001.safetensors"


def as_format_3(content):
    """Lists chunks as format 3 did; their checksums are not those of values."""
    files = list(content["files"])
    content["format"] = 3
    content["files"] = {
        name: {"n_bytes": n_bytes, "header_sha256": sha256}
        for name, (n_bytes, sha256) in content["files"].items()
    }
    content["tensors"] = {}
    for grid in content.pop("grids"):
        for name in grid["names"]:
            chunk = {"offset": [0] * len(grid["shape"]), "shape": grid["shape"]}
            chunk |= {"file": files[grid["files"][0]], "checksum": "0" * 32}
            stored = {"dtype": grid["dtype"], "shape": grid["shape"], "chunks": [chunk]}
            content["tensors"][name] = stored


def _chunk(content):
    return content["tensors"][NAME]["chunks"][0]


def _older(change):
    """Changes a manifest of format 3."""

    def change_older(content):
        as_format_3(content)
        change(content)

    return change_older


def _set_chunks(shape, *chunks):
    """Gives the tensor of 16 values another shape, in chunks of an offset and a shape each."""

    def change(content):
        stored, first = content["tensors"][NAME], _chunk(content)
        stored["shape"] = shape
        stored["chunks"] = [{**first, "offset": offset, "shape": size} for offset, size in chunks]

    return _older(change)


def _rename_file(name):
    """Renames a file, in its place, which is how grids refer to it."""

    def change(content):
        files = content["files"].items()
        content["files"] = {name if old == FILE else old: file for old, file in files}

    return change


def _set_grid(**fields):
    """Gives the tensor of 16 values a grid of its own with other fields."""

    def change(content):
        (grid,) = (grid for grid in content["grids"] if NAME in grid["names"])
        grid["names"].remove(NAME)
        content["grids"].append({**grid, "names": [NAME], **fields})

    return change


PATTERN = "malformed: .*should match pattern"
ABSURD = "less than 9223372036854775808"
NO_GRID = r"tensor 'model\.final_norm\.bias' of shape .* chunks overlap, or leave a hole"
HOSTILE = {
    "path upwards": (_rename_file("../../secret"), PATTERN),
    "absolute path": (_rename_file("/etc/passwd"), PATTERN),
    "hidden file": (_rename_file(".ssh"), PATTERN),
    "manifest as data": (_rename_file("manifest.json"), "bytes instead of"),
    "step of text": (lambda c: c.update(step="7"), "malformed: step"),
    "checksum of text": (lambda c: c["files"][FILE].__setitem__(1, "x"), "malformed: files"),
    "field missing": (lambda c: c.pop("grids"), "malformed: grids: Field required"),
    "field unknown": (lambda c: c.update(exec="rm"), "malformed: exec"),
    "size beyond": (lambda c: c["files"][FILE].__setitem__(0, 2**62), "bytes instead of"),
    "negative size": (lambda c: c["files"][FILE].__setitem__(0, -1), "greater than or equal to 0"),
    "unlisted file": (_set_grid(files=[9]), "in a file that is not listed"),
    "file of text": (_set_grid(files=["0"]), "valid integer"),
    "no file": (_set_grid(files=[]), NO_GRID),
    "two files for a chunk": (_set_grid(files=[0, 1]), NO_GRID),
    "a file twice": (_set_grid(files=[0, 0], starts=[[0, 8]]), NO_GRID),
    "no name": (_set_grid(names=[]), "at least 1 item"),
    "unknown type": (_set_grid(dtype="object"), "unknown dtype 'object'; known: float64, float32"),
    "absurd shape in a grid": (_set_grid(shape=[2**62]), "do not fit in files of"),
    "too large a number in a grid": (_set_grid(shape=[2**63]), ABSURD),
    "negative length": (_set_grid(shape=[-16]), "greater than or equal to 0"),
    "truth for a length": (_set_grid(shape=[True]), "valid integer"),
    "no starts": (_set_grid(starts=[[]], files=[]), NO_GRID),
    "starts late": (_set_grid(starts=[[1]]), NO_GRID),
    "starts backwards": (_set_grid(starts=[[0, 9, 8]], files=[0, 1, 2]), NO_GRID),
    "starts twice": (_set_grid(starts=[[0, 0]], files=[0, 1]), NO_GRID),
    "starts at the end": (_set_grid(starts=[[0, 16]], files=[0, 1]), NO_GRID),
    "other dimensions in a grid": (_set_grid(starts=[[0], [0]]), NO_GRID),
    "format 3: unlisted file": (
        _older(lambda c: _chunk(c).update(file="other")),
        "in a file that is not listed",
    ),
    "absurd shape": (_set_chunks([2**62, 2**62], ([0, 0], [2**62, 2**62])), "do not fit in"),
    "too large a number": (_set_chunks([2**63], ([0], [2**63])), ABSURD),
    "negative shape": (_set_chunks([-16], ([0], [-16])), "greater than or equal to 0"),
    "shape of text": (_set_chunks(["16"], ([0], ["16"])), "valid integer"),
    "shape of truth": (_set_chunks([True], ([0], [True])), "valid integer"),
    "unknown dtype": (
        _older(lambda c: c["tensors"][NAME].update(dtype="object")),
        "unknown dtype 'object'; known: float64, float32",
    ),
    "negative offset": (_set_chunks([16], ([-1], [17])), "greater than or equal to 0"),
    "the same chunk twice": (_set_chunks([4], ([0], [4]), ([0], [4])), NO_GRID),
    "chunks overlap": (_set_chunks([6], ([0], [4]), ([2], [4])), NO_GRID),
    "a hole": (_set_chunks([6], ([0], [2]), ([4], [2])), NO_GRID),
    "a chunk is too short": (_set_chunks([16], ([0], [15])), r"of \[15\], not \[16\]"),
    "a hole within": (
        _set_chunks([4, 4], ([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 2])),
        NO_GRID,
    ),
    "a hole of petabytes": (
        _set_chunks([2**62], ([0], [16])),
        r"at \[0\] is a chunk of \[16",
    ),
    "empty chunk": (_set_chunks([4], ([0], [4]), ([4], [0])), NO_GRID),
    "other dimensions": (_set_chunks([16], ([0, 0], [4, 4])), NO_GRID),
    "fewer dimensions": (_set_chunks([4, 4], ([0], [16])), NO_GRID),
    "empty in chunks": (_set_chunks([0, 4], ([0, 0], [0, 4]), ([0, 0], [0, 4])), NO_GRID),
    "no chunk": (_older(lambda c: c["tensors"][NAME]["chunks"].clear()), NO_GRID),
    "format 3: field missing": (
        _older(lambda c: c.pop("tensors")),
        "malformed: tensors: Field required",
    ),
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
        chunks = [Chunk((a, b), (c, d), file) for file, (a, b, c, d) in enumerate(boxes)]
        problem = ""
        try:
            found = list(make_grid(("a",), "uint8", shape, chunks).chunks())
        except ValueError as error:
            problem = str(error)
        else:
            assert found == sorted(chunks)
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
