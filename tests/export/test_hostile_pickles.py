from __future__ import annotations

import argparse
import functools
import importlib
import io
import os
import pickle
import random
import re
import struct
import sys
import types
import zipfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainyard.errors import CheckpointError
from trainyard.export.from_megatron import import_megatron
from trainyard.export.torch_file import Contents, open_torch_file


class Bomb:
    """Is pickled as the call of a function."""

    def __init__(self, function: Any, *arguments: Any, state: Any = None) -> None:
        self.call = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self):
        return self.call


def bombs(marker: Path) -> dict[str, tuple[Any, str]]:
    """Objects that would make `marker` if they were unpickled, and what the refusal names."""
    mkdir = f"__import__('os').mkdir({str(marker)!r})"
    shell = f"mkdir {marker}"
    return {
        "os.system": (Bomb(os.system, shell), "posix.system"),
        "eval": (Bomb(eval, mkdir), "eval"),
        "import_module": (Bomb(importlib.import_module, "this"), "importlib.import_module"),
        "torch.load": (Bomb(torch.load, "other.pt", "cpu", None), "torch.serialization.load"),
        "partial": (Bomb(functools.partial, os.mkdir), "functools.partial"),
        "in arguments": (Bomb(complex, Bomb(os.mkdir, str(marker))), "posix.mkdir"),
        "in state": (Bomb(types.SimpleNamespace, state={"a": Bomb(eval, mkdir)}), "eval"),
        "in a key": ({("a", Bomb(eval, mkdir)): 1}, "eval"),
        "in an array of objects": (
            np.array([1, Bomb(eval, mkdir)], dtype=object),
            "eval",
        ),
        "a member of a module": (Bomb(getattr, os, "system"), "importlib.import_module"),
        "a class": (Bomb, "test_hostile_pickles.Bomb"),
    }


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return importlib.import_module, (value.__name__,)
        return NotImplemented


def dumps(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file, protocol=2).dump(value)
    return file.getvalue()


def archive(path: Path, data: bytes, **storages: bytes) -> Path:
    """Writes a file as torch.save does, of a pickle and storages."""
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", data)
        file.writestr("archive/version", "3")
        file.writestr("archive/byteorder", "little")
        for key, values in storages.items():
            file.writestr(f"archive/data/{key.removeprefix('s')}", values)
    return path


def arguments(value: bytes) -> bytes:
    """The instructions for a checkpoint whose argument `b` some instructions make."""
    return b"\x80\x02}X\x04\x00\x00\x00args}X\x01\x00\x00\x00b" + value + b"ss."


@pytest.mark.parametrize("name", bombs(Path("marker")))
def test_calls_are_refused_by_name_and_never_made(tmp_path, monkeypatch, name):
    monkeypatch.setattr(Bomb, "__module__", "test_hostile_pickles")
    monkeypatch.setitem(sys.modules, "test_hostile_pickles", sys.modules[__name__])
    value, named = bombs(tmp_path / "marker")[name]
    folder = tmp_path / "iter_0000001" / "mp_rank_00"
    folder.mkdir(parents=True)
    archive(folder / "model_optim_rng.pt", dumps({"args": {}, "optimizer": [value]}))
    with pytest.raises(CheckpointError, match="cannot be read: it names") as raised:
        import_megatron(tmp_path / "iter_0000001", tmp_path / "mine")
    assert f"it names {named}" in raised.value.problem
    assert {path.name for path in tmp_path.iterdir()} == {"iter_0000001"}


def test_packages_that_are_named_are_not_imported(tmp_path, monkeypatch):
    """Not even where they can be: here a megatron lies in the working folder and on the path."""
    package = tmp_path / "megatron"
    package.mkdir()
    (package / "__init__.py").write_text(f"import os; os.mkdir({str(tmp_path / 'marker')!r})\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    data = arguments(b"cmegatron.training\nrun\n(X\x01\x00\x00\x00atR")
    assert open_torch_file(archive(tmp_path / "file.pt", data)).arguments == {"b": "run(a)"}
    assert not (tmp_path / "marker").exists()


def test_classes_that_other_libraries_registered_are_not_made(tmp_path):
    """Megatron-Core registers Namespace, for example."""
    path = tmp_path / "file.pt"
    torch.save({"args": argparse.Namespace(seed=3), "other": Fraction(1, 3)}, path)
    with torch.serialization.safe_globals([argparse.Namespace, Fraction]):
        before = set(torch.serialization.get_safe_globals())
        with pytest.raises(CheckpointError, match=r"it names fractions\.Fraction"):
            open_torch_file(path)
        torch.save({"args": argparse.Namespace(seed=3)}, path)
        for _ in range(20):  # a set of classes has any order
            assert open_torch_file(path).arguments == {"seed": 3}
        assert set(torch.serialization.get_safe_globals()) == before


def test_members_of_enumerations_are_told_however_they_were_pickled(tmp_path):
    by_name = b"c__builtin__\ngetattr\n(cmegatron.enums\nKind\nX\x01\x00\x00\x00atR"
    by_value = b"cmegatron.enums\nKind\nK\x02\x85R"
    older = b"ccopy_reg\n_reconstructor\n(cfp16.loss_scaler\nKind\nc__builtin__\nobject\nNtR"
    empty = b"ccollections\ndefaultdict\n)R"
    members = {by_name: "Kind.a", by_value: "Kind(2)", older: "Kind()", empty: []}
    for member, text in members.items():
        path = archive(tmp_path / "file.pt", arguments(member))
        assert open_torch_file(path).arguments == {"b": text}


def storage(n_values: int, kind: bytes = b"FloatStorage") -> bytes:
    """The instructions for storage "0"."""
    length = pickle.dumps(n_values, protocol=2)[2:-1]
    return b"(U\x07storagectorch\n" + kind + b"\nU\x010U\x03cpu" + length + b"tQ"


def tensor(n_values: int, first: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """The instructions for a dict with one tensor."""
    numbers = b"".join(pickle.dumps(part, protocol=2)[2:-1] for part in (first, shape, strides))
    make = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage(n_values) + numbers + b"\x89NtR"
    return b"\x80\x02}U\x01w" + make + b"s."


MALFORMED = {
    "no end": (b"\x80\x02}", "malformed"),
    "empty stack": (b"\x80\x02.", "malformed: IndexError"),
    "not even a dict": (b"\x80\x02K\x01.", "does not hold a dict"),
    "calls a text": (b"\x80\x02U\x01a)R.", "call reduce for unrecognized function a"),
    "calls what was made": (
        b"\x80\x02cargparse\nNamespace\n)R)R.",
        "call reduce for unrecognized function Namespace",
    ),
    "unhashable key": (b"\x80\x02}]K\x01s]Q.", "malformed: TypeError: unhashable"),
    "unknown storage": (
        tensor(4, 0, (4,), (1,)).replace(b"FloatS", b"QInt8S"),
        "malformed: NotImplementedError",
    ),
    "complex storage": (
        tensor(2, 0, (2,), (1,)).replace(b"FloatS", b"ComplexFloatS"),
        r"w is torch\.complex64",
    ),
    "shape beyond the storage": (tensor(4, 0, (2**60,), (1,)), "more than the 4 values stored"),
    "first beyond the storage": (tensor(4, 4, (1,), (1,)), "more than the 0 values stored"),
    "strides beyond": (tensor(4, 0, (2, 2), (3, 1)), "more than the 4 values stored"),
    "before the storage": (tensor(4, -1, (1,), (1,)), "invalid storage offset -1"),
    "endless": (b"\x80\x02}q\x00U\x01ah\x00s.", "nested too deep"),
    "deep": (b"\x80\x02}U\x01w" + b"}U\x01a" * 10**5 + b"N" + b"s" * 10**5 + b"s.", "too deep"),
    "many": (
        b"\x80\x02}q\x00"  # each dict holds the one before twice
        + b"".join(b"}q%c(U\x01ah%cU\x01bh%cu" % (n, n - 1, n - 1) for n in range(1, 40))
        + b".",
        "too many parts",
    ),
    "OBJ, which torch never writes": (
        b"\x80\x02(cargparse\nNamespace\no.",
        "Unsupported operand",
    ),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_pickles_are_refused_within_limits(tmp_path, name):
    data, message = MALFORMED[name]
    path = archive(tmp_path / "file.pt", data, s0=b"\0" * 16)
    with pytest.raises(CheckpointError, match=message):
        open_torch_file(path)


def test_deep_tuples_do_not_end_the_reader_unheard(tmp_path):
    path = archive(tmp_path / "file.pt", arguments(b")" + b"\x85" * 10**5))
    assert open_torch_file(path).arguments == {"b": ["a tuple"]}
    path = archive(tmp_path / "key.pt", b"\x80\x02})" + b"\x85" * 10**4 + b"Ns.")
    with pytest.raises(CheckpointError, match="malformed: RecursionError"):
        open_torch_file(path)


def test_more_values_than_are_stored_are_never_made(tmp_path):
    """One stored value, said to be a thousand billion: nothing of that size is allocated."""
    path = archive(tmp_path / "file.pt", tensor(4, 0, (10**6, 10**6), (0, 0)), s0=b"\0" * 16)
    with pytest.raises(CheckpointError, match="more than the 4 values stored"):
        open_torch_file(path)
    path = archive(tmp_path / "file.pt", tensor(2**40, 0, (4,), (1,)), s0=b"\0" * 16)
    assert open_torch_file(path).tensors["w"].read().tolist() == [0.0] * 4


def test_hostile_archives_are_refused(tmp_path):
    good = tensor(4, 0, (4,), (1,))
    values = np.arange(4, dtype=np.float32).tobytes()
    path = archive(tmp_path / "file.pt", good, s0=values)
    assert open_torch_file(path).tensors["w"].read().tolist() == [0, 1, 2, 3]

    def refusal() -> str:
        with pytest.raises(CheckpointError) as raised:
            open_torch_file(path)
        return raised.value.problem

    content = path.read_bytes()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", good)
    assert "is compressed or encrypted" in refusal()
    with zipfile.ZipFile(path, "w") as file, pytest.warns(UserWarning, match="Duplicate"):
        for _ in range(2):
            file.writestr("archive/data.pkl", good)
    assert "two files of the same name" in refusal()
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", good)
        file.writestr("archive/byteorder", "big")
    assert "big-endian" in refusal()
    path.write_bytes(b"PK\x03\x04")
    assert "BadZipFile" in refusal()
    path.write_bytes(b"")
    assert "it is malformed: EOFError" in refusal()
    # The list at the end of the archive says that the values lie beyond the end of the file.
    entry = content.rindex(b"archive/data/0") - 46
    moved = bytearray(content)
    moved[entry + 42 : entry + 46] = struct.pack("<I", len(content) - 8)
    path.write_bytes(moved)
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_torch_file(path).tensors["w"].read()


def test_files_from_before_archives_are_no_way_around(tmp_path):
    path = tmp_path / "file.pt"
    torch.save({"w": torch.arange(3.0)}, path, _use_new_zipfile_serialization=False)
    assert open_torch_file(path).tensors["w"].read().tolist() == [0, 1, 2]
    good = path.read_bytes()
    for start in (dumps(Bomb(os.mkdir, str(tmp_path / "marker"))), good[:40]):
        path.write_bytes(start + good[40:])
        if start != good[:40]:
            with pytest.raises(CheckpointError, match=r"it names posix\.mkdir"):
                open_torch_file(path)
    path.write_bytes(good[:-5])
    with pytest.raises(CheckpointError, match="malformed: RuntimeError: unexpected EOF"):
        open_torch_file(path)
    assert not (tmp_path / "marker").exists()


def test_no_damage_makes_the_reader_do_anything_else_than_read(tmp_path):
    """Flipped bits either show as refusals or as other numbers; in this process, to try many."""
    path = tmp_path / "file.pt"
    torch.save({"args": {"a": 1}, "model": {"w": torch.arange(6.0).view(2, 3)}}, path)
    good = path.read_bytes()
    chance = random.Random(0)
    outcomes = set()
    for _ in range(400):
        damaged = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(len(good))] ^= 1 << chance.randrange(8)
        path.write_bytes(damaged)
        try:
            assert isinstance(open_torch_file(path), Contents)
            outcomes.add("read")
        except CheckpointError as error:
            outcomes.update(re.findall("BadZipFile|UnpicklingError|RuntimeError", error.problem))
    assert outcomes == {"read", "BadZipFile", "UnpicklingError", "RuntimeError"}


def test_texts_larger_than_memory_are_refused_before_they_are_read(tmp_path):
    path = tmp_path / "file.pt"
    with path.open("wb") as file:
        file.write(pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2))
        file.write(b"\x80\x02\x8e" + struct.pack("<Q", 2**40))
        file.truncate(2**41)
    with pytest.raises(CheckpointError, match="it is malformed: UnpicklingError: Unsupported"):
        open_torch_file(path)
