"""`trainyard prepare`: raw text to token files."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from trainyard.errors import ConfigError, printable

if TYPE_CHECKING:
    from trainyard.config.corpus import Corpus
    from trainyard.corpus.preparation.prepare import OnError
    from trainyard.corpus.preparation.work_folder import Progress
    from trainyard.data.sidecar import Sidecar


def prepare(
    inputs: Annotated[list[str] | None, typer.Argument()] = None,
    output: Annotated[str, typer.Option("--output", "-o")] = "",
    tokenizer: str = "",
    train_tokenizer: Annotated[int, typer.Option(metavar="N")] = 0,
    json_key: str = "",
    append_eod: Annotated[bool | None, typer.Option("--append-eod/--no-append-eod")] = None,
    special_tokens: Literal["text", "parse"] | None = None,
    split_on: Annotated[str, typer.Option(metavar="TEXT")] = "",
    workers: Annotated[int, typer.Option(min=1)] = 1,
    on_error: Literal["stop", "quarantine"] = "stop",
    overwrite: bool = False,
    status: bool = False,
    fetch: Annotated[str, typer.Option(metavar="CORPUS")] = "",
    only: Annotated[str, typer.Option(metavar="PATTERN")] = "*",
    mirror: Annotated[str, typer.Option(metavar="URL")] = "",
    contact: str = "",
) -> None:
    """Tokenize raw text into Megatron-LM token files.

    Reads JSON Lines and plain text (.jsonl .ndjson .json .txt, also .gz .bz2 .xz .zst), Parquet,
    folders of Hugging Face's datasets library (.arrow), and Wikipedia dumps (.xml .xml.bz2). Reads
    any other file you name as plain text.

    Example: trainyard prepare corpus/ -o web

    With -o web it writes web_text_document.bin, .idx and .json, the tokenizer web_tokenizer, and
    web.toml, a run file for trainyard train. A data file, corpus.toml, holds these settings, and
    steps that clean the text.

    Example: trainyard prepare recipes/azure/data/slimpajama.toml --workers 8

    Run the same command on many machines at once, such as in a job array, to share the work. Run it
    again after an interruption to continue.

    Tokens:
        tokenizer: gpt2 (included), or a folder with vocab.json and merges.txt or with a
            tokenizer.json; default: train one.
        train_tokenizer: First train a tokenizer of N tokens on the inputs and save it as the data
            file's tokenizer, or as <output>_tokenizer; default: N depends on the size of the text.
        json_key: Top-level JSON key, or Parquet or Arrow column, of the text [text].
        append_eod: End every document with the tokenizer's end of document, such as <|endoftext|>
            [yes] (Megatron-LM's tool: no).
        special_tokens: Special tokens such as <|endoftext|> inside a document: text, or parse
            (their ids, as Megatron-LM) [text].
        split_on: Split each document wherever it has this text, such as '<|endoftext|>'.

    Downloading:
        fetch: Only download a corpus, or hf:OWNER/NAME[@REVISION] of Hugging Face, into the folder
            --output (docs/fetching.md).
        only: With --fetch: only files whose path matches.
        mirror: With --fetch: another server to use.
        contact: Your e-mail address or web page, required by Wikimedia's server.

    Options:
        inputs: Text files, folders and globs, or one data file, corpus.toml.
        output: Path prefix of the token files.
        workers: Processes; one core each.
        on_error: On a bad document: stop, or quarantine (set aside and report it).
        overwrite: Replace token files and work made with other settings.
        status: Print the progress and exit.
    """
    from trainyard.config.corpus import check_complete, load_corpus
    from trainyard.corpus.preparation.prepare import choose_tokenizer, train_on_inputs
    from trainyard.corpus.preparation.run_file import write_run_file
    from trainyard.corpus.sources.files import scan_inputs

    if fetch:
        _fetch(fetch, output, only, (mirror, contact))
        return
    if train_tokenizer and tokenizer:
        raise ConfigError(
            "both --tokenizer and --train-tokenizer given",
            "pass --tokenizer gpt2 or a folder, or --train-tokenizer 4096 to train one",
        )
    data_file, files = _split(inputs or [])
    given = {
        "inputs": files,
        "output": output,
        "tokenizer": tokenizer,
        "json_key": json_key,
        "append_eod": append_eod,
        "special_tokens": special_tokens,
        "split_on": split_on,
    }
    values = {name: value for name, value in given.items() if value not in ("", None, [])}
    corpus = load_corpus(data_file, values)
    check_complete(corpus)
    or_fewer = not train_tokenizer
    if not corpus.tokenizer:
        corpus, train_tokenizer = choose_tokenizer(corpus, train_tokenizer)
    if status:
        _print_status(corpus)
        return
    if train_tokenizer:
        _print_skipped(scan_inputs(corpus.inputs)[1])
        train_on_inputs(
            corpus, train_tokenizer, overwrite=overwrite, on_error=on_error, or_fewer=or_fewer
        )
    on_skipped = None if train_tokenizer else _print_skipped
    sidecars = tokenize(corpus, workers, on_error, on_skipped, overwrite=overwrite)
    run_file = write_run_file(corpus, sidecars)
    typer.echo(run_file.note)
    if run_file.command:
        typer.echo(f"train with: {run_file.command}")


def tokenize(
    corpus: Corpus,
    workers: int = 1,
    on_error: OnError = "stop",
    on_skipped: Callable[[Counter[str]], None] | None = None,
    *,
    overwrite: bool,
) -> list[Sidecar]:
    """Writes the token files of a corpus, shows progress, and prints their counts."""
    from trainyard.corpus.preparation.prepare import prepare as prepare_tokens
    from trainyard.log import show_progress

    with show_progress("tokenizing") as update:

        def report(progress: Progress) -> None:
            detail = f"{progress.documents:,} documents, {progress.tokens:,} tokens"
            update(progress.done_bytes, progress.total_bytes, detail)

        sidecars = prepare_tokens(
            corpus,
            workers=workers,
            on_error=on_error,
            overwrite=overwrite,
            on_progress=report,
            on_skipped=on_skipped,
        )
    _print_result(corpus, sidecars)
    return sidecars


def _split(inputs: list[str]) -> tuple[Path | None, list[str]]:
    """Separates a data file from inputs."""
    data_files = [name for name in inputs if name.endswith(".toml")]
    if len(data_files) > 1:
        raise ConfigError(f"{data_files[1]} is a second data file", "prepare one at a time")
    others = [name for name in inputs if name not in data_files]
    return (Path(data_files[0]) if data_files else None), others


def _print_skipped(skipped: Counter[str]) -> None:
    from trainyard.corpus.sources.files import OTHER_TEXT, describe_skipped

    if skipped:
        typer.echo(f"skipped {describe_skipped(skipped)}; {OTHER_TEXT}", err=True)


def _print_result(corpus: Corpus, sidecars: list[Sidecar]) -> None:
    from trainyard.config.corpus import output_prefixes

    prefixes = output_prefixes(corpus, len(sidecars))
    for prefix, sidecar in zip(prefixes, sidecars, strict=True):
        documents = "1 document" if sidecar.documents == 1 else f"{sidecar.documents:,} documents"
        typer.echo(f"{printable(prefix)}.bin: {documents}, {sidecar.tokens:,} tokens")
        for step in sidecar.steps:
            for reason, count in step.dropped.items():
                if step.kind != "read" or reason not in sidecar.quarantined:
                    typer.echo(f"  {step.kind} dropped {count:,}: {reason}")
            if sentences := step.describe_sentences():
                typer.echo(f"  {step.kind} dropped {sentences}")
        _print_odd_texts(sidecar)
        if corpus.split_on and sidecar.steps[0].documents_out <= len(sidecar.sources):
            mark = shlex.quote(printable(corpus.split_on))
            hint = "a shell writes line feeds as $'\\n'"
            typer.echo(f"  --split-on {mark} split no document: {hint}", err=True)
        for kind, count in sidecar.quarantined.items():
            typer.echo(f"quarantined, {kind}: {count}", err=True)
        for place in sidecar.quarantined_places:
            typer.echo(f"  {place}", err=True)
        if sidecar.quarantined:
            typer.echo(f"  all of them: {printable(prefix)}.quarantine.jsonl", err=True)


def _print_odd_texts(sidecar: Sidecar) -> None:
    """Says what looks like no prose, has no token, or is a special token read as text."""
    for kind, count in (sidecar.not_prose or {}).items():
        hint = "if that is not intended, extract the text first (docs/corpora.md)"
        typer.echo(f"  {count:,} documents look like {kind}; {hint}", err=True)
    if sidecar.lost_bytes:
        typer.echo(f"  {sidecar.lost_bytes:,} bytes have no token, and are left out", err=True)
    if not sidecar.special_texts:
        return
    ordered = sorted(sidecar.special_texts.items(), key=lambda item: (-item[1], item[0]))
    listed = ", ".join(f"{printable(token)} {count:,}" for token, count in ordered[:5])
    token = shlex.quote(printable(ordered[0][0]))
    typer.echo(
        f"  special tokens within documents, read as ordinary text: {listed}; to split documents "
        f"there, pass --split-on {token}; to read them as tokens, --special-tokens parse",
        err=True,
    )


def _print_status(corpus: Corpus) -> None:
    from trainyard.corpus.preparation.prepare import read_status

    progress = read_status(corpus)
    if progress is None:
        typer.echo("no work in progress: it is finished or has not started")
        return
    share = 100 * progress.done_bytes / max(progress.total_bytes, 1)
    typer.echo(
        f"{share:.1f} % of {progress.total_bytes / 1e9:.3f} GB of input, "
        f"{progress.units_done} of {progress.units} units, {progress.outputs_done} outputs done"
    )
    typer.echo(f"{progress.documents:,} documents, {progress.tokens:,} tokens so far")
    left = progress.seconds_left
    rate = f"{progress.bytes_per_second / 1e6:.1f} MB/s"
    typer.echo(rate + (f", {left / 60:.0f} min left" if left is not None else ""))
    for name, (state, is_alive) in sorted(progress.workers.items()):
        if is_alive:
            silent = time.time() - state.heard
            typer.echo(f"  {name}: {state.piece or 'waiting'}, last update {silent:.0f} s ago")
    for piece in progress.stopped:
        typer.echo(f"  {piece} has an unreadable document")


def _fetch(name: str, folder: str, only: str, network: tuple[str, str]) -> None:
    from trainyard.corpus.fetching.catalogue import describe
    from trainyard.corpus.fetching.fetch import fetch
    from trainyard.corpus.fetching.web import Network
    from trainyard.launch.environment import read_network
    from trainyard.log import show_progress

    if name.startswith("-"):
        raise ConfigError("--fetch needs a corpus", f"such as --fetch wikipedia {name} ...")
    if "://" in name:  # which may hold a password, so it is not repeated
        hint = "such as wikipedia or hf:OWNER/NAME; pass another server as --mirror"
        raise ConfigError("--fetch takes the name of a corpus, not an address", hint)
    if not folder:
        raise ConfigError("no folder to download to", f"pass -o, such as -o corpora/{name}")
    typer.echo(describe(name), err=True)
    mirror, contact = network
    given = read_network()
    token = given.get("hf_token", "").strip()
    if name.startswith("hf:"):
        mirror = mirror or given.get("hf_endpoint", "")
    with show_progress("fetching") as update:
        result = fetch(
            name,
            Path(folder),
            only=only,
            network=Network(mirror, contact=contact, proxies=given, token=token),
            progress=update,
            announce=lambda line: typer.echo(line, err=True),
        )
    typer.echo(
        f"{folder}: {result.n_files:,} files of {name}, revision {result.revision}, "
        f"{result.n_bytes / 1e9:.3f} GB; {result.n_fetched:,} fetched now"
    )
