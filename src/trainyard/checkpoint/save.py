"""Writes checkpoints so that a crash at any time leaves earlier ones intact.

Everything is written and flushed under a hidden name; one rename makes it a checkpoint:

    .step-00002000.partial/  ->  step-00002000/

Ranks save together through that folder, synchronized only by barriers:

    rank 0       checks free space, and creates the folder
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
    every rank   writes its tensors, then parts-00003.json: their places, or its failure
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
    rank 0       merges these into the manifest and renames; or writes failure.json
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
    every rank   checks the outcome
    ||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||||
    rank 0       removes the folder of a failed save

    parts-00003.json   {"tensors": {"model.final_norm.weight": {..., "chunks": [one]}, ...},
                        "files": {"model-00003-of-00016.safetensors": {...}, ...}, "failure": null}
    parts-00004.json   {"tensors": {}, "files": {},
                        "failure": {"problem": "No space left on device", "hint": "free ..."}}
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from torch import Tensor

from trainyard.checkpoint.format import (
    MANIFEST,
    TOKENIZER,
    Chunk,
    Facts,
    Manifest,
    StoredFile,
    StoredTensor,
    StoredTokenizer,
    first_problem,
    render_manifest,
    step_folder_name,
)
from trainyard.checkpoint.shard import limit_of_shards, split_in_shards, write_shards
from trainyard.data.vocabulary import Vocabulary
from trainyard.errors import SPACE, MachineError
from trainyard.files import flush
from trainyard.parallel.placement import Placement, whole
from trainyard.units import format_bytes

EXPECTED = (OSError, SafetensorError, MachineError)
"""Errors from a disk; anything else is a bug."""
FREE_SPACE = f"{SPACE}, or make it writable; earlier checkpoints are untouched"
_ROOM_FOR_MANIFEST_BYTES = 2**20
_PARTIAL = ".partial"
_FAILURE = "failure.json"
_RANK_0_KNOWS = "rank 0 failed; see its message"


@dataclass(frozen=True)
class SavingRank:
    """This rank among those that save a checkpoint together."""

    rank: int
    n_ranks: int
    barrier: Callable[[], object]
    """Waits until every rank has called it."""


ALONE = SavingRank(0, 1, lambda: None)


class Failure(BaseModel):
    """Why a rank failed, as in `MachineError`."""

    problem: str
    hint: str


class RankManifest(BaseModel):
    """One rank's chunks of tensors, or why it failed."""

    tensors: dict[str, StoredTensor] = {}
    files: dict[str, StoredFile] = {}
    failure: Failure | None = None


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
    error = _attempt(lambda: _prepare(folder, partial, total_bytes)) if leads else None
    ranks.barrier()
    if error is None:
        error = _attempt(lambda: _write_parts(partial, tensors, placements or {}, ranks))
    ranks.barrier()
    if leads:
        error = error or _attempt(
            lambda: _join_and_publish(partial, final, facts, ranks, vocabulary)
        )
        if error is not None:
            _tell_failure(partial, error)
    ranks.barrier()
    failure = _find_failure(partial, final, error)
    ranks.barrier()
    if leads and error is not None:
        shutil.rmtree(partial, ignore_errors=True)
    if error is not None and not isinstance(error, EXPECTED):
        raise error
    if failure is not None:
        problem = f"cannot write the checkpoint {final}: {failure.problem}"
        raise MachineError(problem, failure.hint) from error
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


def write_tokenizer(folder: Path, vocabulary: Vocabulary | None) -> StoredTokenizer | None:
    """Writes and flushes a copy of the run's tokenizer; returns its manifest entry."""
    if vocabulary is None:
        return None
    content = vocabulary.render_json().encode()
    (folder / TOKENIZER).write_bytes(content)
    flush(folder / TOKENIZER)
    sha256 = hashlib.sha256(content).hexdigest()
    return StoredTokenizer(n_bytes=len(content), sha256=sha256, fingerprint=vocabulary.fingerprint)


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
        raise MachineError(_RANK_0_KNOWS, FREE_SPACE)
    places = {name: placements.get(name) or whole(t.shape) for name, t in tensors.items()}
    held = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.numel() or tensor.shape == places[name].shape
    }
    shards = {partial / name: shard for name, shard in _named_shards(held, ranks)}
    own = partial / parts_name(ranks.rank)
    try:
        parts = RankManifest()
        for path, written in write_shards(shards).items():
            parts.files[path.name] = written.file
            for name, checksum in written.checksums.items():
                part = describe_part(held[name], places[name], path.name, checksum)
                parts.tensors[name] = part
        _write_flushed(own, parts)
    except Exception as error:
        with suppress(OSError):  # the file system may have become read-only
            for path in shards:
                path.unlink(missing_ok=True)
        failed = RankManifest(failure=failure_of(error))
        _attempt(lambda: _write_flushed(own, failed))
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
    tensors, files = join_parts(read_parts(partial, ranks.n_ranks))
    tokenizer = write_tokenizer(partial, vocabulary)
    try:
        manifest = Manifest(**dict(facts), tensors=tensors, files=files, tokenizer=tokenizer)
    except ValidationError as error:
        raise ValueError(first_problem(error)) from None
    (partial / MANIFEST).write_bytes(render_manifest(manifest))
    flush(partial / MANIFEST)
    for rank in range(ranks.n_ranks):
        (partial / parts_name(rank)).unlink()
    flush(partial)
    replaced = _rename_to_partial(final) if os.path.lexists(final) else None
    partial.rename(final)
    flush(final.parent)
    if replaced:
        with suppress(OSError):  # else the next save does it
            _remove(replaced)


def parts_name(rank: int) -> str:
    """Names a rank's file for rank 0."""
    return f"parts-{rank:05d}.json"


def failure_of(error: Exception) -> Failure:
    """Describes an error."""
    if isinstance(error, MachineError):
        return Failure(problem=error.problem, hint=error.hint)
    problem = str(error) if isinstance(error, EXPECTED) else f"{type(error).__name__}: {error}"
    return Failure(problem=problem, hint=FREE_SPACE)


def describe_part(tensor: Tensor, place: Placement, file: str, checksum: str) -> StoredTensor:
    """Makes the entry of a tensor with this one chunk."""
    assert tuple(tensor.shape) == place.local_shape, (tensor.shape, place)
    chunk = Chunk(offset=place.offsets, shape=place.local_shape, file=file, checksum=checksum)
    dtype = str(tensor.dtype).removeprefix("torch.")
    return StoredTensor(dtype=dtype, shape=place.shape, chunks=(chunk,))


def read_parts(folder: Path, n_ranks: int) -> list[RankManifest]:
    """Reads the manifests of all ranks.

    Raises:
        MachineError: one failed, for the reason it gives, or left no readable file.
    """
    parts: list[RankManifest] = []
    silent: list[int] = []
    for rank in range(n_ranks):
        try:
            parts.append(RankManifest.model_validate_json((folder / parts_name(rank)).read_bytes()))
        except (OSError, ValidationError):  # it could not even write the reason
            silent.append(rank)
            continue
        failure = parts[-1].failure
        if failure:
            raise MachineError(f"rank {rank}: {failure.problem}", failure.hint)
    if silent:
        raise MachineError(f"rank {silent[0]} could not write to {folder}", FREE_SPACE)
    return parts


def join_parts(
    ranks: list[RankManifest],
) -> tuple[dict[str, StoredTensor], dict[str, StoredFile]]:
    """Merges the manifests of all ranks; the final manifest checks completeness.

    Raises:
        ValueError: two ranks disagree about a tensor.
    """
    tensors: dict[str, StoredTensor] = {}
    chunks: dict[str, list[Chunk]] = {}
    for name, stored in (item for rank in ranks for item in rank.tensors.items()):
        first = tensors.setdefault(name, stored)
        if (first.dtype, first.shape) != (stored.dtype, stored.shape):
            raise ValueError(
                f"{name!r} is {first.dtype} {list(first.shape)} on one rank, "
                f"{stored.dtype} {list(stored.shape)} on another"
            )
        chunks.setdefault(name, []).extend(stored.chunks)
    for name, joined in chunks.items():
        in_order = tuple(sorted(joined, key=lambda chunk: chunk.offset))
        tensors[name] = tensors[name].model_copy(update={"chunks": in_order})
    return tensors, {name: file for rank in ranks for name, file in rank.files.items()}


def _tell_failure(partial: Path, error: Exception) -> None:
    """Leaves a message for the other ranks, in space freed from the rest."""
    failure = failure_of(error)

    def tell() -> None:
        for path in partial.iterdir():
            path.unlink()
        _write_flushed(partial / _FAILURE, failure)

    _attempt(tell)


def _find_failure(partial: Path, final: Path, error: Exception | None) -> Failure | None:
    """Returns why a save failed, on any rank, if it did.

    Opens only names not looked up before, since a network file system may cache lookups for a
    while.
    """
    try:
        return Failure.model_validate_json((partial / _FAILURE).read_bytes())
    except (OSError, ValidationError):  # none, or no space for it
        pass
    if error is not None:
        return failure_of(error)
    try:
        (final / MANIFEST).open("rb").close()
    except OSError:
        return Failure(problem=_RANK_0_KNOWS, hint=FREE_SPACE)
    return None


def _write_flushed(path: Path, content: BaseModel) -> None:
    path.write_text(content.model_dump_json(), encoding="utf-8")
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
