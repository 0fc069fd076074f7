"""The global gradient norm, and an update that clips by it without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.parallel.model import ParallelModel
from trainyard.precision.block_scaled import BlockScaledTensor


@dataclass(frozen=True)
class StepStats:
    """What a step found over all ranks, on the device."""

    loss: Tensor
    """Mean over the labelled tokens of the batch."""
    norm: Tensor
    """Euclidean norm of the gradients of that mean, each counted once."""
    multiplier: Tensor
    """What the gradients that are stored must be multiplied by to be those of the mean."""


def reduce_step_stats(
    parallel_model: ParallelModel, loss: Tensor, n_labelled: int, divisor: float | Tensor
) -> StepStats:
    """Adds up loss, labelled tokens and the squares of all gradients of all ranks in one message.

    Args:
        parallel_model: its gradients are complete.
        loss: this rank's part, divided by `divisor`.
        n_labelled: tokens with a label in this rank's sequences.
        divisor: of the sum of all losses; totals are those of their mean whatever it is.
    """
    norms = norms_of([each.gradient for each in parallel_model.local_parameters])
    square = norms.square() @ parallel_model.norm_weights
    topology = parallel_model.mesh.topology
    alike = topology.n_ranks // topology.data  # ranks that work on the same sequences
    count = torch.full_like(square, n_labelled / alike)
    totals = torch.stack([loss.double(), square, count])
    if topology.n_ranks > 1:
        dist.all_reduce(totals)
    multiplier = divisor / totals[2]
    precise = torch.promote_types(torch.float32, parallel_model.local_parameters[0].parameter.dtype)
    return StepStats(
        (totals[0] * multiplier).to(precise),
        (totals[1].sqrt() * multiplier).to(precise),
        multiplier.to(precise),
    )


def norms_of(gradients: Sequence[Tensor | BlockScaledTensor]) -> Tensor:
    """Returns the norm of each gradient, in fp64; of codes, that of what they stand for."""
    # On a CPU a sum of squares in fp32 over a whole matrix is wrong by 3e-3 for an embedding of
    # 50,257 rows, and so differs from the sum of its parts. A row is short enough, and as fast.
    parts = [each if isinstance(each, Tensor) else each.block_norms() for each in gradients]
    if parts[0].is_cpu:
        parts = [torch.linalg.vector_norm(g, dim=-1) if g.ndim > 1 else g for g in parts]
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64))
    return torch.stack(torch._foreach_norm(parts)).double()


def apply_update(
    optimizer: torch.optim.Optimizer,
    totals: StepStats,
    clip_norm: float,
    leave_out: Tensor | None = None,
) -> Tensor:
    """Updates the weights with clipped gradients; leaves them alone when a total is not finite.

    The fused AdamW kernel divides gradients by `grad_scale` and skips when `found_inf` is 1, which
    torch.amp.GradScaler uses for loss scaling; here they carry that and the clipping, so that
    gradients are read once and nobody asks the device whether they are finite. Low-bit AdamW does
    the same with them.

    Args:
        optimizer: built by `build_optimizer`; weights, moments and step count stay if it is
            skipped.
        totals: of its gradients.
        clip_norm: the largest norm gradients keep; inf for any.
        leave_out: 1 on the device to skip the step for another reason, else 0.

    Returns:
        1 if the step was skipped, else 0, on the device.
    """
    is_finite = torch.isfinite(totals.norm) & torch.isfinite(totals.loss)
    skipped = (~is_finite).float()
    if leave_out is not None:
        skipped = torch.maximum(skipped, leave_out)
    # The small number is the one torch.nn.utils.clip_grad_norm_ adds: both give the same weights.
    divisor = torch.clamp((totals.norm + 1e-6) / clip_norm, min=1.0) / totals.multiplier
    optimizer.grad_scale = divisor.float()  # type: ignore[attr-defined]
    optimizer.found_inf = skipped  # type: ignore[attr-defined]
    optimizer.step()
    return skipped
