"""Tests of the metadata that readers bring along, and of lines that are hard to describe."""

from __future__ import annotations

import gzip
import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trainyard.corpus.sources.documents import read_documents
from trainyard.corpus.sources.files import Segment


def read_fields(folder: Path, data: bytes | pyarrow.Table, *fields: str) -> dict[str, list[str]]:
    """Reads lines of JSON, or a table of Parquet."""
    path = folder / ("a.jsonl" if isinstance(data, bytes) else "a.parquet")
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        pyarrow.parquet.write_table(data, path)
    columns: dict[str, list[str]] = {field: [] for field in fields}
    for batch in read_documents(Segment(path, 0, path.stat().st_size), "text", fields):
        for field, values in batch.fields.items():
            assert len(values) == len(batch.texts)
            columns[field] += values
    return columns


ROWS = [
    {"text": "a", "set": "C4", "meta": {"n": 7, "deep": {"er": "x"}}},
    {"text": "b", "set": None, "meta": {"n": None, "deep": None}},
    {"text": "c", "meta": {}},
    {"text": "d", "set": "", "meta": None},
    {"text": "e", "set": "Wiki 漢", "meta": {"n": -1, "deep": {"er": None}}},
]
COLUMNS = {
    "set": ["C4", "", "", "", "Wiki 漢"],
    "meta.n": ["7", "", "", "", "-1"],
    "meta.deep.er": ["x", "", "", "", ""],
    "nowhere.at.all": [""] * 5,
}


JSON_LINES = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
TABLE = pyarrow.Table.from_pylist([*ROWS[:2], {**ROWS[2], "text": None}, *ROWS[2:]])


@pytest.mark.parametrize(
    "data", [JSON_LINES, b"bad\n" + JSON_LINES, TABLE], ids=["typed", "one by one", "Parquet"]
)
def test_metadata_is_that_of_the_texts(tmp_path: Path, data: bytes | pyarrow.Table) -> None:
    assert read_fields(tmp_path, data, *COLUMNS) == COLUMNS


@pytest.mark.parametrize("fault", [b"", b"bad\n"], ids=["typed", "one by one"])
def test_metadata_that_is_no_string_is_json(tmp_path: Path, fault: bytes) -> None:
    values = [b"true", b"1.0", b'[1, "a"]', b'{"b": 2}', b"123456789012345678901234567890", b"NaN"]
    data = fault + b"".join(b'{"m": %b, "text": ""}\n' % value for value in values)
    assert read_fields(tmp_path, data, "m") == {"m": [value.decode() for value in values]}


@pytest.mark.parametrize("fields", [("m", "m.a"), ("m.a", "m"), ("text",)])
def test_any_fields_may_be_asked_for_together(tmp_path: Path, fields: tuple[str, ...]) -> None:
    line = b'{"text": "cat", "m": {"a": 1}}\n'
    known = {"m": ['{"a": 1}'], "m.a": ["1"], "text": ["cat"]}
    assert read_fields(tmp_path, line, *fields) == {field: known[field] for field in fields}


BROKEN = pyarrow.array([b"caf\xe9"], pyarrow.binary())
BROKEN_TEXT = pyarrow.Array.from_buffers(pyarrow.string(), 1, BROKEN.buffers())
NANOSECONDS = pyarrow.array([1], pyarrow.timestamp("ns"))


@pytest.mark.parametrize(
    ("column", "rendered"),
    [
        (pyarrow.array([date(2020, 1, 2)]), "2020-01-02"),
        (pyarrow.array([datetime(2020, 1, 2)]), "2020-01-02 00:00:00"),
        (NANOSECONDS, "1970-01-01 00:00:00.000000001"),
        (pyarrow.array([2**60], pyarrow.timestamp("ms")), f"<value out of range: {2**60}>"),
        (pyarrow.array([Decimal("1.50")]), "1.50"),
        (pyarrow.array(["é".encode()]), "é"),
        (BROKEN, r"caf\xe9"),
        (BROKEN_TEXT, r"caf\xe9"),
        (pyarrow.array([[date(2020, 1, 2), None]]), '["2020-01-02", null]'),
    ],
    ids=str,
)
def test_metadata_of_any_type_of_parquet(
    tmp_path: Path, column: pyarrow.Array, rendered: str
) -> None:
    inside = pyarrow.StructArray.from_arrays([column], ["a"])
    table = pyarrow.table({"text": ["cat"], "m": column, "s": inside})
    columns = read_fields(tmp_path, table, "m", "s.a", "s.a.b", "s", "text")
    whole = columns.pop("s")
    assert columns == {"m": [rendered], "s.a": [rendered], "s.a.b": [""], "text": ["cat"]}
    assert whole[0].encode()


ODD_LINES = {
    "a key that is half a character": b'{"\\ud800": 1}',
    "metadata that is half a character": b'{"text": "a", "m": "\\ud800"}',
    "a number of 5000 digits": b'{"n": ' + b"1" * 5000 + b"}",
    "metadata of 5000 digits": b'{"text": "a", "m": ' + b"1" * 5000 + b"}",
    "metadata nested deeply": b'{"text": "a", "m": ' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    "a key of a megabyte": b'{"' + b"x" * 2**20 + b'": 1}',
}


@pytest.mark.parametrize("line", ODD_LINES)
def test_whatever_a_line_holds_can_be_told_and_recorded(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(ODD_LINES[line] + b'\n{"text": "good"}\n')
    (batch,) = read_documents(Segment(path, 0, path.stat().st_size), "text", ["m"])
    (fault,) = batch.faults
    assert (batch.texts, batch.fields) == (["good"], {"m": [""]})
    assert len(f"{fault.detail}{fault.hint}".encode()) < 1000


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.parquet", "a.arrow", "a.txt"])
def test_metadata_of_files_without_any(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.table({"other": [1]}), path)
    else:
        path.write_bytes(gzip.compress(b'{"text": "a"}\n' * 9)[:-12] if "gz" in name else b"a")
    batches = list(read_documents(Segment(path, 0, path.stat().st_size), "text", ["set"]))
    assert [batch.fields for batch in batches] == [{"set": [""] * len(b.texts)} for b in batches]
