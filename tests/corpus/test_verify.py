"""The check finds every damaged bit and says where; it never accuses a good file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.command import peak_bytes
from tests.data.records import EOD, VOCABULARY_SIZE, record_file, write_record

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.corpus.verify import BlockChecker, BlockErrors, DataReport, Span, check_data
from trainyard.data.indexed import IndexedDataset, IndexedWriter, write_index
from trainyard.data.sidecar import TokenizerRecord
from trainyard.data.tokenizer import Tokenizer, load_tokenizer
from trainyard.errors import DataError
from trainyard.files import BlockChecksum, FileRecord

SUFFIXES = (".bin", ".idx", ".json")
DOCUMENTS = [[5, 6, EOD], [], [7, 8, 9, 10, EOD], [11, EOD], []]


def write_corpus(
    prefix: Path, documents: list[list[int]], dtype: str = "uint16", *, recorded: bool = True
) -> str:
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype))
    if recorded:
        write_record(prefix)
    return str(prefix)


def problems_of(prefix: str | Path, tokenizer: Tokenizer | None = None) -> list[str]:
    """The problems, one a line, without the folder in their paths."""
    with pytest.raises(DataError) as caught:
        check_data(prefix, tokenizer)
    title, *lines = caught.value.problem.splitlines()
    assert title.startswith(f"{prefix}: ")
    return [line.strip().replace(f"{Path(prefix).parent}/", "") for line in lines]


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return write_corpus(tmp_path / "corpus", DOCUMENTS)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(["some words, and more of the same words"], 260, folder)
    return load_tokenizer(folder)


@pytest.mark.parametrize("block_bytes", [1, 2, 3, 7, 1000])
def test_good_files_are_good(prefix: str, block_bytes: int) -> None:
    assert check_data(write_corpus(Path(f"{prefix}-empty"), [[], []])).documents == 2
    write_record(Path(prefix), block_bytes)
    calls: list[tuple[int, int]] = []
    report = check_data(prefix, progress=lambda done, total: calls.append((done, total)))
    n_bytes = [Path(prefix + suffix).stat().st_size for suffix in (".bin", ".idx")]
    assert report == DataReport(
        prefix=prefix,
        documents=5,
        sequences=3,
        tokens=10,
        n_bytes=sum(n_bytes),
        n_blocks=sum(-(-size // block_bytes) for size in n_bytes),
        vocabulary_size=VOCABULARY_SIZE,
        ends_checked=True,
        has_record=True,
    )
    assert calls[-1] == (sum(n_bytes), sum(n_bytes))
    assert calls == sorted(calls)


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Flips over all three files in turn, and each is refused."""
    random = np.random.default_rng(5)
    documents = [
        [*random.integers(0, EOD, size), EOD] if size else []
        for size in random.integers(0, 60, 300)
    ]
    prefix = write_corpus(tmp_path / "c", documents, recorded=False)
    write_record(Path(prefix), 1000)
    for number in range(60):
        path = Path(prefix + SUFFIXES[number % 3])
        content = path.read_bytes()
        bit = int(random.integers(8 * len(content)))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        found = problems_of(prefix)
        if path.suffix != ".json":
            first = bit // 8 // 1000 * 1000
            last = min(first + 1000, len(content)) - 1
            place = f"{path.name}: bytes {first} to {last} differ from what was written"
            assert any(line.startswith(place) for line in found), (bit, found)
        path.write_bytes(content)
    check_data(prefix)


@pytest.mark.parametrize(
    ("flipped", "place"),  # neighbouring bad blocks of 7 bytes are one place
    [
        (
            (8, 16, 2),
            "bytes 0 to 19 differ from what was written (sequences 0 to 2, documents 0 to 3)",
        ),
        (
            (8, 16),
            "bytes 7 to 19 differ from what was written (sequences 1 to 2, documents 2 to 3)",
        ),
    ],
)
def test_damage_has_a_place(prefix: str, flipped: tuple[int, ...], place: str) -> None:
    path = Path(f"{prefix}.bin")
    data = bytearray(path.read_bytes())
    for byte in flipped:
        data[byte] ^= 1
    path.write_bytes(data)
    assert problems_of(prefix) == [f"corpus.bin: {place}"]


def test_all_problems_are_listed(prefix: str) -> None:
    Path(f"{prefix}.bin").write_bytes(bytes(18))
    data = bytearray(Path(f"{prefix}.idx").read_bytes())
    data[34] = 4  # the length of the first sequence
    Path(f"{prefix}.idx").write_bytes(data)
    assert problems_of(prefix) == [
        "corpus.idx: byte 54: sequence_pointers[1] is 6, but the lengths before it make 8",
        "corpus.bin: 18 bytes, but 20 were written: cut short",
        "corpus.bin: bytes 0 to 13 differ from what was written",
        "corpus.idx: bytes 28 to 34 differ from what was written",
    ]


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
@pytest.mark.parametrize("recorded", [True, False])
def test_truncated_longer_and_missing_files(prefix: str, suffix: str, recorded: bool) -> None:
    path = Path(prefix + suffix)
    content = path.read_bytes()
    if not recorded:
        Path(f"{prefix}.json").unlink()
    for damaged in (content[:-1], content[:-7], b"", content + b"\0"):
        path.write_bytes(damaged)
        found = problems_of(prefix)
        assert all(line.startswith(f"corpus{suffix}: ") for line in found)
        assert any(f"{len(damaged)} bytes" in line for line in found)
    path.unlink()
    assert problems_of(prefix) == [f"corpus{suffix}: No such file or directory"]


@pytest.mark.parametrize(
    ("documents", "recorded", "problem"),
    [
        (
            [[5, EOD], [], [6, 7, 300, 8, 65535, EOD]],
            True,
            "outside the vocabulary (0 to 299): 2; "
            "the first is 300: token 2 of sequence 1 (document 2)",
        ),
        ([[5], [6, -1]], False, "below 0: 1; the first is -1: token 1 of sequence 1 (document 1)"),
    ],
)
def test_ids_that_cannot_be_have_a_place(
    tmp_path: Path, documents: list[list[int]], recorded: bool, problem: str
) -> None:
    prefix = write_corpus(tmp_path / "c", documents, "int32", recorded=recorded)
    assert problems_of(prefix) == [f"c.bin: ids {problem}"]


def test_documents_without_their_end_have_a_place(tmp_path: Path) -> None:
    documents = [[], [5, EOD], [], [6, 7], [], [], [8], [EOD, 9]]
    prefix = write_corpus(tmp_path / "c", documents)
    assert problems_of(prefix) == [
        "c.bin: documents that do not end with the end of document (299): 3; the first is "
        "document 3, which ends with 7"
    ]
    write_record(Path(prefix), append_eod=False)
    assert not check_data(prefix).ends_checked


def test_a_document_of_several_sequences_ends_once(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "c", np.dtype(np.uint16)) as writer:
        writer.add_document(np.array([1, 2]), np.array([3, EOD]))
        writer.add_document(np.array([4, EOD]), np.array([5]))
    write_record(tmp_path / "c")
    (found,) = problems_of(tmp_path / "c")
    assert found.endswith(": 1; the first is document 1, which ends with 5")


def test_an_end_is_found_wherever_the_reading_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pieces of 1 to 9 bytes: documents and ids lie across them in every way."""
    for piece_bytes in range(1, 10):
        monkeypatch.setattr("trainyard.corpus.verify._PIECE_BYTES", piece_bytes)
        for dtype in ("uint16", "int32"):
            prefix = write_corpus(tmp_path / "good", DOCUMENTS, dtype)
            check_data(prefix)
            bad = write_corpus(tmp_path / "bad", [*DOCUMENTS, [1, 300, 301], [3, EOD], [4]], dtype)
            ids, ends = problems_of(bad)
            assert "299): 2; the first is 300: token 1 of sequence 3 (document 5)" in ids
            assert ends.endswith("(299): 2; the first is document 5, which ends with 301")


NO_BLOCK = FileRecord([BlockChecksum(0, ""), BlockChecksum(20, "")])
NO_END = TokenizerRecord("small", "f", 300, 300, "text")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": 6}, "documents is 6, the files have 5"),
        ({"empty_documents": 1}, "empty_documents is 1, the files have 2"),
        ({"sequences": 5}, "sequences is 5, the files have 3"),
        ({"tokens": 9}, "tokens is 9, the files have 10"),
        ({"dtype": "int32"}, "dtype is int32, the files have uint16"),
        ({"bin": NO_BLOCK}, "blocks of corpus.bin have sizes"),
        ({"tokenizer": NO_END, "append_eod": False}, "eod_id 300 is outside the vocabulary of 300"),
    ],
)
def test_a_record_that_counts_otherwise(
    prefix: str, changes: dict[str, object], message: str
) -> None:
    write_record(Path(prefix), **changes)
    (found,) = problems_of(prefix)
    assert found.startswith("corpus.json: ")
    assert message in found


def test_a_malformed_record_does_not_stop_the_rest(prefix: str) -> None:
    path = Path(f"{prefix}.json")
    path.write_text(path.read_text()[:-10])
    assert problems_of(prefix)[0].startswith("corpus.json is not a record of token files: ")
    Path(f"{prefix}.bin").write_bytes(bytes(19))
    assert len(problems_of(prefix)) == 2


def test_the_tokenizer_is_compared(tmp_path: Path, tokenizer: Tokenizer) -> None:
    made_by = TokenizerRecord("its", tokenizer.fingerprint, 260, tokenizer.eod_id, "text")
    prefix = write_corpus(tmp_path / "c", [[5, tokenizer.eod_id]], recorded=False)
    assert check_data(prefix, tokenizer).vocabulary_size == 260
    write_record(Path(prefix), tokenizer=made_by)
    check_data(prefix, tokenizer)
    write_record(Path(prefix), tokenizer=msgspec.structs.replace(made_by, vocabulary_size=261))
    (found,) = problems_of(prefix, tokenizer)
    assert "vocabulary_size is 261, the tokenizer" in found
    write_record(Path(prefix), tokenizer=msgspec.structs.replace(made_by, fingerprint="0" * 64))
    (found,) = problems_of(prefix, tokenizer)
    assert "was made with the tokenizer its (fingerprint 0000000000000000" in found


def test_without_a_record_nothing_vouches_for_the_bytes(prefix: str) -> None:
    with_record = check_data(prefix)
    Path(f"{prefix}.json").unlink()
    report = check_data(prefix)
    assert report == replace(
        with_record, n_blocks=0, vocabulary_size=None, ends_checked=False, has_record=False
    )


@pytest.mark.parametrize(
    "name", ["megatron/novels_text_document", "golden/data/synth0_text_document"]
)
def test_files_of_megatron_are_good(shared_data: Path, name: str) -> None:
    assert check_data(shared_data / name).tokens > 0


def test_bytes_that_cannot_be_read_are_not_good(prefix: str) -> None:
    path = Path(f"{prefix}.bin")
    checker = BlockChecker(IndexedDataset(prefix), VOCABULARY_SIZE, EOD)
    span = Span(path, 0, 21, record_file(path, 20).blocks[0].sha256)
    assert checker.check(span).error == "truncated while being read"
    assert checker.check(replace(span, n_bytes=20)) == BlockErrors()
    path.unlink()
    assert checker.check(span).error == "No such file or directory"


def test_memory_does_not_grow_with_the_files(tmp_path: Path) -> None:
    n_tokens = 32 << 20
    with (tmp_path / "c.bin").open("wb") as file:
        file.truncate(2 * n_tokens)
    lengths = np.full(n_tokens // 64, 64, np.int32)
    counts = (len(lengths), len(lengths))
    slabs = [(lengths, np.ones_like(lengths))]
    write_index(tmp_path / "c.idx", np.dtype(np.uint16), counts, lambda: iter(slabs))
    no_end = TokenizerRecord("small", "f", VOCABULARY_SIZE, 0, "text")
    write_record(tmp_path / "c", 16 << 20, tokenizer=no_end)
    assert check_data(tmp_path / "c").documents == len(lengths)
    assert peak_bytes(lambda: check_data(tmp_path / "c")) < 24 << 20
