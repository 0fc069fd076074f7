"""`trainyard import`: a Hugging Face GPT-2 as a run to train on from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_(
    folder: Annotated[
        Path, typer.Argument(help="A folder with config.json and model.safetensors.")
    ],
    output: Annotated[Path, typer.Option(help="The run folder to make.")],
) -> None:
    """Make a run folder from a GPT-2 in Hugging Face's layout.

    Example: trainyard import gpt2 --output runs/gpt2

    Fill in data and schedule in its run.toml; trainyard train then goes on from the weights.
    """
    from trainyard.export.from_huggingface import import_huggingface

    checkpoint = import_huggingface(folder, output)
    typer.echo(f"{folder} is now {checkpoint}")
    typer.echo(f"its run file is {output / 'run.toml'}: fill in data, batches and schedule")
