"""Loads a user's inputs: the model of a run or checkpoint, and held-out text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_tokenizer_copy
from trainyard.checkpoint.resume import find_checkpoint
from trainyard.config.run import Run
from trainyard.data.indexed import IndexedDataset, token_paths
from trainyard.data.order import SequenceOrder
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import Tokenizer, tokenizer_name
from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.loss import Ids
from trainyard.files import FILE_LIMIT_BYTES, read_file
from trainyard.launch.environment import Process
from trainyard.model.gpt import GPT
from trainyard.parallel.mesh import choose_device
from trainyard.planning.hardware import is_cpu_of_amd
from trainyard.precision.block_scaled import torch_dtype
from trainyard.precision.policy import use_onednn

FREQUENCY_TOKENS = 20_000_000  # of the training data: enough for its frequencies
_COUNTED_SEQUENCES = 256


@dataclass(frozen=True)
class TrainedRun:
    """What a checkpoint holds besides its tensors."""

    checkpoint: Path
    run: Run
    tokenizer: Tokenizer | None

    def require_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer.

        Raises:
            ConfigError: the run names none.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"the run in {self.checkpoint} has no tokenizer.path, so it cannot read text",
                "set tokenizer.path in the run file before training; gpt2 ships with Trainyard",
            )
        return self.tokenizer


@dataclass(frozen=True)
class Trained(TrainedRun):
    """A model loaded from a checkpoint, on one device."""

    model: GPT


def read_trained_run(path: Path) -> TrainedRun:
    """Reads a checkpoint, or the newest one of a run folder, without its tensors.

    Raises:
        CheckpointError: there is none, or it is damaged.
        DataError: its tokenizer is missing.
    """
    checkpoint = find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    run = manifest.build_run()
    vocabulary = load_tokenizer_copy(checkpoint, manifest)
    tokenizer = Tokenizer(vocabulary, tokenizer_name(run.tokenizer.path)) if vocabulary else None
    return TrainedRun(checkpoint, run, tokenizer)


def load_trained(path: Path) -> Trained:
    """Loads the model of a checkpoint, or of the newest one of a run folder.

    Raises:
        CheckpointError: there is none, or it is damaged.
        DataError: its tokenizer is missing.
    """
    trained = read_trained_run(path)
    device = choose_device(Process())
    model = load_model(trained, device, choose_dtype(trained.run, device))
    return Trained(trained.checkpoint, trained.run, trained.tokenizer, model)


def load_model(trained: TrainedRun, device: torch.device, dtype: torch.dtype) -> GPT:
    """Loads the model of a checkpoint, to compute in `dtype` by the fastest matmuls of a device.

    Raises:
        CheckpointError: it is damaged.
    """
    model, _, _ = build_model_from_checkpoint(trained.checkpoint, device, dtype)
    if device.type == "cpu" and is_cpu_of_amd():
        use_onednn(model)
    return model


def choose_dtype(run: Run, device: torch.device) -> torch.dtype:
    """Chooses what a trained model computes in: fp32 on a CPU; as trained or bf16 on a GPU."""
    on_gpu = device.type == "cuda"
    return torch_dtype(run.precision.formats.compute) if on_gpu else torch.float32


def read_documents(source: str, tokenizer: Tokenizer | None) -> Iterator[Ids]:
    """Yields the ids of each document of token files, or those of a text file as one document.

    Args:
        source: a prefix of `.bin` and `.idx`, or the path of a UTF-8 text file.
        tokenizer: the model's; must match the token files.

    Raises:
        DataError: the file is missing, not text, or made with another tokenizer.
    """
    prefix = source.removesuffix(".bin").removesuffix(".idx")
    if token_paths(prefix)[1].exists():
        if tokenizer and Path(f"{prefix}.json").exists():
            load_sidecar(prefix).check_against(tokenizer.name, tokenizer.fingerprint, prefix)
        dataset = IndexedDataset(prefix)
        return (dataset.tokens(index) for index in range(len(dataset)))
    text = _read_text(Path(source))
    if tokenizer is None:
        raise DataError(
            f"{source} is text, and the run names no tokenizer",
            "evaluate token files, or set tokenizer.path in the run file before training; "
            "gpt2 ships with Trainyard",
        )
    return iter([np.array(tokenizer.encode(text), np.int64)])


def count_training_tokens(order: SequenceOrder, vocabulary_size: int) -> NDArray[np.int64]:
    """Counts how often each id occurs in the training sequences, (V,).

    The first `FREQUENCY_TOKENS` are enough, since the order is shuffled and blended as in training.
    """
    counts = np.zeros(vocabulary_size, np.int64)
    for first in range(0, len(order), _COUNTED_SEQUENCES):
        count = min(_COUNTED_SEQUENCES, len(order) - first)
        ids = order.sequences(first, count)[:, 1:]  # the first belongs to the previous sequence
        counts += np.bincount(ids.ravel(), minlength=vocabulary_size)
        if counts.sum() >= FREQUENCY_TOKENS:
            break
    return counts


def _read_text(path: Path) -> str:
    if path.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        raise DataError(
            f"{path} is JSON; --data reads plain text and would score its keys and quotes",
            "tokenize it with trainyard prepare and the model's --tokenizer, and give the prefix",
        )
    try:
        return read_file(path, 16 * FILE_LIMIT_BYTES).decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 text: byte {error.start} is {error.object[error.start]:#04x}",
            "convert it to UTF-8, or give a prefix of token files",
        ) from None
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror}",
            "give a text file, or token files <prefix>.bin and <prefix>.idx without their ending",
        ) from None
