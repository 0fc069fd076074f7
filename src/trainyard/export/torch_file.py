"""Reads tensors from `torch.save` files, which are pickles, without unpickling them.

A separate process (`describe.py`) locates a file's contents and looks up no names from it; after
that there are only bytes and validated counts.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from pydantic import BaseModel, JsonValue, ValidationError
from torch import Tensor

from trainyard.checkpoint.format import Count, first_problem
from trainyard.checkpoint.shard import DTYPES, Values, read_values
from trainyard.errors import CheckpointError
from trainyard.files import open_file, refuse_lfs_pointer

_TIMEOUT_SECONDS = 600
_NO_CHECKPOINT = "it is damaged, or was not written by Megatron; none of its code was run"


class TorchTensor(BaseModel, extra="forbid", frozen=True):
    """The location of a tensor's values in its file."""

    dtype: str
    shape: tuple[Count, ...]
    strides: tuple[Count, ...]
    begin: Count
    """The first byte."""


class Contents(BaseModel):
    """A file's contents, by path: keys joined by dots."""

    values: dict[str, JsonValue]
    """Numbers, booleans and text; text for others."""
    tensors: dict[str, TorchTensor]


def describe_file(path: Path) -> Contents:
    """Describes the contents of a `torch.save` file.

    Raises:
        CheckpointError: it is missing or malformed, or names a class or function that no checkpoint
            needs.
    """
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing or not a regular file", "copy the whole folder of the checkpoint"
        )
    with open_file(path) as file:
        refuse_lfs_pointer(file, path, CheckpointError)
    package = Path(__file__).parents[2]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-S", "-m", "trainyard.export.describe", str(path.absolute())],
            env={"PYTHONPATH": str(package)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
        answer = json.loads(done.stdout)
        if "refusal" not in answer:
            return Contents.model_validate(answer)
        problem = answer["refusal"]
    except subprocess.TimeoutExpired:
        problem = f"reading it took more than {_TIMEOUT_SECONDS} s"
    except subprocess.CalledProcessError as error:
        said = error.stderr.decode(errors="replace").strip().splitlines()
        problem = f"its reader ended with {error.returncode}: {said[-1] if said else 'no message'}"
    except ValidationError as error:
        problem = first_problem(error)
    except (ValueError, TypeError, RecursionError):
        problem = "its reader returned nothing"
    raise CheckpointError(f"{path} cannot be read: {problem}", _NO_CHECKPOINT)


def read_tensor(path: Path, stored: TorchTensor) -> Tensor:
    """Reads one tensor.

    Raises:
        CheckpointError: the file ends before its values.
    """
    dtype = DTYPES[stored.dtype]
    steps = zip(stored.shape, stored.strides, strict=True)
    n_values = 1 + sum((n - 1) * stride for n, stride in steps)
    n_bytes = n_values * dtype.itemsize
    problem = ""
    if math.prod(stored.shape) > n_values:
        problem = "a tensor in it has more values than are stored"
    elif stored.begin + n_bytes > path.stat().st_size:
        problem = f"it ends before the {n_bytes} bytes from byte {stored.begin}"
    if problem:
        raise CheckpointError(f"{path} cannot be read: {problem}", _NO_CHECKPOINT)
    values = torch.empty(n_values, dtype=dtype)
    read_values(Values(path, dtype, (n_values,), stored.begin, n_bytes), into=values)
    return values.as_strided(stored.shape, stored.strides)
