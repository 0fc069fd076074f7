"""Held-out loss: per token, as perplexity and per byte, with a unigram baseline.

A worked example: the documents "ab" and "c", one token per letter, | for end-of-document, in
windows of sequence_length 4 with stride 4. Each token of the stream a b | c | is predicted once; an
end-of-document token precedes the first, as if a document had just ended:

    window   model reads    predicts
         0   | a b |        a b | c
         1   c              |

With stride 2 windows overlap, so that every token except the first few is predicted from more than
two. This is slower, but lowers the loss, since no token has little context at a window's start.

    window   model reads    predicts
         0   | a            a b
         1   | a b |        . . | c
         2   b | c          . . |

Documents follow each other in a window, as in training. The five losses sum to S nats; the text has
3 bytes (end-of-document tokens have none, but their loss counts), so bits per byte are
S / ln 2 / 3. Use it to compare models with different tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trainyard.data.tokenizer import Tokenizer
from trainyard.errors import DataError
from trainyard.model.gpt import GPT
from trainyard.model.loss import IGNORE_INDEX

Ids = NDArray[Any]
Window = tuple[Ids, Ids]
"""Input ids and labels of a part of a text."""
LossOf = Callable[[Tensor, Tensor], Tensor]
"""Returns the summed loss, in nats, of token ids and labels, (B, T) each."""
ScoreOf = Callable[[Tensor, Tensor], Tensor]
"""Returns the scores, (B, 2), of token ids and labels, as `GPT.score_sequences`."""


@dataclass(frozen=True)
class Predictor:
    """A model that predicts, on one device or on the ranks of a job."""

    loss_of: LossOf
    score_of: ScoreOf
    sequence_length: int
    vocabulary_size: int
    batch_size: int
    """Sequences of a batch."""
    barrier: Callable[[], object] = lambda: None
    """Waits for all ranks; one rank waits for nobody."""
    is_fixed_length: bool = False
    """Whether `score_of` takes only sequences of sequence_length tokens."""


@dataclass(frozen=True)
class HeldOut:
    """Held-out loss of a model.

    Attributes:
        summed_loss: over all predicted tokens, in nats.
        n_tokens: predicted tokens.
        n_bytes: of their text in UTF-8; None without a tokenizer.
        token_counts: how often each id was predicted, (V,).
    """

    summed_loss: float
    n_tokens: int
    n_bytes: int | None = None
    token_counts: NDArray[np.int64] | None = None

    @property
    def mean_loss(self) -> float:
        """Nats per token."""
        return self.summed_loss / self.n_tokens

    @property
    def perplexity(self) -> float:
        """The exponential of the mean loss."""
        return math.exp(self.mean_loss) if self.mean_loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text, independent of the tokenizer."""
        return self.summed_loss / math.log(2) / self.n_bytes if self.n_bytes else None

    def as_dict(self) -> dict[str, float | None]:
        """Returns the figures under the names they have in metrics.jsonl and evaluation.json."""
        return {
            "loss": self.mean_loss,
            "perplexity": self.perplexity if math.isfinite(self.perplexity) else None,
            "bits_per_byte": self.bits_per_byte,
            "n_tokens": self.n_tokens,
            "n_bytes": self.n_bytes,
        }


def loss_of_model(model: GPT, measure: Callable[..., Tensor] = GPT.summed_loss) -> LossOf:
    """Builds a loss function of a model on one device, which restores the model's mode.

    `measure` is a method of the model that takes hidden states and labels.
    """

    @torch.no_grad()
    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        device = model.head_weight.device
        was_training = model.training
        model.eval()
        try:
            return measure(model, model(tokens.to(device)), labels.to(device))
        finally:
            model.train(was_training)

    return loss_of


def held_out_loss(
    loss_of: LossOf,
    batches: Iterable[tuple[Tensor, Tensor]],
    vocabulary_size: int,
    tokenizer: Tokenizer | None = None,
) -> HeldOut:
    """Sums the loss of every labelled token.

    Args:
        loss_of: computes it, without dropout.
        batches: token ids and labels, (B, T) each, int64; label -100 for no label.
        vocabulary_size: labels are below it.
        tokenizer: counts the bytes of the labels; without one there are no bits per byte.

    Raises:
        DataError: no token is labelled.
    """
    summed_loss, n_bytes = 0.0, 0
    token_counts = np.zeros(vocabulary_size, np.int64)
    for tokens, labels in batches:
        # fp64 from here on, to sum many batches accurately.
        summed_loss += loss_of(tokens, labels).item()
        predicted = labels[labels != IGNORE_INDEX].cpu().numpy()
        token_counts += np.bincount(predicted, minlength=vocabulary_size)
        n_bytes += count_bytes(predicted, tokenizer) if tokenizer else 0
    n_tokens = int(token_counts.sum())
    if n_tokens == 0:
        raise DataError(
            "the held-out data has no token to predict", "give a longer text, or a larger split"
        )
    return HeldOut(summed_loss, n_tokens, n_bytes if tokenizer else None, token_counts)


def pad_batch(tokens: Tensor, labels: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Pads a batch, (B, T) each, with rows without labels to a multiple of `size`."""
    missing = (0, 0, 0, -len(tokens) % size)
    return F.pad(tokens, missing), F.pad(labels, missing, value=IGNORE_INDEX)


def evaluate_documents(
    predictor: Predictor,
    documents: Iterable[Ids],
    tokenizer: Tokenizer | None,
    stride: int | None = None,
) -> HeldOut:
    """Predicts every token of whole documents once, in windows as in the example above.

    Args:
        predictor: sets the window length.
        documents: token ids of one document each, with any end-of-document tokens.
        tokenizer: counts bytes and starts the first document; without one, the very first token
            is not predicted, and there are no bits per byte.
        stride: tokens predicted per window; by default a whole window, without overlap.

    Raises:
        DataError: a token id is outside the model's vocabulary, or there is nothing to predict.
    """
    sequence_length, vocabulary_size = predictor.sequence_length, predictor.vocabulary_size

    def checked() -> Iterator[Ids]:
        for number, ids in enumerate(documents):
            _check_ids(ids, number, vocabulary_size)
            yield ids

    first = [tokenizer.eod_id] if tokenizer else []
    windows = _cut_windows(checked(), first, sequence_length, stride or sequence_length)
    groups = iter(lambda: list(islice(windows, predictor.batch_size)), [])
    batches = (stack(group, sequence_length) for group in groups)
    return held_out_loss(predictor.loss_of, batches, vocabulary_size, tokenizer)


def count_bytes(ids: Ids, tokenizer: Tokenizer) -> int:
    """Counts the bytes of the text of token ids; end-of-document tokens have none.

    Where ids begin or end within a character, its bytes among them count.
    """
    text = ids[(ids != tokenizer.eod_id) & (ids != IGNORE_INDEX)]
    return len(tokenizer.decode_bytes(text.tolist()))


def unigram_loss(train_counts: Ids, held_out_counts: Ids) -> float:
    """Returns the unigram loss, in nats per token, from token frequencies only.

    A trained model must beat it; otherwise it has learnt nothing from context.

    Args:
        train_counts: occurrences of each id in the training data; add-one smoothing makes unseen
            tokens possible.
        held_out_counts: occurrences of each id in the text to predict.
    """
    n_train = float(train_counts.sum()) + len(train_counts)
    surprise = math.log(n_train) - np.log(train_counts + 1.0)  # (V,)
    return float(held_out_counts @ surprise / held_out_counts.sum())


def _check_ids(ids: Ids, number: int, vocabulary_size: int) -> None:
    if len(ids) and not 0 <= ids.min() <= ids.max() < vocabulary_size:
        wrong = ids.max() if ids.max() >= vocabulary_size else ids.min()
        raise DataError(
            f"document {number}: token id {wrong} is outside the model's vocabulary of "
            f"{vocabulary_size}",
            "the text was tokenized for another model: use the tokenizer it was trained with",
        )


def _cut_windows(
    documents: Iterable[Ids], first: list[int], sequence_length: int, stride: int
) -> Iterator[Window]:
    """Yields the input ids and labels of each window, at most sequence_length each."""
    if not 1 <= stride <= sequence_length:
        raise DataError(
            f"stride {stride} is not between 1 and the model's sequence_length {sequence_length}",
            "a smaller stride gives each token more context, and takes longer",
        )
    kept = sequence_length + 1 - stride  # overlap with the next window, plus the last of this one
    held = np.array(first, np.int64)
    n_context = 1  # tokens of `held` that are only context
    for document in documents:
        held = np.concatenate([held, document])
        while len(held) >= n_context + stride:
            end = n_context + stride
            yield window(held[:end], n_context)
            n_context = min(end, kept)
            held = held[end - n_context :]
    if len(held) > n_context:
        yield window(held, n_context)


def window(ids: Ids, n_context: int) -> Window:
    """Returns the input ids and the labels that predict all ids after the first `n_context`."""
    labels = ids[1:].copy()
    labels[: n_context - 1] = IGNORE_INDEX
    return ids[:-1], labels


def stack(windows: Sequence[Window], length: int) -> tuple[Tensor, Tensor]:
    """Stacks windows, (B, length) each; pads short ones without labels."""
    tokens = torch.zeros(len(windows), length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE_INDEX)
    for row, (ids, labels_of_ids) in enumerate(windows):
        tokens[row, : len(ids)] = torch.from_numpy(ids)
        labels[row, : len(ids)] = torch.from_numpy(labels_of_ids)
    return tokens, labels
