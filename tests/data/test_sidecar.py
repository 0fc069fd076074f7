"""The record beside token files: sealed, of one version, and with the last word on sizes."""

from __future__ import annotations

import hashlib
import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trainyard.data import sidecar as records
from trainyard.data.indexed import IndexedWriter
from trainyard.data.sidecar import Sidecar, StepCount, load_sidecar, save_sidecar
from trainyard.errors import DataError, MachineError
from trainyard.files import BLOCK_BYTES, BlockChecksum, BlockWriter, FileRecord, publish_text

from .records import write_record

NO_RECORD = "is not a record of token files"


@pytest.fixture
def sidecar(tmp_path: Path) -> Sidecar:
    """The record of the token files `tmp_path / "corpus"`, saved."""
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(4))
    return write_record(
        tmp_path / "corpus",
        text_bytes=9,
        steps=[StepCount(kind="read", documents_in=3, documents_out=1, dropped={"too long": 2})],
        groups={"ü": records.GroupCount(1, 9, 4)},
        quarantined={"too long": 2},
        quarantined_places=['a "b"\n.jsonl:2: too long'],
        sources=[records.SourceRecord('a "b"\n.jsonl', 100, 10**18)],
    )


def test_what_is_saved_is_loaded(sidecar: Sidecar, tmp_path: Path) -> None:
    loaded = load_sidecar(tmp_path / "corpus")
    assert msgspec.structs.replace(loaded, seal="") == sidecar
    assert len(loaded.seal) == 64
    loaded.check_sizes(tmp_path / "corpus")
    save_sidecar(loaded, tmp_path / "again")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "corpus.json").read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('"tokens": 4', '"tokens": 5', "was changed after it was written: its checksum"),
        ('"documents_in": 3', '"documents_in": 4', "its checksum does not match"),
        ('"format_version": 2', '"format_version": 1', f"{NO_RECORD}: Invalid"),
        ('"tokens": 4', '"n": 4', NO_RECORD),
        ('"text_bytes": 9', '"text_bytes": 9, "more": 1', f"{NO_RECORD}: Object"),
        ("}\n", "", NO_RECORD),
    ],
)
def test_a_record_that_was_changed_is_refused(
    sidecar: Sidecar, tmp_path: Path, old: str, new: str, problem: str
) -> None:
    path = tmp_path / "corpus.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(DataError, match=problem) as caught:
        load_sidecar(tmp_path / "corpus")
    assert str(path) in caught.value.problem
    assert "prepare the data again" in caught.value.hint


def test_any_order_of_json_is_the_same_record_and_a_missing_one_is_named(
    sidecar: Sidecar, tmp_path: Path
) -> None:
    path = tmp_path / "corpus.json"
    fields = msgspec.json.decode(path.read_bytes())
    path.write_bytes(msgspec.json.encode(dict(reversed(fields.items()))))
    assert msgspec.structs.replace(load_sidecar(tmp_path / "corpus"), seal="") == sidecar
    path.unlink()
    with pytest.raises(DataError, match=r"corpus.json is missing, so the tokenizer") as caught:
        load_sidecar(tmp_path / "corpus")
    assert "trainyard prepare" in caught.value.hint


def test_sizes_are_compared(sidecar: Sidecar, tmp_path: Path) -> None:
    for suffix, size in (("bin", 8), ("idx", 34 + 12 + 16)):
        path = tmp_path / f"corpus.{suffix}"
        data = path.read_bytes()
        assert len(data) == size
        path.write_bytes(data[:-2])
        with pytest.raises(DataError, match=rf"{suffix} has {size - 2} bytes, but {size} were"):
            sidecar.check_sizes(tmp_path / "corpus")
        path.unlink()
        with pytest.raises(DataError, match=rf"corpus.{suffix} is missing") as caught:
            sidecar.check_sizes(tmp_path / "corpus")
        assert "copy all three files" in caught.value.hint
        path.write_bytes(data)


def test_blocks_end_between_two_writes(tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as file:
        writer = BlockWriter(file)
        assert writer.close_block() == []
        for size in (1, BLOCK_BYTES - 1, BLOCK_BYTES + 5, 3, 0):
            writer.write(bytes(size))
        blocks = writer.close_block()
        assert writer.close_block() == blocks
    sizes = [BLOCK_BYTES, BLOCK_BYTES + 5, 3]
    digests = [hashlib.sha256(bytes(size)).hexdigest() for size in sizes]
    record = FileRecord(blocks)
    assert blocks == list(map(BlockChecksum, sizes, digests))
    assert record.size_bytes == (tmp_path / "file").stat().st_size
    assert record.sha256 != FileRecord(blocks[::-1]).sha256
    assert FileRecord([]).size_bytes == 0


def test_a_small_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    publish_text(tmp_path / "a.json", "old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))  # as a full disk
    try:
        with pytest.raises(MachineError, match=r"a.json cannot be written") as caught:
            publish_text(tmp_path / "a.json", "longer than four bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in caught.value.problem
    assert (tmp_path / "a.json").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(MachineError, match=r"a.json/b cannot be written: Not a directory"):
        publish_text(tmp_path / "a.json" / "b", "")
