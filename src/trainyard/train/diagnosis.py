"""Diagnosis when training aborts: the last step again, block by block.

    step 42, sequences 328 to 335: loss nan, gradient norm nan
      loss not finite on: rank 3
      weights not finite: none
      gradients not finite: blocks.1.mlp.up.weight, blocks.1.mlp.up.bias and 7 more
      gradient norms:
        embedding    not finite
        positions    not finite
        blocks.0     not finite
        blocks.1     not finite
        blocks.2     0.0412
        final_norm   0.00731

Gradients flow from the last block to the first: here a fault in block 1 spoiled everything up to
block 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from trainyard.model.gpt import GPT
from trainyard.optim.clip import norms_of
from trainyard.parallel.placement import local_part
from trainyard.precision.block_scaled import BlockScaledTensor
from trainyard.train.state import State, TrainContext
from trainyard.train.step import compute_gradients
from trainyard.units import format_figure

MOST_NAMED = 8


def diagnose(context: TrainContext, state: State) -> str:
    """Computes the last step again, without an update, and describes its gradients.

    Every rank must call it, and gets the same text. If the step's update was skipped, the weights
    are unchanged and the numbers are those of that step.
    """
    step = state.step - 1
    loss_scale = None if state.scaler is None else state.scaler.scale
    loss, totals = compute_gradients(context, step, state.data_offset, loss_scale)
    names = _parameter_names(context)
    squares, bad_gradients, bad_weights = (
        torch.zeros(len(names), dtype=torch.float64, device=context.device) for _ in range(3)
    )
    parameters = context.model.local_parameters
    index = torch.tensor([names.index(each.name) for each in parameters], device=context.device)
    gradients = [each.gradient for each in parameters]
    squares.index_add_(0, index, norms_of(gradients).square() * context.model.norm_weights)
    bad_gradients.index_add_(0, index, _count_bad(gradients))
    bad_weights.index_add_(
        0, index, _count_bad([local_part(each.parameter) for each in parameters])
    )
    mesh = context.model.mesh
    bad_losses = torch.zeros(mesh.topology.n_ranks, dtype=torch.float64, device=context.device)
    bad_losses[mesh.rank] = 1.0 - loss.isfinite().double()
    context.model.zero_grad()

    found = torch.cat([squares, bad_gradients, bad_weights, bad_losses])
    if mesh.topology.n_ranks > 1:
        dist.all_reduce(found)
    squares, bad_gradients, bad_weights, bad_losses = torch.split(
        found.cpu(), [len(names)] * 3 + [len(bad_losses)]
    )
    norms = _norms_of_blocks(names, squares, float(totals.multiplier))
    width = max(len(block) for block in norms)
    first, end = (state.first_sequence(each) for each in (step, step + 1))
    bad_ranks = [f"rank {rank}" for rank in range(len(bad_losses)) if bad_losses[rank] > 0]
    return "\n".join(
        [
            f"step {state.step}, sequences {first} to {end - 1}: "
            f"loss {format_figure(float(totals.loss), 4)}, "
            f"gradient norm {format_figure(float(totals.norm), 4)}",
            f"  loss not finite on: {_some(bad_ranks)}",
            f"  weights not finite: {_some(_where(names, bad_weights))}",
            f"  gradients not finite: {_some(_where(names, bad_gradients))}",
            "  gradient norms:",
            *(f"    {block:{width}}  {text}" for block, text in norms.items()),
        ]
    )


def _parameter_names(context: TrainContext) -> list[str]:
    """Lists all parameter names, including those of other ranks."""
    with torch.device("meta"):
        model = GPT(context.run.model, context.plan.padded_vocabulary_size)
    return [name for name, _ in model.named_parameters()]


def _count_bad(tensors: Sequence[Tensor | BlockScaledTensor]) -> Tensor:
    """Counts the values of each that are not finite; for block-scaled tensors, blocks."""
    found = (each if isinstance(each, Tensor) else each.block_norms() for each in tensors)
    return torch.stack([(~tensor.isfinite()).sum() for tensor in found]).double()


def _norms_of_blocks(names: list[str], squares: Tensor, multiplier: float) -> dict[str, str]:
    """Renders the gradient norm of each block, and of each layer outside the blocks."""
    sums: dict[str, float] = {}
    for name, square in zip(names, squares.tolist(), strict=True):
        words = name.split(".")
        block = ".".join(words[: 2 if words[0] == "blocks" else 1])
        sums[block] = sums.get(block, 0.0) + square
    norms = {block: square**0.5 * multiplier for block, square in sums.items()}
    return {
        block: f"{norm:.3g}" if norm < float("inf") else "not finite"
        for block, norm in norms.items()
    }


def _where(names: list[str], counts: Tensor) -> list[str]:
    return [name for name, count in zip(names, counts.tolist(), strict=True) if count > 0]


def _some(texts: list[str]) -> str:
    """Lists a few, and counts the rest."""
    n_more = len(texts) - MOST_NAMED
    more = f" and {n_more} more" if n_more > 0 else ""
    return (", ".join(texts[:MOST_NAMED]) or "none") + more
