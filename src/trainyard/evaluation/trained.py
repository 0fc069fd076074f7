"""A trained model, whole on one device or in any layout over the ranks of a job; and its inputs.

    checkpoint of 128 ranks  ->  the parts of this rank  ->  summed loss of a batch, the same on all

Every rank reads the same batches and takes its sequences and tokens of each, as held-out evaluation
in training does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.checkpoint.format import read_manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_into, load_tokenizer_copy
from trainyard.checkpoint.resume import find_checkpoint
from trainyard.config.devices import is_cpu_of_amd
from trainyard.config.load import override_run, render_run
from trainyard.config.precisions import Precision, PrecisionKind
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.data.indexed import IndexedDataset, token_paths
from trainyard.data.order import SequenceOrder
from trainyard.data.sidecar import load_sidecar
from trainyard.data.tokenizer import Tokenizer, tokenizer_name
from trainyard.errors import ConfigError, DataError
from trainyard.evaluation.loss import Ids, Predictor, loss_of_model, pad_batch
from trainyard.files import FILE_LIMIT_BYTES, read_file
from trainyard.launch.environment import Process, refuse_missing_devices
from trainyard.layout.resolve import resolve
from trainyard.model.gpt import GPT
from trainyard.parallel.mesh import build_mesh, choose_device, explain_device_errors
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.precision.block_scaled import torch_dtype
from trainyard.precision.policy import use_onednn

ROUNDS = 4
"""Micro batches of a pipeline for each of its stages; every schedule supports whole rounds."""
KINDS: dict[torch.dtype, PrecisionKind] = {torch.float16: "fp16", torch.bfloat16: "bf16"}
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

    def load_model(
        self, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> GPT:
        """Loads the whole model, with the fastest matmuls of a device.

        Args:
            device: absent: the GPU if there is one.
            dtype: of activations; absent: fp32 on a CPU, on a GPU as trained.

        Raises:
            CheckpointError: it is damaged.
        """
        device = device or choose_device(Process())
        dtype = dtype or _choose_dtype(self.run, device)
        model, _, _ = build_model_from_checkpoint(self.checkpoint, device, dtype)
        if device.type == "cpu" and is_cpu_of_amd():
            use_onednn(model)
        return model


def _choose_dtype(run: Run, device: torch.device) -> torch.dtype:
    on_gpu = device.type == "cuda"
    return torch_dtype(run.precision.formats.compute) if on_gpu else torch.float32


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


def evaluated_run(run: Run, overrides: Sequence[str], n_ranks: int, kind: PrecisionKind) -> Run:
    """Returns a run in the layout and precision to evaluate in, with a batch that suits both.

    Args:
        run: as it was trained.
        overrides: of `parallel`.
        n_ranks: of the evaluation.
        kind: of precision.

    Raises:
        ConfigError: an override is not of the layout, or the layout is impossible.
    """
    for text in overrides:
        if not text.startswith("parallel."):
            raise ConfigError(
                f"{text!r}: evaluate can change only the layout of a run",
                "give fields of parallel, such as parallel.tensor=2",
            )
    plain = {"train.batch_ramp": None, "train.compile": "never", "precision": Precision(kind=kind)}
    run = change(run, {**plain, "parallel.reduce_format": "fp32"})
    if run.parallel.zero_stage < 3:  # without gradients, lower stages are alike
        run = change(run, {"parallel.zero_stage": 0, "parallel.data_replicate": 1})
    run = override_run(run, overrides)
    n_rounds = ROUNDS * run.parallel.pipeline if run.parallel.pipeline > 1 else 1
    any_batch = run.train.micro_batch_size * n_ranks * n_rounds
    plan = resolve(change(run, {"train.global_batch_size": any_batch}), n_ranks)
    batch = run.train.micro_batch_size * plan.data_parallel_size * n_rounds
    return change(run, {"train.global_batch_size": batch})


@contextmanager
def open_predictor(
    trained: TrainedRun,
    process: Process,
    overrides: Sequence[str],
    inputs: str,
    compute_dtype: torch.dtype | None = None,
) -> Iterator[Predictor]:
    """Loads the model of a checkpoint on this rank, for the block; with several ranks, on all.

    Args:
        trained: of the checkpoint.
        process: this rank.
        overrides: other layout than the one it was trained in; see `evaluated_run`.
        inputs: what it will predict; equal on all ranks.
        compute_dtype: of activations; absent: as `TrainedRun.load_model`.

    Raises:
        ConfigError: the layout is impossible.
        CheckpointError: the checkpoint is damaged.
        LaunchError: ranks are missing, or differ.
    """
    device = choose_device(process)
    dtype = compute_dtype or _choose_dtype(trained.run, device)
    model, size = trained.run.model, trained.run.train.micro_batch_size
    if process.n_ranks == 1 and not overrides:
        whole = trained.load_model(device, dtype)
        measures = loss_of_model(whole), loss_of_model(whole, GPT.score_sequences)
        yield Predictor(*measures, model.sequence_length, model.vocabulary_size, size)
        return
    run = evaluated_run(trained.run, overrides, process.n_ranks, KINDS.get(dtype, "fp32"))
    plan = resolve(run, process.n_ranks)
    refuse_missing_devices(torch.cuda.device_count())

    def facts() -> dict[str, str]:
        return gather_facts(render_run(run), inputs) | {"checkpoint": trained.checkpoint.name}

    with start_ranks(process, device, facts), explain_device_errors(run, plan, device):
        mesh = build_mesh(plan.topology, process.rank, device)
        parallel_model = ParallelModel(run, plan, mesh, dtype, is_filled=True)
        _load_weights(trained, parallel_model)
        batch = run.train.global_batch_size

        def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
            return parallel_model.held_out_loss(*pad_batch(tokens, labels, batch))

        def score_of(tokens: Tensor, labels: Tensor) -> Tensor:
            return parallel_model.score_sequences(*pad_batch(tokens, labels, batch))[: len(tokens)]

        shards_tokens = run.parallel.sequence or run.parallel.context > 1
        yield Predictor(
            loss_of,
            score_of,
            model.sequence_length,
            model.vocabulary_size,
            batch,
            mesh.barrier,
            is_fixed_length=shards_tokens or run.parallel.pipeline > 1,
        )


def _load_weights(trained: TrainedRun, model: ParallelModel) -> None:
    """Copies the weights of a checkpoint into this rank's part of the model."""
    tensors, placements = {}, {}
    for each in model.saved_tensors:
        name = f"model.{each.name}"
        tensors[name] = local_part(each.parameter)
        placements[name] = each.placement
    load_into(trained.checkpoint, tensors, trained.run.model.vocabulary_size, placements)


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
