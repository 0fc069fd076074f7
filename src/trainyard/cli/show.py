"""`trainyard show`: prints any part of a run in readable form."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import RUNS_FOLDER, complete_shown, holds_checkpoint, without_ending

if TYPE_CHECKING:
    from rich.console import Console


def show(
    what: Annotated[list[str] | None, typer.Argument(autocompletion=complete_shown)] = None,
    fields: Annotated[bool, typer.Option("--fields")] = False,
    schema: Annotated[bool, typer.Option("--schema")] = False,
    all_fields: Annotated[bool, typer.Option("--all")] = False,
    tokenizer: str = "",
    split: str = "train",
    start: int = 0,
    count: int = 3,
    dropped: Annotated[bool, typer.Option("--dropped")] = False,
    output: Path | None = None,
) -> None:
    """Show a preset, run, token file, checkpoint or cluster.

    It also shows tokenizers, and the order of training sequences.

    Examples:
    trainyard show gpt3-13b
    trainyard show run.toml model.n_layers=24 --all
    trainyard show data/wiki_text_document --tokenizer gpt2 --count 5
    trainyard show data/wiki_text_document --dropped
    trainyard show runs/demo
    trainyard show cluster lumi
    trainyard show --fields train
    trainyard show --schema > run.schema.json
    trainyard show order run.toml --split train --start 0 --count 2000 --output order.npz

    Fields:
        fields: Describe every field, or those of a section.
        all_fields: Also show fields at their defaults.
        schema: Print the JSON schema of run files, for editors.

    Token files and order:
        tokenizer: For token files: gpt2 or a folder; decodes the documents.
        dropped: For token files: show some dropped documents.
        split: For order: train, valid or test.
        start: For order: the first sequence.
        count: For order and token files: number to show.
        output: For order: write the sequences to this .npz file.

    Options:
        what: A preset, a run file with overrides, a token file prefix, a checkpoint or run folder,
            a tokenizer folder or gpt2; or: order RUN_FILE, cluster NAME.
    """
    from trainyard.cli import show_run
    from trainyard.log import build_console, print_lines

    console, names = build_console(soft_wrap=True), what or []
    if schema:
        from trainyard.config.schema import render_schema

        typer.echo(render_schema(), nl=False)
    elif fields:
        print_lines(show_run.render_fields(names[0] if names else ""))
    elif not names:
        typer.echo(show_run.render_families())
    elif names[0] == "order":
        from trainyard.cli.show_data import show_order

        show_order(names[1:], split, start, count, output)
    elif names[0] == "cluster":
        show_run.show_cluster(names[1:], console)
    elif Path(f"{without_ending(names[0])}.idx").exists() or names[0].endswith(".bin"):
        from trainyard.cli.show_data import show_data, show_dropped

        prefix = without_ending(names[0])
        if dropped:
            show_dropped(prefix, console)
            return
        show_data(prefix, console, count=count, tokenizer_path=tokenizer)
    else:
        _show_thing(names[0], names[1:], console, all_fields=all_fields)


def _show_thing(name: str, overrides: list[str], console: Console, *, all_fields: bool) -> None:
    from trainyard.cli import show_run
    from trainyard.config.load import load_run, preset_names
    from trainyard.data.vocabulary import GPT2
    from trainyard.log import print_lines

    path = Path(name)
    if not path.exists() and name not in preset_names():
        path = RUNS_FOLDER / name
    files = ("tokenizer.json", "vocab.json", "gpt2-vocab.json")
    has_tokenizer = any((path / file).exists() for file in files)
    if name == GPT2 or (has_tokenizer and not (path / "manifest.json").exists()):
        from trainyard.cli.show_data import show_tokenizer

        show_tokenizer(name, console)
    elif family := show_run.render_family(name):
        typer.echo(family)
    elif overrides or all_fields or not holds_checkpoint(path):
        loaded = load_run(name, overrides)
        print_lines(show_run.render_run_summary(loaded, with_defaults=all_fields))
    else:
        show_run.show_checkpoint(path, console)
