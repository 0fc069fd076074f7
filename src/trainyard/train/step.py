"""One optimizer step: forward and backward over the micro batches, clip, update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.model.dropout import sequence_keys
from trainyard.model.loss import LABEL_OF_NOTHING
from trainyard.optim.clip import Totals, add_up, apply_update
from trainyard.optim.schedule import learning_rate
from trainyard.parallel.mesh import Mesh
from trainyard.train.state import Parts, State


@dataclass(frozen=True)
class StepResult:
    """What a step found; scalars that stay on the device until somebody logs them."""

    loss: Tensor
    """Mean over the labelled tokens of the whole batch, in nats."""
    gradient_norm: Tensor
    """Global norm before clipping."""
    skipped: Tensor
    """1 where something was not finite, or a spike is to be left out: nothing was changed; or 0."""
    spike: Tensor
    """1 where loss or gradient norm were far above those before, else 0."""
    learning_rate: float


def train_step(parts: Parts, state: State) -> StepResult:
    """Does step `state.step`, counted from 0: it follows from the state and the weights alone.

    The state learns what became of the step; whoever calls this counts it.
    """
    run, step = parts.run, state.step
    scaler = state.scaler
    loss_scale = None if scaler is None else scaler.scale
    _, totals = compute_gradients(parts, step, state.data_offset, loss_scale)
    rate = learning_rate(run, parts.plan, parts.batches.consumed(step + 1))
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    policy = run.guard.spikes
    no = torch.zeros((), device=parts.device)
    spike = no if policy == "off" else state.spikes.judge(totals)
    leave_out = spike if policy == "skip" else None
    skipped = apply_update(parts.optimizer, totals, run.optimizer.clip_norm, leave_out)
    parts.optimizer.zero_grad(set_to_none=True)
    # A smaller scale helps gradients alone: a loss that is not finite was so before it was scaled.
    answered = no if scaler is None else scaler.update(totals.norm) * totals.loss.isfinite()
    state.add(skipped, spike, answered)
    return StepResult(totals.loss, totals.norm, skipped, spike, rate)


def compute_gradients(
    parts: Parts, step: int, data_offset: int, loss_scale: Tensor | None = None
) -> tuple[Tensor, Totals]:
    """Does the forward and backward passes of a step.

    Args:
        parts: hold the weights.
        step: counted from 0.
        data_offset: sequences left out before.
        loss_scale: multiplies the loss in the backward pass; None for 1.

    Returns:
        this rank's part of the loss, scaled, and what all ranks found, which is not.
    """
    run, replica = parts.run, parts.replica
    parts.pulse.enter("data", step)
    tokens, labels = parts.train_data.batch(step, data_offset)  # (G/dp, T): this rank's sequences
    share, n_shares = replica.mesh.data_share
    keys = None
    if run.model.dropout:
        _seed_attention_dropout(run.train.seed, step, replica.mesh)
        keys = sequence_keys(run.train.seed, step, share * len(tokens), len(tokens))
    # Tokens of the whole batch, some of which may have no label.
    n_expected = n_shares * labels.numel()
    divisor = n_expected if loss_scale is None else n_expected / loss_scale
    parts.pulse.enter("forward and backward", step)
    loss = replica.forward_backward(tokens, labels, keys, scale=1 / divisor)
    n_labelled = int((labels != LABEL_OF_NOTHING).sum())
    parts.pulse.enter("update", step)
    return loss, add_up(replica, loss, n_labelled, divisor)


def _seed_attention_dropout(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds what kernels of attention on a GPU draw from; all other dropout follows from keys."""
    if mesh.device.type == "cuda":
        digest = hashlib.sha256(f"attention {seed} {step} {mesh.rank}".encode()).digest()
        torch.cuda.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
