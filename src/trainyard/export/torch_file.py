"""Reads `torch.save` files of other programs, which are pickles, without running what they name.

`torch.load(weights_only=True)` builds only tensors and plain containers. Here it also accepts the
names of settings, enumerations and random states, but gets inert classes for them: nothing that a
file names is imported or called. Other names are refused.

Values of tensors are read one at a time; files from before torch 1.6 are loaded whole.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from bisect import bisect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.checkpoint.shard import DTYPES, Values, read_values
from trainyard.errors import CheckpointError
from trainyard.files import open_file, refuse_lfs_pointer

_TEXT_LIMIT = 500
_NODE_LIMIT = 1_000_000
_LIST_LIMIT = 1000
_PICKLE_LIMIT_BYTES = 16 * 2**20


class _RefusedError(Exception):
    """The file's problem, which `open_torch_file` reports."""


class _Inert:
    """Stands in for an object of a class that the file names; keeps what it was made from."""

    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> _Inert:
        made = object.__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __str__(self) -> str:
        shown = [str(value) for value in self.arguments if isinstance(value, str | int)]
        return f"{type(self).__name__}({', '.join(shown)})"


# Named by real checkpoints: settings, states of random generators and of optimizers.
_CLASSES = (
    *("argparse.Namespace", "types.SimpleNamespace", "builtins.object", "_io.BytesIO"),
    *("pathlib.PosixPath", "pathlib._local.PosixPath", "datetime.timedelta", "datetime.datetime"),
    *("signal.Signals", "numpy.ndarray", "numpy.dtype"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "builtins.getattr": lambda owner, name: f"{owner.__name__}.{name}",  # of an enumeration
    "collections.defaultdict": lambda *_: {},
    "copyreg._reconstructor": lambda kind, *_: kind(),
}
# Enumerations and loss scalers, which have moved between modules.
_NAMES_OF_PACKAGES = re.compile(rb"c((?:megatron|deepspeed|fp16\.loss_scaler)\.?[\w.]*)\n(\w+)\n")


@dataclass(frozen=True)
class TensorInFile:
    """A tensor of a file, whose values are read on demand."""

    file: Path
    tensor: Tensor
    """On the device "meta", unless its file was loaded whole."""

    def read(self) -> Tensor:
        """Reads the values.

        Raises:
            CheckpointError: the file cannot be read, or ends before its values.
        """
        like = self.tensor
        if not like.is_meta:
            return like
        n_values = _extent(like)
        start = _begin(like) + int(like.storage_offset()) * like.itemsize
        values = torch.empty(n_values, dtype=like.dtype)
        place = Values(self.file, like.dtype, (n_values,), start, n_values * like.itemsize)
        read_values(place, into=values)
        return values.as_strided(like.shape, like.stride())


@dataclass(frozen=True)
class Contents:
    """What a checkpoint's file holds."""

    arguments: dict[str, Any]
    """Numbers, booleans, text and lists of them; text for others."""
    iteration: Any
    version: Any
    tensors: dict[str, TensorInFile]
    """By path: keys joined by dots."""


def open_torch_file(path: Path) -> Contents:
    """Reads a `torch.save` file, but not the values of its tensors.

    Raises:
        CheckpointError: it is missing or malformed, or names a class or function that no checkpoint
            needs.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing or not a regular file", "copy the whole folder of the checkpoint"
        )
    try:
        tree, entries = _load(path)
        if not isinstance(tree, dict):
            raise _RefusedError("it does not hold a dict")
        arguments = tree.get("args", {})
        arguments = arguments.state if isinstance(arguments, _Inert) else arguments
        return Contents(
            {str(name): _plain(value) for name, value in arguments.items()},
            _plain(tree.get("iteration")),
            _plain(tree.get("checkpoint_version", 0)),
            {name: TensorInFile(path, t) for name, t in _find_tensors(tree, entries).items()},
        )
    except CheckpointError:
        raise
    except Exception as error:  # malformed in one of many ways
        problem = str(error)
        if named := re.search(r"\bGLOBAL (\S+)", problem):
            problem = f"it names {named[1]}"
        elif not isinstance(error, _RefusedError):
            problem = problem.rpartition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
            problem = f"it is malformed: {type(error).__name__}: {problem:.200}"
        raise CheckpointError(
            f"{path} cannot be read: {problem}",
            "it is damaged, or was not written by Megatron; none of its code was run",
        ) from None


def _load(path: Path) -> tuple[Any, list[zipfile.ZipInfo]]:
    """Returns the contents of a file, and the entries of its archive, by position."""
    entries: list[zipfile.ZipInfo] = []
    with open_file(path) as file:
        refuse_lfs_pointer(file, path, CheckpointError)
        head = file.read(_PICKLE_LIMIT_BYTES)  # begins with the pickle
        if head.startswith(b"PK"):
            archive = zipfile.ZipFile(file)
            entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
            if len({entry.filename for entry in entries}) < len(entries):
                raise _RefusedError("its archive has two files of the same name")
            if any(entry.compress_type or entry.flag_bits & 1 for entry in entries):
                raise _RefusedError("it is compressed or encrypted, which torch.save never does")
            order = [entry for entry in entries if entry.filename.endswith("/byteorder")]
            if any(archive.read(entry) != b"little" for entry in order):
                raise _RefusedError("its numbers are big-endian")
    names = {b".".join(found).decode() for found in _NAMES_OF_PACKAGES.findall(head)}
    stand_ins: list[Any] = [(function, name) for name, function in _FUNCTIONS.items()]
    for name in names.union(_CLASSES):
        stand_ins.append((type(name.rpartition(".")[2], (_Inert,), {}), name))
    where = "meta" if entries else "cpu"
    of_others = torch.serialization.get_safe_globals()  # libraries name classes for any file
    torch.serialization.clear_safe_globals()
    try:
        with torch.serialization.safe_globals(stand_ins), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of old formats
            return torch.load(path, map_location=where, weights_only=True), entries
    finally:
        torch.serialization.add_safe_globals(of_others)


def _find_tensors(tree: dict[Any, Any], entries: list[zipfile.ZipInfo]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    is_checkpoint = not tree.keys().isdisjoint(("args", "model", "module"))
    nodes = [
        (str(key), node)
        for key, node in tree.items()
        if not is_checkpoint or str(key).startswith(("model", "module"))
    ]
    for path, node in nodes:  # grows
        if len(nodes) > _NODE_LIMIT or len(path) > _TEXT_LIMIT:
            raise _RefusedError("it is nested too deep, or has too many parts")
        if isinstance(node, dict):
            nodes += [(f"{path}.{key}", part) for key, part in node.items()]
        elif isinstance(node, Tensor):
            if path in found:
                raise _RefusedError(f"it has {path} twice")
            found[path] = node.detach()
            _check_tensor(path, found[path], entries)
    return found


def _check_tensor(path: str, tensor: Tensor, entries: list[zipfile.ZipInfo]) -> None:
    """Checks that the file holds all values: torch does not, on "meta"."""
    if tensor.layout != torch.strided or tensor.dtype not in DTYPES.values():
        raise _RefusedError(f"{path} is {tensor.dtype} {tensor.layout}")
    n_bytes = tensor.untyped_storage().nbytes()
    if tensor.is_meta:
        entry = entries[bisect(entries, _begin(tensor), key=lambda entry: entry.header_offset) - 1]
        n_bytes = entry.file_size
    room = n_bytes // tensor.itemsize - tensor.storage_offset()
    if min(tensor.stride(), default=0) < 0 or not tensor.numel() <= _extent(tensor) <= room:
        raise _RefusedError(
            f"{path} has shape {list(tensor.shape)}, more than the {room} values stored"
        )


def _begin(tensor: Tensor) -> int:
    """Returns where the storage of a tensor on "meta" begins in the file."""
    offset = tensor.untyped_storage()._checkpoint_offset
    assert offset is not None, "a tensor that is not in the file"
    return offset


def _extent(tensor: Tensor) -> int:
    """Counts the values from a tensor's first to its last in memory."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((n - 1) * step for n, step in steps) if tensor.numel() else 0


def _plain(value: Any, *, is_item: bool = False) -> Any:
    """Returns numbers, booleans, text and short lists of them; text for others."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str | _Inert):
        return str(value)[:_TEXT_LIMIT]
    if isinstance(value, dict | set) and not value:
        return []
    if isinstance(value, list | tuple) and not is_item:
        items = [_plain(item, is_item=True) for item in value[:_LIST_LIMIT]]
        return items if len(value) <= _LIST_LIMIT else f"{len(value)} values"
    return f"a {type(value).__name__}"
