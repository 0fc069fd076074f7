"""What `[guard]` of a run does: aborts stuck runs with a diagnosis, rolls back, compares copies.

A diagnosis computes the last step again, block by block:

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

Comparing copies of weights across ranks detects silent data corruption: a faulty device or a
flipped bit in memory makes copies differ, and nothing else reveals it. Copies are replicas of data
parallelism (ZeRO 0, hybrid sharding), layers that tensor ranks replicate, and the embedding tied to
the head on the last pipeline stage. They start equal, get equal gradients, and stay bitwise equal.
Weights on one rank only cannot be compared.

Each part is hashed to one number: the sum of its values' bits, each times an odd factor that
depends on the position. Modulo 2**64, an odd factor maps only 0 to 0, so any change of one value
changes the hash. Changes of several values cancel only by rare coincidence.

    weight       1.5          -2.0                     as bits      0x3fc00000   0xc0000000
    number       0x3fc00000 * factor(0) + 0xc0000000 * factor(1)    mod 2**64
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainyard.errors import GuardError
from trainyard.model.gpt import GPT
from trainyard.optim.clip import norms_of
from trainyard.parallel.model import EMBEDDING, LocalParameter, ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.precision.block_scaled import BlockScaledTensor
from trainyard.topology import name_ranks
from trainyard.training.checkpoints import load_newest
from trainyard.training.metrics import Metrics
from trainyard.training.state import State, TrainContext
from trainyard.training.step import compute_gradients
from trainyard.units import format_figure

ROLLBACKS_LIMIT = 3
MOST_NAMED = 8
MOST_COPIES_NAMED = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = -7046029254386353131  # 2**64 / golden ratio, odd: neighbours get factors far apart
_CHUNK = 2**18  # values; temporaries fit the CPU cache: twice as fast as 2**20


def stop_if_stuck(context: TrainContext, state: State) -> None:
    """Aborts when `guard.skipped_steps_limit` steps in a row were skipped.

    Raises:
        GuardError: with the step and its gradients; nothing is saved.
    """
    in_a_row, limit = state.skipped.in_a_row, context.run.guard.skipped_steps_limit
    if in_a_row >= limit:
        raise GuardError(
            f"{in_a_row} steps in a row up to step {state.step} were skipped "
            f"(guard.skipped_steps_limit={limit})\n{diagnose(context, state)}",
            "these steps changed no weights; lower optimizer.learning_rate or check the data",
        )


def require_equal_copies(context: TrainContext, state: State) -> None:
    """Compares weights that several ranks hold copies of.

    Raises:
        GuardError: names ranks and parameters; nothing is saved.
    """
    problems = differing_copies(context.model)
    if problems:
        interval = context.run.guard.compare_interval
        raise GuardError(
            f"after step {state.step} copies of the same weights differ between ranks; suspect a "
            "faulty device or memory:\n" + "\n".join(f"  {each}" for each in problems),
            "exclude that machine, and remove the checkpoints after step "
            f"{max(0, state.step - interval)}, the last comparison that passed",
        )


def describe_spikes(context: TrainContext, spikes: list[int]) -> str:
    """Describes which steps spiked, and the action taken."""
    guard = context.run.guard
    steps = ", ".join(str(step + 1) for step in spikes[:10]) + (", ..." if spikes[10:] else "")
    done = {"skip": "skipped", "rollback": "rolling back"}.get(guard.spikes, "no action")
    return (
        f"warning: loss or gradient norm of step {steps} is more than {guard.spike_deviations:g} "
        f"standard deviations above the {guard.spike_window} steps before: {done} "
        f"(guard.spikes={guard.spikes})"
    )


def roll_back(
    context: TrainContext,
    state: State,
    spike: int,
    metrics: Metrics,
    show: Callable[[int, str], None],
) -> State:
    """Rolls back to the newest checkpoint before a spike, and skips the data since.

    Args:
        context: of the run; weights and optimizer are reloaded.
        state: the current progress.
        spike: the step of the spike, counted from 0.
        metrics: receives an event.
        show: receives a line.

    Raises:
        CheckpointError: there is no checkpoint before it.
        GuardError: too many rollbacks to this checkpoint.
    """
    context.heartbeat.enter("load", state.step)
    before = load_newest(context, lambda step: step <= spike)
    n_skipped = context.batches.consumed(state.step) - context.batches.consumed(before.step)
    before.skip_data(state, n_skipped, f"spike at step {spike + 1}")
    if before.n_rollbacks_here > ROLLBACKS_LIMIT:
        raise GuardError(
            f"the spike at step {spike + 1} needs rollback {before.n_rollbacks_here} to "
            f"step {before.step}; the limit is {ROLLBACKS_LIMIT}",
            "lower optimizer.learning_rate, or set guard.spikes=warn",
        )
    metrics.forget_steps()
    metrics.write(
        "rollback", {"step": before.step, "from_step": state.step, "skipped_sequences": n_skipped}
    )
    show(before.step, f"rolled back to step {before.step}; skipping {n_skipped} sequences")
    return before


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


def differing_copies(parallel_model: ParallelModel) -> list[str]:
    """Compares weights that several ranks hold; all ranks must call it, between two steps.

    Returns:
        a line for each part whose copies differ, ranks of the rarest copy first, such as
        "blocks.3.mlp.up.weight: rank 3 differs from ranks 0-2"; the same on every rank.
    """
    mesh = parallel_model.mesh
    if mesh.topology.n_ranks == 1:
        return []
    shared = [
        local
        for local in parallel_model.local_parameters
        if _others_may_hold(local, parallel_model)
    ]
    names = {_key_of(local, parallel_model): local.name for local in shared}
    table = _gather_copies(
        list(names), [fingerprint(local_part(local.parameter)) for local in shared]
    )
    # Padding is equal everywhere.
    different = np.unique(table.reshape(-1, 2), axis=0)
    keys, n_different = np.unique(different[:, 0], return_counts=True)
    suspects = set(keys[n_different > 1].tolist())
    if not suspects:
        return []
    in_order = [key for key in dict.fromkeys(table[:, :, 0].flatten().tolist()) if key in suspects]
    lines = []
    for key in in_order[:MOST_COPIES_NAMED]:
        name = mesh.agree(names.get(key))  # a stage knows only its own names
        lines.append(f"{name}: {_describe_copies(table, key)}")
    n_more = len(in_order) - MOST_COPIES_NAMED
    return [*lines, f"and {n_more} more"] if n_more > 0 else lines


def fingerprint(values: Tensor) -> Tensor:
    """Hashes all bits of a tensor to one int64 on its device, without waiting for it."""
    bits = values.flatten().view(_INTEGERS[values.element_size()])
    factors = torch.arange(min(_CHUNK, len(bits)), device=values.device) * _FACTOR
    factors = (factors ^ (factors >> 31)) | 1
    number = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in torch.split(bits, _CHUNK):
        number = number * _FACTOR + (chunk * factors[: len(chunk)]).sum()
    return number


def _others_may_hold(local: LocalParameter, parallel_model: ParallelModel) -> bool:
    is_at_an_end = parallel_model.mesh.first_and_last_stage is not None
    if local.name == EMBEDDING and is_at_an_end:
        return True
    return local.norm_weight(parallel_model.mesh.topology.tensor) < 1


def _key_of(local: LocalParameter, parallel_model: ParallelModel) -> int:
    """Hashes a part of a parameter's name and place; equal on all ranks that hold this part."""
    placed = local.placement
    text = f"{local.name} {placed.offsets} {placed.local_shape}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _gather_copies(keys: list[int], numbers: list[Tensor]) -> NDArray[np.int64]:
    """Gathers the keys and numbers of all ranks, (ranks, parts, 2); 0 where a rank has fewer."""
    n_parts = torch.tensor(len(keys))
    dist.all_reduce(n_parts, dist.ReduceOp.MAX)
    mine = torch.zeros(int(n_parts), 2, dtype=torch.int64)
    if keys:
        mine[: len(keys), 0] = torch.tensor(keys)
        mine[: len(keys), 1] = torch.stack(numbers).cpu()
    everyone = torch.zeros(dist.get_world_size(), *mine.shape, dtype=torch.int64)
    if mine.numel():
        dist.all_gather(list(everyone), mine)
    return everyone.numpy()


def _describe_copies(table: NDArray[np.int64], key: int) -> str:
    """Describes which ranks' copies of a part differ from which others'."""
    ranks_of: dict[int, list[int]] = {}
    for rank, part in zip(*np.nonzero(table[:, :, 0] == key), strict=True):
        ranks_of.setdefault(int(table[rank, part, 1]), []).append(int(rank))
    rarest, *others = sorted(ranks_of.values(), key=lambda ranks: (len(ranks), ranks))
    verb = "differs" if len(rarest) == 1 else "differ"
    return f"{name_ranks(rarest)} {verb} from {' and from '.join(map(name_ranks, others))}"
