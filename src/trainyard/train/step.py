"""One optimizer step: forward and backward over the micro batches, clip, update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.model.dropout import sequence_keys
from trainyard.model.loss import LABEL_OF_NOTHING
from trainyard.optim.clip import add_up, apply_update
from trainyard.optim.schedule import learning_rate
from trainyard.parallel.mesh import Mesh
from trainyard.train.state import Parts


@dataclass(frozen=True)
class StepResult:
    """What a step found; scalars that stay on the device until somebody logs them."""

    loss: Tensor
    """Mean over the labelled tokens of the whole batch, in nats."""
    gradient_norm: Tensor
    """Global norm before clipping."""
    skipped: Tensor
    """1 where a gradient was not finite and nothing was changed, else 0."""
    learning_rate: float


def train_step(parts: Parts, step: int) -> StepResult:
    """Does step `step`, counted from 0: a pure function of the step number and the weights."""
    run, replica = parts.run, parts.replica
    tokens, labels = parts.train_data.batch(step)  # (G/dp, T) each: this rank's sequences
    share, n_shares = replica.mesh.data_share
    keys = None
    if run.model.dropout:
        _seed_attention_dropout(run.train.seed, step, replica.mesh)
        keys = sequence_keys(run.train.seed, step, share * len(tokens), len(tokens))
    n_expected = n_shares * labels.numel()
    loss = replica.forward_backward(tokens, labels, keys, scale=1 / n_expected)
    n_labelled = int((labels != LABEL_OF_NOTHING).sum())
    totals = add_up(replica, loss, n_labelled, n_expected)

    rate = learning_rate(run, parts.plan, parts.batches.consumed(step + 1))
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    skipped = apply_update(parts.optimizer, totals, run.optimizer.clip_norm)
    parts.optimizer.zero_grad(set_to_none=True)
    return StepResult(totals.loss, totals.norm, skipped, rate)


def _seed_attention_dropout(seed: int, step: int, mesh: Mesh) -> None:
    """Seeds what kernels of attention on a GPU draw from; all other dropout follows from keys."""
    if mesh.device.type == "cuda":
        digest = hashlib.sha256(f"attention {seed} {step} {mesh.rank}".encode()).digest()
        torch.cuda.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
