"""Rows of the parity table: small runs, each in a layout of its own and on a single device."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch.distributed as dist

from trainyard.config.load import build_run
from trainyard.config.run import Run
from trainyard.planning.layout_check import N_STEPS
from trainyard.training.parity import Outcome, train_three_steps


@dataclass(frozen=True)
class Row:
    """One line of the parity table."""

    parallel: dict[str, Any] = field(default_factory=dict)
    data: int = 1
    model: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    computed_in: str = "fp64"
    precision: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    bound: str = ""
    """What allows for more than the precision does."""

    @property
    def n_ranks(self) -> int:
        """Processes it takes."""
        axes = ("tensor", "pipeline", "context")
        return self.data * int(np.prod([self.parallel.get(axis, 1) for axis in axes]))

    @property
    def batch_size(self) -> int:
        """Sequences of a step: two for each stage on each rank, so that all there is to do is done.

        What is computed in few digits has more, of which the errors are known (decision 013).
        """
        is_exact = self.computed_in in ("fp64", "fp32") and not self.precision
        return 2 * self.parallel.get("pipeline", 1) * self.data if is_exact else 8

    def build_run(self, *, cut: bool = True) -> Run:
        """Builds the run of this row, or the same run on a single device."""
        parallel = {"zero_stage": 0, **self.parallel} if cut else {"zero_stage": 0}
        return build_run(
            {
                "model": {
                    "n_layers": 4,
                    "d_model": 32,
                    "n_heads": 4,
                    "d_ff": 64,
                    "sequence_length": 16,
                    "vocabulary_size": 90,
                    "vocabulary_multiple": 8,
                    "dropout": 0.0,
                    "init_std": 0.2,
                    **self.model,
                },
                "train": {
                    "micro_batch_size": 1,
                    "global_batch_size": self.batch_size,
                    "length": f"{N_STEPS} steps",
                    "compile": "never",
                    **self.train,
                },
                # The gradient of the bias of keys is zero but for rounding: with a usual epsilon
                # Adam would make a full step in the direction of that noise.
                "optimizer": {
                    "kind": self.optimizer,
                    "learning_rate": 1e-2,
                    "clip_norm": 0.5,
                    "epsilon": 1e-3,
                },
                "schedule": {"warmup": "2 steps", "decay": "10 steps", "cooldown": "1 steps"},
                "precision": {"kind": "fp32"} | self.precision,
                "parallel": parallel,
            }
        )


def train_rank(run: Run, n_ranks: int, precision: str) -> Outcome:
    """Trains in this process, one of `n_ranks` that `run_ranks` has started."""
    return train_three_steps(run, dist.get_rank(), n_ranks, precision)
