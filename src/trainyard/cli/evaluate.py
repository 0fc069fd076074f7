"""`trainyard evaluate`: how well a trained model predicts held-out text."""

from __future__ import annotations

import json
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.names import complete_run, find_trained
from trainyard.errors import CheckpointError, ConfigError, LaunchError
from trainyard.extras import require
from trainyard.launch.environment import Process, read_process

if TYPE_CHECKING:
    from trainyard.data.order import SequenceOrder, Split
    from trainyard.evaluation.inputs import TrainedRun
    from trainyard.evaluation.loss import HeldOut, Predictor

logger = logging.getLogger("trainyard")

Orders = dict[Any, "SequenceOrder | None"]


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
    from trainyard.evaluation.inputs import (
        count_training_tokens,
        read_documents,
        read_trained_run,
    )
    from trainyard.evaluation.loss import evaluate_documents, unigram_loss
    from trainyard.evaluation.ranks import open_predictor
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
    inputs = f"{data or 'test split'}, {batches} batches, stride {stride}"
    with open_predictor(trained, process, overrides or [], inputs) as predictor:
        if process.rank > 0:  # the first rank fills the cache of orders
            predictor.barrier()
        orders = _build_orders(trained, needed=not data)
        if process.rank == 0:
            predictor.barrier()
        if data:
            documents = read_documents(data, trained.tokenizer)
            found = evaluate_documents(predictor, documents, trained.tokenizer, stride or None)
        else:
            found = _evaluate_test_split(trained, predictor, orders["test"], batches)
    if process.rank > 0:
        return
    if not math.isfinite(found.mean_loss):
        raise CheckpointError(
            f"the loss of {trained.checkpoint} on {data or 'its test split'} is {found.mean_loss}",
            "its weights are not finite: use a checkpoint from before training diverged",
        )
    result: dict[str, Any] = {**found.as_dict(), "unigram_loss": None}
    train_order = orders.get("train")
    if train_order is not None and found.token_counts is not None:
        counts = count_training_tokens(train_order, trained.run.model.vocabulary_size)
        result["unigram_loss"] = unigram_loss(counts, found.token_counts)
    text = json.dumps(result)
    if source != trained.checkpoint:
        publish_text(source / "evaluation.json", text + "\n")
    typer.echo(text if as_json else _render(result, trained.checkpoint, data or "test split"))


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


def _build_orders(trained: TrainedRun, *, needed: bool) -> Orders:
    """Builds the run's orders; empty if only token frequencies need them and the data is absent."""
    from trainyard.config.run import Data
    from trainyard.data.loader import build_orders
    from trainyard.errors import UserError
    from trainyard.planning.resolve import resolve

    wanted: tuple[Split, ...] = ("train", "test") if needed else ("train",)
    # Not the checkpoint's cache folder: the checkpoint may come from someone else.
    data = trained.run.data.model_copy(update={"cache_folder": Data().cache_folder})
    run = trained.run.model_copy(update={"data": data})
    try:
        return {**build_orders(run, resolve(run), wanted)}
    except UserError:
        if needed:
            raise
        return {}


def _evaluate_test_split(
    trained: TrainedRun, predictor: Predictor, order: SequenceOrder | None, batches: int
) -> HeldOut:
    from trainyard.data.loader import held_out_batches
    from trainyard.evaluation.loss import evaluate_sequences

    run, vocabulary_size = trained.run, predictor.vocabulary_size
    n_sequences = (batches or run.evaluate.batches) * run.train.global_batch_size
    if order is None or n_sequences == 0:
        raise ConfigError(
            f"the run has no test split: data.split={run.data.split!r}, "
            f"evaluate.batches={run.evaluate.batches}",
            "pass held-out text with --data",
        )
    n_sequences = min(n_sequences, len(order))
    pieces = held_out_batches(order, n_sequences, predictor.batch_size, vocabulary_size)
    return evaluate_sequences(predictor.loss_of, pieces, vocabulary_size, trained.tokenizer)


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
