"""`trainyard check`: verifies token files, checkpoints and layouts, and locates every error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.check_checkpoint import checkpoint
from trainyard.cli.check_layout import layout
from trainyard.errors import DataError

if TYPE_CHECKING:
    from trainyard.corpus.verify import DataReport

check = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Verify that token files or checkpoints are intact, or that a layout computes correctly.",
)
check.command()(checkpoint)
check.command()(layout)


@check.command()
def data(
    prefixes: Annotated[
        list[str], typer.Argument(metavar="PREFIX", help="Token files, with or without extension.")
    ],
    tokenizer: Annotated[
        str, typer.Option(help="Expected tokenizer: gpt2 or a folder; also checks token ids.")
    ] = "",
) -> None:
    """Verify every byte of token files against their checksums and the file format.

    Checks the checksum of every block of .bin and .idx, the structure of the .idx, the counts,
    every token id and the end of every document. Lists all problems with their locations. Exit
    code 2 if any prefix has one.

    Example: trainyard check data data/web_text_document --tokenizer gpt2
    """
    from rich.console import Console

    from trainyard.cli.show import without_ending
    from trainyard.cli.show_data import facts_table
    from trainyard.corpus.verify import check_data
    from trainyard.data.tokenizer import load_tokenizer
    from trainyard.log import show_progress

    made_by = load_tokenizer(tokenizer) if tokenizer else None
    console = Console(soft_wrap=True)
    errors: list[DataError] = []
    for prefix in map(without_ending, prefixes):
        try:
            with show_progress(f"checking {prefix}") as update:
                report = check_data(prefix, made_by, update)
        except DataError as error:
            errors.append(error)
        else:
            facts = _facts(report, tokenizer)
            console.print(facts_table(f"{prefix}: OK", facts))
    if errors:
        raise DataError("\n".join(error.problem for error in errors), errors[0].hint)


def _facts(report: DataReport, tokenizer: str) -> dict[str, str]:
    from trainyard.units import format_bytes

    if report.has_record:
        checksums = f"all {report.n_blocks:,} blocks match, {format_bytes(report.n_bytes)}"
    else:
        checksums = "none: without a .json the bytes cannot be verified"
    unknown = "0 or more; the vocabulary is unknown"
    size = report.vocabulary_size
    ends = "every document that is not empty has one" if report.ends_checked else "not expected"
    if not report.has_record:
        ends = "unknown: there is no .json"
    return {
        "checksums": checksums,
        "documents": f"{report.documents:,}",
        "sequences": f"{report.sequences:,}",
        "tokens": f"{report.tokens:,}",
        "token ids": unknown if size is None else f"0 to {size - 1}",
        "document ends": ends,
        "tokenizer": _tokenizer_fact(report, tokenizer),
    }


def _tokenizer_fact(report: DataReport, tokenizer: str) -> str:
    if not tokenizer:
        return "not compared: pass --tokenizer"
    return f"made by {tokenizer}" if report.has_record else f"{tokenizer}: all ids are valid"
