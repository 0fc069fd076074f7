"""One optimizer step: forward and backward over the micro batches, clip, update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.model.dropout import sequence_seeds
from trainyard.model.loss import IGNORE_INDEX
from trainyard.optim.clip import StepStats, reduce_step_stats, set_clipping
from trainyard.optim.schedule import learning_rate
from trainyard.parallel.mesh import Mesh
from trainyard.train.state import State, TrainContext


@dataclass(frozen=True)
class StepResult:
    """What a step found; scalars that stay on the device until somebody logs them."""

    loss: Tensor
    """Mean over the labelled tokens of the whole batch, in nats."""
    gradient_norm: Tensor
    """Global norm before clipping."""
    skipped: Tensor
    """1 where something was not finite, or a spike is to be skipped: nothing was changed; or 0."""
    spike: Tensor
    """1 where loss or gradient norm were far above those before, else 0."""
    learning_rate: float


def train_step(context: TrainContext, state: State) -> StepResult:
    """Does step `state.step`, counted from 0: it follows from the state and the weights alone.

    The state learns what became of the step; whoever calls this counts it.
    """
    run, step = context.run, state.step
    scaler = state.scaler
    loss_scale = None if scaler is None else scaler.scale
    _, totals = compute_gradients(context, step, state.data_offset, loss_scale)
    rate = learning_rate(run, context.plan, context.batches.consumed(step + 1))
    for group in context.optimizer.param_groups:
        group["lr"] = rate
    policy = run.guard.spikes
    no = torch.zeros((), device=context.device)
    spike = no if policy == "off" else state.spikes.judge(totals)
    leave_out = spike if policy == "skip" else None
    skipped = set_clipping(context.optimizer, totals, run.optimizer.clip_norm, leave_out)
    context.optimizer.step()
    context.optimizer.zero_grad(set_to_none=True)
    # A smaller scale helps gradients alone: a loss that is not finite was so before it was scaled.
    handled_by_loss_scale = (
        no if scaler is None else scaler.update(totals.norm) * totals.loss.isfinite()
    )
    state.add(skipped, spike, handled_by_loss_scale)
    return StepResult(totals.loss, totals.norm, skipped, spike, rate)


def compute_gradients(
    context: TrainContext, step: int, data_offset: int, loss_scale: Tensor | None = None
) -> tuple[Tensor, StepStats]:
    """Does the forward and backward passes of a step.

    Args:
        context: holds the weights.
        step: counted from 0.
        data_offset: sequences skipped before.
        loss_scale: multiplies the loss in the backward pass; None for 1.

    Returns:
        this rank's part of the loss, scaled, and what all ranks found, which is not.
    """
    run, parallel_model = context.run, context.model
    context.heartbeat.enter("data", step)
    tokens, labels = context.train_data.batch(step, data_offset)  # (G/dp, T): this rank's sequences
    dp_rank, dp_size = parallel_model.mesh.data_rank_and_size
    seeds = None
    if run.model.dropout:
        _seed_attention_dropout(run.train.seed, step, parallel_model.mesh)
        seeds = sequence_seeds(run.train.seed, step, dp_rank * len(tokens), len(tokens))
    # Tokens of the whole batch, some of which may have no label.
    n_expected = dp_size * labels.numel()
    divisor = n_expected if loss_scale is None else n_expected / loss_scale
    context.heartbeat.enter("forward and backward", step)
    loss = parallel_model.forward_backward(tokens, labels, seeds, scale=1 / divisor)
    n_labelled = int((labels != IGNORE_INDEX).sum())
    context.heartbeat.enter("update", step)
    return loss, reduce_step_stats(parallel_model, loss, n_labelled, divisor)


def _seed_attention_dropout(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds what kernels of attention on a GPU draw from; all other dropout follows from seeds."""
    if mesh.device.type == "cuda":
        digest = hashlib.sha256(f"attention {seed} {step} {mesh.rank}".encode()).digest()
        torch.cuda.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
