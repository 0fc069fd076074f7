"""Dynamic loss scaling: keeps fp16 gradients from underflow and overflow.

fp16's maximum is 65,504, and values below 6e-8 become zero. The loss is multiplied by a scale
before the backward pass, and the gradients divided by it in the update. A step with overflowed
gradients is skipped. With a window of 4 good steps and a hysteresis of 2:

    step         1     2     3     4     5     6     7     8     9
    gradients    good  inf   inf   inf   good  good  good  good  inf
    scale        2^16  2^16  2^16  2^15  2^14  2^14  2^14  2^14  2^15
    patience     2     2     1     0     0     0     0     0     2

The first `hysteresis` - 1 overflows, perhaps from odd documents, do not change the scale; each
later one halves it. A full window of consecutive good steps doubles the scale and restores the
patience. A single good step does neither.

Source: Megatron-LM's DynamicGradScaler. Unlike there, the scale has a maximum, 2^64: with all-zero
gradients it would otherwise grow to infinity.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt
from torch import Tensor

from trainyard.config.precisions import LossScale

LARGEST = 2.0**64


class SavedScale(BaseModel):
    """A loss scale in a checkpoint."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    scale: float = Field(gt=0, le=LARGEST)
    good_steps: NonNegativeInt
    """Consecutive good steps since the last scale change or overflow."""
    patience: NonNegativeInt
    """Overflows until the scale halves, including that one; 0: each halves it."""


class LossScaler:
    """Adjusts the loss scale during training; on the device, so that no step waits.

    All ranks use the same global gradient norm, and so get the same scale.

    Args:
        settings: of the run.
        device: where the gradient norm is.
        saved: from a checkpoint; None starts from `settings.initial`.
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
        """Factor for the loss of the next step; a scalar never changed in place."""
        return self._scale

    def update(self, norm: Tensor) -> Tensor:
        """Adds the gradient norm of a step.

        Returns:
            1 if it overflowed and a smaller scale may help, 0 if not or the scale is at its
            minimum, on the device.
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
        """Returns the exact state for a checkpoint, so that a resumed run scales alike."""
        return SavedScale(
            scale=self._scale.item(),
            good_steps=int(self._good_steps.item()),
            patience=int(self._patience.item()),
        )
