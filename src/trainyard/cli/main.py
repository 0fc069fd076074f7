"""The command line: one verb per file, heavy imports inside the verbs.

Results go to standard output, everything else to standard error. Exit codes: 0 success, 2 user
error (one message, no traceback), 1 bug, 130 Ctrl-C, 141 closed pipe.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated

import typer
from typer._completion_classes import completion_init
from typer.exceptions import TyperException

from trainyard import __version__
from trainyard.cli.help import PROGRAM, Verbs
from trainyard.errors import EXIT_INTERRUPTED, ConfigError, printable
from trainyard.launch.program import run_program

EXIT_CLOSED_PIPE = 141
"""Exit code where the reader of the output has left, as `head` does."""

app = typer.Typer(
    cls=Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"{PROGRAM} {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Print tracebacks for user errors too; works anywhere on the line."
        ),
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Pretrain GPT models from raw text, with one run file.

    Every verb takes a run by its name in runs/ or by its folder. trainyard VERB -h shows examples.
    """


def main(arguments: list[str] | None = None) -> None:
    """Runs one verb and exits with its exit code."""
    words = [*(sys.argv[1:] if arguments is None else arguments)]
    own = words.index("--") if "--" in words else len(words)
    is_debug = "--debug" in words[:own]
    words = [word for word in words[:own] if word != "--debug"] + words[own:]
    run_program(lambda: _run(words or ["--help"]), is_debug=is_debug)


def _run(words: list[str]) -> int:
    """Runs a verb; returns its exit code."""
    completion_init()
    if odd := [word for word in words if word != word.encode(errors="ignore").decode()]:
        raise ConfigError(f"{printable(odd[0])} is not UTF-8", "rename the file or its folder")
    try:
        code = app(words, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except TyperException as error:
        context = getattr(error, "ctx", None)
        text = error.format_message()
        if text.startswith("Usage:"):  # of a verb that has verbs, alone
            typer.echo(text)
            return 0
        place = context.command_path if context else PROGRAM
        text = f"error: {text[:1].lower()}{text[1:].rstrip('.')}\nhint: {place} --help"
        typer.echo(text, err=True)
        return 2
    except BrokenPipeError:
        code = 1
    except SystemExit as end:  # 1: the parser has met a closed pipe
        if end.code != 1:
            raise
        code = 1
    if code == 1 and isinstance(sys.__stdout__, io.TextIOWrapper):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())
        return EXIT_CLOSED_PIPE
    if code == EXIT_INTERRUPTED:
        typer.echo("interrupted", err=True)
    return code if isinstance(code, int) else 0
