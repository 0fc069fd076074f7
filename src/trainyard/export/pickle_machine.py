"""Interprets a pickle without calling or importing anything it names.

A pickle is a program for a small stack machine. Usual readers call whatever it names; this one only
records the names and arguments:

    c torch._utils _rebuild_tensor_v2       Named("torch._utils._rebuild_tensor_v2")
    ( ... t R                               StoredView(Storage("0", ...), 0, shape=(4, 2), ...)
    c megatron.model.enums AttnMaskType     Named("megatron.model.enums.AttnMaskType")
    K 2 ... R                               Made(..., arguments=(2,)), shown as "AttnMaskType(2)"
    c posix system                          rejected by name

Anything unknown in checkpoints is also rejected: the file is malicious, or not a checkpoint.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import IO, Any

TEXT_LIMIT = 500
ITEM_BYTES = {
    **{"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
_STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ShortStorage": "int16",
    "torch.CharStorage": "int8",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
}
_REBUILD_TENSOR = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_REBUILD_PARAMETER = (
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
)
_DICTS = ("collections.OrderedDict", "collections.defaultdict")
_MEMBER_OF_ENUM = "builtins.getattr"
# Named by real checkpoints: settings, states of random generators and of optimizers.
_HARMLESS = {
    *(*_STORAGES, *_REBUILD_TENSOR, *_REBUILD_PARAMETER, *_DICTS, _MEMBER_OF_ENUM),
    *("torch.Size", "torch.device", *(f"torch.{dtype}" for dtype in ITEM_BYTES)),
    *("argparse.Namespace", "types.SimpleNamespace", "copyreg._reconstructor"),
    *("builtins.object", "builtins.set", "builtins.complex", "builtins.bytearray"),
    *("_codecs.encode", "_io.BytesIO", "pathlib.PosixPath", "pathlib._local.PosixPath"),
    *("datetime.timedelta", "datetime.datetime", "signal.Signals", "numpy.ndarray", "numpy.dtype"),
    *("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct"),
    *("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar"),
}
# torch.save writes the names of Python 2.
_NEW_NAMES = {"__builtin__": "builtins", "copy_reg": "copyreg"}
# Their enumerations and loss scalers have moved between modules; none is ever imported.
_HARMLESS_PACKAGES = ("megatron.", "deepspeed.", "fp16.loss_scaler.")

_PUSHES_ITS_ARGUMENT = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BYTEARRAY8"),
}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class RefusedError(Exception):
    """The file is malformed, or has a name that no checkpoint needs."""


@dataclass(frozen=True)
class Named:
    """A class or function that the file names."""

    name: str


@dataclass
class Made:
    """A recorded call of a class or function, not executed."""

    name: str
    arguments: Any
    state: Any = None


@dataclass(frozen=True)
class Storage:
    """Contiguous values in the file; `first` is the start of a part."""

    key: str
    dtype: str
    n_values: int
    first: int = 0


@dataclass(frozen=True)
class StoredView:
    """A tensor: part of a storage."""

    storage: Storage
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass
class PickleMachine:
    """Interprets one pickle without calling anything."""

    stack: list[Any] = field(default_factory=list)
    marks: list[int] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)

    def run(self, file: IO[bytes]) -> Any:
        """Interprets the pickle at the current position, and leaves the file at its end.

        Raises:
            RefusedError: it has a name that no checkpoint needs, or a form that torch never writes.
            Exception: it is malformed in some other way.
        """
        for opcode, argument, _ in pickletools.genops(file):
            name = opcode.name
            if name in _PUSHES_ITS_ARGUMENT:
                self.stack.append(argument)
            elif name in _CONSTANTS:
                self.stack.append(_CONSTANTS[name])
            elif name == "STOP":
                return self.stack.pop()
            else:
                self._do(name, argument)
        raise RefusedError("its pickle has no end")

    def _do(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self.memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            self.memo[len(self.memo)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name == "POP_MARK":
            self._since_mark()
        elif name == "POP":
            stack.pop()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name not in ("PROTO", "FRAME"):
            self._collect(name, argument)

    def _collect(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _TUPLES:
            count = _TUPLES[name]
            stack.append(tuple(self._pop(count)))
        elif name == "TUPLE":
            stack.append(tuple(self._since_mark()))
        elif name in ("EMPTY_LIST", "EMPTY_SET"):
            stack.append([])
        elif name in ("LIST", "FROZENSET"):
            stack.append(self._since_mark())
        elif name in ("APPEND", "APPENDS", "ADDITEMS"):
            items = self._pop(1) if name == "APPEND" else self._since_mark()
            if isinstance(stack[-1], list):
                stack[-1].extend(items)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "DICT":
            stack.append(_set_items({}, self._since_mark()))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._pop(2) if name == "SETITEM" else self._since_mark()
            _set_items(stack[-1], items)
        else:
            self._make(name, argument)

    def _make(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name == "GLOBAL":
            stack.append(_named(*argument.split(" ", 1)))
        elif name == "STACK_GLOBAL":
            stack.append(_named(*self._pop(2)))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(_make(*self._pop(2)))
        elif name == "NEWOBJ_EX":
            what, arguments, _ = self._pop(3)
            stack.append(_make(what, arguments))
        elif name == "BUILD":
            (state,) = self._pop(1)
            if isinstance(stack[-1], Made):
                stack[-1].state = state
        elif name == "BINPERSID":
            storage = _storage(*self._pop(1))
            known = self.storages.setdefault(storage.key, storage)
            if (known.dtype, known.n_values) != (storage.dtype, storage.n_values):
                raise RefusedError(f"its storage {storage.key!r} has two different descriptions")
            stack.append(storage)
        else:
            raise RefusedError(
                f"its pickle has the instruction {name}, which torch.save never writes"
            )

    def _pop(self, count: int) -> list[Any]:
        if len(self.stack) - (self.marks[-1] if self.marks else 0) < count:
            raise RefusedError("its pickle pops more from its stack than it holds")
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return items

    def _since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items


def _named(module: Any, name: Any) -> Named:
    if not isinstance(module, str) or not isinstance(name, str):
        raise RefusedError("it has a name that is not text")
    full = f"{_NEW_NAMES.get(module, module)}.{name}"[:TEXT_LIMIT]
    if full not in _HARMLESS and not full.startswith(_HARMLESS_PACKAGES):
        raise RefusedError(f"it names {full}")
    return Named(full)


def _make(what: Any, arguments: Any) -> Any:
    if not isinstance(what, Named) or not isinstance(arguments, tuple):
        raise RefusedError("its pickle calls something that is neither a class nor a function")
    if what.name in _REBUILD_TENSOR:
        storage, first, shape, strides = arguments[:4]
        if not isinstance(storage, Storage) or len(shape) != len(strides):
            raise RefusedError("a tensor in it has no storage")
        if any(type(n) is not int or n < 0 for n in (first, *shape, *strides)):
            raise RefusedError("the shape of a tensor in it has entries that are not counts")
        return StoredView(storage, storage.first + first, tuple(shape), tuple(strides))
    if what.name in _REBUILD_PARAMETER:
        return arguments[0]
    if what.name in _DICTS:
        return {}
    if what.name == "torch.Size":
        return list(arguments[0])
    if what.name.endswith("._reconstructor"):
        return Made(arguments[0].name, ())
    return Made(what.name, arguments)


def _set_items(target: Any, items: list[Any]) -> Any:
    """Sets text and number keys; nothing important has others."""
    if isinstance(target, dict):
        for key, value in zip(items[::2], items[1::2], strict=True):
            if isinstance(key, str | int | float):
                target[key] = value
    return target


def _storage(identity: Any) -> Storage:
    kind, what, key, _, n_values, *view = identity
    dtype = _STORAGES.get(what.name if isinstance(what, Named) else "")
    if kind != "storage" or dtype is None or not isinstance(key, str) or type(n_values) is not int:
        kind_of_it = what.name if isinstance(what, Named) else type(what).__name__
        raise RefusedError(f"it has a storage of an unknown kind: {kind_of_it}")
    first = view[0][1] if view and view[0] is not None else 0
    if type(first) is not int or first < 0 or n_values < 0:
        raise RefusedError("a storage in it begins before its values")
    return Storage(key, dtype, n_values, first)


def plain(value: Any) -> Any:
    """Returns what JSON can say of a value: "AttnMaskType(2)" of a member of an enumeration.

    Only None is None.
    """
    if isinstance(value, Named):
        return value.name
    if isinstance(value, Made):
        known = [argument for argument in value.arguments if isinstance(argument, str | int)]
        if value.name == _MEMBER_OF_ENUM and isinstance(value.arguments[0], Named):
            text = f"{_last(value.arguments[0].name)}.{known[0]}"
        else:
            text = f"{_last(value.name)}({', '.join(map(str, known))})"
        return text[:TEXT_LIMIT]
    if isinstance(value, str):
        return value[:TEXT_LIMIT]
    if isinstance(value, int):
        return value if abs(value) < 2**63 else "a large number"
    return value if isinstance(value, float | None) else f"a {type(value).__name__}"


def _last(name: str) -> str:
    return name.rpartition(".")[2]
