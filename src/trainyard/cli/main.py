"""The command line: one verb per file, heavy imports inside the verbs.

Exit codes: 0 success, 2 user error (one message, no traceback), 1 bug.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from trainyard import __version__
from trainyard.cli.bench import bench
from trainyard.cli.check import check
from trainyard.cli.demo import demo
from trainyard.cli.doctor import doctor
from trainyard.cli.evaluate import evaluate
from trainyard.cli.export import export
from trainyard.cli.generate import generate
from trainyard.cli.import_ import import_
from trainyard.cli.launch import launch
from trainyard.cli.plan import plan
from trainyard.cli.prepare import prepare
from trainyard.cli.report import report
from trainyard.cli.show import show
from trainyard.cli.status import status
from trainyard.cli.train import train
from trainyard.errors import UserError
from trainyard.extras import missing_package
from trainyard.launch.environment import hide_secrets, let_idle_threads_sleep
from trainyard.log import build_logger

EXIT_INTERRUPTED = 130
"""Exit code of Ctrl-C where nothing is saved."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Pretrains GPT-3-class language models from raw text, from one run file.",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"trainyard {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Print tracebacks for user errors too.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Pretrains GPT-3-class language models from raw text, from one run file."""


for verb in (
    prepare, plan, launch, status, train, bench, evaluate, generate, report, show, demo,
    doctor,
):  # fmt: skip
    app.command()(verb)
app.add_typer(check, name="check")
app.command("export")(export)
app.command("import")(import_)


def main(arguments: list[str] | None = None) -> None:
    """Runs one verb and exits with its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    build_logger(hide_secrets)
    let_idle_threads_sleep()
    try:
        app(arguments)
    except SystemExit as end:
        if end.code == EXIT_INTERRUPTED:
            typer.echo("interrupted", err=True)
        raise
    except (UserError, ModuleNotFoundError) as error:
        told = missing_package(error) if isinstance(error, ModuleNotFoundError) else error
        if told is None:
            raise
        if "--debug" in arguments:
            typer.echo(hide_secrets(traceback.format_exc()), err=True)
        typer.echo(hide_secrets(f"error: {told}"), err=True)
        sys.exit(told.exit_code)
