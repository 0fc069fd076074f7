"""Processes one unit of a corpus: reads it, applies the steps, tokenizes, writes a part."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from trainyard.config.corpus import Corpus, Step
from trainyard.corpus.preparation.duplicates import document_keys
from trainyard.corpus.preparation.steps import apply_steps, count_bytes
from trainyard.corpus.sources.batch import Batch, Fault, UnreadableDocumentError
from trainyard.corpus.sources.documents import read_documents
from trainyard.corpus.sources.files import Segment
from trainyard.data.indexed import Array, IndexedWriter, optimal_dtype
from trainyard.data.sidecar import GroupCount, StepCount, add_counts
from trainyard.data.tokenizer import Encoded, Tokenizer
from trainyard.errors import DataError
from trainyard.files import BlockChecksum, explain_disk_errors

# Takes what was done since the last call: bytes of input, documents, tokens.
Report = Callable[[int, int, int], None]
PLACES_PER_KIND = 5
MAX_GROUPS = 1000

# What the join must know of each document to leave it out: its bytes, its tokens (with the end of
# document) and the number of its group.
DOCUMENT = np.dtype([("text_bytes", "<u8"), ("tokens", "<u8"), ("group", "<u4")])


class UnitResult(msgspec.Struct, kw_only=True):
    """What became of a unit; `places` holds the first few faults of each kind, without text."""

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    n_lines: int = 0
    special_texts: dict[str, int] = msgspec.field(default_factory=dict)
    not_prose: dict[str, int] = msgspec.field(default_factory=dict)
    lost_bytes: int = 0
    steps: list[StepCount] = msgspec.field(default_factory=list)
    groups: dict[str, GroupCount] = msgspec.field(default_factory=dict)
    quarantined: dict[str, int] = msgspec.field(default_factory=dict)
    places: list[Fault] = msgspec.field(default_factory=list)
    blocks: list[BlockChecksum] = msgspec.field(default_factory=list)
    """Checksums of the blocks of its .bin."""
    files: dict[str, str] = msgspec.field(default_factory=dict)
    """Checksums of its other files, by what follows the piece's name."""


class UnitWorker:
    """Writes one unit as a part: token files, keys for later comparison, quarantined documents.

    The files are `<prefix>.bin .idx`, and where there is need `.quarantine`, `.documents.npy` and
    `.keys-N.npy` for comparing step N.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, *, quarantine: bool) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._quarantine = quarantine

    @cached_property
    def _special(self) -> re.Pattern[str]:
        special = sorted(self._tokenizer.vocabulary.special_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, special)))

    def run(self, unit: list[Segment], prefix: Path, report: Report) -> UnitResult:
        """Does the unit.

        Raises:
            UnreadableDocumentError: at the first bad document, unless it is to be quarantined.
            DataError: a file cannot be read.
            MachineError: the disk is full.
        """
        corpus = self._corpus
        result = UnitResult(steps=count_steps(corpus.document_steps))
        rows: list[npt.NDArray[np.void]] = []
        keys: list[list[npt.NDArray[np.uint64]]] = [[] for _ in corpus.comparing_steps]
        dtype = optimal_dtype(self._tokenizer.vocabulary_size)
        aside = Path(f"{prefix}.quarantine")
        with IndexedWriter(prefix, dtype) as writer, aside.open("wb") as quarantine:
            for batch, texts, fields, sizes in read_unit(
                corpus, unit, result, partial(self._set_aside, result, quarantine)
            ):
                row = self._tokenize(texts, sizes, writer, result)
                if corpus.count_by:
                    _count_groups(fields[corpus.count_by], row, result.groups)
                if corpus.comparing_steps:
                    rows.append(row)
                    for step, step_keys in zip(corpus.comparing_steps, keys, strict=True):
                        step_keys.append(document_keys(step, texts))
                report(batch.n_bytes, len(row), int(row["tokens"].sum()))
        result.blocks = writer.bin_blocks
        for number, step in enumerate(corpus.comparing_steps):
            step_keys = [document_keys(step, []), *keys[number]]
            save_array(
                Path(f"{prefix}.keys-{number}.npy"), np.asfortranarray(np.concatenate(step_keys))
            )
        if keys:
            all_rows = np.concatenate([np.empty(0, DOCUMENT), *rows])
            save_array(Path(f"{prefix}.documents.npy"), all_rows)
        if not result.quarantined:
            aside.unlink()
        return result

    def _set_aside(self, result: UnitResult, quarantine: BinaryIO, fault: Fault) -> None:
        located = msgspec.structs.replace(fault, raw=b"")
        if not self._quarantine:
            raise UnreadableDocumentError(located)
        if sum(kept.kind == fault.kind for kept in result.places) < PLACES_PER_KIND:
            result.places.append(located)
        add_counts(result.quarantined, {fault.kind: fault.n_documents})
        line = {
            "file": fault.path,
            "position": fault.position,
            "kind": fault.kind,
            "detail": fault.detail,
            "raw": _render_raw(fault),
        }
        quarantine.write(msgspec.json.encode(line) + b"\n")

    def _tokenize(
        self,
        texts: list[str],
        sizes: list[int],
        writer: IndexedWriter,
        result: UnitResult,
    ) -> npt.NDArray[np.void]:
        tokens: Array
        tokens, lengths = self._tokenizer.encode_batch(texts)
        add_counts(result.not_prose, Counter(filter(None, map(_format_within, texts))))
        result.lost_bytes += sum(map(self._tokenizer.count_lost_bytes, texts))
        if self._corpus.special_tokens == "text":
            add_counts(result.special_texts, Counter(chain(*map(self._special.findall, texts))))
        result.documents += len(lengths)
        result.empty_documents += int(np.count_nonzero(lengths == 0))
        if self._corpus.append_eod:
            tokens, lengths = _append_eod((tokens, lengths), self._tokenizer.eod_id, writer.dtype)
        writer.add_documents(tokens, lengths)
        rows = np.zeros(len(texts), DOCUMENT)
        rows["text_bytes"] = sizes
        rows["tokens"] = lengths
        result.tokens += len(tokens)
        result.text_bytes += sum(sizes)
        return rows


def _format_within(text: str) -> str:
    """Names the format that a text looks like: HTML, or CSV of three columns or more."""
    start = text[:2000].lstrip()
    if start[:14].lower().startswith(("<!doctype html", "<html")):
        return "HTML"
    *lines, _ = start.split("\n")
    counts = [{line.count(sign) for line in lines} for sign in ",;\t"] if len(lines) >= 5 else []
    return "CSV" if any(len(numbers) == 1 and max(numbers) >= 2 for numbers in counts) else ""


def save_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Writes a .npy file.

    Raises:
        MachineError: the disk is full.
    """
    buffer = io.BytesIO()  # np.save loses the reason when a disk is full
    np.save(buffer, array)
    with explain_disk_errors(path):
        path.write_bytes(buffer.getbuffer())


def count_steps(steps: Iterable[Step]) -> list[StepCount]:
    """Returns counts of zero: for reading, and for each step."""
    return [StepCount(kind="read"), *(StepCount(kind=step.kind) for step in steps)]


def read_unit(
    corpus: Corpus,
    unit: Iterable[Segment],
    result: UnitResult,
    set_aside: Callable[[Fault], None],
) -> Iterator[tuple[Batch, list[str], dict[str, list[str]], list[int]]]:
    """Yields documents, some at a time, as the steps leave them: texts, metadata and bytes.

    Args:
        corpus: whose options to follow.
        unit: what to read.
        result: what is read, and what each step does, is counted in `result.steps`.
        set_aside: takes each document that cannot be read.
    """
    for segment in unit:
        for batch in read_documents(
            segment, corpus.json_key, corpus.metadata_fields, corpus.split_on
        ):
            for fault in batch.faults:
                set_aside(fault)
            sizes = [count_bytes(text) for text in batch.texts]
            _count_reading(batch, sum(sizes), result)
            yield (
                batch,
                *apply_steps(
                    corpus.document_steps, batch.texts, batch.fields, sizes, result.steps[1:]
                ),
            )


def _count_reading(batch: Batch, text_bytes: int, result: UnitResult) -> None:
    count = result.steps[0]
    result.n_lines += batch.n_lines
    count.documents_out += len(batch.texts)
    count.bytes_in += batch.n_bytes
    count.bytes_out += text_bytes
    add_counts(count.dropped, batch.dropped)
    add_counts(count.dropped_sentences, batch.dropped_sentences)
    for fault in batch.faults:
        add_counts(count.dropped, {fault.kind: fault.n_documents})
        count.documents_in += fault.n_documents
    count.documents_in += len(batch.texts) + sum(batch.dropped.values())


def _count_groups(
    values: list[str], rows: npt.NDArray[np.void], groups: dict[str, GroupCount]
) -> None:
    for value in dict.fromkeys(values):
        groups.setdefault(value, GroupCount())
    if len(groups) > MAX_GROUPS:
        raise DataError(
            f"count_by: the field has more than {MAX_GROUPS} different values, such as "
            f"{values[-1][:40]!r}",
            "count by a field with few values, such as the name of a source",
        )
    numbers = {value: number for number, value in enumerate(groups)}
    rows["group"] = [numbers[value] for value in values]
    add_groups(list(groups.values()), rows)


def add_groups(groups: list[GroupCount], rows: npt.NDArray[np.void], sign: int = 1) -> None:
    """Adds the documents of `rows` to the groups that they number; a `sign` of -1 subtracts."""
    counts = np.bincount(rows["group"], minlength=len(groups))
    text_bytes = np.bincount(rows["group"], rows["text_bytes"], len(groups))
    tokens = np.bincount(rows["group"], rows["tokens"], len(groups))
    for group, *added in zip(groups, counts, text_bytes, tokens, strict=False):
        group.add(GroupCount(*(sign * int(number) for number in added)))


def _render_raw(fault: Fault) -> str:
    """Returns the content of a document: text, or `base64:` and the bytes if it is not text."""
    try:
        return fault.raw.decode()
    except UnicodeDecodeError:
        return f"base64:{base64.b64encode(fault.raw).decode()}"


def _append_eod(encoded: Encoded, eod_id: int, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Ends every document that has tokens; Megatron-LM leaves empty ones without an end too."""
    tokens, lengths = encoded
    has_tokens = lengths > 0
    ends = np.cumsum(lengths)[has_tokens] + np.arange(np.count_nonzero(has_tokens))
    ended = np.empty(len(tokens) + len(ends), dtype)
    is_text = np.ones(len(ended), np.bool_)
    is_text[ends] = False
    ended[is_text] = tokens
    ended[ends] = eod_id
    return ended, lengths + has_tokens
