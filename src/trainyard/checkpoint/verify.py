"""Checks every byte of a checkpoint against its checksums, and lists all problems.

    report = check_checkpoint(Path("runs/demo/checkpoints/step-00002000"))
    report.manifest.step, report.n_bytes

raises a CheckpointError with each file's problem, such as

    runs/demo/checkpoints/step-00002000: 2 problems
      model.safetensors is damaged: the checksum of 'model.a' in it is 3f..., the manifest ...
      optimizer.safetensors is missing

Each byte belongs to exactly one of these, so no flipped bit is missed:

    manifest.json          its first line, compared whole | the rest, self-checksummed
    NAME.safetensors       length and header, one checksum | values of a chunk, one checksum | ...
    tokenizer.json         one checksum

Values are read once, in pieces, as plain bytes, with constant memory.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from trainyard.checkpoint.format import (
    MANIFEST,
    OLDER_IS_KEPT,
    TOKENIZER,
    Chunk,
    Manifest,
    header_sha256,
    load_manifest,
    regular_file_size,
    step_of,
)
from trainyard.checkpoint.shard import DTYPES, read_header, read_values
from trainyard.errors import CheckpointError, refuse_problems

# Takes bytes done and total bytes; called by several threads, one at a time.
Progress = Callable[[int, int], None]

_THREADS = min(os.cpu_count() or 1, 8)

_Chunks = dict[str, tuple[str, Chunk]]
"""The type and the chunk of each tensor in a file."""


@dataclass(frozen=True)
class CheckpointReport:
    """An intact checkpoint."""

    path: Path
    manifest: Manifest
    n_bytes: int
    """Total size of all files, including the manifest."""


def check_checkpoint(path: Path, progress: Progress | None = None) -> CheckpointReport:
    """Reads every byte of a step folder.

    Args:
        path: the step folder.
        progress: called with the bytes read.

    Raises:
        CheckpointError: lists missing, damaged, extra and misplaced files.
    """
    manifest = load_manifest(path)
    problems = _problems_of_folder(path, manifest)
    counter = _Counter(sum(manifest.sizes.values()), progress)
    chunks: dict[str, _Chunks] = {name: {} for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            if name in chunks[chunk.file]:
                problems.append(f"{chunk.file} is listed with two chunks of {name!r}")
            chunks[chunk.file][name] = (tensor.dtype, chunk)

    def problem_of(name: str) -> str:
        file = path / name
        try:
            size, expected = regular_file_size(file), manifest.sizes[name]
            if size is None:
                return f"{name} is missing or not a regular file"
            if size != expected:
                return f"{name} has {size} bytes instead of {expected}"
            if manifest.tokenizer and name == TOKENIZER:
                return _problem_of_tokenizer(file, manifest.tokenizer.sha256, counter.add)
            header = manifest.files[name].header_sha256
            return _problem_of_file(file, header, chunks[name], counter.add)
        except CheckpointError as error:
            return error.problem.removeprefix(f"{path}/")
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    with ThreadPoolExecutor(_THREADS) as pool:
        problems += filter(None, pool.map(problem_of, sorted(manifest.sizes)))
    refuse_problems(str(path), problems, CheckpointError, OLDER_IS_KEPT)
    return CheckpointReport(path, manifest, counter.total + (path / MANIFEST).stat().st_size)


def _problems_of_folder(path: Path, manifest: Manifest) -> list[str]:
    problems = []
    step = step_of(path)
    if step is not None and step != manifest.step:
        problems.append(f"{MANIFEST} is for step {manifest.step}, the folder name for {step}")
    known = {MANIFEST, *manifest.sizes}
    problems += [
        f"{entry.name!r} is not part of this checkpoint: the manifest does not list it"
        for entry in sorted(path.iterdir())
        if entry.name not in known
    ]
    return problems


def _problem_of_tokenizer(path: Path, expected: str, read: Callable[[int], None]) -> str:
    content = path.read_bytes()
    read(len(content))
    found = hashlib.sha256(content).hexdigest()
    if found == expected:
        return ""
    return f"{path.name} is damaged: its sha256 is {found}, the manifest says {expected}"


def _problem_of_file(
    path: Path, expected_header: str, chunks: _Chunks, read: Callable[[int], None]
) -> str:
    """Describes the problem of a file of tensors; empty if it is intact.

    Raises:
        CheckpointError, OSError: it cannot be read, or is not a safetensors file.
    """
    name = path.name
    found = header_sha256(path)
    if found != expected_header:
        return (
            f"{name} is damaged: the sha256 of its header is {found}, the manifest says "
            f"{expected_header}"
        )
    header = read_header(path)
    holds = {tensor: (values.dtype, values.shape) for tensor, values in header.items()}
    listed = {tensor: (DTYPES[dtype], chunk.shape) for tensor, (dtype, chunk) in chunks.items()}
    for tensor in sorted(holds.keys() | listed.keys()):
        if holds.get(tensor) != listed.get(tensor):
            return (
                f"{name} does not match the manifest: {tensor!r} is "
                f"{_describe(holds.get(tensor))}, not {_describe(listed.get(tensor))}"
            )
    read(path.stat().st_size - sum(values.n_bytes for values in header.values()))
    damaged = []
    for tensor, values in header.items():  # in file order
        expected = chunks[tensor][1].checksum
        found = read_values(values, like=expected)
        read(values.n_bytes)
        if found != expected:
            damaged.append(
                f"the checksum of {tensor!r} in it is {found}, the manifest says {expected}"
            )
    if not damaged:
        return ""
    others = f"; so are {len(damaged) - 1} more of its {len(header)} tensors"
    return f"{name} is damaged: {damaged[0]}{others if len(damaged) > 1 else ''}"


def _describe(values: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return f"{str(values[0]).removeprefix('torch.')} {list(values[1])}" if values else "absent"


class _Counter:
    """Counts bytes read by several threads."""

    def __init__(self, total: int, progress: Progress | None) -> None:
        self.total = total
        self._done = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, n_bytes: int) -> None:
        with self._lock:
            self._done += n_bytes
            if self._progress is not None:
                self._progress(self._done, self.total)
