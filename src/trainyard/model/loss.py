"""Fused output head and cross entropy, without materializing all logits.

At vocabulary 50,304 the logits of a micro batch are the largest tensor of a training step: for 16
sequences of 256 tokens, 824 MB each for logits, log-probabilities and gradient.

    hidden (4,096, 384) -> 4 chunks of 1,024 rows
      for each chunk:  logits = hidden weight^T          (1,024, 50,304)
                       loss  -= log softmax(logits)[label]
                       logits = softmax(logits) - one-hot(label), the gradient, in place
                       gradient of hidden  = logits weight
                       gradient of weight += logits^T hidden

The gradient of a sum of cross entropies follows from the logits, so the forward pass computes both
backward matmuls and drops the logits. The upstream gradient is one number; `scale` applies it in
advance, so that the large gradient need not be read again. In fp16 it is applied after the matmuls,
whose largest factor is 1, so it cannot overflow them.

Compiled, two kernels read the logits, and one of them writes the gradient over them; with the three
matmuls that is 12 bytes per 16-bit logit. Otherwise their exponentials are in fp32: 50 bytes.

A z-loss of coefficient z adds z log^2(sum of exp(logits)) of each token to what is minimized, and
2 z log(sum of exp(logits)) softmax(logits) to the gradient of its logits. The returned loss remains
the cross entropy.

If tensor ranks shard the rows of the weight, each has the logits of its rows. Ranks reduce small
tensors, but no logits:

    rank           0            1
    logits         2.0  1.0     3.0  0.5
    largest        2.0          3.0               overall: 3.0
    sum of exp(logit - 3.0)
                   0.50         1.08              overall: 1.59
    logit of the label, in row 1, less 3.0
                   -2.0         0                 overall: -2.0; its log probability: -2.0 - ln 1.59
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trainyard.architecture import count_logit_chunks
from trainyard.model.linear import Layer, as_output, sum_product

IGNORE_INDEX = -100


class ShardedVocabulary(Protocol):
    """This rank's rows of the weight, and reductions over the others."""

    first_row: int
    """Its first row in the whole weight."""

    def spread(self, hidden: Tensor) -> Tensor:
        """Gives every rank the hidden states of all; sums their gradients."""

    def maximum(self, x: Tensor) -> Tensor:
        """Elementwise maximum over ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Elementwise sum over ranks."""


class WholeVocabulary:
    """All rows of the weight, on one device: nothing to exchange."""

    first_row = 0

    def maximum(self, x: Tensor) -> Tensor:
        """Returns `x`."""
        return x

    spread = sum = maximum


class CrossEntropy(nn.Module):
    """The model's loss.

    Attributes:
        compiles: whether to compile what reads the logits of a whole vocabulary.
        z_loss: coefficient of the z-loss.
        shard: this rank's rows of the vocabulary; None: all of them.
    """

    compiles = False
    z_loss = 0.0
    shard: ShardedVocabulary | None = None

    def forward(
        self,
        hidden: Tensor,
        head: Layer,
        labels: Tensor,
        vocabulary_size: int,
        scale: float | Tensor,
    ) -> Tensor:
        """Sums over the labels, like `summed_cross_entropy`."""
        cast, total = head.casts and head.casts[0], head.sums and head.sums[0]
        options = LossOptions(vocabulary_size, self.shard, self.compiles, self.z_loss, cast, total)
        hidden = (self.shard or WholeVocabulary()).spread(hidden)
        return summed_cross_entropy(hidden, head.weight, labels, options, scale)


class LossOptions(NamedTuple):
    """Which rows the output matrix has, and how to compute with their logits."""

    vocabulary_size: int
    """Real rows of the whole matrix; the padding above gets no probability."""
    shard: ShardedVocabulary | None = None
    """Which rows a rank has, if ranks shard them, (V/tp, D) each. The loss is then the same on all;
    the gradient of hidden states is partial, for the caller to sum."""
    compiles: bool = False
    """Compile what reads the logits; for the loss of one device."""
    z_loss: float = 0.0
    """Coefficient of the z-loss, which only gradients contain."""
    cast: Tensor | None = None
    """The weight in the compute precision, if passes share it."""
    total: Tensor | None = None
    """Receives the gradient of the weight, in the forward pass, in place of autograd's."""


def summed_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    options: LossOptions,
    scale: float | Tensor = 1.0,
) -> Tensor:
    """Sums the cross entropy of every labelled token.

    On a GPU it must be the root of a backward pass: an upstream gradient of 1, which the device
    checks.

    Args:
        hidden: final hidden states, (B, T, D), in the compute precision.
        weight: output matrix, (V, D), fp32 or in the compute precision.
        labels: next token ids, (B, T), int64; -100 for no label.
        options: the rows of `weight`, and more.
        scale: multiplies the sum; one over the tokens of a step makes it a part of their mean. A
            scalar tensor stays on its device.

    Returns:
        a scalar in fp32, in nats; it can be differentiated once.
    """
    rows, targets = hidden.flatten(0, -2), labels.flatten()  # (N, D), (N)
    factor = scale if torch.is_grad_enabled() else None
    loss: Tensor = _SummedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        rows, weight, targets, factor, options
    )
    return loss if torch.is_grad_enabled() else scale * loss


def score_sequences(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocabulary_size: int,
    shard: ShardedVocabulary,
) -> Tensor:
    """Scores the labels of each sequence; computes no other logits than theirs.

    Args:
        hidden: final hidden states, (B, T, D), in the compute precision.
        weight: output matrix, (V, D), or (V/tp, D) of the shard.
        labels: next token ids, (B, T), int64; -100 for no label.
        vocabulary_size: real rows of the whole matrix.
        shard: which rows `weight` has.

    Returns:
        (B, 2), fp64: the summed log probability of a sequence's labels, in nats, and how many of
        them are not the most likely token (of several, the one with the lowest id).
    """
    labelled = labels != IGNORE_INDEX
    rows, targets = hidden[labelled], labels[labelled][:, None]  # (N, D), (N, 1)
    matrix = weight.to(hidden.dtype)
    columns = shard.first_row + torch.arange(len(weight), device=hidden.device)
    scores = torch.zeros(len(rows), 2, dtype=torch.float64, device=hidden.device)
    for start, end in _chunks(rows, len(weight)):
        target = targets[start:end]
        logits = F.linear(rows[start:end], matrix)  # (n, V/tp)
        logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
        logits.masked_fill_(columns >= vocabulary_size, -torch.inf)
        largest = shard.maximum(logits.amax(1, keepdim=True))
        row = target - shard.first_row
        is_here = (row >= 0) & (row < len(weight))
        logit = logits.gather(1, row.masked_fill(~is_here, 0))
        logit = shard.sum(logit.masked_fill(~is_here, 0.0))
        likelier = (logits > logit) | ((logits == logit) & (columns < target))
        n_likelier = shard.sum(likelier.sum(1, keepdim=True).to(logits.dtype))
        total = shard.sum(logits.sub_(largest).exp_().sum(1, keepdim=True))
        log_probability = logit - largest - total.log()
        scores[start:end] = torch.cat((log_probability, n_likelier.sign()), dim=1)
    found = scores.new_zeros(len(labels), 2)
    return found.index_add_(0, labelled.nonzero()[:, 0], scores)


class _SummedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        scale: float | Tensor | None,
        options: LossOptions,
    ) -> Tensor:
        shard, z_loss = options.shard, options.z_loss
        precise = torch.promote_types(torch.float32, hidden.dtype)
        scale = scale.to(precise) if isinstance(scale, Tensor) else scale
        matrix = weight.to(hidden.dtype) if options.cast is None else options.cast
        loss = torch.zeros((), dtype=precise, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient = options.total
        for start, end in _chunks(hidden, weight.shape[0]):
            rows, targets = hidden[start:end], labels[start:end, None]
            nothing = targets == IGNORE_INDEX  # (n, 1)
            targets = targets.masked_fill(nothing, 0)
            logits = F.linear(rows, matrix)  # (n, V)
            if options.compiles and shard is None:
                target = _compiled(_to_error)(logits, targets, options.vocabulary_size, z_loss)
            else:
                row, is_here = targets, None
                if shard is not None:
                    row = targets - shard.first_row
                    is_here = (row >= 0) & (row < weight.shape[0])
                    row = row.masked_fill(~is_here, 0)
                exponentials, total, target, largest = _exponentials(
                    logits, row, is_here, options.vocabulary_size, shard
                )
                if scale is not None:
                    less_one = torch.expm1(target)
                    if z_loss:
                        factor = 2 * z_loss * (largest + total.log())  # (n, 1)
                        less_one += factor * target.exp()
                        total = total / (1 + factor)
                    logits.copy_(exponentials.div_(total))
                    less_one = less_one.to(logits.dtype)
                    if is_here is not None:
                        less_one = torch.where(is_here, less_one, logits.gather(1, row))
                    logits.scatter_(1, row, less_one)
                del exponentials
            loss -= target.masked_fill(nothing, 0.0).sum()
            if scale is not None:
                error = logits
                del logits
                # Rows without a label are zeroed here, where they are D wide instead of V.
                product = (error @ matrix).masked_fill_(nothing, 0.0)
                hidden_gradient[start:end] = _scaled(product, scale)
                rows = rows.masked_fill(nothing, 0.0)
                weight_gradient = _add_product(weight_gradient, error.t(), rows, scale, like=weight)
                del error
        if weight_gradient is not None:  # one that ranks gather is in the compute precision
            weight_gradient = weight_gradient.to(weight.dtype) if options.total is None else None
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return as_output(loss) if scale is None else scale * loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        if not upstream.is_cpu:  # to read it would synchronize; to multiply, take a copy
            torch._assert_async(upstream == 1)
        elif upstream.item() != 1.0:
            # Not in place: a pipeline may need one of the two now and the other later.
            assert weight_gradient is not None, "the gradient was added to the sum before"
            hidden_gradient = hidden_gradient * upstream
            weight_gradient = weight_gradient * upstream
        return hidden_gradient, weight_gradient, None, None, None


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function, dynamic=False)  # chunks have two sizes at most


def _to_error(logits: Tensor, targets: Tensor, vocabulary_size: int, z_loss: float) -> Tensor:
    """Replaces logits, (n, V), by their gradient; returns the log probabilities of targets, (n, 1).

    In one precision wider than that of the logits; padding gets no probability.
    """
    precise = torch.promote_types(torch.float32, logits.dtype)
    columns = torch.arange(logits.shape[1], device=logits.device)
    x = logits.to(precise).masked_fill(columns >= vocabulary_size, -torch.inf)
    largest = x.amax(1, keepdim=True)
    log_sum = (x - largest).exp().sum(1, keepdim=True).log() + largest
    target = logits.gather(1, targets).to(precise) - log_sum
    error = torch.where(columns == targets, torch.expm1(target), torch.exp(x - log_sum))
    if z_loss:
        error = error + 2 * z_loss * log_sum * torch.exp(x - log_sum)
    logits.copy_(error)
    return target


def _exponentials(
    logits: Tensor,
    columns: Tensor,
    is_here: Tensor | None,
    vocabulary_size: int,
    shard: ShardedVocabulary | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes the exponentials of logits less the largest, of a shard less that of all shards.

    Not by `log_softmax`, whose sum on a CPU in fp32 is wrong by 1e-5 at 50,000 columns.

    Args:
        logits: (n, V), of a shard (n, V/tp), overwritten if in fp32 or more precise.
        columns: of the labels, (n, 1), if in the shard; else any.
        is_here: whether they are in the shard.
        vocabulary_size: of all shards.
        shard: reduces over ranks, if they shard the vocabulary.

    Returns:
        them, their sum over all shards, the log probability of the label, and the largest logit,
        (n, 1) each.
    """
    x = logits.to(torch.promote_types(torch.float32, logits.dtype))
    n_real = vocabulary_size - (0 if shard is None else shard.first_row)
    x[:, max(0, n_real) :] = -torch.inf
    largest = x.amax(1, keepdim=True)
    if shard is not None:
        largest = shard.maximum(largest)
    target = x.sub_(largest).gather(1, columns)
    exponentials = x.exp_()
    total = exponentials.sum(1, keepdim=True)
    if shard is not None and is_here is not None:
        sums = torch.stack((total, target.masked_fill(~is_here, 0.0)))
        total, target = shard.sum(sums).unbind()
    return exponentials, total, target - total.log(), largest


def _chunks(hidden: Tensor, n_columns: int) -> list[tuple[int, int]]:
    """Splits rows into the fewest, nearly equal chunks whose logits fit in the memory budget."""
    n_rows = hidden.shape[0]
    value_bytes = max(4, hidden.element_size())
    n_chunks = count_logit_chunks(n_rows, n_columns, value_bytes, on_gpu=not hidden.is_cpu)
    edges = [n_rows * index // max(1, n_chunks) for index in range(n_chunks + 1)]
    return list(pairwise(edges))


def _scaled(x: Tensor, scale: float | Tensor) -> Tensor:
    """Multiplies `x`, perhaps in place."""
    if isinstance(scale, Tensor):  # rounded to fp16 it would be infinite
        return (x.to(scale.dtype) * scale).to(x.dtype)
    return x.mul_(scale)


def _add_product(
    total: Tensor | None, a: Tensor, b: Tensor, scale: float | Tensor, like: Tensor
) -> Tensor:
    """Adds scale x a @ b to `total`, if given, of the shape of `like`, in fp32 or more precise."""
    precise = torch.promote_types(torch.float32, a.dtype)
    if isinstance(scale, Tensor):
        total = torch.zeros_like(like, dtype=precise) if total is None else total
        return total.addcmul_(a @ b, scale)
    if a.dtype != precise:
        return sum_product(total, a, b, scale)
    if total is None:
        return torch.addmm(like, a, b, beta=0.0, alpha=scale)
    return total.addmm_(a, b, alpha=scale)
