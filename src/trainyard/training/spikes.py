"""Spikes: a loss or gradient norm far above those of the last steps, judged on the device.

A step is a spike when its loss or its gradient norm is above the mean of those in a window by
more than `guard.spike_deviations` standard deviations. With a window of 8 steps and 6 deviations:

    losses in the window   3.10 3.14 3.08 3.12 3.09 3.11 3.13 3.07    mean 3.105, deviation 0.023
    deviation that counts  at least a fiftieth of the mean: 0.062
    limit                  3.105 + 6 * 0.062 = 3.478
    the next losses        3.30 is taken in; 3.90 is a spike and stays out, so the step after it is
                           compared with the same window

Standard deviations predict rare values poorly when most are alike. Noise on a loss that hardly
moves would count as a spike, so a loss spikes at 12 % above the mean at least. Gradient norms have
a long tail: an odd document in a small batch trebled them in healthy runs on novels (512 tokens a
step), 14 standard deviations above their mean. Their deviation counts as at least half of the mean,
so a gradient norm spikes only beyond four times the mean.

There are no spikes until the window is half full. Steps that are not finite are not spikes: their
update is skipped anyway. A rise that lasts as long as the window is the new level: the window
starts over.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, NonNegativeInt, model_validator
from torch import Tensor

from trainyard.config.run import Guard
from trainyard.optim.clip import StepStats

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
