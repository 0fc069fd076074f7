"""The cache: known again after a move, not after a replacement, and never trusted when damaged."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainyard.data.index_cache import FileBlock, IndexCache
from trainyard.data.indexed import IndexedWriter
from trainyard.data.sidecar import load_sidecar
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


def as_file(write: Callable[..., None], *shape: int, dtype: type = np.int32) -> bytes:
    """What numpy writes of zeros."""
    file = io.BytesIO()
    write(file, np.zeros(shape, dtype))
    return file.getvalue()


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda content: content[:-1],
    "long": lambda content: content + b"\0",
    "empty": lambda _: b"",
    "text": lambda _: b"[1]",
    "shape": lambda _: as_file(np.save, 2, 3),
    "kind": lambda _: as_file(np.save, 3, 2, dtype=np.int64),
    "archive": lambda _: as_file(np.savez, 3, 2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_array_is_not_trusted(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    cache, path = IndexCache(tmp_path), tmp_path / "a.npy"
    save(cache)
    intact = path.read_bytes()
    path.write_bytes(damage(intact))
    assert cache.load("a", (3, 2), INT32) is None
    assert save(cache).tolist() == [[1, 1], [2, 2], [2, 2]]
    path.with_name("b.npy").write_bytes(intact)  # under the name of another
    assert cache.load("b", (3, 2), INT32) is None


def test_mapped_files_are_not_kept_open(tmp_path: Path) -> None:
    """A blend may have more of them than a process may open: 1,024 on most machines."""
    values = np.arange(2**15)  # large enough to be mapped
    shape, dtype, names = values.shape, values.dtype, list(map(str, range(300)))
    for name in names:
        IndexCache(tmp_path).save(name, shape, dtype, [values])
    before = len(list(Path("/proc/self/fd").iterdir()))
    arrays = [IndexCache(tmp_path).load(name, shape, dtype) for name in names]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    for array in arrays:
        assert array is not None and not array.flags.writeable
        assert np.array_equal(array, values)
    part = arrays[0][7:9]
    del array, arrays
    assert part.tolist() == [7, 8]  # mapped as long as something of it is used
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 1
    del part
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"a.npy cannot be written: File exists") as caught:
        save(IndexCache(tmp_path / "file"))
    assert "cache folder" in caught.value.hint


@pytest.mark.parametrize("sidecar", [True, False])
def test_replaced_data_is_other_data_and_moved_data_is_not(tmp_path: Path, sidecar: bool) -> None:
    cache = IndexCache(tmp_path / "cache")
    prints = set()
    for name in ("moved", "corpus"):
        prefix = write_corpus(tmp_path / name, [1, 2, 3, 4], [2, 2])
        if sidecar:
            write_record(Path(prefix), 2)
        prints |= {cache.fingerprint(prefix), cache.fingerprint(prefix)}
    (first,) = prints
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
    sidecar = load_sidecar(prefix)
    checksums = json.dumps([sidecar.bin.sha256, sidecar.idx.sha256])
    path = Path(f"{prefix}.bin")
    path.write_bytes(bytes(6))  # replaced by an older one of the same size
    os.utime(path, ns=(0, 0))
    touch_after(path, Path(f"{prefix}.json"))
    assert cache.fingerprint(prefix) != recorded
    assert recorded == hashlib.sha256(checksums.encode()).hexdigest()


def touch_after(path: Path, other: Path) -> None:
    """Changes a file without changing its content or time of modification."""
    status = path.stat()
    while path.stat().st_ctime_ns <= other.stat().st_ctime_ns:  # clocks of files tick slowly
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


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
