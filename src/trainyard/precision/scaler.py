"""Dynamic loss scaling: keeps the gradients of fp16 between what underflows and what overflows.

fp16 ends at 65,504, and what is below 6e-8 is zero. The loss is multiplied by a scale before the
backward pass, and the gradients divided by it in the update. A step whose gradients overflowed is
left out. With a window of 4 good steps and a hysteresis of 2:

    step         1     2     3     4     5     6     7     8     9
    gradients    good  inf   inf   inf   good  good  good  good  inf
    scale        2^16  2^16  2^16  2^15  2^14  2^14  2^14  2^14  2^15
    patience     2     2     1     0     0     0     0     0     2

The first `hysteresis` - 1 overflows are let pass, perhaps for odd documents; the next halves the
scale, and so does each after it. So many good steps in a row as the window is long double the
scale, and restore the patience. A lone good step does neither.

Source: the rule of Megatron-LM's DynamicGradScaler. It differs in that the scale has a largest
value, 2^64: where all gradients are zero it would otherwise grow until it is infinite.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from torch import Tensor

from trainyard.config.run import LossScale

LARGEST = 2.0**64


class SavedScale(BaseModel):
    """A loss scale as a checkpoint keeps it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    scale: float = Field(gt=0, le=LARGEST)
    good_steps: NonNegativeInt
    """In a row, since the scale last changed or a step overflowed."""
    patience: NonNegativeInt
    """Overflows until the scale halves, the halving one counted; 0: each does."""


class LossScaler:
    """Finds the loss scale while training; on the device, so that no step waits for it.

    All ranks judge by the same norm, that of all gradients, and so come to the same scale.

    Args:
        settings: of the run.
        device: where the gradient norm is.
        saved: what a checkpoint kept; None starts from `settings.initial`.
    """

    def __init__(
        self, settings: LossScale, device: torch.device, saved: SavedScale | None = None
    ) -> None:
        self._settings = settings
        if saved is None:
            first = min(max(settings.initial, settings.minimum), LARGEST)
            saved = SavedScale(scale=first, good_steps=0, patience=settings.hysteresis)
        # In fp64 any number of tokens divided by a power of two is exact.
        self._scale = torch.tensor(saved.scale, dtype=torch.float64, device=device)
        self._good_steps = torch.tensor(saved.good_steps, device=device)
        self._patience = torch.tensor(saved.patience, device=device)

    @property
    def scale(self) -> Tensor:
        """What the loss of the next step is multiplied by; a scalar that nobody changes."""
        return self._scale

    def update(self, norm: Tensor) -> Tensor:
        """Takes in the gradient norm of a step.

        Returns:
            1 where it overflowed and a smaller scale may help, 0 where it did not or the scale
            is at its minimum, on the device.
        """
        settings, scale = self._settings, self._scale
        overflowed = ~torch.isfinite(norm)
        good_steps = torch.where(overflowed, 0, self._good_steps + 1)
        grows = good_steps >= settings.window
        patience = torch.where(overflowed, (self._patience - 1).clamp(min=0), self._patience)
        halved = torch.where(overflowed & (patience == 0), scale / 2, scale)
        doubled = torch.where(grows, scale * 2, halved)
        self._scale = doubled.clamp(settings.minimum, LARGEST)
        self._good_steps = good_steps.masked_fill(grows, 0)
        self._patience = patience.masked_fill(grows, settings.hysteresis)
        return (overflowed & (scale > settings.minimum)).float()

    def as_saved(self) -> SavedScale:
        """Returns what a checkpoint keeps, exactly, so that a resumed run scales alike."""
        return SavedScale(
            scale=self._scale.item(),
            good_steps=int(self._good_steps.item()),
            patience=int(self._patience.item()),
        )
