"""Token files: the bytes, the refusals, and that nothing half-written is left behind."""

from __future__ import annotations

import hashlib
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.command import peak_bytes

from trainyard.data.indexed import (
    IndexedDataset,
    IndexedWriter,
    count_tokens,
    optimal_dtype,
    token_paths,
    write_index,
)
from trainyard.errors import DataError, MachineError
from trainyard.files import BlockChecksum

UINT16 = np.dtype(np.uint16)


def write(prefix: Path, *documents: list[int], dtype: np.dtype = UINT16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    return prefix


def read_bytes(prefix: Path) -> tuple[bytes, bytes]:
    bin_path, idx_path = token_paths(prefix)
    return bin_path.read_bytes(), idx_path.read_bytes()


def record(data: bytes) -> BlockChecksum:
    return BlockChecksum(len(data), hashlib.sha256(data).hexdigest())


def test_the_bytes_are_those_of_the_worked_example(tmp_path: Path) -> None:
    tokens, index = read_bytes(write(tmp_path / "dots.in.name", [5, 6, 7], [8, 7]))
    assert tokens == bytes([5, 0, 6, 0, 7, 0, 8, 0, 7, 0])
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert index == header + struct.pack("<iiqqqqq", 3, 2, 0, 6, 0, 1, 2)
    dataset = IndexedDataset(tmp_path / "dots.in.name")
    assert (len(dataset), dataset.n_tokens, dataset.dtype) == (2, 5, UINT16)
    assert dataset.tokens(0).tolist() == [5, 6, 7]
    assert dataset.tokens(1).tolist() == [8, 7]
    assert dataset.load_sequence_lengths(range(1, 2)).tolist() == [2]


def test_tokens_are_counted_without_reading_the_index(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", [1, 2, 3, 4], [], [5, 6, 7, 8, 9, 10])
    assert count_tokens(prefix) == IndexedDataset(prefix).n_tokens == 10
    with Path(f"{prefix}.bin").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DataError, match=r"corpus\.bin: 21 bytes are not whole tokens of 2 bytes"):
        count_tokens(prefix)


def test_an_empty_document_has_no_sequence(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "bulk", UINT16) as writer:
        writer.add_documents(np.array([5, 6], UINT16), np.array([1, 0, 1]))
        assert writer.n_tokens == 2
    for prefix in (tmp_path / "bulk", write(tmp_path / "corpus", [5], [], [6])):
        dataset = IndexedDataset(prefix)
        assert dataset.document_indices.tolist() == [0, 1, 1, 2]
        assert dataset.sequence_lengths.tolist() == [1, 1]


def test_a_document_may_have_several_sequences(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", UINT16) as writer:
        writer.add_document(np.array([5, 6]), np.array([], np.int64), np.array([7]))
        writer.add_document(np.array([8]))
    dataset = IndexedDataset(tmp_path / "corpus")
    assert dataset.document_indices.tolist() == [0, 2, 3]
    assert dataset.sequence_pointers.tolist() == [0, 4, 6]


def test_the_writer_gives_the_checksums_of_its_file(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "corpus", UINT16) as writer:
        for _ in range(5):
            writer.add_document(np.arange(4_000_000) % 1000)
    tokens = read_bytes(tmp_path / "corpus")[0]
    pieces = [tokens[:24_000_000], tokens[24_000_000:]]
    assert writer.bin_blocks == [record(piece) for piece in pieces]


def test_an_index_may_be_written_in_any_pieces(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", [5, 6, 7], [], [8, 7], [9])
    lengths, counts = np.array([3, 2, 1]), np.array([1, 0, 1, 1])

    def read_slabs() -> list[tuple[np.ndarray, np.ndarray]]:
        nothing = np.empty(0, np.int32)
        return [(lengths[:1], counts[:2]), (nothing, nothing), (lengths[1:], counts[2:])]

    blocks = write_index(tmp_path / "pieces.idx", UINT16, (3, 4), read_slabs)
    written = (tmp_path / "pieces.idx").read_bytes()
    assert written == read_bytes(prefix)[1]
    assert blocks == [record(written)]


def test_reads_and_rewrites_megatron_files(shared_data: Path, tmp_path: Path) -> None:
    assert [optimal_dtype(size).name for size in (65499, 65500)] == ["uint16", "int32"]
    for prefix in sorted((shared_data / "golden" / "data").glob("synth*.bin")):
        theirs = IndexedDataset(prefix.with_suffix(""))
        with IndexedWriter(tmp_path / prefix.stem, theirs.dtype) as writer:
            writer.add_documents(theirs.stream, theirs.sequence_lengths)
        assert read_bytes(tmp_path / prefix.stem) == read_bytes(prefix.with_suffix(""))


def test_an_error_leaves_nothing_behind_and_old_files_alone(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", [1, 2])
    before = read_bytes(prefix)
    with pytest.raises(RuntimeError), IndexedWriter(prefix, UINT16) as writer:
        writer.add_document(np.array([3]))
        (added,) = set(tmp_path.iterdir()) - set(token_paths(prefix))
        assert added.name == "corpus.bin.partial"  # files appear only at the end
        raise RuntimeError
    assert read_bytes(prefix) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


def test_an_old_index_goes_before_its_tokens_do(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").mkdir()  # so that the new tokens cannot take their name
    (tmp_path / "corpus.idx").write_text("old")
    with pytest.raises(MachineError, match=r"corpus.bin.partial: Is a directory"):
        write(tmp_path / "corpus", [1])
    assert [path.name for path in tmp_path.iterdir()] == ["corpus.bin"]


def test_a_token_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    problem = r"corpus.bin: token ids 3 to 65536 do not fit uint16"
    with pytest.raises(DataError, match=problem), IndexedWriter(tmp_path / "corpus", UINT16) as w:
        w.add_documents(np.array([3, 65536]), np.array([2]))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's always-full device")
@pytest.mark.parametrize(("suffix", "size"), [("bin", 100), ("bin", 10_000), ("idx", 100)])
def test_a_full_disk_is_named(tmp_path: Path, suffix: str, size: int) -> None:
    (tmp_path / f"corpus.{suffix}.partial").symlink_to("/dev/full")
    problem = rf"corpus.{suffix}.partial: No space left on device after \d+ bytes"
    with pytest.raises(MachineError, match=problem) as caught:
        write(tmp_path / "corpus", *[[0] * size] * 3)
    assert "free space, inodes (df -i) or quota" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_missing_file_is_named(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(MachineError, match="No such file or directory"):
        write(tmp_path / "missing" / "corpus")
    prefix = write(tmp_path / "corpus", [1])
    Path(f"{prefix}.{suffix}").unlink()
    with pytest.raises(DataError, match=f"corpus.{suffix}: No such file") as caught:
        IndexedDataset(prefix)
    what = "give the prefix without ending" if suffix == "bin" else "docs/importing.md converts raw"
    assert f"token files are a pair, <prefix>.bin and <prefix>.idx; {what}" in caught.value.hint


DAMAGES = {
    "magic": (0, b"X", r"byte 0: starts with b'XMIDIDX"),
    "version": (9, b"\x02", r"byte 9: version 2; only version 1"),
    "kind": (17, b"\x07", r"byte 17: dtype code 7 is not one of 1 \(uint8\)"),
    "huge count": (18, b"\xff" * 8, r"82 bytes, but its counts at byte 18 \(18446744073709551615"),
    "counts": (18, b"\x03", r"82 bytes, but its counts at byte 18 \(3 sequences, 3 .* make 94"),
    "negative": (38, b"\xff" * 4, r"byte 38: sequence_lengths\[1\] is -1"),
    "pointer": (50, b"\x08", r"byte 50: sequence_pointers\[1\] is 8, but the .* before it make 6"),
    "too long": (38, b"\x03", r"corpus.bin: 10 bytes, but corpus.idx describes 6 tokens of 2"),
    "start": (58, b"\x01", r"byte 58: document_indices\[0\] is 1; they start at 0 and never fall"),
    "falling": (66, b"\x03", r"byte 74: document_indices\[2\] is 2; they start at 0"),
    "end": (74, b"\x01", r"document_indices end at 1, not at the 2 sequences"),
    "multimodal": (82, b"\0\0", "84 bytes, but its counts at byte 18 .* make 82"),
    "no header": (20, None, "20 bytes, less than its header of 34"),
    "short": (81, None, "81 bytes, but its counts at byte 18"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_refused_with_its_place(tmp_path: Path, name: str) -> None:
    """Bytes at an offset are others, or (None) the file ends there."""
    prefix = write(tmp_path / "corpus", [5, 6, 7], [8, 7])
    offset, patch, problem = DAMAGES[name]
    path = tmp_path / "corpus.idx"
    content = path.read_bytes()
    rest = b"" if patch is None else patch + content[offset + len(patch) :]
    path.write_bytes(content[:offset] + rest)
    with pytest.raises(DataError, match=problem) as caught:
        IndexedDataset(prefix)
    assert caught.value.hint


def test_an_index_without_entries_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").touch()
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 0, 0)
    (tmp_path / "corpus.idx").write_bytes(header)
    with pytest.raises(DataError, match="document_indices end at 0, not at the 0 sequences"):
        IndexedDataset(tmp_path / "corpus")


@given(data=st.data())
@settings(max_examples=80)
def test_no_damage_does_worse_than_a_clear_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    prefix = write(tmp_path_factory.mktemp("fuzz") / "corpus", [5, 6, 7], [], [8, 7])
    path = Path(f"{prefix}.idx")
    content = bytearray(path.read_bytes())
    edits = st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255))
    for offset, value in data.draw(st.lists(edits, max_size=6)):
        content[offset] = value
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))] + data.draw(st.binary()))

    def read() -> None:
        with suppress(DataError):
            dataset = IndexedDataset(prefix)
            assert dataset.n_tokens * dataset.dtype.itemsize <= 10
            for index in range(len(dataset)):
                dataset.tokens(index)

    assert peak_bytes(read) < 2_000_000


def test_a_missing_prefix_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"web.bin: No such file") as caught:
        IndexedDataset("web")
    assert f"relative paths start at the working folder, here {tmp_path}" in caught.value.hint
    write(tmp_path / "web_text_document", [5, 6])
    with pytest.raises(DataError) as caught:
        IndexedDataset("web")
    assert caught.value.hint == "did you mean the prefix web_text_document?"


def test_files_longer_than_one_slab(tmp_path: Path) -> None:
    n_documents = 150_000
    lengths = np.arange(n_documents) % 3
    with IndexedWriter(tmp_path / "corpus", UINT16) as writer:
        writer.add_documents(np.zeros(lengths.sum(), UINT16), lengths)
    dataset = IndexedDataset(tmp_path / "corpus")
    assert (dataset.sequence_lengths == lengths[lengths > 0]).all()
    ends = np.cumsum(lengths)
    assert (dataset.sequence_pointers == 2 * (ends - lengths)[lengths > 0]).all()
    assert (dataset.document_indices == np.cumsum([0, *(lengths > 0)])).all()
    index = bytearray((tmp_path / "corpus.idx").read_bytes())
    at = 34 + 4 * 90_000
    index[at : at + 4] = struct.pack("<i", -5)
    (tmp_path / "corpus.idx").write_bytes(index)
    with pytest.raises(DataError, match=rf"byte {at}: sequence_lengths\[90000\] is -5"):
        IndexedDataset(tmp_path / "corpus")
