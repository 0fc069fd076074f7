"""Our safetensors files: the same as everybody's, and safe to read whoever wrote them."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from trainyard.checkpoint import shard
from trainyard.checkpoint.format import header_sha256
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
    written = write_shards({path: of_every_type})[path]
    found = load_file(path)
    assert found.keys() == of_every_type.keys()
    for name, tensor in of_every_type.items():
        assert same(found[name], tensor), name
        values = found[name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert written.checksums[name] == xxhash.xxh3_128_hexdigest(values)
    assert written.file.n_bytes == path.stat().st_size
    assert written.file.header_sha256 == header_sha256(path)


def test_we_read_what_the_library_writes(tmp_path, of_every_type):
    path = tmp_path / "a.safetensors"
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in of_every_type.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.keys() == tensors.keys()
    for name, tensor in tensors.items():
        into = torch.empty_like(tensor)
        checksum = read_values(header[name], into)
        assert same(into, tensor), name
        assert read_values(header[name]) == checksum
        values = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert checksum == xxhash.xxh3_128_hexdigest(values)


@pytest.mark.parametrize("piece_bytes", [8, 4096, 10_000])
def test_pieces_make_the_whole(tmp_path, monkeypatch, piece_bytes):
    monkeypatch.setattr(shard, "_PIECE_BYTES", piece_bytes)
    tensors = {f"t{n}": torch.arange(n, dtype=torch.float32) for n in (1, 2, 1023, 1024, 2500)}
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    written = write_shards(dict.fromkeys(paths, tensors))
    assert written[paths[0]] == written[paths[1]]
    for path in paths:
        for name, values in read_header(path).items():
            into = torch.empty(values.shape)
            assert read_values(values, into) == written[path].checksums[name]
            assert torch.equal(into, tensors[name])
            assert read_values(values) == written[path].checksums[name]


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


def write_file(path: Path, header: bytes, n_value_bytes: int, length: int | None = None) -> None:
    length = len(header) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + header + bytes(n_value_bytes))


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> bytes:
    fields = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    return json.dumps({"a": fields}).encode()


HOSTILE = {
    "empty file": (b"", 0, 0, "its header would have|Input data was truncated"),
    "length beyond the file": (b"{}", 0, 3, "its header would have 3 bytes"),
    "largest length": (b"{}", 0, 2**64 - 1, "its header would have 18446744073709551615 bytes"),
    "not JSON": (b"\x80\x04cos\nsystem\n", 8, None, "malformed|invalid"),
    "a list": (b"[]", 8, None, "Expected `object`"),
    "deep": (b'{"a":' + b"[" * 100_000, 8, None, "recursion|malformed|Expected|truncated"),
    "unknown type": (entry("F4"), 8, None, r"'a' is F4 \[2\]"),
    "type of Python": (entry("object"), 8, None, r"'a' is object \[2\]"),
    "text for a number": (entry(shape=["2"]), 8, None, "Expected `int`"),
    "fraction": (entry(shape=[2.5]), 8, None, "Expected `int`"),
    "negative shape": (entry(shape=[-1, -2]), 8, None, r"'a' is F32 \[-1, -2\]"),
    "beyond the end": (entry(shape=[3], offsets=[0, 12]), 8, None, "at 0:12, beyond its end"),
    "before the start": (entry(offsets=[-8, 0]), 8, None, "at -8:0, beyond its end"),
    "backwards": (entry(shape=[0], offsets=[4, 0]), 8, None, "at 4:0, beyond its end"),
    "too few bytes": (entry(offsets=[0, 4]), 8, None, r"has 4 bytes for \[2\]"),
    "product wraps": (entry(shape=[2**62, 4], offsets=[0, 0]), 8, None, "has 0 bytes for"),
    "bytes in front": (
        entry(shape=[1], offsets=[4, 8]),
        8,
        None,
        "'a' begins at 4, not at the next byte, 0",
    ),
    "bytes behind": (entry(shape=[1], offsets=[0, 4]), 8, None, "4 bytes belong to no tensor"),
    "bytes of two": (
        *(b'{"b": {"dtype": "U8", "shape": [5], "data_offsets": [0, 5]}, ' + entry()[1:], 8, None),
        "'a' begins at 0, not at the next byte, 5|'b' begins at 0, not at the next byte, 8",
    ),
    "no offsets": (b'{"a": {"dtype": "F32", "shape": [2]}}', 8, None, r"has 0 bytes for \[2\]"),
}


@pytest.mark.parametrize("header, n_value_bytes, length, problem", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_header_is_refused(tmp_path, header, n_value_bytes, length, problem):
    path = tmp_path / "a.safetensors"
    write_file(path, header, n_value_bytes, length)
    with pytest.raises(CheckpointError) as raised:
        read_header(path)
    assert raised.value.problem.startswith(f"{path} is not a safetensors file: ")
    assert re.search(problem, raised.value.problem), raised.value.problem


def test_a_file_that_becomes_shorter_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    write_shards({path: {"a": torch.zeros(5000)}})
    values = read_header(path)["a"]
    os.truncate(path, 10_000)
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: it ends at byte 10000"):
        read_values(values, torch.empty(5000))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path} cannot be read: .*No such file"):
        read_values(values)


def test_a_checkpoint_that_training_removed_meanwhile_is_not_called_damaged(tmp_path):
    path = tmp_path / "step-00000004" / "a.safetensors"
    path.parent.mkdir()
    write_shards({path: {"a": torch.zeros(5000)}})
    values = read_header(path)["a"]
    shutil.rmtree(path.parent)
    for read in (lambda: read_values(values), lambda: read_header(path)):
        with pytest.raises(CheckpointError) as caught:
            read()
        assert caught.value.hint == "training has removed it meanwhile: run the command again"
