"""The global gradient norm, and clipping by it without a device sync."""

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
    """Totals of a step over all ranks, on the device."""

    loss: Tensor
    """Mean over the labelled tokens of the batch."""
    norm: Tensor
    """Euclidean norm of the gradients of that mean, each counted once."""
    multiplier: Tensor
    """Factor from the stored gradients to those of the mean."""

    @property
    def is_finite(self) -> Tensor:
        """Whether loss and norm are finite."""
        return torch.isfinite(self.norm) & torch.isfinite(self.loss)

    def divisor(self, clip_norm: float) -> Tensor:
        """Returns the divisor of the stored gradients that clips those of the mean; fp32.

        Args:
            clip_norm: the largest norm after clipping; inf for no clipping.
        """
        # The same epsilon as torch.nn.utils.clip_grad_norm_, so that weights are equal.
        clipped = torch.clamp((self.norm + 1e-6) / clip_norm, min=1.0)
        return (clipped / self.multiplier).float()


def reduce_step_stats(
    parallel_model: ParallelModel, loss: Tensor, n_labelled: int, divisor: float | Tensor
) -> StepStats:
    """Reduces loss, labelled tokens and squared gradients of all ranks in one message.

    Args:
        parallel_model: with complete gradients.
        loss: this rank's part, divided by `divisor`.
        n_labelled: tokens with a label in this rank's sequences.
        divisor: of the sum of all losses; totals are for their mean, whatever the divisor.
    """
    norms = norms_of([local.gradient for local in parallel_model.local_parameters])
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
    """Returns the norm of each gradient, in fp64; for block-scaled ones, of the decoded values."""
    # On a CPU an fp32 sum of squares over a whole matrix is off by 3e-3 for an embedding of
    # 50,257 rows, and so differs from the sum of its shards. Rows are short enough, and as fast.
    parts = [g if isinstance(g, Tensor) else g.block_norms() for g in gradients]
    if parts[0].is_cpu:
        parts = [torch.linalg.vector_norm(g, dim=-1) if g.ndim > 1 else g for g in parts]
        return torch.stack(torch._foreach_norm(parts, 2, torch.float64))
    return torch.stack(torch._foreach_norm(parts)).double()
