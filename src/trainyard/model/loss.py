"""Output head and cross entropy in one, without ever holding all logits.

At vocabulary 50,304 the logits of a micro batch are the largest tensor of a training step: those of
16 sequences of 256 tokens take 824 MB, their log-probabilities as much, their gradient as much.

    hidden (4,096, 384) -> 4 chunks of 1,024 rows
      for each chunk:  logits = hidden weight^T          (1,024, 50,304)
                       loss  -= log softmax(logits)[label]
                       logits = softmax(logits) - one-hot(label), the gradient, in the same memory
                       gradient of hidden  = logits weight
                       gradient of weight += logits^T hidden

The gradient of a sum of cross entropies is known as soon as the logits are, so both backward
products are taken at once and the logits are dropped. What comes from above in the backward pass is
one number; `scale` brings it in beforehand, so that the large gradient need not be read again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LABEL_OF_NOTHING = -100
# A smaller chunk takes less memory, a larger one adds to the gradient of the weight less often.
CPU_CHUNK_BYTES = 256 * 2**20
GPU_CHUNK_BYTES = 512 * 2**20


def summed_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocabulary_size: int, scale: float = 1.0
) -> Tensor:
    """Sums the cross entropy of every labelled token.

    Args:
        hidden: final hidden states, (B, T, D), in the compute precision.
        weight: output matrix, (V, D), fp32.
        labels: next token ids, (B, T), int64; -100 where there is nothing to learn.
        vocabulary_size: rows of `weight` that are real; the padding above gets no probability.
        scale: multiplies the sum; one over the tokens of a step makes it a share of their mean.

    Returns:
        a scalar in fp32, in nats; it can be differentiated once.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()  # (N, D), (N)
    loss: Tensor = _SummedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, targets, vocabulary_size, scale if torch.is_grad_enabled() else None
    )
    return loss if torch.is_grad_enabled() else scale * loss


class _SummedCrossEntropy(torch.autograd.Function):
    """Takes the gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocabulary_size: int,
        scale: float | None,
    ) -> Tensor:
        precise = torch.promote_types(torch.float32, hidden.dtype)
        matrix = weight.to(hidden.dtype)
        loss = torch.zeros((), dtype=precise, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: Tensor | None = None
        for start, end in _chunks(hidden, weight.shape[0]):
            rows, targets = hidden[start:end], labels[start:end, None]
            nothing = targets == LABEL_OF_NOTHING  # (n, 1)
            targets = targets.masked_fill(nothing, 0)
            logits = F.linear(rows, matrix)  # (n, V)
            logits[:, vocabulary_size:] = -torch.inf
            log_probabilities = F.log_softmax(logits, -1, dtype=precise)
            target = log_probabilities.gather(1, targets)  # (n, 1)
            loss -= target.masked_fill(nothing, 0.0).sum()
            if scale is not None:
                error = torch.exp(log_probabilities, out=logits)
                del logits, log_probabilities  # two of them at once are enough
                error.scatter_(1, targets, torch.expm1(target).to(error.dtype))
                # Rows without a label are left out here, where they are D wide instead of V.
                hidden_gradient[start:end] = (error @ matrix).masked_fill_(nothing, 0.0).mul_(scale)
                rows = rows.masked_fill(nothing, 0.0)
                weight_gradient = _add_product(weight_gradient, error.t(), rows, scale, like=weight)
                del error
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return loss if scale is None else scale * loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if not (upstream.is_cpu and upstream.item() == 1.0):  # a GPU would have to be waited for
            hidden_gradient.mul_(upstream)
            weight_gradient.mul_(upstream)
        return hidden_gradient, weight_gradient, None, None, None


def _chunks(hidden: Tensor, n_columns: int) -> list[tuple[int, int]]:
    """Cuts rows into the fewest, nearly equal chunks whose logits fit in memory set aside."""
    n_rows = hidden.shape[0]
    chunk_bytes = CPU_CHUNK_BYTES if hidden.is_cpu else GPU_CHUNK_BYTES
    bytes_per_row = n_columns * max(4, hidden.element_size())
    most = max(1, chunk_bytes // bytes_per_row)
    n_chunks = -(-n_rows // most)
    edges = [n_rows * index // n_chunks for index in range(n_chunks + 1)]
    return list(pairwise(edges))


def _add_product(total: Tensor | None, a: Tensor, b: Tensor, scale: float, like: Tensor) -> Tensor:
    """Adds scale x a @ b to `total`, where there is one, in the precision of `like`."""
    if a.dtype != like.dtype:
        total = torch.zeros_like(like) if total is None else total
        return total.add_(a @ b, alpha=scale)
    if total is None:
        return torch.addmm(like, a, b, beta=0.0, alpha=scale)
    return total.addmm_(a, b, alpha=scale)
