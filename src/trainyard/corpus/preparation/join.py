"""Last stage of preparation: joins the parts of an output in order, without duplicates.

The kernel copies parts, so a join runs at disk speed with constant memory. It reuses the checksums
from when they were written. Only a part with documents to drop is read, and written with new
checksums. Their counts are summed for the record.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from trainyard.corpus.preparation.plan import Output, PreparationPlan
from trainyard.corpus.preparation.unit import (
    PLACES_PER_KIND,
    UnitResult,
    add_groups,
    count_steps,
)
from trainyard.data.indexed import (
    Array,
    IndexedDataset,
    optimal_dtype,
    token_paths,
    write_index,
)
from trainyard.data.sidecar import (
    GroupCount,
    Sidecar,
    SourceRecord,
    StepCount,
    add_counts,
    load_sidecar,
    save_sidecar,
)
from trainyard.errors import DataError, explain_failure, printable
from trainyard.files import BlockChecksum, BlockWriter, FileRecord, explain_disk_errors

_COPY_BYTES = 16 * 2**20
_SUMS = ("documents", "empty_documents", "tokens", "text_bytes")


@dataclass(frozen=True)
class Part:
    """Token files of a unit, the checksums of the .bin, and which documents stay (None: all)."""

    prefix: Path
    blocks: list[BlockChecksum]
    stays: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class FinishedUnit:
    """A unit's result and its part."""

    result: UnitResult
    prefix: Path
    lines_before: int
    """Lines of the same file in earlier units."""
    repeats: npt.NDArray[np.uint8] | None = None
    """For each document the comparing step that drops it, from 1; 0: none."""


class EmptyCorpusError(DataError):
    """No document with text in it came through, so there is nothing to publish."""


def check_not_empty(plan: PreparationPlan, units: list[FinishedUnit]) -> None:
    """Rejects a corpus without text, with the fates of its documents.

    Raises:
        EmptyCorpusError: no unit has a document with text.
    """
    result, places, _ = _add_up(plan, units)
    if result.documents == result.empty_documents:
        raise empty_corpus(result.documents, result.steps, places)


def empty_corpus(documents: int, steps: list[StepCount], places: list[str]) -> EmptyCorpusError:
    """Builds the error of a corpus whose `documents`, after all steps, have no text."""
    fates = [f"{documents:,} without text"] if documents else []
    for step in steps:
        fates += [f"{step.kind} dropped {n:,}: {why}" for why, n in step.dropped.items()]
    problem = f"the corpus is empty: {'; '.join(fates) or 'the inputs hold no document'}"
    return EmptyCorpusError(
        "\n  ".join([problem, *places]),
        "check the inputs, json_key and the steps; nothing was written",
    )


def join_output(
    plan: PreparationPlan, output: Output, units: list[FinishedUnit], made: Path
) -> None:
    """Merges the parts of an output into token files with the prefix `made`, with their record.

    Raises:
        DataError: an input changed.
        MachineError: the disk is full or the folder cannot be written.
    """
    check_unchanged(plan.output_sources(output))
    dtype = optimal_dtype(plan.tokenizer.vocabulary_size)
    result, places, parts = _add_up(plan, units)
    bin_record, idx_record = merge_parts(parts, made, dtype)
    if result.quarantined:
        _join_quarantine(units, Path(f"{made}.quarantine.jsonl"))
    counts: dict[str, Any] = {name: getattr(result, name) for name in (*_SUMS, "steps")}
    for name in ("special_texts", "not_prose", "lost_bytes"):
        counts[name] = getattr(result, name) or msgspec.UNSET
    sidecar = Sidecar(
        recipe=plan.recipe,
        tokenizer=plan.tokenizer,
        json_key=plan.corpus.json_key,
        append_eod=plan.corpus.append_eod,
        dtype=dtype.name,
        sequences=result.documents - result.empty_documents,
        groups=dict(sorted(result.groups.items())),
        quarantined=dict(sorted(result.quarantined.items())),
        quarantined_places=places,
        bin=bin_record,
        idx=idx_record,
        sources=plan.output_sources(output),
        split_on=plan.corpus.split_on or msgspec.UNSET,
        **counts,
    )
    save_sidecar(sidecar, made)


def publish_output(plan: PreparationPlan, output: Output, made: Path) -> None:
    """Gives the files of an output their final names.

    Raises:
        MachineError: the folder cannot be written.
    """
    try:
        replaces_other = load_sidecar(output.prefix).recipe != plan.recipe
    except DataError:
        replaces_other = True
    publish_files(made, Path(output.prefix), replaces_other=replaces_other)


def find_stale(plan: PreparationPlan) -> list[Path]:
    """Lists outputs of the corpus that is being replaced which nothing will replace."""
    kept = {output.prefix for output in plan.outputs}
    try:
        replaced = load_sidecar(plan.outputs[0].prefix).recipe
    except DataError:
        return []
    stale = []
    name = Path(plan.corpus.output).name
    for path in Path(plan.outputs[0].prefix).parent.glob(f"{glob.escape(name)}_*_document.json"):
        prefix = str(path.with_suffix(""))
        with suppress(DataError):
            if prefix not in kept and load_sidecar(prefix).recipe == replaced != plan.recipe:
                suffixes = (".json", ".idx", ".bin", ".quarantine.jsonl")
                stale += [Path(f"{prefix}{suffix}") for suffix in suffixes]
    return stale


def check_unchanged(sources: Sequence[SourceRecord]) -> None:
    """Refuses inputs that changed since the plan was made.

    Raises:
        DataError: names the first one.
    """
    for source in sources:
        problem = f"{printable(source.path)} can no longer be read"
        hint = "put it back; then run the same command again"
        with explain_failure(problem, hint, DataError):
            status = Path(source.path).stat()
        if (status.st_size, status.st_mtime_ns) != (source.size_bytes, source.modified_ns):
            raise DataError(
                f"{printable(source.path)} changed while it was read: {source.size_bytes} bytes "
                f"before, {status.st_size} now",
                "run the same command again: it reads changed files again, and keeps the rest",
            )


def _add_up(
    plan: PreparationPlan, units: list[FinishedUnit]
) -> tuple[UnitResult, list[str], list[Part]]:
    """Adds up units, less the documents that repeat an earlier one.

    Returns:
        the sums, the first faults of each kind with their places, and the parts.
    """
    total = UnitResult(steps=count_steps(plan.corpus.steps))
    places: list[str] = []
    n_faults: Counter[str] = Counter()
    parts = []
    for unit in units:
        result, stays = unit.result, None
        for name in (*_SUMS, "lost_bytes"):
            setattr(total, name, getattr(total, name) + getattr(result, name))
        for name in ("special_texts", "not_prose", "quarantined"):
            add_counts(getattr(total, name), getattr(result, name))
        for value, group in result.groups.items():
            total.groups.setdefault(value, GroupCount()).add(group)
        for fault in result.places:
            n_faults[fault.kind] += 1
            if n_faults[fault.kind] <= PLACES_PER_KIND:
                places.append(fault.render(unit.lines_before))
        for count, added in zip(total.steps, result.steps, strict=False):
            count.add(added)
        if unit.repeats is not None:
            stays = unit.repeats == 0
            rows = np.load(f"{unit.prefix}.documents.npy")
            counts = total.steps[-len(plan.corpus.comparing_steps) :]
            groups = [total.groups[value] for value in result.groups]
            _leave_out(rows, unit.repeats, total, counts, groups)
        parts.append(Part(unit.prefix, result.blocks, stays))
    return total, places, parts


def _leave_out(
    rows: npt.NDArray[np.void],
    repeats: npt.NDArray[np.uint8],
    total: UnitResult,
    counts: list[StepCount],
    groups: list[GroupCount],
) -> None:
    """Subtracts the documents that repeat an earlier one; `counts` are of the comparing steps."""
    for number, count in enumerate(counts, 1):
        came = rows[(repeats == 0) | (repeats >= number)]
        left = rows[(repeats == 0) | (repeats > number)]
        count.documents_in += len(came)
        count.documents_out += len(left)
        count.bytes_in += int(came["text_bytes"].sum())
        count.bytes_out += int(left["text_bytes"].sum())
        if len(came) > len(left):
            n_repeats = len(came) - len(left)
            add_counts(count.dropped, {"repeats an earlier document": n_repeats})
    gone = rows[repeats > 0]
    total.documents -= len(gone)
    total.empty_documents -= int(np.count_nonzero(gone["tokens"] == 0))
    total.tokens -= int(gone["tokens"].sum())
    total.text_bytes -= int(gone["text_bytes"].sum())
    if groups:
        add_groups(groups, gone, sign=-1)


def _join_quarantine(units: list[FinishedUnit], path: Path) -> None:
    """Joins the quarantined documents, with positions counted from the start of each file."""
    with explain_disk_errors(path), path.open("wb") as file:
        for unit in units:
            if not unit.result.quarantined:
                continue
            with Path(f"{unit.prefix}.quarantine").open("rb") as lines:
                for line in lines:
                    document = msgspec.json.decode(line)
                    if document["position"]:
                        document["position"] += unit.lines_before
                    file.write(msgspec.json.encode(document) + b"\n")


def merge_parts(
    parts: Sequence[Part], prefix: Path, dtype: np.dtype[Any]
) -> tuple[FileRecord, FileRecord]:
    """Joins parts into `<prefix>.bin` and `.idx`, as if all had been written in one go.

    Raises:
        DataError: a part is damaged.
        MachineError: the disk is full or the folder cannot be written.
    """
    bin_path, idx_path = token_paths(prefix)
    n_sequences = n_documents = 0
    with explain_disk_errors(bin_path), bin_path.open("wb") as file:
        blocks: list[BlockChecksum] = []
        for part in parts:
            dataset = IndexedDataset(part.prefix)
            if part.stays is None or part.stays.all():
                with token_paths(part.prefix)[0].open("rb") as source:
                    _copy(source, file, sum(block.n_bytes for block in part.blocks))
                blocks += part.blocks
            else:
                blocks += _copy_some(dataset, part.stays, file)
            lengths, per_document = _describe(dataset, part.stays)
            n_sequences += len(lengths)
            n_documents += len(per_document)
        file.flush()
        os.fsync(file.fileno())

    def read_slabs() -> Iterator[tuple[Array, Array]]:
        for part in parts:
            yield _describe(IndexedDataset(part.prefix), part.stays)

    index_blocks = write_index(idx_path, dtype, (n_sequences, n_documents), read_slabs)
    return FileRecord(blocks), FileRecord(index_blocks)


def _describe(dataset: IndexedDataset, stays: npt.NDArray[np.bool_] | None) -> tuple[Array, Array]:
    """Returns the lengths of the sequences that stay, and how many each staying document has."""
    per_document = np.diff(dataset.document_indices)
    if stays is None:
        return dataset.sequence_lengths, per_document
    return dataset.sequence_lengths[np.repeat(stays, per_document)], per_document[stays]


def _copy(source: BinaryIO, target: BinaryIO, n_bytes: int) -> None:
    """Copies the first bytes of a file to the end of another, inside the kernel where it can."""
    target.flush()
    left = n_bytes
    # Some systems and file systems cannot; another error comes again when Python copies the rest.
    with suppress(AttributeError, OSError):
        while left and (copied := os.copy_file_range(source.fileno(), target.fileno(), left)):
            left -= copied
    source.seek(n_bytes - left)
    target.seek(0, os.SEEK_END)
    while left and (data := source.read(min(_COPY_BYTES, left))):
        target.write(data)
        left -= len(data)


def _copy_some(
    dataset: IndexedDataset, stays: npt.NDArray[np.bool_], target: BinaryIO
) -> list[BlockChecksum]:
    """Copies the sequences of the documents that stay, run by run."""
    checked = BlockWriter(target)
    sequences = np.repeat(stays, np.diff(dataset.document_indices)).astype(np.int8)
    edges = np.flatnonzero(np.diff(sequences, prepend=0, append=0))
    ends = np.append(dataset.sequence_pointers, dataset.n_tokens * dataset.dtype.itemsize)
    for first, last in edges.reshape(-1, 2):
        start, stop = int(ends[first]), int(ends[last])
        tokens = dataset.stream.view(np.uint8)[start:stop]
        for at in range(0, len(tokens), _COPY_BYTES):
            checked.write(tokens[at : at + _COPY_BYTES].data)
    return checked.close_block()


def publish_files(made: Path, prefix: Path, *, replaces_other: bool) -> None:
    """Renames finished token files and their record to their final names, the record last.

    Two processes may do so with the same content; each leaves complete files.

    Args:
        made: prefix of the finished files.
        prefix: what they are to be called.
        replaces_other: whether files of other content may be there; an old record then goes first.

    Raises:
        FileNotFoundError: a finished file is gone; what stood under the final names still stands.
        MachineError: the folder cannot be written.
    """
    suffixes = [".bin", ".idx", ".json"]
    if Path(f"{made}.quarantine.jsonl").exists():
        suffixes.insert(2, ".quarantine.jsonl")
    for suffix in suffixes:
        Path(f"{made}{suffix}").stat()
    with explain_failure(str(prefix), "fix the folder; then run the same command again"):
        if replaces_other:
            for suffix in (".json", ".idx", ".quarantine.jsonl"):
                Path(f"{prefix}{suffix}").unlink(missing_ok=True)
        for suffix in suffixes:
            Path(f"{made}{suffix}").replace(f"{prefix}{suffix}")
