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

from trainyard.checkpoint.format import (
    MANIFEST,
    OLDER_IS_KEPT,
    TOKENIZER,
    Chunk,
    Grid,
    Manifest,
    load_manifest,
    regular_file_size,
    step_of,
)
from trainyard.checkpoint.load import describe_damage, find_values
from trainyard.checkpoint.shard import read_header, read_values
from trainyard.errors import CheckpointError, refuse_problems

# Takes bytes done and total bytes; called by several threads, one at a time.
Progress = Callable[[int, int], None]

_THREADS = min(os.cpu_count() or 1, 8)


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
    sizes, done, lock = manifest.sizes, 0, threading.Lock()
    total = sum(sizes.values())
    chunks = _list_chunks(manifest)

    def count(n_bytes: int) -> None:
        nonlocal done
        with lock:
            done += n_bytes
            if progress is not None:
                progress(done, total)

    def problem_of(name: str) -> str:
        file = path / name
        try:
            size, expected = regular_file_size(file), sizes[name]
            if size is None:
                return f"{name} is missing or not a regular file"
            if size != expected:
                return f"{name} has {size} bytes instead of {expected}"
            if manifest.tokenizer and name == TOKENIZER:
                return _problem_of_tokenizer(file, manifest.tokenizer.sha256, count)
            return _problem_of_file(file, manifest, chunks[name], count)
        except CheckpointError as error:
            return error.problem.replace(f"{path}/", "")
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"

    with ThreadPoolExecutor(_THREADS) as pool:
        problems += filter(None, pool.map(problem_of, sorted(sizes)))
    refuse_problems(str(path), problems, CheckpointError, OLDER_IS_KEPT)
    return CheckpointReport(path, manifest, total + (path / MANIFEST).stat().st_size)


def _list_chunks(manifest: Manifest) -> dict[str, list[tuple[Grid, Chunk]]]:
    """Lists what each file should hold: chunks, each of all tensors of its grid."""
    chunks: dict[str, list[tuple[Grid, Chunk]]] = {name: [] for name in manifest.files}
    names = list(manifest.files)
    for grid in manifest.grids:
        for chunk in grid.chunks():
            chunks[names[chunk.file]].append((grid, chunk))
    return chunks


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
    path: Path, manifest: Manifest, held: list[tuple[Grid, Chunk]], read: Callable[[int], None]
) -> str:
    """Describes the problem of a file of tensors; empty if it is intact.

    Args:
        path: the file.
        manifest: of its checkpoint.
        held: all that it should hold.
        read: called with the bytes of each read.

    Raises:
        CheckpointError, OSError: it cannot be read, or does not hold the chunks.
    """
    chunks = [(name, grid.dtype, chunk) for grid, chunk in held for name in grid.names]
    values_of_chunks = find_values(path.parent, manifest, path.name, chunks)
    header = read_header(path)
    if len(header) != len(chunks):
        return f"{path.name} does not match the manifest: {len(header)} tensors, not {len(chunks)}"
    read(path.stat().st_size - sum(values.n_bytes for values in header.values()))
    damaged = []
    for name, _, values in values_of_chunks:
        found = read_values(values, like=values.checksum)
        read(values.n_bytes)
        if found != values.checksum:
            damaged.append(describe_damage(name, values, found))
    if not damaged:
        return ""
    others = f"; so are {len(damaged) - 1} more of its {len(header)} tensors"
    return f"{path.name} is damaged: {damaged[0]}{others if len(damaged) > 1 else ''}"
