"""What changes while training, beside weights and optimizer; and the parts a step needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainyard.config.run import Run
from trainyard.data.loader import Loader
from trainyard.data.order import SequenceOrder
from trainyard.data.tokenizer import Tokenizer
from trainyard.parallel.replica import Replica
from trainyard.plan.batches import BatchSchedule
from trainyard.plan.resolve import Plan


class SkippedSteps:
    """Counts steps that left the weights alone because a gradient was not finite.

    The counts stay on the device until somebody reads them, so that counting waits for no step.
    """

    def __init__(self, total: int, device: torch.device) -> None:
        self._total = torch.tensor(float(total), device=device)
        self._in_a_row = torch.zeros((), device=device)

    def add(self, skipped: Tensor) -> None:
        """Takes in one step: 1 if it was skipped, else 0."""
        self._total += skipped
        self._in_a_row = (self._in_a_row + skipped) * skipped

    @property
    def total(self) -> int:
        """Skipped steps since the beginning of the run."""
        return int(self._total.item())

    @property
    def in_a_row(self) -> int:
        """How many of the newest steps were skipped."""
        return int(self._in_a_row.item())


@dataclass
class State:
    """How far the run is; consumed data, learning rate and dropout all follow from the step."""

    step: int
    """Steps done."""
    skipped: SkippedSteps


@dataclass(frozen=True)
class Parts:
    """What training is made of; built once by the worker, passed to whoever needs it."""

    folder: Path
    """The run folder."""
    run: Run
    plan: Plan
    batches: BatchSchedule
    replica: Replica
    """This rank's share of the model."""
    optimizer: torch.optim.AdamW
    train_data: Loader
    valid_order: SequenceOrder | None
    """Held-out sequences; None where there are none."""
    tokenizer: Tokenizer | None
    data_fingerprint: str
    """Identifies the contents of the token files."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.replica.mesh.device

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank speaks for all."""
        return self.replica.mesh.rank == 0
