"""`trainyard prepare`: raw text to token files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainyard.errors import ConfigError


def prepare(
    inputs: Annotated[list[str], typer.Argument(help="Files, folders and globs of text.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Path that the token files begin with.")
    ],
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Folder with vocab.json and merges.txt, or with a tokenizer.json."),
    ] = None,
    train_tokenizer: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Train a tokenizer of N tokens on the inputs first: <output>_tokenizer.",
        ),
    ] = 0,
    json_key: Annotated[
        str, typer.Option(help="JSON key, or Parquet column, that holds the text.")
    ] = "text",
    append_eod: Annotated[
        bool,
        typer.Option(
            "--append-eod/--no-append-eod",
            help="End every document with <|endoftext|> (Megatron-LM's tool: off by default).",
        ),
    ] = True,
    workers: Annotated[int, typer.Option(min=1, help="Processes; one core each.")] = 1,
    on_error: Annotated[
        Literal["stop", "skip"],
        typer.Option(help="A bad document: stop, or skip (left out, counted, named)."),
    ] = "stop",
    special_tokens: Annotated[
        Literal["text", "parse"],
        typer.Option(
            help="<|endoftext|> inside a document: text, or parse (its own id, as Megatron-LM)."
        ),
    ] = "text",
    overwrite: Annotated[bool, typer.Option(help="Replace existing token files.")] = False,
) -> None:
    """Tokenises raw text into Megatron-LM token files: .bin and .idx, with a record in .json.

    Reads JSON lines and plain text (.jsonl .json .txt, also .gz .bz2 .xz .zst) and Parquet.

    Example: trainyard prepare corpus/ -o data/web --tokenizer gpt2/ --workers 8

    writes data/web_text_document.bin, .idx and .json.
    """
    from trainyard.data.prepare import PrepareOptions, output_prefix, train_on_inputs
    from trainyard.data.prepare import prepare as prepare_tokens
    from trainyard.log import show_progress

    options = PrepareOptions(
        inputs=tuple(inputs),
        output=output,
        tokenizer=_choose_tokenizer(tokenizer, train_tokenizer, output),
        json_key=json_key,
        append_eod=append_eod,
        workers=workers,
        on_error=on_error,
        special_tokens=special_tokens,
        overwrite=overwrite,
    )
    if train_tokenizer:
        train_on_inputs(options, train_tokenizer)
    with show_progress("tokenising") as update:

        def report(done_bytes: int, total_bytes: int, documents: int, tokens: int) -> None:
            update(done_bytes, total_bytes, f"{documents:,} documents, {tokens:,} tokens")

        sidecar = prepare_tokens(options, report)
    prefix = output_prefix(output, json_key)
    typer.echo(f"{prefix}.bin: {sidecar.documents:,} documents, {sidecar.tokens:,} tokens")
    for kind, count in sidecar.skipped.items():
        typer.echo(f"skipped, {kind}: {count}", err=True)
    for place in sidecar.skipped_places:
        typer.echo(f"  {place}", err=True)


def _choose_tokenizer(tokenizer: Path | None, train_tokenizer: int, output: Path) -> Path:
    if tokenizer is not None and not train_tokenizer:
        return tokenizer
    if tokenizer is None and train_tokenizer:
        return Path(f"{output}_tokenizer")
    given = "both --tokenizer and --train-tokenizer" if tokenizer else "no tokenizer"
    raise ConfigError(
        f"{given} given",
        "pass --tokenizer with a folder such as GPT-2's, or --train-tokenizer 4096 to make one",
    )
