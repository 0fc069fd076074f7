"""Training order: which tokens are sequence i of the train, valid or test split.

A pure function of the token files, their weights, the split, the sizes, the seed and the sequence
length, identical to Megatron-Core's for the same settings, whatever the number of processes.

A worked example: two corpora at 0.35 and 0.65, split "949,50,1", 2000 training sequences.

    documents    of each corpus, the first 94.9 % train, the next 5 % validate, the rest test; of a
                 corpus with few documents, the first 94.9 % of its tokens, and so on
    requested    ceil(2000 * 0.35) = 700 and 1300 sequences, each + 0.5 % margin: 704 and 1307
    corpus       each has that many or more, in its own order (see corpus_order.py)
    blend        which corpus each of the 700 + 1300 comes from (see build_blend_index)

Sequence 5 of the split: the blend maps it to sequence 3 of corpus 1; that corpus's order maps it to
ranges of documents.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from trainyard.config.run import Blend
from trainyard.data.corpus_order import (
    CorpusOrder,
    SequenceSettings,
    build_corpus_order,
    plan_corpus,
)
from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import IndexedDataset
from trainyard.errors import DataError
from trainyard.units import parse_shares

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
Part = tuple[float, float]
Float = NDArray[np.float64]

_log = logging.getLogger("trainyard")

FEW_DOCUMENTS = 100
"""A file with fewer is split by tokens: a single large document would distort the shares."""
_WHOLE: Part = (0.0, 1.0)
_SURPLUS = 0.005  # Megatron-LM's mid_level_dataset_surplus
_ROWS_AT_ONCE = 64  # as many as fit a processor's cache
_LANES = 4096
_LANE_DRAWS = 1024


@dataclass(frozen=True, eq=False)
class SequenceOrder:
    """The sequences of one split, in the order they are trained on.

    Attributes:
        corpora: the order within each corpus.
        dataset_index: for each sequence, its corpus; None if there is one corpus without a blend.
        dataset_sample_index: for each sequence, its number within that corpus.
    """

    corpora: Sequence[CorpusOrder]
    dataset_index: NDArray[np.int16] | None = None
    dataset_sample_index: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        """Counts the sequences."""
        return len(self.corpora[0] if self.dataset_index is None else self.dataset_index)

    def sequences(self, start: int, count: int) -> NDArray[np.int64]:
        """Reads sequences `start` to `start + count`.

        Returns:
            Token ids, (count, T + 1): the first T are read and the last T predicted.
        """
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"sequences {start} to {start + count} of {len(self)}")
        rows = np.empty((count, self.corpora[0].settings.sequence_length + 1), np.int64)
        for first in range(0, count, _ROWS_AT_ONCE):
            part = rows[first : first + _ROWS_AT_ONCE]
            numbers = np.arange(start + first, start + first + len(part))
            if self.dataset_index is None or self.dataset_sample_index is None:
                part[:] = self.corpora[0].sequences(numbers)
                continue
            corpora = self.dataset_index[numbers]
            numbers = self.dataset_sample_index[numbers]
            for corpus in set(corpora.tolist()):
                chosen = corpora == corpus
                part[chosen] = self.corpora[corpus].sequences(numbers[chosen])
        return rows


def parse_split(text: str) -> tuple[Part | None, Part | None, Part | None]:
    """Reads "949,50,1" as the parts of each corpus that train, validate and test.

    Returns:
        Begin and end of each part as shares of the documents; None for an empty part.

    Raises:
        ValueError: it is not one to three numbers, at least one of them above 0.
    """
    bounds = [0.0]
    for share in _normalized(parse_shares(text)):
        bounds.append(bounds[-1] + share)
    train, valid, test = ((begin, end) if end > begin else None for begin, end in pairwise(bounds))
    return train, valid, test


def build_order(
    blend: Blend | tuple[Blend, Blend, Blend],
    split: str | None,
    sizes: tuple[int, int, int],
    settings: SequenceSettings,
    cache: IndexCache,
) -> dict[Split, SequenceOrder | None]:
    """Builds the order of the train, valid and test sequences, or loads it if it was built before.

    Args:
        blend: one blend that `split` divides, or one for each split, without prefixes for none.
        split: shares such as "949,50,1": of the documents, as in Megatron-LM, or of the tokens if
            there are few documents; None with a blend for each split.
        sizes: sequences wanted of each split, 0 for no such split. An order without weights may be
            shorter; one with weights, longer by a few.
        settings: how documents are cut into sequences and shuffled.
        cache: where the built arrays are kept.

    Raises:
        DataError: a corpus is missing, damaged, or too small; a part that is wanted is empty.
        MachineError: the cache cannot be written.
    """
    blends = (blend, blend, blend) if isinstance(blend, Blend) else blend
    parts = (_WHOLE, _WHOLE, _WHOLE) if split is None else parse_split(split)
    prefixes = {prefix for split_blend in blends for prefix in split_blend.prefixes}
    datasets = {prefix: IndexedDataset(prefix, cache.trusted) for prefix in sorted(prefixes)}
    by_tokens = {prefix for prefix in datasets if splits_by_tokens(len(datasets[prefix]), parts)}
    for prefix in sorted(by_tokens)[:3]:
        count = len(datasets[prefix])
        _log.info("%s is split by tokens: it has few documents (%s)", prefix, f"{count:,}")
    if len(by_tokens) > 3:
        _log.info("and so are %s more token files", f"{len(by_tokens) - 3:,}")
    orders: dict[Split, SequenceOrder | None] = {}
    for name, blend_of_split, part, size in zip(SPLITS, blends, parts, sizes, strict=True):
        orders[name] = None
        if not blend_of_split.prefixes or size == 0:
            continue
        if part is None:
            raise DataError(
                f"{size} {name} sequences requested, but split {split!r} leaves {name} empty",
                f"give {name} a share in the split, or ask for 0 of them",
            )
        if isinstance(blend, tuple):
            blend_of_split = drop_single_weight(blend_of_split)
        selected = [
            _select(datasets[prefix], part, name, by_tokens=prefix in by_tokens)
            for prefix in blend_of_split.prefixes
        ]
        counts = _sequences_per_corpus(blend_of_split, size, _SURPLUS)
        corpora = [
            build_corpus_order(dataset, documents, count, settings, cache)
            for (dataset, documents), count in zip(selected, counts, strict=True)
        ]
        orders[name] = _blend_corpora(blend_of_split, size, corpora, cache)
    return orders


def _normalized(weights: Sequence[float]) -> NDArray[np.float64]:
    values = np.array(weights, dtype=np.float64)
    return values / np.sum(values)  # numpy's pairwise sum decides the last bit


def splits_by_tokens(n_documents: int, parts: Sequence[Part | None]) -> bool:
    """Whether a file has too few documents to be split by them.

    It depends on nothing else, so that the splits of a run never overlap. An empty test split does
    not decide: few runs need one, and the order of the others stays Megatron-LM's.
    """
    if _WHOLE in parts:
        return False
    train_and_valid = [_span(n_documents, part) for part in parts[:2] if part]
    return n_documents < FEW_DOCUMENTS or not all(train_and_valid)


def _span(count: int, part: Part) -> range:
    begin, end = (round(share * float(count)) for share in part)
    return range(begin, end)


def _select(
    dataset: IndexedDataset, part: Part, name: Split, *, by_tokens: bool
) -> tuple[IndexedDataset, range]:
    """Selects the documents of a part, by documents or by tokens."""
    if by_tokens and (span := _span(dataset.n_tokens, part)):
        dataset = _cut(dataset, span)
        return dataset, range(len(dataset))
    documents = _span(len(dataset), part)
    if by_tokens or not documents:
        things = f"{dataset.n_tokens} tokens" if by_tokens else f"{len(dataset)} documents"
        raise DataError(
            f"{dataset.prefix}: the {name} split gets none of its {things}",
            f"give {name} a larger share in the split, or another corpus",
        )
    return dataset, documents


def _cut(dataset: IndexedDataset, span: range) -> IndexedDataset:
    """Returns consecutive tokens as a dataset, whose first and last document may be incomplete."""
    lengths = dataset.load_sequence_lengths(range(len(dataset)))
    ends = np.cumsum(lengths, dtype=np.int64)
    begins = np.clip(ends - lengths, span.start, span.stop)
    lengths = (np.clip(ends, span.start, span.stop) - begins).astype(np.int32)
    inside = lengths > 0
    part = copy.copy(dataset)
    part.sequence_lengths = lengths[inside]
    part.sequence_pointers = (begins[inside] - span.start) * dataset.dtype.itemsize
    part.document_indices = np.arange(len(part) + 1)
    part.stream = dataset.stream[span.start : span.stop]
    part.n_tokens, part.span = len(span), span
    return part


def drop_single_weight(blend: Blend) -> Blend:
    """Returns a blend whose only corpus has no weight, as it is weighed against nothing."""
    return Blend(prefixes=blend.prefixes) if len(blend.prefixes) == 1 else blend


def _sequences_per_corpus(blend: Blend, size: int, surplus: float) -> list[int | None]:
    """Returns how many sequences each corpus must give; None is one pass over its documents."""
    if not blend.weights:
        return [size if len(blend.prefixes) == 1 else None] * len(blend.prefixes)
    shares = _normalized(blend.weights)
    return [math.ceil(math.ceil(size * float(share)) * (1 + surplus)) for share in shares]


def repeats_alike(order: SequenceOrder, blend: Blend, size: int) -> bool:
    """Returns whether an order of `size` sequences of the blend makes as many passes as this."""
    counts = _sequences_per_corpus(blend, size, _SURPLUS)
    for corpus, count in zip(order.corpora, counts, strict=True):
        plan, other = corpus.plan, plan_corpus(corpus.plan.epoch_tokens, count, corpus.settings)
        if plan.n_epochs != other.n_epochs:
            return False
        if plan.shuffle_last_epoch_apart != other.shuffle_last_epoch_apart:
            return False
    return True


def _blend_corpora(
    blend: Blend, size: int, corpora: list[CorpusOrder], cache: IndexCache
) -> SequenceOrder:
    if not blend.weights and len(corpora) == 1:
        return SequenceOrder(corpora)
    lengths = [len(corpus) for corpus in corpora]
    if blend.weights:
        # Megatron-LM normalizes twice, which can change the last bit
        weights = _normalized(_normalized(blend.weights).tolist())
        length = sum(filter(None, _sequences_per_corpus(blend, size, 0.0)))
    else:
        weights, length = _normalized(lengths), min(size, sum(lengths))

    def build() -> Iterator[list[NDArray[Any]]]:
        corpus, position = build_blend_index(weights, length)
        for number, corpus_order in enumerate(corpora):
            n_drawn = int(np.count_nonzero(corpus == number))
            if n_drawn > len(corpus_order):
                raise DataError(
                    f"the blend draws {n_drawn} sequences from {blend.prefixes[number]}, which "
                    f"has {len(corpus_order)}",
                    f"request more than {size}: too few for {len(corpora)} corpora",
                )
        yield [corpus]
        yield [position]

    key = cache.key(weights=weights.tolist(), length=length, lengths=lengths, exhaustive=False)
    names = ("dataset_index", np.int16), ("dataset_sample_index", np.int64)
    stored = [(name, (length,), np.dtype(kind)) for name, kind in names]
    return SequenceOrder(corpora, *cache.load_or_build(key, stored, build))


def build_blend_index(weights: Float, size: int) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Draws `size` times from corpora of these weights, by Megatron-LM's rule, exactly.

    The rule: corpus i has been drawn c[i] times; draw k goes to the corpus that lags most behind
    its share, the one with the largest w[i] * max(k, 1) - c[i], the first of equals. For weights
    0.5, 0.3 and 0.2:

        k   lag before the draw      drawn      c after
        0    0.5   0.3   0.2         corpus 0   1 0 0
        1   -0.5   0.3   0.2         corpus 1   1 1 0
        2    0.0  -0.4   0.4         corpus 2   1 1 1
        3    0.5  -0.1  -0.4         corpus 0   2 1 1

    Each draw depends on all earlier draws, down to the rounding, so it has no closed form. But the
    rule converges: from any sensible counts it soon reaches the true ones. So the draws are split
    into lanes that run in parallel, each from estimated counts. If a lane ends with other counts
    than the next one started with, the next one runs again from there, until every lane starts
    where the previous one ended. The first starts with the true counts, so then all are true.

    Args:
        weights: each corpus's share, adding up to 1.
        size: the number of draws.

    Returns:
        For each draw the corpus, and how often that corpus had been drawn before
        (Megatron-LM's dataset_index and dataset_sample_index).
    """
    corpus = np.empty(size, np.int16)
    position = np.empty(size, np.int64)
    counts = np.zeros(len(weights))
    for start in range(0, size, _LANES * _LANE_DRAWS):
        stop = min(size, start + _LANES * _LANE_DRAWS)
        part = slice(start, stop)
        counts = _fill(corpus[part], position[part], start, counts, weights)
    return corpus, position


def _fill(
    corpus: NDArray[np.int16],
    position: NDArray[np.int64],
    start: int,
    counts: Float,
    weights: Float,
) -> Float:
    """Draws from number `start` on, given how often each file was drawn before; returns that."""
    n_draws = min(_LANE_DRAWS, len(corpus))
    n_lanes = len(corpus) // n_draws
    starts = start + n_draws * np.arange(n_lanes)
    begins = _guess_counts(starts, weights)
    begins[0] = counts
    ends: Float = np.empty_like(begins)
    lanes = np.arange(n_lanes)
    whole = n_lanes * n_draws
    corpus_lanes = corpus[:whole].reshape(n_lanes, n_draws)
    position_lanes = position[:whole].reshape(n_lanes, n_draws)
    while len(lanes):
        corpus_lanes[lanes], position_lanes[lanes], ends[lanes] = _walk(
            starts[lanes], begins[lanes], n_draws, weights
        )
        lanes = np.flatnonzero((ends[:-1] != begins[1:]).any(axis=1)) + 1
        begins[lanes] = ends[lanes - 1]
    if whole < len(corpus):  # the last draws, too few for another row of lanes
        return _fill(corpus[whole:], position[whole:], start + whole, ends[-1], weights)
    last: Float = ends[-1]
    return last


def _guess_counts(starts: NDArray[np.int64], weights: Float) -> Float:
    """Rounds each corpus's share of the draws so that they add up to the number of draws."""
    shares = np.multiply.outer(starts.astype(np.float64), weights)
    whole = np.floor(shares)
    missing = starts - whole.sum(axis=1)
    rank = np.argsort(np.argsort(whole - shares, axis=1, kind="stable"), axis=1)
    counts: Float = whole + (rank < missing[:, None])
    return counts


def _walk(
    starts: NDArray[np.int64], begins: Float, n_draws: int, weights: Float
) -> tuple[NDArray[np.int16], NDArray[np.int64], Float]:
    """Follows the rule for `n_draws` draws in every lane at once."""
    counts = begins.copy()
    rows = np.arange(len(starts))
    corpus = np.empty((n_draws, len(starts)), np.int16)
    position = np.empty((n_draws, len(starts)), np.int64)
    for draw in range(n_draws):
        lag = np.multiply.outer(np.maximum(starts + draw, 1).astype(np.float64), weights)
        lag -= counts
        chosen = lag.argmax(axis=1)  # the first of equals
        corpus[draw] = chosen
        position[draw] = counts[rows, chosen]
        counts[rows, chosen] += 1
    return corpus.T, position.T, counts
