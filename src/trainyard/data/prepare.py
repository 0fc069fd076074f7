r"""Raw text to Megatron-LM token files, with the same bytes for any number of workers.

    options = PrepareOptions(("corpus/",), Path("data/web"), Path("gpt2"), workers=8)
    sidecar = prepare(options)

writes `data/web_text_document.bin`, `.idx` and `.json`. The corpus is cut into units of about
128 MiB that depend on the files alone. Then either this process does all units one after another,
straight into the final files, or:

    parent    hands out units 0 1 2 ...              joins parts 0 1 2 ... in order
    worker A  unit 0 -> parts/000000.{bin,idx}   \
    worker B  unit 1 -> parts/000001.{bin,idx}    > only counts travel between processes
    worker A  unit 2 -> parts/000002.{bin,idx}   /

A fault is dealt with in the order of the input, so the first error and the counts do not depend on
the workers either. The `.json` is written last: files without it are not finished.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from trainyard.data.indexed import IndexedWriter, concatenate, optimal_dtype
from trainyard.data.sidecar import (
    Sidecar,
    SourceRecord,
    TokenizerRecord,
    record_file,
    save_sidecar,
)
from trainyard.data.sources import Segment, find_files, read_documents, split_into_units
from trainyard.data.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from trainyard.data.unit import PrepareOptions, UnitResult, render_fault, tokenize_unit
from trainyard.data.worker_pool import tokenize_in_processes
from trainyard.errors import DataError, MachineError
from trainyard.units import format_bytes

__all__ = ["PrepareOptions", "output_prefix", "prepare", "train_on_inputs"]

# Takes bytes of input done, bytes of input in all, documents and tokens so far.
Progress = Callable[[int, int, int, int], None]

_log = logging.getLogger(__name__)


def output_prefix(output: Path, json_key: str) -> str:
    """Names the token files as Megatron-LM does, without `.bin` or `.idx`."""
    return f"{output}_{json_key}_document"


def prepare(options: PrepareOptions, progress: Progress | None = None) -> Sidecar:
    """Tokenises a corpus into `{output}_{json_key}_document.{bin,idx,json}`.

    Raises:
        DataError: an input, a document or the tokenizer is wrong, or the output exists.
        MachineError: the disk is full or cannot be written, or a worker was killed.
    """
    files = find_files(options.inputs)
    prefix = output_prefix(options.output, options.json_key)
    _check_output(Path(prefix), files, options)
    units = split_into_units(files, options.unit_bytes)
    tokenizer = load_tokenizer(options.tokenizer, options.special_tokens)
    counter = _Counter(sum(path.stat().st_size for path in files), progress)
    if min(options.workers, len(units)) == 1:
        result = _prepare_here(units, options, tokenizer, prefix, counter)
    else:
        result = _prepare_in_processes(units, options, prefix, counter)
    sidecar = _build_sidecar(result, options, tokenizer, prefix, files)
    save_sidecar(sidecar, prefix)
    return sidecar


def train_on_inputs(options: PrepareOptions, vocabulary_size: int) -> None:
    """Trains a tokenizer on the inputs and saves it in the folder `options.tokenizer`.

    Raises:
        DataError: an input or a document is wrong, or the text is too little.
    """
    files = find_files(options.inputs)
    _check_output(Path(output_prefix(options.output, options.json_key)), files, options)
    existing = options.tokenizer / "tokenizer.json"
    if existing.exists() and not options.overwrite:
        hint = "data may depend on it: use it with --tokenizer, or pass --overwrite"
        raise DataError(f"the tokenizer {existing} is there already", hint)
    train_tokenizer(_read_texts(files, options), vocabulary_size, options.tokenizer)


def _read_texts(files: Sequence[Path], options: PrepareOptions) -> Iterator[str]:
    for path in files:
        for batch in read_documents(Segment(path, 0, path.stat().st_size), options.json_key):
            if batch.faults and options.on_error == "stop":
                raise DataError(render_fault(path, batch.faults[0]), batch.faults[0].hint)
            yield from batch.texts


class _Counter:
    """Adds up what was done and tells the caller."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._totals = [0, 0, 0]
        self._total_bytes = total_bytes
        self._progress = progress

    def add(self, n_bytes: int, documents: int, tokens: int) -> None:
        self._totals = [
            self._totals[0] + n_bytes,
            self._totals[1] + documents,
            self._totals[2] + tokens,
        ]
        if self._progress:
            self._progress(self._totals[0], self._total_bytes, *self._totals[1:])


def _prepare_here(
    units: Sequence[list[Segment]],
    options: PrepareOptions,
    tokenizer: Tokenizer,
    prefix: str,
    counter: _Counter,
) -> UnitResult:
    with IndexedWriter(prefix, optimal_dtype(tokenizer.vocabulary_size)) as writer:
        results = (tokenize_unit(unit, options, tokenizer, writer, counter.add) for unit in units)
        result = _join_results(units, results)
        _forget_old_sidecar(prefix)
    return result


def _prepare_in_processes(
    units: Sequence[list[Segment]], options: PrepareOptions, prefix: str, counter: _Counter
) -> UnitResult:
    path = Path(prefix)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}.parts-", dir=path.parent) as folder:
        parts = [Path(folder) / f"{number:06d}" for number in range(len(units))]
        with closing(tokenize_in_processes(units, parts, options, counter.add)) as results:
            result = _join_results(units, results)
        _forget_old_sidecar(prefix)
        concatenate(parts, prefix)
    return result


def _forget_old_sidecar(prefix: str) -> None:
    """Takes away an overwritten record first, so that it never lies beside new token files."""
    Path(f"{prefix}.json").unlink(missing_ok=True)


def _join_results(units: Sequence[list[Segment]], results: Iterable[UnitResult]) -> UnitResult:
    """Adds up the results in order, with line numbers counted from the start of each file.

    Raises:
        DataError: a document is bad and the policy is to stop, or no document holds text.
    """
    total = UnitResult()
    lines_before = 0
    for unit, result in zip(units, results, strict=True):
        if unit[0].start == 0:
            lines_before = 0
        faults = [
            (path, replace(fault, position=fault.position + lines_before if fault.position else 0))
            for path, fault in result.faults
        ]
        if result.stopped:
            path, fault = faults[-1]
            raise DataError(render_fault(path, fault), fault.hint)
        lines_before += result.n_lines
        total.add(replace(result, faults=faults))
    if total.documents == total.empty_documents:
        skipped = sum(total.skipped.values())
        raise DataError(
            f"the corpus is empty: {total.documents} documents with no text in them, "
            f"{skipped} skipped",
            "check the inputs and json_key",
        )
    return total


def _check_output(path: Path, files: Sequence[Path], options: PrepareOptions) -> None:
    """Finds out before the work what would spoil its end."""
    folder = path.parent
    if not folder.is_dir():
        raise DataError(f"the output folder {folder} does not exist", "create it first")
    if not os.access(folder, os.W_OK):
        raise MachineError(f"the output folder {folder} cannot be written", "choose another")
    for suffix in (".bin", ".idx", ".json"):
        existing = Path(f"{path}{suffix}")
        if existing.exists() and not options.overwrite:
            raise DataError(f"{existing} is there already", "pass --overwrite, or another --output")
    for left in folder.glob(f"{glob.escape(path.name)}.parts-*"):
        _log.warning("%s was left by a run that was killed; it can be deleted", left)
    # Half of what English text takes with GPT-2's vocabulary: below it no run can succeed. Parts
    # and the joined files are on the disk together.
    input_bytes = sum(file.stat().st_size for file in files)
    needed_bytes = input_bytes // 4 * (2 if options.workers > 1 else 1)
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise MachineError(
            f"{folder} has {format_bytes(free_bytes)} free; the token files of "
            f"{format_bytes(input_bytes)} of input need {format_bytes(needed_bytes)} or more",
            "free space, or write to another folder; one worker needs half as much as several",
        )


def _build_sidecar(
    result: UnitResult,
    options: PrepareOptions,
    tokenizer: Tokenizer,
    prefix: str,
    files: Sequence[Path],
) -> Sidecar:
    made_by = TokenizerRecord(
        tokenizer.name,
        tokenizer.fingerprint,
        tokenizer.vocabulary_size,
        tokenizer.eod_id,
        tokenizer.special_tokens,
    )
    statuses = [(path.as_posix(), path.stat()) for path in files]
    return Sidecar(
        tokenizer=made_by,
        json_key=options.json_key,
        append_eod=options.append_eod,
        dtype=optimal_dtype(tokenizer.vocabulary_size).name,
        documents=result.documents,
        empty_documents=result.empty_documents,
        sequences=result.documents - result.empty_documents,
        tokens=result.tokens,
        text_bytes=result.text_bytes,
        skipped=dict(sorted(result.skipped.items())),
        skipped_places=[render_fault(path, fault) for path, fault in result.faults],
        bin=record_file(Path(f"{prefix}.bin")),
        idx=record_file(Path(f"{prefix}.idx")),
        sources=[SourceRecord(name, stat.st_size, stat.st_mtime_ns) for name, stat in statuses],
    )
