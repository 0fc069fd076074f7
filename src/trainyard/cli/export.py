"""`trainyard export`: writes a trained model in another library's format."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainyard.cli.names import complete_run, find_trained

_VERIFIED_BYTES = 4 * 2**30


def export(
    source: Annotated[
        Path,
        typer.Argument(help="A run, its folder or a checkpoint.", autocompletion=complete_run),
    ],
    output: Annotated[Path, typer.Option(help="The folder to create.")],
    to: Annotated[Literal["huggingface"], typer.Option(help="Target format.")] = "huggingface",
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], typer.Option(help="Data type of the weights.")
    ] = "float32",
    verify: Annotated[
        bool | None,
        typer.Option(
            help="Load the folder back and compare logits, with both models in memory; default: "
            "if transformers is installed and the weights are below 4 GiB."
        ),
    ] = None,
) -> None:
    """Write a checkpoint as a Hugging Face GPT-2 folder.

    Example: trainyard export runs/demo --output demo-hf

    Example: trainyard export runs/demo --output demo-half --dtype bfloat16
    """
    source = find_trained(source)
    import torch

    from trainyard.checkpoint.load import find_checkpoint
    from trainyard.export.to_huggingface import export_huggingface, require_equal_logits

    checkpoint = find_checkpoint(source)
    names = export_huggingface(checkpoint, output, getattr(torch, dtype))
    typer.echo(f"exported {checkpoint} to {output}: {', '.join(names)}")
    if verify is None:
        n_bytes = sum((output / name).stat().st_size for name in names)
        verify = n_bytes < _VERIFIED_BYTES and importlib.util.find_spec("transformers") is not None
    if verify:
        difference = require_equal_logits(checkpoint, output, getattr(torch, dtype))
        typer.echo(
            f"transformers loads it; its logits differ by at most {difference:.1e} of the largest"
        )
