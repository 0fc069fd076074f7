"""One piece of a corpus, tokenised: the work that a process does between two messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from trainyard.data.indexed import IndexedWriter
from trainyard.data.sources import Fault, Segment, read_documents
from trainyard.data.sources.files import UNIT_BYTES, format_of
from trainyard.data.tokenizer import Encoded, SpecialTokens, Tokenizer

# Takes what was done since the last call: bytes of input, documents, tokens.
Report = Callable[[int, int, int], None]
PLACES_PER_KIND = 5


@dataclass(frozen=True)
class PrepareOptions:
    """What to tokenise, and how."""

    inputs: tuple[str, ...]
    """Files, folders and globs, in the order the documents shall have."""
    output: Path
    """The path that the names of the token files begin with."""
    tokenizer: Path
    """A folder with vocab.json and merges.txt, or with a tokenizer.json."""
    json_key: str = "text"
    """The JSON key, or the Parquet column, that holds the text."""
    append_eod: bool = True
    """Whether `<|endoftext|>` ends every document that is not empty."""
    workers: int = 1
    """How many processes tokenise; each takes one core."""
    on_error: Literal["stop", "skip"] = "stop"
    """Whether a bad document ends the run, or is left out and counted."""
    special_tokens: SpecialTokens = "text"
    """Whether `<|endoftext|>` written in a text is text, or is parsed as Megatron-LM does."""
    overwrite: bool = False
    """Whether existing token files are replaced."""
    unit_bytes: int = UNIT_BYTES
    """How much input a worker takes at a time; changes no byte of the output."""


@dataclass
class UnitResult:
    """What became of a unit, or of several.

    `faults` holds the first few of each kind; when `stopped`, the last one is why.
    """

    documents: int = 0
    empty_documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    n_lines: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    faults: list[tuple[Path, Fault]] = field(default_factory=list)
    stopped: bool = False

    def add(self, other: UnitResult) -> None:
        """Adds what came next in the corpus."""
        self.documents += other.documents
        self.empty_documents += other.empty_documents
        self.tokens += other.tokens
        self.text_bytes += other.text_bytes
        self.n_lines += other.n_lines
        for path, fault in other.faults:
            self._keep_place(path, fault)
        self.skipped += other.skipped

    def skip(self, path: Path, fault: Fault) -> None:
        """Counts a document that is left out."""
        self._keep_place(path, fault)
        self.skipped[fault.kind] += 1

    def _keep_place(self, path: Path, fault: Fault) -> None:
        if sum(kept.kind == fault.kind for _, kept in self.faults) < PLACES_PER_KIND:
            self.faults.append((path, fault))


def render_fault(path: Path, fault: Fault) -> str:
    """Renders a fault and its place: `corpus.jsonl:12: the line is not valid JSON: ...`."""
    is_table = format_of(path) == ("parquet", "")
    place = f"{path}, row {fault.position}" if is_table else f"{path}:{fault.position}"
    return f"{place if fault.position else path}: {fault.detail}"


def tokenize_unit(
    unit: list[Segment],
    options: PrepareOptions,
    tokenizer: Tokenizer,
    writer: IndexedWriter,
    report: Report,
) -> UnitResult:
    """Writes the tokens of a unit and gives its counts; stops at a fault if the options say so."""
    result = UnitResult()
    for segment in unit:
        for batch in read_documents(segment, options.json_key):
            if batch.faults and options.on_error == "stop":
                result.faults.append((segment.path, batch.faults[0]))
                result.stopped = True
                return result
            for fault in batch.faults:
                result.skip(segment.path, fault)
            result.n_lines += batch.n_lines
            tokens, lengths = tokenizer.encode_batch(batch.texts)
            result.documents += len(lengths)
            result.empty_documents += int(np.count_nonzero(lengths == 0))
            if options.append_eod:
                tokens, lengths = _append_eod((tokens, lengths), tokenizer.eod_id)
            writer.add_documents(tokens, lengths)
            result.tokens += len(tokens)
            result.text_bytes += sum(len(text.encode()) for text in batch.texts)
            report(batch.n_bytes, len(lengths), len(tokens))
    return result


def _append_eod(encoded: Encoded, eod_id: int) -> Encoded:
    """Ends every document that has tokens; Megatron-LM leaves empty ones without an end too."""
    tokens, lengths = encoded
    has_tokens = lengths > 0
    ends = np.cumsum(lengths)[has_tokens]
    return np.insert(tokens, ends, eod_id), lengths + has_tokens
