"""One optimizer step: forward and backward over the micro batches, clip, update."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from trainyard.model.loss import LABEL_OF_NOTHING, summed_cross_entropy
from trainyard.optim.clip import apply_update, gradient_norm
from trainyard.optim.schedule import learning_rate
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
    run, model = parts.run, parts.model
    tokens, labels = parts.train_data.batch(step)  # (G, T) each
    n_labelled = int((labels != LABEL_OF_NOTHING).sum())
    loss = torch.zeros((), device=parts.device)
    size = run.train.micro_batch_size
    micro_batches = zip(torch.split(tokens, size), torch.split(labels, size), strict=True)
    for index, (inputs, targets) in enumerate(micro_batches):
        seed_dropout(run.train.seed, step, index)
        hidden = model(_to_device(inputs, parts.device))  # (B, T, D)
        targets = _to_device(targets, parts.device)
        part = summed_cross_entropy(
            hidden, model.head_weight, targets, model.vocabulary_size, scale=1 / n_labelled
        )
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach()

    rate = learning_rate(run, parts.plan, parts.batches.consumed(step + 1))
    for group in parts.optimizer.param_groups:
        group["lr"] = rate
    norm = gradient_norm(model.parameters())
    skipped = apply_update(parts.optimizer, norm, run.optimizer.clip_norm)
    parts.optimizer.zero_grad(set_to_none=True)
    return StepResult(loss, norm, skipped, rate)


def seed_dropout(seed: int, step: int, micro_batch: int) -> None:
    """Makes dropout a function of (seed, step, micro batch), so that no generator is saved."""
    digest = hashlib.sha256(f"dropout {seed} {step} {micro_batch}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=True)
