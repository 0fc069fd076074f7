"""`trainyard evaluate`: how well a trained model predicts held-out text."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trainyard.cli.names import complete_run, find_trained
from trainyard.errors import DataError, LaunchError
from trainyard.extras import require
from trainyard.launch.environment import Process, read_process

logger = logging.getLogger("trainyard")


def evaluate(
    source: Annotated[
        Path,
        typer.Argument(help="A run, its folder or a checkpoint.", autocompletion=complete_run),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="With ranks: another layout than in training, parallel.field=value ..."
        ),
    ] = None,
    data: Annotated[
        str, typer.Option(help="A text file or a token file prefix; default: the test split.")
    ] = "",
    batches: Annotated[
        int,
        typer.Option(min=0, help="Global batches of the test split; 0: the run's setting."),
    ] = 0,
    stride: Annotated[
        int,
        typer.Option(min=0, help="With --data: tokens between windows; 0: no overlap."),
    ] = 0,
    ranks: Annotated[
        int, typer.Option(min=1, help="Processes on this machine, in the run's layout.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure loss, perplexity and bits per byte on held-out text.

    Example: trainyard evaluate runs/tiny

    Example: trainyard evaluate runs/tiny/checkpoints/step-00000100 --data book.txt --json

    Example: trainyard evaluate runs/big --ranks 8 parallel.tensor=8 parallel.pipeline=1

    On one device the whole model must fit there. With --ranks, or under torchrun, srun or mpiexec,
    each rank loads its part of it, from a checkpoint of any layout. For a run folder, writes the
    result to its evaluation.json, for the report.
    """
    source = find_trained(source)
    _refuse_missing(data)
    from trainyard.api.checkpoints import measure
    from trainyard.evaluation.inputs import read_trained_run
    from trainyard.files import publish_text

    process = read_process()
    if ranks > 1:
        options = ["--data", data, "--batches", str(batches), "--stride", str(stride)]
        options += ["--json"] if as_json else []
        _start_ranks(ranks, process, [*options, "--", str(source), *(overrides or [])])
        return
    if process.rank > 0:
        logger.setLevel(logging.ERROR)  # rank 0 logs for all
    trained = read_trained_run(source)
    found = measure(trained, process, overrides or [], data, batches, stride)
    if found is None:
        return
    result = asdict(found)
    text = json.dumps(result)
    if source != trained.checkpoint:
        publish_text(source / "evaluation.json", text + "\n")
    typer.echo(text if as_json else _render(result, trained.checkpoint, data or "test split"))


def _refuse_missing(data: str) -> None:
    if data and not any(Path(data + ending).exists() for ending in ("", ".idx")):
        raise DataError(f"--data: {data} does not exist", "name a text file or a token file prefix")


def _start_ranks(n_ranks: int, process: Process, words: list[str]) -> None:
    """Runs this verb once per rank."""
    from trainyard.launch.local import run_ranks

    if process.n_ranks > 1:
        raise LaunchError(
            f"--ranks: a launcher has already started {process.n_ranks} ranks",
            "omit --ranks, or the launcher",
        )
    require("torch")
    with tempfile.TemporaryDirectory(prefix="trainyard-") as logs:
        command = [sys.executable, "-P", "-m", "trainyard.cli", "evaluate", *words]
        run_ranks(n_ranks, command, Path(logs))


def _render(result: dict[str, Any], checkpoint: Path, data: str) -> str:
    def number(key: str, digits: int) -> str:
        return "unknown" if result[key] is None else f"{result[key]:,.{digits}f}"

    rows = {
        "checkpoint": str(checkpoint),
        "text": f"{data}, {number('n_tokens', 0)} tokens, {number('n_bytes', 0)} bytes",
        "loss": f"{number('loss', 4)} nats per token",
        "perplexity": number("perplexity", 2),
        "bits per byte": number("bits_per_byte", 4),
        "unigram loss": f"{number('unigram_loss', 4)} (from token frequencies alone)",
    }
    return "\n".join(f"{name:<14}{value}" for name, value in rows.items())
