"""The loss on held-out text: per token, as perplexity and per byte, beside what frequencies reach.

A worked example: the documents "ab" and "c", one token per letter, | for end-of-document, in
windows of sequence_length 4 that move by stride 4. The stream a b | c | is predicted whole, each
token once; the first is given an end-of-document token to follow, as if a document had just ended:

    window   model reads    predicts
         0   | a b |        a b | c
         1   c              |

With stride 2 windows read tokens again, so that every token but the first few is predicted from
more than two: slower, and a lower loss, since no token pays for standing at the edge of a window.

    window   model reads    predicts
         0   | a            a b
         1   | a b |        . . | c
         2   b | c          . . |

Documents follow each other in a window, as they do in training. The five losses add up to S nats;
the text has 3 bytes (the end-of-document tokens have none, but their loss counts), so bits per byte
are S / ln 2 / 3: the number to compare models with different tokenizers by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainyard.errors import DataError
from trainyard.model.gpt import GPT
from trainyard.model.loss import IGNORE_INDEX

Ids = NDArray[Any]
LossOf = Callable[[Tensor, Tensor], Tensor]
"""Returns the summed loss, in nats, of token ids and labels, (B, T) each."""


class Decoder(Protocol):
    """What evaluation needs of a tokenizer."""

    @property
    def eod_id(self) -> int:
        """The end-of-document token."""

    def decode(self, ids: list[int]) -> str:
        """Returns the text of token ids."""


@dataclass(frozen=True)
class HeldOut:
    """The loss of a model on text it was not trained on.

    Attributes:
        summed_loss: over all predicted tokens, in nats.
        n_tokens: predicted, each once.
        n_bytes: of their text in UTF-8; None where no tokenizer is known.
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
        """The number of tokens to choose from evenly that would be as hard to guess."""
        return math.exp(self.mean_loss) if self.mean_loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits for each byte of text, whatever the tokenizer."""
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


def loss_of_model(model: GPT) -> LossOf:
    """Makes a function of a model on one device; it leaves the model in the mode it came in."""

    @torch.no_grad()
    def loss_of(tokens: Tensor, labels: Tensor) -> Tensor:
        device = model.head_weight.device
        was_training = model.training
        model.eval()
        try:
            return model.summed_loss(model(tokens.to(device)), labels.to(device))
        finally:
            model.train(was_training)

    return loss_of


def held_out_loss(
    loss_of: LossOf, batches: Iterable[tuple[Tensor, Tensor]], vocabulary_size: int
) -> HeldOut:
    """Adds up the loss of every labelled token.

    Args:
        loss_of: computes it, without dropout.
        batches: token ids and labels, (B, T) each, int64; label -100 where nothing is predicted.
        vocabulary_size: labels are below this.

    Raises:
        DataError: no token is labelled.
    """
    summed_loss = 0.0
    token_counts = np.zeros(vocabulary_size, np.int64)
    for tokens, labels in batches:
        # fp64 from here on: many batches add up exactly enough.
        summed_loss += loss_of(tokens, labels).item()
        predicted = labels[labels != IGNORE_INDEX].cpu().numpy()
        token_counts += np.bincount(predicted, minlength=vocabulary_size)
    n_tokens = int(token_counts.sum())
    if n_tokens == 0:
        raise DataError(
            "the held-out data has no token to predict", "give a longer text, or a larger split"
        )
    return HeldOut(summed_loss, n_tokens, token_counts=token_counts)


def evaluate_documents(
    model: GPT,
    documents: Iterable[Ids],
    tokenizer: Decoder | None,
    stride: int | None = None,
    batch_size: int = 8,
) -> HeldOut:
    """Predicts every token of whole documents once, in windows as the worked example above shows.

    Args:
        model: sets the length of a window.
        documents: token ids of one document each, with end-of-document tokens where they have them.
        tokenizer: counts bytes and starts the first document; without one, the first token of all
            is read but not predicted, and there are no bits per byte.
        stride: tokens predicted in each window; by default a whole window, so that none overlap.
        batch_size: windows in one forward pass.

    Raises:
        DataError: a token id the model does not know, or nothing to predict.
    """
    sequence_length = len(model.token_positions)
    n_bytes = 0

    def checked() -> Iterator[Ids]:
        nonlocal n_bytes
        for number, ids in enumerate(documents):
            _check_ids(ids, number, model.vocabulary_size)
            if tokenizer:
                n_bytes += count_bytes(ids, tokenizer)
            yield ids

    first = [tokenizer.eod_id] if tokenizer else []
    windows = _cut_windows(checked(), first, sequence_length, stride or sequence_length)
    batches = _stack(windows, sequence_length, batch_size)
    found = held_out_loss(loss_of_model(model), batches, model.vocabulary_size)
    return replace(found, n_bytes=n_bytes if tokenizer else None)


def evaluate_sequences(
    loss_of: LossOf,
    batches: Iterable[tuple[Tensor, Tensor]],
    vocabulary_size: int,
    tokenizer: Decoder | None,
) -> HeldOut:
    """Predicts sequences of a split, as `held_out_loss`, and counts their bytes.

    A sequence ends anywhere, perhaps within a character: that makes an error of some bytes in each.
    """
    n_bytes = 0

    def counted() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal n_bytes
        for tokens, labels in batches:
            if tokenizer:
                n_bytes += sum(count_bytes(row.numpy(), tokenizer) for row in labels)
            yield tokens, labels

    found = held_out_loss(loss_of, counted(), vocabulary_size)
    return replace(found, n_bytes=n_bytes if tokenizer else None)


def count_bytes(ids: Ids, tokenizer: Decoder) -> int:
    """Counts the UTF-8 bytes of the text of token ids; end-of-document tokens have none."""
    text = ids[(ids != tokenizer.eod_id) & (ids != IGNORE_INDEX)]
    return len(tokenizer.decode(text.tolist()).encode())


def unigram_loss(train_counts: Ids, held_out_counts: Ids) -> float:
    """Returns the loss, in nats per token, of a model that knows only how frequent each token is.

    A trained model must beat it; one that does not has learnt nothing from context.

    Args:
        train_counts: occurrences of each id in the training data; one is added to each, so that a
            token never seen there is possible.
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
) -> Iterator[tuple[Ids, Ids]]:
    """Yields the ids a window reads and the labels it predicts, of at most sequence_length each."""
    if not 1 <= stride <= sequence_length:
        raise DataError(
            f"stride {stride} is not between 1 and the model's sequence_length {sequence_length}",
            "a smaller stride gives each token more context, and takes longer",
        )
    kept = sequence_length + 1 - stride  # read again by the next window, or last of this one
    held = np.array(first, np.int64)
    n_context = 1  # tokens of `held` that are read but no longer predicted
    for document in documents:
        held = np.concatenate([held, document])
        while len(held) >= n_context + stride:
            end = n_context + stride
            yield _window(held[:end], n_context)
            n_context = min(end, kept)
            held = held[end - n_context :]
    if len(held) > n_context:
        yield _window(held, n_context)


def _window(ids: Ids, n_context: int) -> tuple[Ids, Ids]:
    labels = ids[1:].copy()
    labels[: n_context - 1] = IGNORE_INDEX
    return ids[:-1], labels


def _stack(
    windows: Iterable[tuple[Ids, Ids]], sequence_length: int, batch_size: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Stacks windows to batches, (B, T) each; short ones are padded with nothing to predict."""
    batch = _empty_batch(batch_size, sequence_length)
    filled = 0
    for ids, labels in windows:
        batch[0][filled, : len(ids)] = torch.from_numpy(ids)
        batch[1][filled, : len(labels)] = torch.from_numpy(labels)
        filled += 1
        if filled == batch_size:
            yield batch
            batch = _empty_batch(batch_size, sequence_length)
            filled = 0
    if filled:
        yield batch[0][:filled], batch[1][:filled]


def _empty_batch(batch_size: int, sequence_length: int) -> tuple[Tensor, Tensor]:
    shape = (batch_size, sequence_length)
    tokens = torch.zeros(shape, dtype=torch.int64)
    return tokens, torch.full(shape, IGNORE_INDEX)
