"""The cache: known again after a move, not after a replacement, and never trusted when damaged."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

from trainyard.data.index_cache import FileBlock, IndexCache
from trainyard.data.indexed import IndexedWriter
from trainyard.errors import MachineError
from trainyard.files import BlockChecksum, FileRecord

from .records import write_record

INT32 = np.dtype(np.int32)


def write_corpus(prefix: Path, tokens: list[int], lengths: list[int]) -> str:
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_documents(np.array(tokens), np.array(lengths))
    return str(prefix)


def save(cache: IndexCache) -> np.ndarray:
    return cache.save("a", (3, 2), INT32, (np.full((n, 2), n) for n in (1, 2)))


def test_an_array_comes_back_as_it_was(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    assert cache.load("a", (3, 2), INT32) is None
    saved = save(cache)
    assert (saved.dtype, saved.tolist()) == (INT32, [[1, 1], [2, 2], [2, 2]])
    stored = cache.load("a", (3, 2), INT32)
    assert stored is not None
    assert stored.tolist() == saved.tolist()
    (made,) = (tmp_path / "cache").iterdir()
    (tmp_path / "usual").touch()
    assert (made.name, made.stat().st_mode) == ("a.npy", (tmp_path / "usual").stat().st_mode)


@pytest.mark.parametrize("damage", ["short", "long", "empty", "text", "shape", "kind", "archive"])
def test_a_damaged_array_is_not_trusted(tmp_path: Path, damage: str) -> None:
    cache = IndexCache(tmp_path)
    save(cache)
    path = tmp_path / "a.npy"
    content = path.read_bytes()
    if damage == "shape":
        np.save(path, np.zeros((2, 3), INT32))
    elif damage == "kind":
        np.save(path, np.zeros((3, 2), np.int64))
    elif damage == "archive":
        with path.open("wb") as file:
            np.savez(file, np.zeros((3, 2), INT32))
    else:
        damaged = {"short": content[:-1], "long": content + b"\0", "empty": b"", "text": b"[1]"}
        path.write_bytes(damaged[damage])
    assert cache.load("a", (3, 2), INT32) is None
    assert save(cache).tolist() == [[1, 1], [2, 2], [2, 2]]


def test_an_array_under_the_name_of_another_is_not_trusted(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path)
    save(cache)
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    assert cache.load("b", (3, 2), INT32) is None


@pytest.mark.parametrize("n_files", [1, 300])
def test_mapped_files_are_not_kept_open(tmp_path: Path, n_files: int) -> None:
    values = np.arange(2**15)  # large enough to be mapped
    for number in range(n_files):
        IndexCache(tmp_path).save(f"{number}", values.shape, values.dtype, [values])
    before = len(list(Path("/proc/self/fd").iterdir()))
    shape, dtype = values.shape, values.dtype
    arrays = [IndexCache(tmp_path).load(f"{number}", shape, dtype) for number in range(n_files)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for array in arrays:
        assert array is not None
        assert not array.flags.writeable
        assert np.array_equal(array, values)
    part = arrays[0][7:9]
    del array, arrays
    assert part.tolist() == [7, 8]  # mapped as long as something of it is used
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1
    del part
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"a.npy: (Not a directory|File exists)") as caught:
        save(IndexCache(tmp_path / "file"))
    assert "cache folder" in caught.value.hint


@pytest.mark.parametrize("sidecar", [True, False])
def test_replaced_data_is_other_data_and_moved_data_is_not(tmp_path: Path, sidecar: bool) -> None:
    cache = IndexCache(tmp_path / "cache")
    prefix = write_corpus(tmp_path / "corpus", [1, 2, 3, 4], [2, 2])
    if sidecar:
        write_record(Path(prefix), 2)
    first = cache.fingerprint(prefix)
    assert cache.fingerprint(prefix) == first
    moved = write_corpus(tmp_path / "moved", [1, 2, 3, 4], [2, 2])
    if sidecar:
        write_record(Path(moved), 2)
    assert cache.fingerprint(moved) == first
    for tokens, lengths in (([1, 2, 3, 5], [2, 2]), ([1, 2, 3, 4], [1, 3])):  # the same sizes
        write_corpus(tmp_path / "corpus", tokens, lengths)
        assert cache.fingerprint(prefix) != first


@pytest.mark.parametrize("blocks", [[(6, "x")], [(6, "x"), (-2, "y")], [], None])
def test_a_record_that_does_not_fit_is_passed_over(
    tmp_path: Path, blocks: list[tuple[int, str]] | None
) -> None:
    prefix = Path(write_corpus(tmp_path / "corpus", [1, 2], [2]))
    expected = IndexCache(tmp_path / "cache").fingerprint(str(prefix))
    if blocks is None:
        write_record(prefix)
        path = Path(f"{prefix}.json")
        path.write_text(path.read_text().replace('"sequences": 1', '"sequences": 2'))
    else:
        write_record(prefix, bin=FileRecord([BlockChecksum(*block) for block in blocks]))
    assert IndexCache(tmp_path / "cache").fingerprint(str(prefix)) == expected


def test_a_record_and_a_reading_give_the_same_fingerprint(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "corpus", [1, 2, 3], [3])
    write_record(Path(prefix), 2)
    cache = IndexCache(tmp_path / "cache")
    recorded = cache.fingerprint(prefix)
    assert not (tmp_path / "cache").exists()
    touch_after(Path(f"{prefix}.bin"), Path(f"{prefix}.json"))  # as after a copy
    assert cache.fingerprint(prefix) == recorded
    assert (tmp_path / "cache").exists()
    sidecar = json.loads(Path(f"{prefix}.json").read_text())
    checksums = [msgspec.convert(sidecar[kind], FileRecord).sha256 for kind in ("bin", "idx")]
    assert recorded == hashlib.sha256(json.dumps(checksums).encode()).hexdigest()


def touch_after(path: Path, other: Path) -> None:
    """Changes a file without changing its content or time of modification."""
    status = path.stat()
    while path.stat().st_ctime_ns <= other.stat().st_ctime_ns:  # clocks of files tick slowly
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_a_file_replaced_by_an_older_one_of_the_same_size_is_read(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "cache")
    prefix = write_corpus(tmp_path / "corpus", [1, 2], [2])
    write_record(Path(prefix), 2)
    recorded = cache.fingerprint(prefix)
    path = Path(f"{prefix}.bin")
    path.write_bytes(bytes(4))
    os.utime(path, ns=(0, 0))
    touch_after(path, Path(f"{prefix}.json"))
    assert cache.fingerprint(prefix) != recorded


def digest_in(text: str) -> str:
    checksum: str = json.loads(text.splitlines()[0])["sha256"][0]
    return checksum


def test_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write_corpus(tmp_path / "corpus", [1, 2], [2])
    cache = IndexCache(tmp_path / "cache")
    first = cache.fingerprint(prefix)
    with monkeypatch.context() as patch:
        patch.setattr(FileBlock, "read_digest", None)
        assert cache.fingerprint(prefix) == first
    path = Path(f"{prefix}.bin")
    status = path.stat()
    path.write_bytes(bytes(4))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    touch_after(path, Path(f"{prefix}.idx"))
    changed = cache.fingerprint(prefix)
    assert changed != first
    (memory,) = (tmp_path / "cache").glob("content-*.json")
    damaged = memory.read_text()
    for text in ("{", damaged.replace(digest_in(damaged), "0" * 64)):
        memory.write_text(text)
        assert cache.fingerprint(prefix) == changed
        assert memory.read_text() != text
