"""Parts of a small run in this process, alone or as one rank of several, without any files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.config.load import build_run
from trainyard.config.run import Run
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import resolve
from trainyard.optim.optimizer import build_optimizer
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.simulate.parity import build_loader
from trainyard.training.state import State, TrainContext
from trainyard.training.step import StepResult, train_step

BATCH = 8


SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "n_layers": 4,
        "d_model": 16,
        "n_heads": 2,
        "d_ff": 32,
        "sequence_length": 8,
        "vocabulary_size": 40,
        "vocabulary_multiple": 8,
    },
    "train": {
        "micro_batch_size": 1,
        "global_batch_size": BATCH,
        "length": "100 steps",
        "compile": "never",
    },
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"warmup": "0 steps", "decay": "100 steps"},
    "precision": {"kind": "fp32"},
    "parallel": {"zero_stage": 0},
}


def build_small_run(**sections: dict[str, Any]) -> Run:
    """Builds a run; what is given of a section changes its fields."""
    return build_run({n: SECTIONS.get(n, {}) | sections.get(n, {}) for n in SECTIONS | sections})


def build_small_context(n_ranks: int = 1, **sections: dict[str, Any]) -> TrainContext:
    """Builds the context of this rank, for `build_small_run`."""
    run = build_small_run(**sections)
    plan = resolve(run, n_ranks)
    rank = dist.get_rank() if n_ranks > 1 else 0
    mesh = build_mesh(plan.topology, rank, torch.device("cpu"))
    batches = BatchSchedule(run)
    parallel_model = ParallelModel(run, plan, mesh)
    return TrainContext(
        folder=Path(),
        run=run,
        plan=plan,
        batches=batches,
        model=parallel_model,
        optimizer=build_optimizer(parallel_model, run),
        train_data=build_loader(run, plan, mesh.data_rank_and_size),
        valid_order=None,
        tokenizer=None,
        data_fingerprint="",
    )


def take_steps(context: TrainContext, state: State, n: int) -> list[StepResult]:
    results = []
    for _ in range(n):
        results.append(train_step(context, state))
        state.step += 1
    return results


def weights(context: TrainContext) -> list[Tensor]:
    return [
        local_part(local.parameter).detach().clone() for local in context.model.local_parameters
    ]
