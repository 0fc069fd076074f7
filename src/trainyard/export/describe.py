"""Describes a file of `torch.save` in JSON, for a process of its own with narrow limits.

    python -m trainyard.export.describe FILE

It does not read values of tensors, only locates them: the file stores them as in memory, in an
archive (since torch 1.6) or one after another (before):

    {"values": {"iteration": 1000, "args.num_layers": 24, ...},
     "tensors": {"model.language_model.encoder.layers.0.mlp.dense_h_to_4h.bias":
         {"dtype": "float16", "shape": [4096], "strides": [1], "begin": 81920}, ...}}
or  {"refusal": "it names posix.system"}
"""

from __future__ import annotations

import contextlib
import io
import json
import resource
import sys
import zipfile
from dataclasses import dataclass, field
from typing import IO, Any

from trainyard.export.pickle_machine import (
    ITEM_BYTES,
    TEXT_LIMIT,
    Made,
    PickleMachine,
    RefusedError,
    StoredView,
    plain,
)

_MEMORY_BYTES = 4 * 2**30
_PROCESSOR_SECONDS = 300
_PICKLE_LIMIT_BYTES = 2**29
_NODE_LIMIT = 1_000_000
_DEPTH_LIMIT = 50
_LIST_LIMIT = 16
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C


def describe(path: str) -> dict[str, Any]:
    """Reads a file of `torch.save`; returns the output of its process.

    Raises:
        RefusedError: with its problem.
    """
    with open(path, "rb") as file:  # noqa: PTH123
        start = file.read(2)
        file.seek(0)
        if start == b"PK":
            tree, begins = _read_archive(file)
        elif start[:1] == b"\x80":
            tree, begins = _read_legacy(file)
        else:
            raise RefusedError("torch.save did not write it")
    if not isinstance(tree, dict):
        raise RefusedError("it does not hold a dict")
    found = _Found(begins)
    is_checkpoint = not tree.keys().isdisjoint(("args", "model", "module"))
    for key, value in tree.items():
        if not is_checkpoint or str(key).startswith(("args", "model", "module", "iteration")):
            found.walk(str(key), value)
    if "checkpoint_version" in tree:
        found.walk("checkpoint_version", tree["checkpoint_version"])
    return {"values": found.values, "tensors": found.tensors}


@dataclass
class _Found:
    begins: dict[str, tuple[int, int]]
    """First byte and number of values of each storage."""
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    n_nodes: int = 0

    def walk(self, path: str, node: Any, depth: int = 0) -> None:
        self.n_nodes += 1
        if self.n_nodes > _NODE_LIMIT or depth > _DEPTH_LIMIT or len(path) > TEXT_LIMIT:
            raise RefusedError("it is nested too deep, or has too many parts")
        if isinstance(node, Made) and node.name.endswith("Namespace"):
            node = node.state
        if isinstance(node, dict):
            for key, value in node.items():
                self.walk(f"{path}.{key}", value, depth + 1)
            return
        if path in self.values or path in self.tensors:
            raise RefusedError(f"it has {path} twice")
        if isinstance(node, StoredView):
            self.tensors[path] = self._place(path, node)
        elif isinstance(node, list | tuple):
            items = [plain(item) for item in node[:_LIST_LIMIT]]
            self.values[path] = items if len(node) <= _LIST_LIMIT else f"{len(node)} values"
        else:
            self.values[path] = plain(node)

    def _place(self, path: str, tensor: StoredView) -> dict[str, Any]:
        begin, n_values = self.begins.get(tensor.storage.key, (0, 0))
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and tensor.first + last >= n_values:
            raise RefusedError(
                f"{path} has shape {list(tensor.shape)}, more than the {n_values} values stored"
            )
        return {
            "dtype": tensor.storage.dtype,
            "shape": tensor.shape,
            "strides": tensor.strides,
            "begin": begin + tensor.first * ITEM_BYTES[tensor.storage.dtype],
        }


def _read_archive(file: IO[bytes]) -> tuple[Any, dict[str, tuple[int, int]]]:
    archive = zipfile.ZipFile(file)
    entries = {entry.filename: entry for entry in archive.infolist()}
    if len(entries) < len(archive.infolist()):
        raise RefusedError("its archive has two files of the same name")
    if any(entry.compress_type or entry.flag_bits & 1 for entry in entries.values()):
        raise RefusedError("its archive is compressed or encrypted, which torch.save never does")
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise RefusedError("its archive has no data.pkl")
    folder = pickles[0].removesuffix("data.pkl")
    if f"{folder}byteorder" in entries and archive.read(f"{folder}byteorder") != b"little":
        raise RefusedError("its numbers are big-endian")
    if entries[pickles[0]].file_size > _PICKLE_LIMIT_BYTES:
        raise RefusedError("its data.pkl is too large")
    machine = PickleMachine()
    tree = machine.run(io.BytesIO(archive.read(pickles[0])))
    begins = {}
    for key, storage in machine.storages.items():
        entry = entries.get(f"{folder}data/{key}")
        n_bytes = storage.n_values * ITEM_BYTES[storage.dtype]
        if entry is None or entry.file_size < n_bytes:
            raise RefusedError(f"its archive has no {n_bytes} bytes for storage {key!r}")
        file.seek(entry.header_offset + 26)
        names = file.read(4)
        begin = entry.header_offset + 30 + sum(memoryview(names).cast("H"))
        begins[key] = (begin, storage.n_values)
    return tree, begins


def _read_legacy(file: IO[bytes]) -> tuple[Any, dict[str, tuple[int, int]]]:
    """Reads files from before torch 1.6: five pickles, then each storage after its length."""
    if PickleMachine().run(file) != _LEGACY_MAGIC:
        raise RefusedError("torch.save did not write it")
    PickleMachine().run(file)
    system = PickleMachine().run(file)
    if not isinstance(system, dict) or system.get("little_endian") is not True:
        raise RefusedError("its numbers are big-endian")
    machine = PickleMachine()
    tree = machine.run(file)
    begins = {}
    for key in PickleMachine().run(file):
        storage = machine.storages[key]
        if int.from_bytes(file.read(8), "little") != storage.n_values:
            raise RefusedError(f"storage {key!r} in it has the wrong length")
        begins[key] = (file.tell(), storage.n_values)
        file.seek(storage.n_values * ITEM_BYTES[storage.dtype], io.SEEK_CUR)
    return tree, begins


def _limit_this_process() -> None:
    limits = [(resource.RLIMIT_AS, _MEMORY_BYTES), (resource.RLIMIT_CPU, _PROCESSOR_SECONDS)]
    for kind, amount in limits:
        with contextlib.suppress(ValueError, OSError):  # not every system supports it
            resource.setrlimit(kind, (amount, amount))


def main() -> None:
    """Prints the description of the file on the command line."""
    _limit_this_process()
    try:
        answer = describe(sys.argv[1])
    except RefusedError as refusal:
        answer = {"refusal": str(refusal)[:TEXT_LIMIT]}
    except Exception as error:  # malformed in one of many ways
        answer = {"refusal": f"it is malformed: {type(error).__name__}: {error!s:.200}"}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
