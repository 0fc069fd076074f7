"""`trainyard.Checkpoint`, `generate`, `evaluate` and `evaluate_tasks`: a trained model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.load import load_tensors
from trainyard.config.run import Data, Run
from trainyard.data.loader import build_orders, held_out_batches
from trainyard.data.order import SequenceOrder, Split
from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import CheckpointError, ConfigError, UserError
from trainyard.evaluation import loss
from trainyard.evaluation.generate import Sampling
from trainyard.evaluation.generate import generate as generate_ids
from trainyard.evaluation.likelihood import Answer, TaskScores, answer_tasks, score_answers
from trainyard.evaluation.tasks import Task, read_tasks
from trainyard.evaluation.trained import (
    TrainedRun,
    count_training_tokens,
    open_predictor,
    read_documents,
    read_trained_run,
)
from trainyard.launch.environment import Process
from trainyard.layout.resolve import resolve
from trainyard.log import show_progress
from trainyard.model.gpt import GPT

Prompt = TypeVar("Prompt", str, list[str])


class SavedCheckpoint:
    """A checkpoint: one of a run folder's `checkpoints/step-...`, or the newest of a run folder.

    Args:
        path: of either.

    Raises:
        TrainyardError: there is none, or it is damaged.
    """

    def __init__(self, path: str | Path) -> None:
        self._trained = read_trained_run(Path(path))
        self._model: GPT | None = None

    @property
    def path(self) -> Path:
        """The step's folder."""
        return self._trained.checkpoint

    @property
    def run(self) -> Run:
        """The settings it was trained with."""
        return self._trained.run

    @property
    def tokenizer(self) -> Tokenizer:
        """Encodes text to ids, and decodes them; a TrainyardError if the run has none."""
        return self._trained.require_tokenizer()

    def tensors(self, prefix: str = "model.") -> dict[str, Tensor]:
        """Reads whole tensors on the CPU, by name without the prefix; "": all.

        `embedding.weight` is (V, D), with V padded; `blocks.0.attention.qkv.weight` (3 D, D).
        """
        return load_tensors(self.path, prefix)

    def model(self) -> GPT:
        """Builds the torch module in evaluation mode, once: token ids (B, T) -> hidden (B, T, D).

        It is on the GPU if there is one; `model.logits(hidden)` are (B, T, V).
        """
        if self._model is None:
            self._model = self._trained.load_model()
        return self._model


def generate(
    checkpoint: SavedCheckpoint | str | Path,
    prompt: Prompt = "",  # type: ignore[assignment]
    *,
    tokens: int = 100,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 0.95,
    seed: int = 0,
) -> Prompt:
    """Continues a prompt; returns both, as `trainyard generate` prints them.

    Args:
        checkpoint: or its path.
        prompt: empty: a new document. Several are continued in one batch: a list, as returned.
        tokens: new ones at most; a document may end earlier.
        temperature: 0: greedy decoding.
        top_k: sample from the k most likely tokens; 0: all.
        top_p: sample from the most likely tokens of this total probability.
        seed: the same gives the same text.

    Raises:
        TrainyardError: a value out of range, or a prompt that is too long.
    """
    found = checkpoint if isinstance(checkpoint, SavedCheckpoint) else SavedCheckpoint(checkpoint)
    tokenizer = found.tokenizer
    sampling = Sampling(temperature, top_k, top_p, seed, tokenizer.vocabulary_size)
    prompts: list[str] = [prompt] if isinstance(prompt, str) else prompt
    ids = list(map(tokenizer.encode, prompts))
    new = generate_ids(found.model(), ids, tokens, sampling, tokenizer.eod_id) if ids else []
    texts = [text + tokenizer.decode(sample) for text, sample in zip(prompts, new, strict=True)]
    return texts[0] if isinstance(prompt, str) else texts


@dataclass(frozen=True)
class Evaluation:
    """How well a model predicts held-out text; losses in nats per token."""

    loss: float
    perplexity: float | None
    bits_per_byte: float | None
    n_tokens: int
    n_bytes: int | None
    """Size of the text in UTF-8; None without a tokenizer."""
    unigram_loss: float | None
    """From token frequencies alone."""


def evaluate(
    checkpoint: SavedCheckpoint | str | Path, *, data: str = "", batches: int = 0, stride: int = 0
) -> Evaluation:
    """Measures a model on held-out text, on one device; writes nothing.

    Args:
        checkpoint: or its path.
        data: a text file or the prefix of token files; empty: the run's test split.
        batches: global batches of the test split; 0: as many as evaluations in training.
        stride: with data: tokens between windows; 0: no overlap.

    Raises:
        TrainyardError: no held-out text, or the checkpoint is damaged or has diverged.
    """
    found = checkpoint if isinstance(checkpoint, SavedCheckpoint) else SavedCheckpoint(checkpoint)
    result = measure(found._trained, Process(), [], data, batches, stride)
    assert result is not None
    return result


def measure(
    trained: TrainedRun,
    process: Process,
    overrides: Sequence[str],
    data: str,
    batches: int,
    stride: int,
) -> Evaluation | None:
    """Evaluates on one device or on all ranks of a job, as `evaluate`; None except on rank 0."""
    told = f"{data or 'test split'}, {batches} batches, stride {stride}"
    with open_predictor(trained, process, overrides, told) as predictor:
        if process.rank > 0:  # the first rank fills the cache of orders
            predictor.barrier()
        orders = _build_orders(trained, needed=not data)
        if process.rank == 0:
            predictor.barrier()
        if data:
            documents = read_documents(data, trained.tokenizer)
            found = loss.evaluate_documents(predictor, documents, trained.tokenizer, stride or None)
        else:
            found = _evaluate_test_split(trained, predictor, orders["test"], batches)
    if process.rank > 0:
        return None
    if not math.isfinite(found.mean_loss):
        raise CheckpointError(
            f"the loss of {trained.checkpoint} on {data or 'its test split'} is {found.mean_loss}",
            "its weights are not finite: use a checkpoint from before training diverged",
        )
    train_order, unigram = orders.get("train"), None
    if train_order is not None and found.token_counts is not None:
        counts = count_training_tokens(train_order, trained.run.model.vocabulary_size)
        unigram = loss.unigram_loss(counts, found.token_counts)
    figures: dict[str, Any] = found.as_dict()
    return Evaluation(**figures, unigram_loss=unigram)


def _build_orders(trained: TrainedRun, *, needed: bool) -> dict[Any, SequenceOrder | None]:
    """Builds the run's orders; empty if only token frequencies need them and the data is absent."""
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
    trained: TrainedRun, predictor: loss.Predictor, order: SequenceOrder | None, batches: int
) -> loss.HeldOut:
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
    return loss.held_out_loss(predictor.loss_of, pieces, vocabulary_size, trained.tokenizer)


def evaluate_tasks(
    checkpoint: SavedCheckpoint | str | Path, files: Sequence[str | Path]
) -> dict[str, TaskScores]:
    """Scores a model on tasks, on one device; writes nothing.

    Args:
        checkpoint: or its path.
        files: LAMBADA, HellaSwag, PIQA, ARC, WinoGrande or BLiMP as published; each a path, or
            KIND=PATH where its fields do not tell.

    Returns:
        the scores of each file by kind and name, such as `piqa/valid`.

    Raises:
        TrainyardError: a file is wrong, or the checkpoint is damaged or has diverged.
    """
    found = checkpoint if isinstance(checkpoint, SavedCheckpoint) else SavedCheckpoint(checkpoint)
    tasks = read_tasks(files)
    scores, _ = measure_tasks(found._trained, Process(), [], tasks)
    return scores


def measure_tasks(
    trained: TrainedRun, process: Process, overrides: Sequence[str], tasks: Sequence[Task]
) -> tuple[dict[str, TaskScores], list[list[Answer]]]:
    """Scores on one device or on all ranks of a job, as `evaluate_tasks`; the same on every rank.

    Returns the answers of each task, too.
    """
    tokenizer = trained.require_tokenizer()
    step = read_manifest(trained.checkpoint).step
    told = hashlib.sha256(repr(tasks).encode()).hexdigest()
    with (
        open_predictor(trained, process, overrides, f"tasks {told}") as predictor,
        show_progress("evaluate", plain_lines=process.rank == 0) as update,
    ):
        answers = answer_tasks(predictor, tokenizer, tasks, update)
    found = zip(tasks, answers, strict=True)
    return {task.name: score_answers(each, step) for task, each in found}, answers


Checkpoint = SavedCheckpoint  # its name in `import trainyard`, in a run that of a section
