"""Tests of folders that Hugging Face's datasets library wrote, and of Arrow and Parquet files.

`datasets_library/make_datasets.py` wrote the folders beside it with the real library.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from trainyard.corpus.sources.batch import Fault
from trainyard.corpus.sources.documents import read_documents
from trainyard.corpus.sources.files import Segment, describe_skipped, find_files, scan_inputs
from trainyard.errors import DataError

WRITTEN = Path(__file__).parent / "datasets_library"
TEXTS = [f"text {n}, naïve 漢" for n in range(5)]


def read(path: Path, key: str = "content") -> tuple[list[str], list[str], list[Fault]]:
    texts: list[str] = []
    sets: list[str] = []
    faults: list[Fault] = []
    n_bytes = 0
    size = path.stat().st_size
    for batch in read_documents(Segment(path, 0, size), key, ["meta.set", "nowhere"]):
        texts += batch.texts
        sets += batch.fields.get("meta.set", [])
        faults += batch.faults
        n_bytes += batch.n_bytes
    assert faults or n_bytes == size or path.suffix == ".parquet"
    return texts, sets, faults


def read_all(*inputs: Path) -> list[str]:
    return [text for path in find_files(list(map(str, inputs))) for text in read(path)[0]]


def write(folder: Path, table: pyarrow.Table, rows: int, kind: str = "stream", **options) -> Path:
    if kind == "parquet":
        path = folder / "a.parquet"
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return path
    path = folder / "a.arrow"
    new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with new(path, table.schema, options=pyarrow.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def test_saved_folders_give_their_rows() -> None:
    assert read_all(WRITTEN / "saved") == TEXTS
    assert read_all(WRITTEN / "selected") == [TEXTS[3], TEXTS[1]]
    texts, sets, faults = read(WRITTEN / "saved/data-00000-of-00002.arrow")
    assert (texts, sets, faults) == (TEXTS[:3], ["s0", "s1", "s0"], [])


def test_a_cache_gives_what_was_loaded_and_not_what_was_mapped() -> None:
    files, skipped = scan_inputs([str(WRITTEN / "cache")])
    assert [path.name for path in files] == ["json-train.arrow"]
    assert describe_skipped(skipped) == "2 not text, of Hugging Face's datasets library"
    assert read_all(WRITTEN / "cache") == TEXTS
    (mapped,) = WRITTEN.glob("cache/cache-*.arrow")
    assert read_all(mapped) == [text.upper() for text in TEXTS]


def test_a_folder_of_splits_asks_for_one(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="splits holds the splits train, test") as error:
        find_files([str(WRITTEN)])
    assert error.value.hint == f"name those to prepare, such as '{WRITTEN}/splits/train'"
    assert read_all(WRITTEN / "splits/test", WRITTEN / "splits/train") == [TEXTS[4], *TEXTS]
    one = tmp_path / "one"
    shutil.copytree(WRITTEN / "splits/train", one / "train")
    (one / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert read_all(one) == TEXTS


def test_a_cache_of_splits_asks_for_one(tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / "cache", tmp_path / "cache")
    shutil.copy(folder / "json-train.arrow", folder / "json-test-00000-of-00001.arrow")
    (folder / "dataset_info.json").write_text(json.dumps({"splits": {"train": {}, "test": {}}}))
    with pytest.raises(DataError, match="cache holds the splits train, test") as error:
        find_files([str(folder)])
    named = error.value.hint.partition("'")[2].rstrip("'")
    assert find_files([named]) == [folder / "json-train.arrow"]


def test_a_folder_that_is_incomplete_or_unreadable(tmp_path: Path) -> None:
    folder = shutil.copytree(WRITTEN / "saved", tmp_path / "saved")
    (folder / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow is missing; state\.json"):
        find_files([str(folder)])
    (folder / "state.json").write_text('{"_data_files": 3}')
    with pytest.raises(DataError, match=r"state\.json is not of Hugging Face's") as error:
        find_files([str(folder)])
    assert "name the .arrow files themselves" in error.value.hint


def test_descriptions_are_no_text_and_a_state_of_ones_own_is(tmp_path: Path) -> None:
    for name in ("state.json", "dataset_infos.json", "a.parquet"):
        (tmp_path / name).touch()
    files = find_files([str(tmp_path)])
    assert [path.name for path in files] == ["a.parquet", "state.json"]


@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_all_formats_and_long_batches(tmp_path: Path, kind: str, compression: str | None) -> None:
    texts = [f"row {n} é" for n in range(3000)]
    table = pyarrow.table({"id": range(3000), "content": pyarrow.array(texts, "large_string")})
    path = write(tmp_path, table, 1300, kind, compression=compression)
    assert read(path)[::2] == (texts, [])


@pytest.mark.parametrize("kind", ["stream", "file", "parquet"])
def test_faults_name_the_row(tmp_path: Path, kind: str) -> None:
    broken = pyarrow.array([b"a", b"\xff", None, b"d"], pyarrow.binary())
    text = pyarrow.Array.from_buffers(pyarrow.string(), 4, broken.buffers())
    path = write(tmp_path, pyarrow.table({"text": text, "n": range(4)}), 2, kind)
    texts, _, faults = read(path, "text")
    assert texts == ["a", "d"]
    assert [(f.kind, f.position) for f in faults] == [("invalid UTF-8", 2), ("not a string", 3)]
    (fault,) = read(path, "txt")[2]
    assert fault.detail == 'there is no key "txt"; the keys are: text, n'
    assert (fault.n_documents, 'did you mean "text"?' in fault.hint) == (4, True)
    path.write_bytes(path.read_bytes()[:-20])
    assert read(path, "text")[2][-1].kind == "damaged file"
    write(tmp_path, pyarrow.table([["a"], ["b"], ["c"]], ["text", "n", "text"]), 1, kind)
    assert read(path, "n")[::2] == (["b"], [])
    texts, _, (fault,) = read(path, "text")
    assert (texts, fault.kind) == ([], "ambiguous column")
    assert '2 columns are called "text"; the columns are: text, n, text' in fault.detail


def test_damage_keeps_the_rows_before_it(tmp_path: Path) -> None:
    table = pyarrow.table({"content": TEXTS * 100})
    whole = write(tmp_path, table, 100).read_bytes()
    path = tmp_path / "b.arrow"
    cuts = {0: 0, 100: 0, len(whole) // 2: 200, len(whole) - 8: 500}
    for n_bytes, n_rows in cuts.items():
        path.write_bytes(whole[:n_bytes])
        texts, _, (fault,) = read(path)
        assert (texts, fault.kind) == (TEXTS * (n_rows // 5), "damaged file")
    assert fault.detail.endswith("after document 500: it ends without Arrow's end of stream")


def test_offsets_outside_the_file_are_damage(tmp_path: Path) -> None:
    offsets = pyarrow.py_buffer(b"".join(n.to_bytes(4, "little") for n in (0, 2**30, 3)))
    text = pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"abc")]
    )
    path = write(tmp_path, pyarrow.table({"content": text}), 2)
    texts, _, (fault,) = read(path)
    assert (texts, fault.kind) == ([], "damaged file")


def test_a_flipped_byte_never_crashes(tmp_path: Path) -> None:
    data = (WRITTEN / "saved/data-00000-of-00002.arrow").read_bytes()
    path = tmp_path / "a.arrow"
    for place in range(0, len(data), 3):
        flipped = bytearray(data)
        flipped[place] ^= 0xFF
        path.write_bytes(flipped)
        read(path)
