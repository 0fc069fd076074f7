"""`trainyard import`: turns a model trained elsewhere into a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def import_(
    folder: Annotated[
        Path, typer.Argument(help="A Hugging Face folder, or a Megatron checkpoint folder.")
    ],
    output: Annotated[Path, typer.Option(help="The run folder to create.")],
    source: Annotated[
        Literal["huggingface", "megatron"], typer.Option("--from", help="Source format.")
    ] = "huggingface",
    tokenizer: Annotated[
        str,
        typer.Option(help="The model's tokenizer: gpt2 or a folder; default: the one in FOLDER."),
    ] = "",
) -> None:
    """Create a run folder from a Hugging Face or Megatron model.

    Example: trainyard import gpt2 --output runs/gpt2

    Example: trainyard import checkpoints --from megatron --output runs/mine --tokenizer gpt2

    Fill in data and schedule in its run.toml; trainyard train then continues from the weights.
    Optimizer state is not imported: moments start from zero.
    """
    if source == "megatron":
        from trainyard.export.from_megatron import import_megatron as import_it
    else:
        from trainyard.export.from_huggingface import import_huggingface as import_it

    checkpoint = import_it(folder, output, tokenizer)
    typer.echo(f"imported {folder} as {checkpoint}: weights only, without optimizer state")
    typer.echo(f"fill in data, batches and schedule in {output / 'run.toml'}")
