"""`trainyard show` for token files, their order in training, and tokenizers.

Counts are exact, computed one slab of documents at a time, so memory use is constant.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, get_args

import numpy as np
from rich.table import Table
from rich.text import Text

from trainyard.errors import ConfigError, DataError
from trainyard.log import facts_table
from trainyard.units import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from rich.console import Console

    from trainyard.data.indexed import IndexedDataset
    from trainyard.data.sidecar import Sidecar
    from trainyard.data.tokenizer import Tokenizer

SHOWN_TOKENS = 64
SHOWN_CHARACTERS = 400
SHOWN_ROWS = 20
BAR_CHARACTERS = 30  # leaves a line of 80 for the largest counts
_SLAB = 1 << 18  # documents looked at together


def show_data(
    prefix: str, console: Console, *, count: int, tokenizer_path: str | Path | None
) -> None:
    """Prints counts, lengths, origins and `count` documents of token files, from first to last.

    Raises:
        DataError: they are damaged, or made with another tokenizer.
    """
    from trainyard.data.indexed import IndexedDataset
    from trainyard.data.sidecar import load_sidecar
    from trainyard.data.tokenizer import load_tokenizer

    dataset = IndexedDataset(prefix)
    sidecar = load_sidecar(prefix) if Path(f"{prefix}.json").exists() else None
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path else None
    if sidecar is not None:
        sidecar.check_sizes(prefix)
        if tokenizer is not None:
            sidecar.check_against(tokenizer.name, tokenizer.fingerprint, prefix)
    facts = {
        "documents": f"{len(dataset.document_indices) - 1:,}",
        "sequences": f"{len(dataset):,}",
        "tokens": f"{dataset.n_tokens:,} of {dataset.dtype}",
    }
    facts |= _record_facts(sidecar) if sidecar else {"made by": "unknown: no .json beside it"}
    console.print(facts_table(printable(prefix), facts))
    _print_table(
        *("tokens per document", "tokens", ("documents", "share"), "", _length_rows(dataset)),
        console,
    )
    if sidecar is not None:
        _show_record(sidecar, console)
    _show_documents(dataset, tokenizer, count, console)


def show_dropped(prefix: str, console: Console) -> None:
    """Prints the start of a few documents that were dropped, for each reason.

    Raises:
        DataError: the record of the token files is missing, or has none.
    """
    from trainyard.data.sidecar import load_sidecar

    samples = [
        (f"{step.kind}: {reason}, {step.dropped[reason]:,} dropped", text)
        for step in load_sidecar(prefix).steps
        for reason, texts in (step.samples or {}).items()
        for text in texts
    ]
    if not samples:
        raise DataError(
            f"{prefix}.json has no dropped documents",
            "keep, length and quality keep the first few of each reason; exact and near duplicates "
            "are only counted",
        )
    for title, text in samples:
        _print_text(f"\n{printable(title)}", text, console)


def printable(text: str) -> str:
    """Escapes every control character and every unusual space."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Counts documents by length: 0 tokens, 1, 2 to 3, 4 to 7, ..., 2^(i-1) to 2^i - 1."""
    counts = np.zeros(64, np.int64)
    documents = dataset.document_indices
    for first in range(0, len(documents) - 1, _SLAB):
        lengths = np.diff(_token_offsets(dataset, documents[first : first + _SLAB + 1]))
        counts += np.bincount(np.frexp(lengths)[1], minlength=64)
    return counts


def _token_offsets(dataset: IndexedDataset, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns where sequences begin, in tokens; the one after the last begins at the end."""
    offsets = np.full(len(sequences), dataset.n_tokens)
    inside = np.asarray(sequences) < len(dataset)
    offsets[inside] = dataset.sequence_pointers[sequences[inside]] // dataset.dtype.itemsize
    return offsets


def _length_rows(dataset: IndexedDataset) -> Iterator[list[str]]:
    counts = count_lengths(dataset)
    filled = np.flatnonzero(counts)
    total, most = int(counts.sum()), int(counts.max())
    for number in range(filled[0], filled[-1] + 1) if len(filled) else ():
        count = int(counts[number])
        low, high = (1 << number) // 2, (1 << number) - 1
        bar = "#" * -(-BAR_CHARACTERS * count // most)  # rounded up: one document is seen
        lengths = f"{low:,}" if low >= high else f"{low:,} to {high:,}"
        yield [lengths, f"{count:,}", f"{count / total:.1%}", bar]


def _record_facts(sidecar: Sidecar) -> dict[str, str]:
    made_by = sidecar.tokenizer
    tokens, text_bytes = max(sidecar.tokens, 1), max(sidecar.text_bytes, 1)
    return {
        "empty documents": f"{sidecar.empty_documents:,}",
        "text": f"{sidecar.text_bytes:,} bytes ({format_bytes(sidecar.text_bytes)})",
        "rate": f"{sidecar.text_bytes / tokens:.3f} bytes per token, "
        f"{sidecar.tokens / text_bytes:.4f} tokens per byte",
        "tokenizer": f"{printable(made_by.name)}, {made_by.vocabulary_size:,} tokens, "
        f"fingerprint {made_by.fingerprint[:16]}",
        "document ends": f"id {made_by.eod_id}" if sidecar.append_eod else "none",
    }


def _show_record(sidecar: Sidecar, console: Console) -> None:
    """Prints groups, steps, source files and unreadable documents."""
    by_tokens = sorted(sidecar.groups.items(), key=lambda item: (-item[1].tokens, item[0]))
    n_tokens = max(sidecar.tokens, 1)
    groups = []
    for value, group in by_tokens:
        counts = [f"{group.documents:,}", format_bytes(group.text_bytes), f"{group.tokens:,}"]
        groups.append([value or "(none)", *counts, f"{group.tokens / n_tokens:.2%}"])
    columns = ("documents", "text", "tokens", "share of tokens")
    _print_table("groups", "value", columns, None, _shortened(groups), console)
    steps = []
    for step in sidecar.steps:
        by_number = sorted(step.dropped.items(), key=lambda item: (-item[1], item[0]))
        reasons = [f"{reason}: {count:,}" for reason, count in by_number]
        reasons += filter(None, [step.describe_sentences()])
        counts = [f"{step.documents_in:,}", f"{step.documents_out:,}"]
        sizes = [format_bytes(step.bytes_in), format_bytes(step.bytes_out)]
        steps.append([step.kind, *counts, *sizes, ", ".join(reasons)])
    columns = ("documents in", "documents out", "text in", "text out")
    _print_table("steps", "step", columns, "dropped", steps, console)
    sources = [[source.path, format_bytes(source.size_bytes)] for source in sidecar.sources]
    _print_table("source files", "file", ("size",), None, _shortened(sources), console)
    if sidecar.quarantined:
        console.print("\nunreadable documents", style="italic")
        kinds = [f"{kind}: {number:,}" for kind, number in sorted(sidecar.quarantined.items())]
        for text in [*kinds, *sidecar.quarantined_places]:
            console.print(f"  {printable(text)}", highlight=False, markup=False)


def _shortened(rows: list[list[str]]) -> list[list[str]]:
    n_more = len(rows) - SHOWN_ROWS
    return rows[:SHOWN_ROWS] + ([[f"and {n_more:,} more"]] if n_more > 0 else [])


def _print_table(
    title: str,
    first: str,
    numbers: Sequence[str],
    last: str | None,
    rows: Iterable[list[str]],
    console: Console,
) -> None:
    """Prints columns of text, numbers and, if there is a last one, text; nothing without rows."""
    table = Table(title=title, title_justify="left", box=None, header_style="")
    table.add_column(first, overflow="fold")
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    if table.row_count:
        console.print()
        console.print(table)


def _show_documents(
    dataset: IndexedDataset, tokenizer: Tokenizer | None, count: int, console: Console
) -> None:
    """Prints evenly spaced documents, including the first and the last."""
    n_documents = len(dataset.document_indices) - 1
    shown = max(0, min(count, n_documents))
    for number in range(shown):
        document = number * (n_documents - 1) // max(shown - 1, 1)
        first, end = _token_offsets(dataset, dataset.document_indices[document : document + 2])
        n_tokens = int(end - first)
        tokens = dataset.stream[first : min(end, first + 4 * SHOWN_CHARACTERS)].astype(np.int64)
        if tokenizer is None:
            text = " ".join(map(str, tokens[:SHOWN_TOKENS]))
            text += " ..." if n_tokens > SHOWN_TOKENS else ""
        else:
            text = tokenizer.decode(tokens)
            is_cut = len(text) > SHOWN_CHARACTERS or n_tokens > len(tokens)
            text = text[:SHOWN_CHARACTERS] + (" ..." if is_cut else "")
        _print_text(f"\ndocument {document:,}, {n_tokens:,} tokens", text, console)


def _print_text(title: str, text: str, console: Console) -> None:
    lines = "\n".join(f"  {printable(line)}" for line in text.split("\n"))
    console.print(f"{title}\n{lines}", highlight=False, markup=False)


def show_order(
    arguments: list[str], split: str, start: int, count: int, output: Path | None
) -> None:
    """Prints the sequences of a split, or writes them as `sequences` (count, T + 1) into an .npz.

    Raises:
        UserError: no such split, or fewer sequences than asked for.
    """
    from trainyard.config.load import load_run
    from trainyard.data.loader import build_orders
    from trainyard.data.order import Split
    from trainyard.data.patterns import find_token_files
    from trainyard.layout.resolve import resolve

    if not arguments:
        raise ConfigError("show order needs a run file", "trainyard show order run.toml")
    run = find_token_files(load_run(arguments[0], arguments[1:]).run)
    names: dict[str, Split] = {name: name for name in get_args(Split)}
    if split not in names:
        raise ConfigError(f"--split {split!r} is not one of {', '.join(names)}")
    order = build_orders(run, resolve(run))[names[split]]
    if order is None:
        raise DataError(
            f"the {split} split of {run.name} has no sequences",
            "see data.split, evaluate.batches and data." + split,
        )
    if start < 0 or count < 1 or start + count > len(order):
        raise DataError(
            f"sequences {start} to {start + count} requested, {split} has {len(order)}",
            "lower --start or --count",
        )
    sequences = order.sequences(start, count)
    if output is None:
        for row in sequences:
            print(*row)  # noqa: T201
        return
    with output.open("wb") as file:
        np.savez(file, sequences=sequences)


def show_tokenizer(name: str, console: Console) -> None:
    """Prints a tokenizer's size, identity and an example.

    Raises:
        DataError: it is not a byte-level BPE tokenizer.
    """
    from trainyard.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(name)
    example = "The train leaves the yard at 07:45."
    ids = tokenizer.encode(example)
    facts = {
        "tokens": f"{tokenizer.vocabulary_size:,}",
        "end of document": str(tokenizer.eod_id),
        "fingerprint": tokenizer.fingerprint,
        "example": f"{example!r} -> {ids}",
        "pieces": " ".join(repr(tokenizer.decode([i])) for i in ids),
    }
    console.print(facts_table(name, facts))
