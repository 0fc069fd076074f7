"""`trainyard completion`: prints what completes commands in a shell."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer._completion_shared import get_completion_script

from trainyard.cli.help import PROGRAM


def completion(
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument()],
) -> None:
    """Print the script for completion in a shell.

    It completes verbs, options, runs, presets and fields.

    Examples:
    source <(trainyard completion bash)
    trainyard completion zsh > ~/.zfunc/_trainyard
    trainyard completion fish > ~/.config/fish/completions/trainyard.fish

    Options:
        shell: The shell.
    """
    variable = f"_{PROGRAM.upper()}_COMPLETE"
    typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=variable, shell=shell))
