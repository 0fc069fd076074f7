"""`trainyard evaluate`: how well a trained model predicts held-out text."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from trainyard.data.order import SequenceOrder, Split
    from trainyard.evaluate.inputs import Trained
    from trainyard.evaluate.loss import HeldOut

Orders = dict[Any, "SequenceOrder | None"]


def evaluate(
    source: Annotated[Path, typer.Argument(help="A run folder or a checkpoint.")],
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure loss, perplexity and bits per byte on held-out text.

    Example: trainyard evaluate runs/tiny

    Example: trainyard evaluate runs/tiny/checkpoints/step-00000100 --data book.txt --json

    For a run folder, writes the result to its evaluation.json, for the report.
    """
    from trainyard.errors import CheckpointError
    from trainyard.evaluate.inputs import count_training_tokens, load_trained
    from trainyard.evaluate.loss import unigram_loss
    from trainyard.files import publish_text

    trained = load_trained(source)
    orders = _build_orders(trained, needed=not data)
    if data:
        found = _evaluate_data(trained, data, stride)
    else:
        found = _evaluate_test_split(trained, orders["test"], batches)
    if not math.isfinite(found.mean_loss):
        raise CheckpointError(
            f"the loss of {trained.checkpoint} on {data or 'its test split'} is {found.mean_loss}",
            "its weights are not finite: use a checkpoint from before training diverged",
        )
    result: dict[str, Any] = {**found.as_dict(), "unigram_loss": None}
    train_order = orders.get("train")
    if train_order is not None and found.token_counts is not None:
        counts = count_training_tokens(train_order, trained.model.vocabulary_size)
        result["unigram_loss"] = unigram_loss(counts, found.token_counts)
    text = json.dumps(result)
    if source != trained.checkpoint:
        publish_text(source / "evaluation.json", text + "\n")
    typer.echo(text if as_json else _render(result, trained.checkpoint, data or "test split"))


def _build_orders(trained: Trained, *, needed: bool) -> Orders:
    """Builds the run's orders; empty if only token frequencies need them and the data is absent."""
    from trainyard.config.run import Data
    from trainyard.data.loader import build_orders
    from trainyard.errors import UserError
    from trainyard.plan.resolve import resolve

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


def _evaluate_data(trained: Trained, data: str, stride: int) -> HeldOut:
    from trainyard.evaluate.inputs import read_documents
    from trainyard.evaluate.loss import evaluate_documents

    documents = read_documents(data, trained.tokenizer)
    return evaluate_documents(trained.model, documents, trained.tokenizer, stride or None)


def _evaluate_test_split(trained: Trained, order: SequenceOrder | None, batches: int) -> HeldOut:
    from trainyard.data.loader import held_out_batches
    from trainyard.errors import ConfigError
    from trainyard.evaluate.loss import evaluate_sequences, loss_of_model

    run = trained.run
    n_sequences = (batches or run.evaluate.batches) * run.train.global_batch_size
    if order is None or n_sequences == 0:
        raise ConfigError(
            f"the run has no test split: data.split={run.data.split!r}, "
            f"evaluate.batches={run.evaluate.batches}",
            "pass held-out text with --data",
        )
    pieces = held_out_batches(
        order,
        min(n_sequences, len(order)),
        run.train.micro_batch_size,
        trained.model.vocabulary_size,
    )
    model = trained.model
    loss_of = loss_of_model(model)
    return evaluate_sequences(loss_of, pieces, model.vocabulary_size, trained.tokenizer)


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
