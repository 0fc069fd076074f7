"""One optimizer step: forward and backward over the micro batches, clip, update."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.layout.resolve import learning_rate
from trainyard.model.dropout import sequence_seeds
from trainyard.model.loss import IGNORE_INDEX
from trainyard.optim.clip import StepStats, reduce_step_stats
from trainyard.parallel.mesh import Mesh
from trainyard.training.state import State, TrainContext

COMPILE_STEPS = 2
"""The first steps of a process, which compile."""


@dataclass(frozen=True)
class StepResult:
    """A step's results; scalars stay on the device until logged."""

    loss: Tensor
    """Mean over the labelled tokens of the whole batch, in nats."""
    gradient_norm: Tensor
    """Global norm before clipping."""
    skipped: Tensor
    """1 if the update was skipped (not finite, or a spike to skip), else 0."""
    spike: Tensor
    """1 if loss or gradient norm spiked, else 0."""
    learning_rate: float


def train_step(context: TrainContext, state: State) -> StepResult:
    """Runs step `state.step`, counted from 0; it depends on state, weights and data only.

    Records the outcome in the state; the caller increments the step.
    """
    run, step = context.run, state.step
    scaler = state.scaler
    loss_scale = None if scaler is None else scaler.scale
    _, totals = compute_gradients(context, step, state.data_offset, loss_scale)
    rate = learning_rate(run, context.plan, context.batches.consumed(step + 1))
    policy = run.guard.spikes
    zero = torch.zeros((), device=context.device)
    spike = zero if policy == "off" else state.spikes.judge(totals)
    skipped = (~totals.is_finite).float()
    if policy == "skip":
        skipped = torch.maximum(skipped, spike)
    context.optimizer.step(rate, totals.divisor(run.optimizer.clip_norm), skipped)
    context.model.balance_experts(skipped)
    context.model.zero_grad()
    # A smaller loss scale cannot mend a loss that is not finite: only gradients count.
    handled_by_loss_scale = (
        zero if scaler is None else scaler.update(totals.norm) * totals.loss.isfinite()
    )
    state.add(skipped, spike, handled_by_loss_scale)
    return StepResult(totals.loss, totals.norm, skipped, spike, rate)


def freeze_collector(n_steps: int) -> None:
    """Hides all live objects from Python's garbage collector once the steps that compile are done.

    A full collection looks at half a million objects of torch: it would stall a step for 0.3 s, at
    a different time on each rank. Objects made later are collected as usual.
    `unfreeze_collector` undoes it.

    Args:
        n_steps: done so far.
    """
    if n_steps == COMPILE_STEPS:
        gc.collect()
        gc.freeze()


@contextmanager
def unfreeze_collector() -> Iterator[None]:
    """Shows the collector all objects again at the end."""
    try:
        yield
    finally:
        gc.unfreeze()


def compute_gradients(
    context: TrainContext, step: int, data_offset: int, loss_scale: Tensor | None = None
) -> tuple[Tensor, StepStats]:
    """Runs the forward and backward passes of a step.

    Args:
        context: holds the weights.
        step: counted from 0.
        data_offset: sequences skipped earlier.
        loss_scale: multiplies the loss in the backward pass; None for 1.

    Returns:
        this rank's part of the loss, scaled, and the totals of all ranks, unscaled.
    """
    run, parallel_model = context.run, context.model
    context.heartbeat.enter("data", step)
    tokens, labels = context.train_data.batch(step, data_offset)  # (G/dp, T): this rank's sequences
    dp_rank, dp_size = parallel_model.mesh.data_rank_and_size
    seeds = None
    if run.model.dropout:
        _seed_attention_dropout(run.train.seed, step, parallel_model.mesh)
        seeds = sequence_seeds(run.train.seed, step, dp_rank * len(tokens), len(tokens))
    # All tokens of the batch; `reduce_step_stats` corrects for those without a label.
    n_expected = dp_size * labels.numel()
    divisor = n_expected if loss_scale is None else n_expected / loss_scale
    context.heartbeat.enter("forward and backward", step)
    loss = parallel_model.forward_backward(tokens, labels, seeds, scale=1 / divisor)
    n_labelled = int((labels != IGNORE_INDEX).sum())
    context.heartbeat.enter("update", step)
    return loss, reduce_step_stats(parallel_model, loss, n_labelled, divisor)


def _seed_attention_dropout(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds the generator of GPU attention kernels; all other dropout uses `dropout_seeds`."""
    if mesh.device.type == "cuda":
        digest = hashlib.sha256(f"attention {seed} {step} {mesh.rank}".encode()).digest()
        torch.cuda.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
