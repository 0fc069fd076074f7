"""A trained model that predicts: whole on one device, or in any layout over the ranks of a job.

    checkpoint of 128 ranks  ->  the parts of this rank  ->  summed loss of a batch, the same on all

Every rank reads the same batches and takes its sequences and tokens of each, as held-out evaluation
in training does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from trainyard.checkpoint.load import load_into
from trainyard.config.load import override_run, render_run
from trainyard.config.precisions import Precision, PrecisionKind
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.evaluation.inputs import TrainedRun, choose_dtype, load_model
from trainyard.evaluation.loss import Predictor, loss_of_model, pad_batch
from trainyard.launch.environment import Process, refuse_missing_devices
from trainyard.model.gpt import GPT
from trainyard.parallel.mesh import build_mesh, choose_device, name_device_errors
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part, place
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.planning.resolve import resolve

ROUNDS = 4
"""Micro batches of a pipeline for each of its stages; every schedule supports whole rounds."""
KINDS: dict[torch.dtype, PrecisionKind] = {torch.float16: "fp16", torch.bfloat16: "bf16"}


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
    run = change(run, plain)
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
        compute_dtype: of activations; absent: as `load_trained`.

    Raises:
        ConfigError: the layout is impossible.
        CheckpointError: the checkpoint is damaged.
        LaunchError: ranks are missing, or differ.
    """
    device = choose_device(process)
    dtype = compute_dtype or choose_dtype(trained.run, device)
    model, size = trained.run.model, trained.run.train.micro_batch_size
    if process.n_ranks == 1 and not overrides:
        whole = load_model(trained, device, dtype)
        measures = loss_of_model(whole), loss_of_model(whole, GPT.score_sequences)
        yield Predictor(*measures, model.sequence_length, model.vocabulary_size, size)
        return
    run = evaluated_run(trained.run, overrides, process.n_ranks, KINDS.get(dtype, "fp32"))
    plan = resolve(run, process.n_ranks)
    refuse_missing_devices(torch.cuda.device_count())

    def facts() -> dict[str, str]:
        return gather_facts(render_run(run), inputs) | {"checkpoint": trained.checkpoint.name}

    with start_ranks(process, device, facts), name_device_errors(run, plan, device):
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
    for each in model.local_parameters:
        name = f"model.{each.name}"
        tensors[name] = local_part(each.parameter)
        placements[name] = place(each.parameter, each.dimension, model.tensor_shard)
    load_into(trained.checkpoint, tensors, trained.run.model.vocabulary_size, placements)
