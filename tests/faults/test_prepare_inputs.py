"""Inputs that are damaged, malformed or hostile: the table of what becomes of each.

Every fault is met with one worker and with two, and the outcome must be the same: stopped, with one
message that names the place and says what to do; or set aside, with every other document kept.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from trainyard.config.corpus import Corpus
from trainyard.data.indexed import IndexedDataset
from trainyard.data.preparation.prepare import OnError, prepare
from trainyard.data.sidecar import Sidecar
from trainyard.data.tokenizer import load_tokenizer
from trainyard.errors import DataError

from .conftest import read_all

GOOD = [f"the cat sat on mat {number}" for number in range(3000)]


def lines(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def with_line(line: bytes, at: int = 1000) -> bytes:
    """Good documents with one bad line among them, the line of number `at` + 1."""
    return lines(GOOD[:at]) + line + b"\n" + lines(GOOD[at:])


def damaged(packed: bytes, share: float = 0.6) -> bytes:
    at = int(len(packed) * share)
    return packed[:at] + bytes(byte ^ 0xFF for byte in packed[at : at + 40]) + packed[at + 40 :]


def write_damaged_parquet(path: Path) -> None:
    table = pyarrow.table({"text": GOOD})
    pyarrow.parquet.write_table(table, path, row_group_size=500, compression="snappy")
    path.write_bytes(damaged(path.read_bytes()))


def pack_zst(data: bytes) -> bytes:
    """Several frames, as long files have, so that some stand before the damage."""
    step = len(data) // 5
    return b"".join(
        zstandard.ZstdCompressor(write_checksum=True).compress(data[at : at + step])
        for at in range(0, len(data), step)
    )


def write_bomb(path: Path) -> None:
    """100 kB that unpack to more than a gigabyte."""
    packer = zstandard.ZstdCompressor().compressobj()
    block = bytes(2**20)
    path.write_bytes(b"".join(packer.compress(block) for _ in range(1100)) + packer.flush())


@dataclass(frozen=True)
class Case:
    """A fault, the file that has it, and what is said of it."""

    name: str
    file: str
    write: Callable[[Path], object]
    kind: str
    """Of the quarantined document."""
    says: str
    hint: str
    keeps_all: bool = True
    """Whether every good document is kept, or only those before the damage."""


def writes(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


CASES = [
    Case(
        "malformed line", "b.jsonl", writes(with_line(b'{"text": "cut')), "malformed JSON",
        "b.jsonl:1001: the line is not valid JSON", "write one JSON object a line",
    ),
    Case(
        "missing key", "b.jsonl", writes(with_line(b'{"txt": "x", "id": 1}')), "missing key",
        'b.jsonl:1001: there is no key "text"; the keys are: txt, id', 'did you mean "txt"?',
    ),
    Case(
        "null", "b.jsonl", writes(with_line(b'{"text": null}')), "not a string",
        'b.jsonl:1001: the value of "text" is null', "mend the line",
    ),
    Case(
        "invalid UTF-8", "b.jsonl", writes(with_line(b'{"text": "caf\xe9 x"}')), "invalid UTF-8",
        "(0xe9) is not valid UTF-8", "convert the file",
    ),
    Case(
        "lone surrogate", "b.jsonl", writes(with_line(rb'{"text": "half \ud83d"}')),
        "lone surrogate", r"b.jsonl:1001: ", "half a character",
    ),
    Case(
        "bad line in a compressed file", "b.jsonl.zst", writes(pack_zst(with_line(b"not json"))),
        "malformed JSON", "b.jsonl.zst:1001: the line is not valid JSON", "one JSON object a line",
    ),
    Case(
        "damaged zst", "b.jsonl.zst", lambda path: path.write_bytes(damaged(pack_zst(lines(GOOD)))),
        "damaged file", "b.jsonl.zst: the file is damaged after document", "fetch or make the file",
        keeps_all=False,
    ),
    Case(
        "damaged bz2", "b.jsonl.bz2",
        writes(damaged(bz2.compress(lines(GOOD[:1500])) + bz2.compress(lines(GOOD[1500:])), 0.8)),
        "damaged file", "b.jsonl.bz2: the file is damaged after document 1", "fetch or make",
        keeps_all=False,
    ),
    Case(
        "truncated gz", "b.jsonl.gz", writes(gzip.compress(lines(GOOD), 1)[:-3000]),
        "damaged file", "b.jsonl.gz: the file is damaged after document", "fetch or make",
        keeps_all=False,
    ),
    Case(
        "truncated xz", "b.jsonl.xz",
        writes(lzma.compress(lines(GOOD[:1500])) + lzma.compress(lines(GOOD[1500:]))[:-200]),
        "damaged file", "b.jsonl.xz: the file is damaged after document", "fetch or make",
        keeps_all=False,
    ),
    Case(
        "damaged Parquet", "b.parquet", write_damaged_parquet, "damaged file",
        "b.parquet: the file is damaged after document", "fetch or make", keeps_all=False,
    ),
    Case(
        "too long a line", "b.jsonl",
        writes(with_line(b'{"text": "' + b"x" * (33 * 2**20) + b'"}')),
        "too long", "b.jsonl:1001: the line is too long", "32 MiB is the most",
    ),
    Case(
        "zip bomb", "b.jsonl.zst", write_bomb, "damaged file",
        "it unpacks to more than 500 times its size", "fetch or make",
        keeps_all=False,
    ),
]  # fmt: skip


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


@pytest.fixture(scope="module")
def inputs(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("inputs") / 'it\'s a "folder" $HOME ; #'
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(lines(GOOD))
    case.write(folder / case.file)
    (folder / "c.jsonl").write_bytes(lines(GOOD))
    return folder


def run(inputs: Path, tokenizer: Path, output: Path, workers: int, on_error: OnError) -> Sidecar:
    output.mkdir()
    corpus = Corpus(inputs=(str(inputs),), output=str(output / "c"), tokenizer=str(tokenizer))
    return prepare(corpus, workers=workers, on_error=on_error, unit_bytes=50_000)[0]


def workers_of(case: Case) -> list[int]:
    """Numbers of processes to try: several work as one does, but for how they tell of a fault."""
    return [1, 2] if case.name in ("malformed line", "damaged zst", "zip bomb") else [1]


def test_the_run_stops_and_names_the_place(
    case: Case, inputs: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    problems = []
    for workers in workers_of(case):
        with pytest.raises(DataError) as caught:
            run(inputs, tokenizer_folder, tmp_path / str(workers), workers, "stop")
        problems.append((caught.value.problem, caught.value.hint))
        assert not list((tmp_path / str(workers)).glob("*.*n*")), "nothing has its final name"
    assert problems[0] == problems[-1]
    assert case.says in problems[0][0]
    assert case.hint in problems[0][1]


def test_the_document_is_set_aside_and_all_others_are_kept(
    case: Case, inputs: Path, tokenizer_folder: Path, tmp_path: Path
) -> None:
    sidecar = run(inputs, tokenizer_folder, tmp_path / "1", 1, "quarantine")
    for workers in workers_of(case)[1:]:
        run(inputs, tokenizer_folder, tmp_path / "2", workers, "quarantine")
        assert read_all(tmp_path / "1") == read_all(tmp_path / "2")
    assert sidecar.quarantined == {case.kind: 1}
    assert case.says in sidecar.quarantined_places[0]
    aside = (tmp_path / "1/c_text_document.quarantine.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in aside] == [case.kind]
    assert sidecar.steps[0].dropped == {case.kind: 1}
    if case.keeps_all:
        assert sidecar.documents == 3 * len(GOOD)
    else:
        assert 2 * len(GOOD) <= sidecar.documents < 3 * len(GOOD)
    # What came before the fault and what came after it are there, in order.
    dataset = IndexedDataset(tmp_path / "1/c_text_document")
    tokenizer = load_tokenizer(tokenizer_folder)
    ends = [GOOD[0], GOOD[len(GOOD) - 1]]
    assert [tokenizer.decode(dataset.tokens(i)[:-1]) for i in (0, len(GOOD) - 1)] == ends
    first_of_c = len(dataset) - len(GOOD)
    assert [tokenizer.decode(dataset.tokens(i)[:-1]) for i in (first_of_c, -1)] == ends
