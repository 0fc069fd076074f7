"""`trainyard show` for tokenizers and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainyard.cli.show_data import facts_table
from trainyard.units import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from trainyard.checkpoint.format import Manifest


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


def show_checkpoint(path: Path, console: Console, *, verify: bool) -> None:
    """Prints the contents of a checkpoint, or of the newest one in a run folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from trainyard.checkpoint.format import read_manifest
    from trainyard.checkpoint.load import find_checkpoint
    from trainyard.checkpoint.verify import check_checkpoint

    checkpoint = find_checkpoint(path)
    manifest = check_checkpoint(checkpoint).manifest if verify else read_manifest(checkpoint)
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
        "tokenizer": _describe_tokenizer(manifest),
        "data fingerprint": manifest.data_fingerprint or "none",
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "files": "every checksum matches" if verify else "sizes match; --verify checks contents",
    }
    console.print(facts_table(str(checkpoint), facts))


def _describe_tokenizer(manifest: Manifest) -> str:
    if manifest.tokenizer is not None:
        return f"a copy, fingerprint {manifest.tokenizer.fingerprint[:16]}"
    path = manifest.build_run().tokenizer.path
    return f"{path}, not copied here" if path else "none"
