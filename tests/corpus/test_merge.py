"""Joining parts gives the bytes of writing at once, whatever is left out or how it is copied."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainyard.corpus.preparation.join import Part, merge_parts, publish_files
from trainyard.data.indexed import IndexedDataset, IndexedWriter, token_paths
from trainyard.errors import DataError, MachineError
from trainyard.files import FileRecord

UINT16 = np.dtype(np.uint16)
Document = list[list[int]]  # of sequences of tokens; usually of one


def write_part(prefix: Path, documents: list[Document], stays: list[bool] | None = None) -> Part:
    with IndexedWriter(prefix, UINT16) as writer:
        for document in documents:
            writer.add_document(*[np.array(sequence, UINT16) for sequence in document])
    return Part(prefix, writer.bin_blocks, None if stays is None else np.array(stays, np.bool_))


def read_bytes(prefix: Path) -> list[bytes]:
    return [path.read_bytes() for path in token_paths(prefix)]


def check_record(record: FileRecord, data: bytes) -> None:
    """Compares the checksums of a record with those of the bytes it is about."""
    assert record.size_bytes == len(data)
    for block in record.blocks:
        assert hashlib.sha256(data[: block.n_bytes]).hexdigest() == block.sha256
        data = data[block.n_bytes :]


def check_merge(
    folder: Path, corpora: list[list[Document]], stays: list[list[bool] | None]
) -> None:
    parts = [
        write_part(folder / f"part-{number}", documents, kept)
        for number, (documents, kept) in enumerate(zip(corpora, stays, strict=True))
    ]
    records = merge_parts(parts, folder / "joined", UINT16)
    left = [
        document
        for documents, kept in zip(corpora, stays, strict=True)
        for document, stay in zip(documents, kept or [True] * len(documents), strict=True)
        if stay
    ]
    write_part(folder / "whole", left)
    assert read_bytes(folder / "joined") == read_bytes(folder / "whole")
    for record, data in zip(records, read_bytes(folder / "joined"), strict=True):
        check_record(record, data)


DOCUMENTS: list[Document] = [[[5, 6, 7]], [], [[8, 7]], [[1], [2, 3]], [[9]]]


def test_parts_with_nothing_in_them(tmp_path: Path) -> None:
    check_merge(tmp_path, [[], [[], []], DOCUMENTS, [], [[]]], [None, None, None, [], [False]])
    assert merge_parts([], tmp_path / "empty", UINT16)[0].blocks == []
    dataset = IndexedDataset(tmp_path / "empty")
    assert (len(dataset), dataset.document_indices.tolist()) == (0, [0])


@st.composite
def corpora_with_gaps(
    draw: st.DrawFn,
) -> tuple[list[list[Document]], list[list[bool] | None]]:
    documents = st.lists(st.lists(st.integers(0, 65535), max_size=3), max_size=3)
    corpora = draw(st.lists(st.lists(documents, max_size=6), min_size=1, max_size=4))
    stays = [
        draw(st.none() | st.lists(st.booleans(), min_size=len(part), max_size=len(part)))
        for part in corpora
    ]
    return corpora, stays


@given(drawn=corpora_with_gaps())
@settings(max_examples=60)
@example(drawn=([DOCUMENTS] * 2, [[False] * 5, [False, True, False, False, False]]))
@example(drawn=([DOCUMENTS] * 2, [[False, True, True, True, False], [True] * 5]))
def test_any_parts_are_joined(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: tuple[list[list[Document]], list[list[bool] | None]],
) -> None:
    check_merge(tmp_path_factory.mktemp("merge"), *drawn)


@pytest.mark.exhaustive
def test_parts_larger_than_a_block_keep_their_checksums(tmp_path: Path) -> None:
    tokens = np.arange(20_000_000, dtype=np.uint32).astype(UINT16)
    lengths = np.full(20, 1_000_000)
    stays = np.arange(20) % 3 > 0
    with IndexedWriter(tmp_path / "part", UINT16) as writer:
        for number in range(20):
            writer.add_document(tokens[number * 1_000_000 :][:1_000_000])
    assert len(writer.bin_blocks) == 3
    whole = Part(tmp_path / "part", writer.bin_blocks)
    some = Part(tmp_path / "part", writer.bin_blocks, stays)
    bin_record, idx_record = merge_parts([whole, some, whole], tmp_path / "joined", UINT16)
    data, index = read_bytes(tmp_path / "joined")
    kept = np.concatenate([tokens, tokens[np.repeat(stays, lengths)], tokens])
    assert data == kept.tobytes()
    check_record(bin_record, data)
    check_record(idx_record, index)
    assert bin_record.blocks[:3] == bin_record.blocks[-3:] == writer.bin_blocks


Copy = Callable[[int, int, int], int]


def copies_little(refusal: int = 0) -> Copy:
    """Copies 3 bytes at a time; every second call fails with an error number, if there is one."""
    copy, calls = os.copy_file_range, count()

    def copy_some(source: int, target: int, n_bytes: int) -> int:
        if next(calls) % 2 and refusal:
            raise OSError(refusal, os.strerror(refusal))
        return copy(source, target, min(n_bytes, 3))

    return copy_some


def refuses(code: int) -> Copy:
    def refuse(source: int, target: int, n_bytes: int) -> int:
        raise OSError(code, os.strerror(code))

    return refuse


CODES = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
KERNELS: dict[str, Copy | None] = {
    "copies little at a time": copies_little(),
    "stops in the middle": copies_little(errno.EXDEV),
    **{errno.errorcode[code]: refuses(code) for code in CODES},
    "copies nothing": lambda source, target, n_bytes: 0,
    "has no such call": None,
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_copy_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    if copy := KERNELS[kernel]:
        monkeypatch.setattr(os, "copy_file_range", copy)
    else:
        monkeypatch.delattr(os, "copy_file_range")
    check_merge(tmp_path, [DOCUMENTS] * 3, [None, [True, False] * 2 + [True], None])


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    part = write_part(tmp_path / "part", DOCUMENTS)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    n_bytes = (tmp_path / "part.bin").stat().st_size + 2
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, limits[1]))
    try:
        with pytest.raises(
            MachineError, match=rf"joined.bin: File too large after {n_bytes} b"
        ) as caught:
            merge_parts([part, part], tmp_path / "joined", UINT16)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "free space, inodes (df -i) or quota" in caught.value.hint


def test_a_part_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    part = write_part(tmp_path / "part", DOCUMENTS)
    data = (tmp_path / "part.bin").read_bytes()
    (tmp_path / "part.bin").write_bytes(data[:-2])
    with pytest.raises(DataError, match=r"part.bin: 16 bytes, but part.idx describes 9 tokens"):
        merge_parts([part], tmp_path / "joined", UINT16)


def test_publishing_replaces_everything_old(tmp_path: Path) -> None:
    prefix, made = tmp_path / "corpus", tmp_path / "made"
    for suffix in (".bin", ".idx", ".json", ".quarantine.jsonl"):
        Path(f"{prefix}{suffix}").write_text("old")
    write_part(made, DOCUMENTS)
    expected = read_bytes(made)
    Path(f"{made}.json").write_text("new")
    publish_files(made, prefix, replaces_other=True)
    assert read_bytes(prefix) == expected
    assert Path(f"{prefix}.json").read_text() == "new"
    names = ["corpus.bin", "corpus.idx", "corpus.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    write_part(made, DOCUMENTS)
    Path(f"{made}.json").write_text("newer")
    Path(f"{made}.quarantine.jsonl").write_text("{}\n")
    publish_files(made, prefix, replaces_other=True)
    assert Path(f"{prefix}.quarantine.jsonl").read_text() == "{}\n"


def test_publishing_what_is_not_there_any_more_ruins_nothing(tmp_path: Path) -> None:
    write_part(tmp_path / "corpus", DOCUMENTS)
    (tmp_path / "corpus.json").write_text("record")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileNotFoundError):
        publish_files(tmp_path / "gone/joined", tmp_path / "corpus", replaces_other=True)
    assert sorted(tmp_path.iterdir()) == before
