"""The global gradient norm, and an update that clips by it without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Computes the Euclidean norm of all gradients together, a scalar on their device."""
    return torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def apply_update(optimizer: torch.optim.AdamW, norm: Tensor, clip_norm: float) -> Tensor:
    """Updates the weights with clipped gradients; leaves them alone when the norm is not finite.

    The fused AdamW kernel divides gradients by `grad_scale` and skips when `found_inf` is 1, which
    torch.amp.GradScaler uses for loss scaling; here they carry the clipping, so that gradients are
    read once and nobody asks the device whether they are finite.

    Args:
        optimizer: built by `build_adamw`; weights, moments and step count stay if it is skipped.
        norm: global norm of its gradients.
        clip_norm: the largest norm gradients keep; inf for any.

    Returns:
        1 if the step was skipped, else 0, on the device.
    """
    skipped = (~torch.isfinite(norm)).float()
    # The small number is the one torch.nn.utils.clip_grad_norm_ adds: both give the same weights.
    optimizer.grad_scale = torch.clamp((norm + 1e-6) / clip_norm, min=1.0)  # type: ignore[attr-defined]
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    optimizer.step()
    return skipped
