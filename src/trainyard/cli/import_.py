"""`trainyard import`: a model trained elsewhere as a run to train on from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def import_(
    folder: Annotated[
        Path, typer.Argument(help="A folder with config.json, or what Megatron saved.")
    ],
    output: Annotated[Path, typer.Option(help="The run folder to make.")],
    source: Annotated[
        Literal["huggingface", "megatron"], typer.Option("--from", help="The layout.")
    ] = "huggingface",
    tokenizer: Annotated[
        str,
        typer.Option(help="The model's tokenizer: gpt2 or a folder; default: the one in FOLDER."),
    ] = "",
) -> None:
    """Make a run folder from a GPT-2 in Hugging Face's layout, or from a Megatron checkpoint.

    Example: trainyard import gpt2 --output runs/gpt2

    Example: trainyard import checkpoints --from megatron --output runs/mine --tokenizer gpt2

    Fill in data and schedule in its run.toml; trainyard train then goes on from the weights.
    Optimizer state is not imported: moments start from zero.
    """
    if source == "megatron":
        from trainyard.export.from_megatron import import_megatron as import_it
    else:
        from trainyard.export.from_huggingface import import_huggingface as import_it

    checkpoint = import_it(folder, output, tokenizer)
    typer.echo(f"{folder} is now {checkpoint}: weights alone, its optimizer starts afresh")
    typer.echo(f"its run file is {output / 'run.toml'}: fill in data, batches and schedule")
