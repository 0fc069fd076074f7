"""Writes checkpoints so that a crash at any time leaves earlier ones intact.

Everything is written and flushed under a hidden name; one rename makes it a checkpoint:

    .step-00002000.partial/  ->  step-00002000/

Ranks save together through that folder, and agree after each part, so that all go on or none:

    rank 0       checks free space, and creates the folder
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
    every rank   writes its tensors, then parts-00003.json: their places
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
    rank 0       merges these into the manifest and renames
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||

    parts-00003.json   {"parts": [[["float32", [768], [[384], [384], 0]],         type, shape, chunk
                                   ["model.final_norm.weight", ...]], ...],       of these tensors
                        "files": {"model-00003-of-00016.safetensors": [...], ...}}

What they agree on is the failure of the lowest rank that has one. It travels between the ranks, not
through the file system, which may be what failed.

A rank lists tensors of the same type, shape and chunk together. Tensors that all ranks list
together have one entry in the manifest, so rank 0 checks and writes few grids, however many the
tensors.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from pydantic import ValidationError
from torch import Tensor

from trainyard.checkpoint.format import (
    MANIFEST,
    TOKENIZER,
    Chunk,
    Facts,
    Grid,
    Manifest,
    StoredFile,
    StoredTokenizer,
    first_problem,
    make_grid,
    render_manifest,
    step_folder_name,
)
from trainyard.checkpoint.shard import limit_of_shards, split_in_shards, write_shards
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import SPACE, MachineError
from trainyard.files import flush
from trainyard.parallel.placement import Placement, whole
from trainyard.units import format_bytes

EXPECTED = (OSError, MachineError)
"""Errors from a disk; anything else is a bug."""
FREE_SPACE = f"{SPACE}, or make it writable; earlier checkpoints are untouched"
SAME_FOLDER = "mount the run folder on every node at the same path"
CHECK_DISK = "check the disk or file server of the run folder; earlier checkpoints are untouched"
BUG = "a bug in Trainyard: see the traceback of that rank; earlier checkpoints are untouched"
_ROOM_FOR_MANIFEST_BYTES = 2**20
# A shared file system answers each slowly, and many at once.
_THREADS_FOR_LISTS: Final = 16
_PARTIAL = ".partial"


@dataclass(frozen=True)
class SavingRank:
    """This rank among those that save a checkpoint together."""

    rank: int
    n_ranks: int
    agree: Callable[[str | None], str | None]
    """Waits until every rank has called it; returns the text of the lowest rank that has one."""


ALONE = SavingRank(0, 1, lambda text: text)


Part = tuple[str, tuple[int, ...], Chunk]
"""What a rank holds of a tensor: its type, whole shape, and chunk in one of this rank's files."""


class RankManifest(msgspec.Struct):
    """One rank's parts with the names of their tensors."""

    parts: list[tuple[Part, list[str]]]
    files: dict[str, StoredFile]


def save_checkpoint(
    folder: Path,
    facts: Facts,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement] | None = None,
    ranks: SavingRank = ALONE,
    total_bytes: int | None = None,
    vocabulary: Vocabulary | None = None,
) -> Path:
    """Writes the checkpoint of one step into `folder` and returns its path.

    Replaces a checkpoint of the same step. Holds no second copy of the tensors. All ranks call it,
    and it fails on all of them or on none.

    Args:
        folder: the run's checkpoints, created if absent; the same for all ranks.
        facts: the step and its facts; rank 0's are written.
        tensors: what this rank writes, by global name; the part before the first dot names the
            files. Of ranks that hold the same part, one passes it.
        placements: their positions in the whole tensors; without one, a tensor is whole.
        ranks: this rank among those that save.
        total_bytes: size of the tensors of all ranks, which must fit before anything is written;
            None: rank 0 holds all tensors.
        vocabulary: of the run's tokenizer; rank 0 writes a copy.

    Raises:
        MachineError: no space, or the disk cannot be written; older checkpoints are unchanged.
    """
    final = folder / step_folder_name(facts.step)
    partial = folder / f".{final.name}{_PARTIAL}"
    leads = ranks.rank == 0
    if total_bytes is None:
        total_bytes = sum(tensor.nbytes for tensor in tensors.values())
    parts: list[tuple[bool, Callable[[], None]]] = [
        (leads, lambda: _prepare(folder, partial, total_bytes)),
        (True, lambda: _write_parts(partial, tensors, placements or {}, ranks)),
        (leads, lambda: _join_and_publish(partial, final, facts, ranks, vocabulary)),
    ]
    for has_part, part in parts:
        error = _attempt(part) if has_part else None
        if (found := ranks.agree(_describe(error, ranks) if error else None)) is None:
            continue
        if leads:
            shutil.rmtree(partial, ignore_errors=True)
        if error is not None and not isinstance(error, EXPECTED):
            raise error
        problem, hint = json.loads(found)
        raise MachineError(f"cannot write the checkpoint {final}: {problem}", hint) from error
    return final


def remove_checkpoint(path: Path) -> None:
    """Removes a step folder.

    Renames it first, so that a half-removed folder never counts as a checkpoint.
    """
    _remove(_rename_to_partial(path))


def require_space(folder: Path, tensors_bytes: int) -> None:
    """Checks that a checkpoint with `tensors_bytes` of tensors fits.

    Raises:
        MachineError: with the needed and the free space.
    """
    needed = tensors_bytes + tensors_bytes // 1000 + _ROOM_FOR_MANIFEST_BYTES
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"a checkpoint of {format_bytes(needed)} does not fit in {folder}: "
            f"{format_bytes(free)} free",
            "free space there or write elsewhere (training: a lower checkpoint.keep_last); "
            "nothing was removed",
        )


def write_manifest(
    folder: Path, facts: Facts, ranks: Iterable[RankManifest], vocabulary: Vocabulary | None
) -> None:
    """Writes and flushes what all ranks wrote, and a copy of the run's tokenizer.

    Raises:
        ValueError: two ranks disagree about a tensor, or parts are missing.
    """
    grids, files = join_parts(ranks)
    copy = None
    if vocabulary is not None:
        content = vocabulary.render_json().encode()
        (folder / TOKENIZER).write_bytes(content)
        flush(folder / TOKENIZER)
        n_bytes, sha256 = len(content), hashlib.sha256(content).hexdigest()
        copy = StoredTokenizer(n_bytes=n_bytes, sha256=sha256, fingerprint=vocabulary.fingerprint)
    manifest = Manifest(**dict(facts), grids=grids, files=files, tokenizer=copy)
    (folder / MANIFEST).write_bytes(render_manifest(manifest))
    flush(folder / MANIFEST)
    flush(folder)


def _attempt(step: Callable[[], None]) -> Exception | None:
    """Runs a step and returns its error: a rank that raised would leave the others waiting."""
    try:
        step()
    except Exception as error:
        return error
    return None


def _prepare(folder: Path, partial: Path, total_bytes: int) -> None:
    folder.mkdir(exist_ok=True)  # a run folder that is gone must not come back
    remove_partials(folder)
    require_space(folder, total_bytes)
    partial.mkdir()


def _write_parts(
    partial: Path,
    tensors: Mapping[str, Tensor],
    placements: Mapping[str, Placement],
    ranks: SavingRank,
) -> None:
    """Writes this rank's files and manifest; removes them on failure."""
    if not partial.is_dir():
        raise MachineError(f"it does not see {partial}, which rank 0 created", SAME_FOLDER)
    places = {name: placements.get(name) or whole(t.shape) for name, t in tensors.items()}
    held = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.numel() or tensor.shape == places[name].shape
    }
    shards = {partial / name: shard for name, shard in _named_shards(held, ranks)}
    try:
        parts = list_parts(shards.values(), places)
        _write_flushed(partial / parts_name(ranks.rank), RankManifest(parts, write_shards(shards)))
    except Exception:
        with suppress(OSError):  # the file system may have become read-only
            for path in shards:
                path.unlink(missing_ok=True)
        raise


def _named_shards(
    tensors: Mapping[str, Tensor], ranks: SavingRank
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields files: model-RANK-of-RANKS, plus -FILE-of-FILES if a rank has several."""
    limit = limit_of_shards(sum(tensor.nbytes for tensor in tensors.values()))
    for part in dict.fromkeys(name.partition(".")[0] for name in tensors):
        own = {name: t for name, t in tensors.items() if name.startswith(f"{part}.")}
        shards = split_in_shards(own, limit)
        for index, shard in enumerate(shards):
            numbers = [(ranks.rank, ranks.n_ranks)] if ranks.n_ranks > 1 else []
            if len(shards) > 1 or not numbers:
                numbers.append((index, len(shards)))
            of = "".join(f"-{number:05d}-of-{count:05d}" for number, count in numbers)
            yield f"{part}{of}.safetensors", shard


def _join_and_publish(
    partial: Path, final: Path, facts: Facts, ranks: SavingRank, vocabulary: Vocabulary | None
) -> None:
    try:
        write_manifest(partial, facts, take_parts(partial, ranks.n_ranks), vocabulary)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    replaced = _rename_to_partial(final) if os.path.lexists(final) else None
    partial.rename(final)
    flush(final.parent)
    if replaced:
        with suppress(OSError):  # else the next save does it
            _remove(replaced)


def parts_name(rank: int) -> str:
    """Names a rank's file for rank 0."""
    return f"parts-{rank:05d}.json"


def _describe(error: Exception, ranks: SavingRank) -> str:
    """Returns problem and hint for all ranks, with this rank's number where there are several."""
    problem, hint = str(error), FREE_SPACE
    if isinstance(error, MachineError):
        problem, hint = error.problem, error.hint
    elif not isinstance(error, EXPECTED):
        problem, hint = f"{type(error).__name__}: {error}", BUG
    rank = f"rank {ranks.rank}: " if ranks.n_ranks > 1 else ""
    return json.dumps([rank + problem, hint])  # msgspec refuses a path that is not UTF-8


def list_parts(
    files: Iterable[Mapping[str, Tensor]], placements: Mapping[str, Placement] | None = None
) -> list[tuple[Part, list[str]]]:
    """Lists what the files of a rank hold; of the tensors it looks at type and shape only.

    Args:
        files: tensors by global name.
        placements: their positions in the whole tensors; without one, a tensor is whole.
    """
    parts: dict[Part, list[str]] = {}
    for number, tensors in enumerate(files):
        for name, tensor in tensors.items():
            place = (placements or {}).get(name) or whole(tensor.shape)
            assert tuple(tensor.shape) == place.local_shape, (tensor.shape, place)
            chunk = Chunk(place.offsets, place.local_shape, number)
            dtype = str(tensor.dtype).removeprefix("torch.")
            parts.setdefault((dtype, place.shape, chunk), []).append(name)
    return list(parts.items())


def take_parts(folder: Path, n_ranks: int) -> Iterator[RankManifest]:
    """Yields the manifests of all ranks, and removes their files.

    Raises:
        MachineError: the file of a rank is missing or damaged.
        OSError: a file cannot be removed.
    """
    paths = [folder / parts_name(rank) for rank in range(n_ranks)]
    with ThreadPoolExecutor(_THREADS_FOR_LISTS) as pool:
        contents = pool.map(Path.read_bytes, paths)
        for rank in range(n_ranks):
            try:
                parts = msgspec.json.decode(next(contents), type=RankManifest)
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                problem = f"cannot read what rank {rank} wrote: {error}"
                raise MachineError(problem, CHECK_DISK) from error
            yield parts
        list(pool.map(Path.unlink, paths))


def join_parts(ranks: Iterable[RankManifest]) -> tuple[tuple[Grid, ...], dict[str, StoredFile]]:
    """Merges the manifests of all ranks.

    Raises:
        ValueError: two ranks disagree about a tensor, or parts are missing.
    """
    files: dict[str, StoredFile] = {}
    held: dict[str, list[Part]] = {}
    for rank in ranks:
        n_before = len(files)
        files |= rank.files
        for (dtype, shape, chunk), names in rank.parts:
            part = dtype, shape, Chunk(chunk.offset, chunk.shape, n_before + chunk.file)
            for name in names:
                held.setdefault(name, []).append(part)
    alike: dict[tuple[int, ...], list[str]] = {}
    for name, parts in held.items():  # the same objects: every rank holds them together
        alike.setdefault(tuple(map(id, parts)), []).append(name)
    return tuple(_join(names, held[names[0]]) for names in alike.values()), files


def _join(names: list[str], parts: list[Part]) -> Grid:
    kinds = list(dict.fromkeys((dtype, shape) for dtype, shape, _ in parts))
    if len(kinds) > 1:
        held = " on one rank, ".join(f"{dtype} {list(shape)}" for dtype, shape in kinds)
        raise ValueError(f"{names[0]!r} is {held} on another")
    return make_grid(tuple(names), *kinds[0], [chunk for _, _, chunk in parts])


def _write_flushed(path: Path, content: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.encode(content))
    flush(path)


def _rename_to_partial(path: Path) -> Path:
    return path.rename(path.with_name(f".{path.name}.old{_PARTIAL}"))


def remove_partials(folder: Path) -> None:
    """Removes leftovers of killed saves and removals in `folder`."""
    for path in folder.glob(f".step-*{_PARTIAL}"):
        _remove(path)


def _remove(path: Path) -> None:
    """Removes a folder, only the link to one moved to another disk, or a file of its name."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
