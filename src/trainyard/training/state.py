"""Training state besides weights and optimizer, and the context a step needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pydantic import (
    BaseModel,
    ConfigDict,
    FiniteFloat,
    JsonValue,
    NonNegativeInt,
    ValidationError,
    model_validator,
)
from torch import Tensor
from typing_extensions import TypedDict

from trainyard.checkpoint.format import first_problem
from trainyard.config.run import Guard, Run
from trainyard.data.loader import Loader
from trainyard.data.order import SequenceOrder
from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import CheckpointError
from trainyard.launch.environment import read_versions
from trainyard.launch.heartbeat import Heartbeat
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import Plan
from trainyard.optim.clip import StepStats
from trainyard.optim.optimizer import LocalOptimizer
from trainyard.parallel.model import ParallelModel
from trainyard.precision.scaler import LossScaler, SavedScale
from trainyard.training.run_folder import Ancestor

ROLLBACK = "rollback: "
LEAST_DEVIATIONS = (0.02, 0.5)
"""Smallest standard deviation of losses and of gradient norms, as a share of their mean."""


class SavedWindow(BaseModel):
    """A window in a checkpoint, oldest step first."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    losses: tuple[FiniteFloat, ...] = ()
    gradient_norms: tuple[FiniteFloat, ...] = ()
    spikes_in_a_row: NonNegativeInt = 0

    @model_validator(mode="after")
    def _one_of_each_a_step(self) -> SavedWindow:
        if len(self.losses) != len(self.gradient_norms):
            raise ValueError(
                f"{len(self.losses)} losses but {len(self.gradient_norms)} gradient norms"
            )
        return self


class SpikeWindow:
    """Losses and gradient norms of the last finite steps that were not spikes.

    A step is a spike when its loss or its gradient norm is more than `guard.spike_deviations`
    standard deviations above the mean of the window. With 8 steps and 6 deviations:

        losses in the window    3.10 3.14 3.08 3.12 3.09 3.11 3.13 3.07; mean 3.105, deviation 0.023
        deviation that counts   at least a fiftieth of the mean: 0.062
        limit                   3.105 + 6 * 0.062 = 3.478
        the next losses         3.30 enters the window; 3.90 is a spike and does not, so the same
                                window judges the step after it

    Noise on a loss that hardly moves would be many deviations: a loss spikes at 12 % above the mean
    at least. Gradient norms have a long tail: in healthy runs on novels (512 tokens a step) an odd
    document trebled them, 14 deviations above their mean. Their deviation counts as at least half
    of the mean, so they spike beyond four times the mean.

    There are no spikes until the window is half full. Steps that are not finite are not spikes:
    their update is skipped anyway. A rise that lasts as long as the window is the new level: the
    window starts over.

    Nothing waits for the device, and all ranks judge alike, since a step's totals are the same on
    all.

    Args:
        guard: the window's length, and the spike threshold.
        device: where totals are.
        saved: from a checkpoint; if the window is shorter now, only the newest steps count.
    """

    def __init__(
        self, guard: Guard, device: torch.device, saved: SavedWindow | None = None
    ) -> None:
        saved = saved or SavedWindow()
        length = guard.spike_window
        known = torch.tensor([saved.losses, saved.gradient_norms], dtype=torch.float64)
        known = known[:, -length:]
        # Newest step last, so that a resumed run sums in the same order; NaN: empty.
        self._values = torch.full((2, length), torch.nan, dtype=torch.float64)
        self._values[:, length - known.shape[1] :] = known
        self._values = self._values.to(device)
        self._in_a_row = torch.tensor(saved.spikes_in_a_row, device=device)
        self._deviations = guard.spike_deviations
        least = torch.tensor(LEAST_DEVIATIONS, dtype=torch.float64)
        self._least_deviations = least.to(device)

    def judge(self, totals: StepStats) -> Tensor:
        """Returns whether a step is a spike; if not, adds it to the window.

        Returns:
            1 for a spike, else 0, on the device; 0 if not finite.
        """
        values, length = self._values, self._values.shape[1]
        new = torch.stack([totals.loss, totals.norm]).double()
        n_known = (~values.isnan()).sum(dim=1)
        mean = values.nansum(dim=1) / n_known  # NaN if empty, and nothing is above NaN
        variance = (values - mean[:, None]).square().nansum(dim=1) / n_known
        deviation = torch.maximum(variance.sqrt(), self._least_deviations * mean.abs())
        is_above = (new > mean + self._deviations * deviation) & (2 * n_known >= length)
        is_finite = new.isfinite().all()
        is_spike = is_above.any() & is_finite

        in_a_row = torch.where(is_spike, self._in_a_row + 1, 0)
        in_a_row = torch.where(is_finite, in_a_row, self._in_a_row)
        is_new_level = in_a_row >= length
        taken_in = torch.cat([values[:, 1:], new[:, None]], dim=1)
        values = torch.where(is_finite & ~is_spike, taken_in, values)
        self._values = values.masked_fill(is_new_level, torch.nan)
        self._in_a_row = in_a_row.masked_fill(is_new_level, 0)
        return is_spike.float()

    def as_saved(self) -> SavedWindow:
        """Returns the exact state for a checkpoint, so that a resumed run judges alike."""
        losses, norms = (tuple(row[~row.isnan()].tolist()) for row in self._values.cpu())
        return SavedWindow(
            losses=losses, gradient_norms=norms, spikes_in_a_row=int(self._in_a_row.item())
        )


class SkippedRange(TypedDict):
    """Sequences that the weights did not learn from, or no longer reflect."""

    from_sequence: int
    """The first, counted as `Loader.batch` does: past the end, the order starts over."""
    to_sequence: int
    """One past the last."""
    step: int
    """Steps done before them."""
    why: str
    """"not finite", "spike", or "rollback: " with its reason."""


class SkippedSteps:
    """Counts steps that did not update the weights: a gradient was not finite, or it was a spike.

    The counts stay on the device until read, so counting waits for no step.
    """

    def __init__(self, total: int, device: torch.device) -> None:
        self._total = torch.tensor(float(total), device=device)
        self._in_a_row = torch.zeros((), device=device)

    def add(self, skipped: Tensor, handled_by_loss_scale: Tensor) -> None:
        """Adds one step; each flag is 1 or 0: it was skipped; the loss scale handled it."""
        self._total += skipped
        self._in_a_row = (self._in_a_row + skipped * (1 - handled_by_loss_scale)) * skipped

    @property
    def total(self) -> int:
        """Skipped steps since the start of the run."""
        return int(self._total.item())

    @property
    def in_a_row(self) -> int:
        """Consecutive newest steps that were skipped, except those the loss scale handled."""
        return int(self._in_a_row.item())


class _Saved(BaseModel):
    """The state in a checkpoint, among other facts."""

    model_config = ConfigDict(frozen=True, strict=True)

    skipped_steps: NonNegativeInt = 0
    data_offset: NonNegativeInt = 0
    skipped_ranges: list[SkippedRange] = []
    spikes: SavedWindow = SavedWindow()
    loss_scale: SavedScale | None = None
    updates_before: NonNegativeInt = 0
    ancestors: list[Ancestor] = []


@dataclass
class State:
    """A run's progress; consumed data, learning rate and dropout all follow from the step."""

    step: int
    """Steps done."""
    batches: BatchSchedule
    skipped: SkippedSteps
    spikes: SpikeWindow
    """Recent losses and gradient norms, to judge the next step."""
    scaler: LossScaler | None = None
    """Where the precision scales the loss."""
    data_offset: int = 0
    """Sequences skipped by rollbacks: every step's data offset."""
    ranges: list[SkippedRange] = field(default_factory=list)
    """All data skipped, up to the last `flush`."""
    updates_before: int = 0
    """Updates that its optimizer state had when it started from another run's."""
    ancestors: list[Ancestor] = field(default_factory=list)
    """The checkpoints it descends from, oldest first."""
    _pending: list[tuple[int, Tensor]] = field(default_factory=list, repr=False)
    """Steps since then, with skipped and spike flags on the device."""

    @classmethod
    def at_start(cls, context: TrainContext) -> State:
        """Returns the state before the first step."""
        return cls.from_json(context, 0, {})

    @classmethod
    def from_json(cls, context: TrainContext, step: int, saved: Mapping[str, JsonValue]) -> State:
        """Returns the state of a checkpoint.

        Args:
            context: of the run.
            step: steps done.
            saved: from `as_json`, perhaps with other facts.

        Raises:
            CheckpointError: `saved` is not valid.
        """
        hint = "it was written by another version of Trainyard, or changed by hand"
        try:
            known = _Saved.model_validate_json(json.dumps(saved))
        except ValidationError as error:
            raise CheckpointError(
                f"the training state in the checkpoint of step {step} is not valid: "
                f"{first_problem(error)}",
                hint,
            ) from None
        if known.skipped_steps > step:
            raise CheckpointError(
                f"the checkpoint of step {step} records {known.skipped_steps} skipped steps", hint
            )
        precision = context.run.precision
        scaler = None
        if precision.formats.scales_loss:
            scaler = LossScaler(precision.loss_scale, context.device, known.loss_scale)
        return cls(
            step,
            context.batches,
            SkippedSteps(known.skipped_steps, context.device),
            SpikeWindow(context.run.guard, context.device, known.spikes),
            scaler,
            known.data_offset,
            known.skipped_ranges,
            known.updates_before,
            known.ancestors,
        )

    def as_json(self) -> dict[str, JsonValue]:
        """Returns the exact state for a checkpoint, except the step, after a flush."""
        self.read_outcomes()
        known = _Saved(
            skipped_steps=self.skipped.total,
            data_offset=self.data_offset,
            skipped_ranges=self.ranges,
            spikes=self.spikes.as_saved(),
            loss_scale=None if self.scaler is None else self.scaler.as_saved(),
            updates_before=self.updates_before,
            ancestors=self.ancestors,
        )
        return known.model_dump(mode="json")

    @property
    def updates(self) -> int:
        """Updates that the optimizer state has had, also in runs before."""
        return self.updates_before + self.step - self.skipped.total

    def add(self, skipped: Tensor, spike: Tensor, handled_by_loss_scale: Tensor) -> None:
        """Adds the outcome of the next step, without waiting for it; all flags are 1 or 0.

        Args:
            skipped: whether its update was skipped.
            spike: whether it was a spike.
            handled_by_loss_scale: whether gradients overflowed and the loss scale can still fall.
        """
        self.skipped.add(skipped, handled_by_loss_scale)
        self._pending.append((self.step, torch.stack([skipped, spike])))

    def read_outcomes(self) -> list[int]:
        """Reads from the device what happened in the steps since the last call.

        Returns:
            the spikes, counted from 0, whether or not their update was skipped.
        """
        if not self._pending:
            return []
        steps = [step for step, _ in self._pending]
        found = torch.stack([each for _, each in self._pending]).tolist()
        self._pending.clear()
        for step, (skipped, spike) in zip(steps, found, strict=True):
            if skipped:
                first, end = (self.first_sequence(each) for each in (step, step + 1))
                self._record(first, end, step, "spike" if spike else "not finite")
        return [step for step, (_, spike) in zip(steps, found, strict=True) if spike]

    def first_sequence(self, step: int) -> int:
        """Returns the first sequence a step reads."""
        return self.batches.position(step) + self.data_offset

    def skip_data(self, abandoned: State, n_sequences: int, why: str) -> None:
        """Skips the data that an abandoned attempt from here has read.

        Args:
            abandoned: its state.
            n_sequences: how many it consumed from this step on.
            why: the reason it was abandoned.
        """
        assert not self._pending and self.step <= abandoned.step
        # Earlier rollbacks to this step have already skipped what lies before.
        before = [r for r in abandoned.ranges if r["step"] == self.step and is_rollback(r)]
        self.ranges = [r for r in abandoned.ranges if r["step"] < self.step] + before
        first = max([self.first_sequence(self.step), *(r["to_sequence"] for r in before)])
        self.data_offset = abandoned.data_offset + n_sequences
        self._record(first, self.first_sequence(self.step), self.step, ROLLBACK + why)

    @property
    def n_rollbacks_here(self) -> int:
        """How often training was rolled back to this step."""
        return sum(r["step"] == self.step and is_rollback(r) for r in self.ranges)

    def _record(self, first: int, end: int, step: int, why: str) -> None:
        self.ranges.append(SkippedRange(from_sequence=first, to_sequence=end, step=step, why=why))


def is_rollback(skipped: SkippedRange) -> bool:
    """Whether data was skipped by a rollback, not by a skipped update."""
    return skipped["why"].startswith(ROLLBACK)


@dataclass(frozen=True)
class TrainContext:
    """Everything a training step needs; built once by the worker."""

    folder: Path
    """The run folder."""
    run: Run
    plan: Plan
    batches: BatchSchedule
    model: ParallelModel
    """This rank's part of the model."""
    optimizer: LocalOptimizer
    train_data: Loader
    valid_order: SequenceOrder | None
    """Held-out sequences; None if there are none."""
    tokenizer: Tokenizer | None
    data_fingerprint: str
    """Identifies the contents of the token files."""
    test_order: SequenceOrder | None = None
    """Sequences of the final evaluation; None if there are none."""
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    """Reports this process's phase to its parent."""

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self.model.mesh.device

    @property
    def attention_kernel(self) -> str:
        """The kernel that computes attention on this device."""
        return self.model.attention_kernel

    @property
    def versions(self) -> dict[str, str]:
        """What can change a result besides the run: versions of software, and kernels."""
        return read_versions() | {"attention": self.attention_kernel}

    @property
    def is_first_rank(self) -> bool:
        """Whether this rank reports for all."""
        return self.model.mesh.rank == 0
