"""`trainyard import`: turns a model trained elsewhere into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from trainyard.errors import ConfigError
from trainyard.export.foreign import recognize
from trainyard.extras import require
from trainyard.files import publish_text


def import_(
    folder: Annotated[str, typer.Argument()],
    output: Path | None = None,
    source: Annotated[
        Literal["huggingface", "megatron", "megatron-args"] | None, typer.Option("--from")
    ] = None,
    tokenizer: str = "",
    settings: Annotated[list[str] | None, typer.Option("--set")] = None,
) -> None:
    """Create a run from a model or flags of other tools.

    A model of Megatron or of Hugging Face (GPT-2, Llama, Qwen3, OLMo 2, Mixtral, OLMoE) becomes a
    run folder, Megatron's flags a run file.

    Example: trainyard import gpt2 --output runs/gpt2

    Example: trainyard import checkpoints --output runs/mine --tokenizer gpt2

    Example: trainyard import "train.sh bf16" --output run.toml

    Fill in data and schedule in its run.toml; trainyard train then continues from the weights.
    Optimizer state is not imported: moments start from zero.

    Options:
        folder: A Hugging Face folder, a Megatron checkpoint folder, or the command line or script
            of a Megatron training.
        output: The run folder to create; with megatron-args: the run file (default: stdout).
        source: Source format; default: recognized.
        tokenizer: The model's tokenizer: gpt2 or a folder; default: the one in FOLDER, if readable.
        settings: With megatron-args: a variable of the script, NAME=value.
    """
    if output and output.exists():
        raise ConfigError(f"{output} already exists", "name another --output, or remove it")
    source = source or recognize(folder)
    if source == "megatron-args":
        _import_arguments(folder, settings or [], output)
        return
    if output is None:
        raise ConfigError("--output is not given", "name the run folder to create")
    require("torch")
    if source == "megatron":
        from trainyard.export.from_megatron import import_megatron as import_it
    else:
        from trainyard.export.huggingface import import_huggingface as import_it

    checkpoint = import_it(Path(folder), output, tokenizer)
    typer.echo(f"imported {folder} as {checkpoint}: weights only, without optimizer state")
    typer.echo(f"fill in data, batches and schedule in {output / 'run.toml'}")


def _import_arguments(source: str, settings: list[str], output: Path | None) -> None:
    from trainyard.export.megatron_flags import import_command

    imported = import_command(source, settings, output.stem if output else "megatron")
    for warning in imported.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if output:
        publish_text(output, imported.text)
        typer.echo(f"wrote {output}: see it with trainyard plan {output}", err=True)
    else:
        typer.echo(imported.text, nl=False)
