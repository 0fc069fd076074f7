"""Our safetensors files: the same as everybody's, and safe to read whoever wrote them."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainyard.checkpoint import shard
from trainyard.checkpoint.shard import DTYPES, read_header, read_values, write_shards
from trainyard.errors import CheckpointError


@pytest.fixture
def of_every_type() -> dict[str, torch.Tensor]:
    drawn = torch.randint(0, 256, (8 * 33,), generator=torch.Generator().manual_seed(0))
    bits = drawn.to(torch.uint8)
    tensors = {name: bits.view(dtype) for name, dtype in DTYPES.items() if name != "bool"}
    tensors["bool"] = drawn > 127
    return {
        "turned": bits.view(torch.float32).reshape(6, 11).t(),
        "odd": bits[:5].clone(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "on a tape": torch.ones(3, requires_grad=True),
        **tensors,
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    pair = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return torch.equal(*pair)


def test_the_library_reads_what_we_write_and_the_checksums_are_right(tmp_path, of_every_type):
    path = tmp_path / "a.safetensors"
    written, found = write_shards({path: of_every_type})[path.name], load_file(path)
    header = read_header(path, written.header_sha256)
    assert found.keys() == of_every_type.keys()
    for name, tensor in of_every_type.items():
        assert same(found[name], tensor), name
        values = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert header[name].checksum == xxhash.xxh3_128_hexdigest(values)
    assert written.n_bytes == path.stat().st_size
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata()["format"] == "pt"
    with pytest.raises(CheckpointError, match="is damaged: the sha256 of its header is"):
        read_header(path, "0" * 64)


def test_we_read_what_the_library_writes(tmp_path, of_every_type):
    path = tmp_path / "a.safetensors"
    tensors = {name: tensor.detach().contiguous() for name, tensor in of_every_type.items()}
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        into = torch.empty_like(tensor)
        assert read_values(header[name], into) == read_values(header[name])
        assert same(into, tensor), name
        rows = []
        read_values(header[name], lambda _, piece, rows=rows: rows.append(piece.clone()))
        assert not tensor.numel() or same(torch.cat(rows).view(tensor.shape), tensor), name


@pytest.mark.parametrize("piece_bytes", [8, 4096, 10_000])
def test_pieces_make_the_whole(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(shard, "_PIECE_BYTES", piece_bytes)
    tensors = {f"t{n}": torch.arange(n, dtype=torch.float32) for n in (1, 2, 1023, 1024, 2500)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    written = write_shards(dict.fromkeys(paths, tensors))
    assert written[paths[0].name] == written[paths[1].name]
    for path in paths:
        for name, values in read_header(path).items():
            into = torch.empty(values.shape)
            assert read_values(values, into) == values.checksum
            assert torch.equal(into, tensors[name])
            assert read_values(values) == values.checksum


def test_a_file_is_replaced_while_it_is_mapped(tmp_path):
    path = tmp_path / "a.safetensors"
    write_shards({path: {"a": torch.arange(5000)}})
    with safe_open(path, framework="pt") as opened:
        mapped = opened.get_tensor("a")
    write_shards({path: {"b": mapped}})
    assert torch.equal(load_file(path)["b"], torch.arange(5000))


def test_the_files_are_the_same_in_any_order_of_tensors(tmp_path, of_every_type):
    one, other = tmp_path / "one", tmp_path / "other"
    write_shards({one: of_every_type, other: dict(reversed(of_every_type.items()))})
    assert one.read_bytes() == other.read_bytes()


def framed(header: bytes, length: int | None = None) -> bytes:
    """A file with this header and 8 bytes of values."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + bytes(8)


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> bytes:
    fields = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return framed(json.dumps({"a": fields}).encode())


HOSTILE = {
    "empty file": (bytes(8), "Input data was truncated"),
    "length beyond the file": (framed(b"{}", 11), "its header would have 11 bytes"),
    "largest length": (framed(b"{}", 2**64 - 1), "would have 18446744073709551615 bytes"),
    "not JSON": (framed(b"\x80\x04cos\nsystem\n"), "malformed|invalid"),
    "a list": (framed(b"[]"), "Expected `object`"),
    "deep": (framed(b'{"a":' + b"[" * 100_000), "recursion|malformed|Expected|truncated"),
    "unknown type": (entry("F4"), r"'a' is F4 \[2\]"),
    "text for a number": (entry(shape=["2"]), "Expected `int`"),
    "fraction": (entry(shape=[2.5]), "Expected `int`"),
    "negative shape": (entry(shape=[-1, -2]), r"'a' is F32 \[-1, -2\]"),
    "beyond the end": (entry(shape=[3], offsets=[0, 12]), "tensors have 12 bytes of 8"),
    "before the start": (entry(offsets=[-8, 0]), "at -8:0, not at 0:8"),
    "backwards": (entry(shape=[0], offsets=[4, 0]), "at 4:0, not at 0:0"),
    "too few bytes": (entry(offsets=[0, 4]), "at 0:4, not at 0:8"),
    "product wraps": (entry(shape=[2**62, 4], offsets=[0, 0]), "at 0:0, not at 0:7378697629"),
    "bytes in front": (entry(shape=[1], offsets=[4, 8]), "at 4:8, not at 0:4"),
    "bytes behind": (entry(shape=[1], offsets=[0, 4]), "tensors have 4 bytes of 8"),
    "bytes of two": (
        framed(b'{"b": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}, ' + entry()[9:-8]),
        "at 0:8, not at 5:13",
    ),
    "no offsets": (framed(b'{"a": {"dtype": "F32", "shape": [2]}}'), "at 0:0, not at 0:8"),
}


@pytest.mark.parametrize("content, problem", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, content, problem):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as raised:
        read_header(path)
    assert raised.value.problem.startswith(f"{path} is not a safetensors file: ")


def test_a_file_that_becomes_shorter_or_is_removed_meanwhile_is_named(tmp_path):
    path = tmp_path / "step-00000004" / "a.safetensors"
    path.parent.mkdir()
    write_shards({path: {"a": torch.zeros(5000)}})
    values = read_header(path)["a"]
    os.truncate(path, 10_000)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: it ends at byte 10000"):
        read_values(values, torch.empty(5000))
    shutil.rmtree(path.parent)
    for read in (lambda: read_values(values), lambda: read_header(path)):
        with pytest.raises(CheckpointError, match=f"{path} cannot be read: .*No such") as caught:
            read()
        assert caught.value.hint == "training has removed it meanwhile: run the command again"
