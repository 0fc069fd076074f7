"""What `trainyard show` says of token files, tokenizers and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table
from rich.text import Text

from trainyard.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from trainyard.data.sidecar import Sidecar

SHOWN_TOKENS = 64


def show_tokens(prefix: str, count: int, console: Console, *, verify: bool) -> None:
    """Prints counts, sources and the first documents of a pair of token files.

    Raises:
        DataError: they are damaged.
    """
    from trainyard.data.indexed import IndexedDataset
    from trainyard.data.sidecar import load_sidecar

    dataset = IndexedDataset(prefix)
    sidecar = load_sidecar(prefix) if Path(f"{prefix}.json").exists() else None
    if sidecar is not None:
        sidecar.check_files(prefix, full=verify)
    lengths = dataset.sequence_lengths
    facts = {
        "documents": f"{len(dataset.document_indices) - 1:,}",
        "sequences": f"{len(dataset):,}",
        "tokens": f"{dataset.n_tokens:,} of {dataset.dtype}",
    }
    if len(lengths):
        shortest, median, longest = np.percentile(lengths, [0, 50, 100])
        facts["lengths"] = f"{shortest:.0f} to {longest:.0f} tokens, median {median:.0f}"
    facts |= _sidecar_facts(sidecar) if sidecar else {"made by": "unknown: no .json beside it"}
    if verify:
        facts["checksums"] = "match" if sidecar else "unknown: no .json beside it"
    console.print(_table(prefix, facts))
    for index in range(min(count, len(dataset))):
        tokens = " ".join(map(str, dataset.tokens(index)[:SHOWN_TOKENS]))
        console.print(f"sequence {index}: {tokens} ...", highlight=False, markup=False)


def show_tokenizer(path: Path, console: Console) -> None:
    """Prints a tokenizer's size, identity and an example.

    Raises:
        DataError: it is not a byte-level BPE tokenizer.
    """
    from trainyard.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    example = "The train leaves the yard at 07:45."
    ids = tokenizer.encode(example)
    facts = {
        "tokens": f"{tokenizer.vocabulary_size:,}",
        "end of document": str(tokenizer.eod_id),
        "fingerprint": tokenizer.fingerprint,
        "example": f"{example!r} -> {ids}",
        "pieces": " ".join(repr(tokenizer.decode([i])) for i in ids),
    }
    console.print(_table(str(path), facts))


def show_checkpoint(path: Path, console: Console, *, verify: bool) -> None:
    """Prints what a checkpoint, or the newest one of a run folder, holds.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from trainyard.checkpoint.format import read_manifest
    from trainyard.checkpoint.load import find_checkpoint, verify_checkpoint

    checkpoint = find_checkpoint(path)
    manifest = verify_checkpoint(checkpoint) if verify else read_manifest(checkpoint)
    run = manifest.build_run()
    size = format_bytes(sum(file.n_bytes for file in manifest.files.values()))
    facts = {
        "run": f"{run.name}: {run.description}" if run.description else run.name,
        "step": f"{manifest.step:,}",
        "consumed": f"{manifest.consumed_sequences:,} sequences, "
        f"{manifest.consumed_tokens:,} tokens",
        "model": f"{run.model.n_layers} blocks, d_model {run.model.d_model}, "
        f"{run.model.n_heads} heads, sequences of {run.model.sequence_length}",
        "tensors": f"{len(manifest.tensors)} in {len(manifest.files)} files, {size}",
        "data fingerprint": manifest.data_fingerprint or "none",
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "files": "every checksum matches" if verify else "sizes match; --verify reads them all",
    }
    console.print(_table(str(checkpoint), facts))


def _sidecar_facts(sidecar: Sidecar) -> dict[str, str]:
    made_by = sidecar.tokenizer
    facts = {
        "tokenizer": f"{made_by.name}, {made_by.vocabulary_size:,} tokens, "
        f"fingerprint {made_by.fingerprint[:16]}",
        "text": f"{format_bytes(sidecar.text_bytes)}, "
        f"{sidecar.text_bytes / max(sidecar.tokens, 1):.2f} bytes per token",
        "empty documents": f"{sidecar.empty_documents:,}",
        "skipped": str(sidecar.skipped) if sidecar.skipped else "nothing",
    }
    sources = [f"{source.path} ({format_bytes(source.size_bytes)})" for source in sidecar.sources]
    facts["sources"] = "\n".join(sources[:5] + ["..."] * (len(sources) > 5))
    return facts


def _table(title: str, facts: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, Text(value))
    return table
