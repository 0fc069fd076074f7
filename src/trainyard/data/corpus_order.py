"""Order of one corpus: documents are shuffled, concatenated, split into sequences, shuffled.

A worked example: documents of 3, 4 and 2 tokens, sequences of 3 tokens, shuffled to B C A. A row
needs one more token than its 3, for the label of the last, so neighbours share a token:

    slot          0        1    2
    document      B        C    A
    stream        b0 b1 b2 b3   c0 c1   a0 a1 a2
    sequence 0    b0 b1 b2 b3
    sequence 1             b3   c0 c1   a0
    sequence 2                          a0 a1 a2 and one is missing: dropped

`sequence_index` holds the slot and offset where each starts, (0, 0) (0, 3) (2, 0), one more entry
than there are sequences; `document_index` the document in each slot; `shuffle_index` the order of
sequences in training. If one pass over the documents is too short, they repeat (epochs). All three
arrays equal Megatron-LM's bit for bit; it calls `sequence_index` sample_index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import IndexedDataset
from trainyard.errors import DataError

_SLAB = 1 << 16
_LARGEST_INT32 = 2**31 - 1
_FULL_LAST_EPOCH = 0.80  # of an epoch: a last one less used than this is shuffled by itself

Array = NDArray[Any]


@dataclass(frozen=True)
class SequenceSettings:
    """How a corpus is cut into sequences.

    Attributes:
        sequence_length: tokens a model sees at once, T.
        seed: of both shuffles; the same for every corpus and split.
    """

    sequence_length: int
    seed: int


@dataclass(frozen=True)
class EpochPlan:
    """How often the documents of one split are laid out, and how many sequences that makes."""

    epoch_tokens: int
    n_epochs: int
    shuffle_last_epoch_apart: bool
    n_sequences: int
    n_full_epoch_sequences: int


def plan_corpus(epoch_tokens: int, asked: int | None, settings: SequenceSettings) -> EpochPlan:
    """Returns the number of epochs for the requested sequences; one if None."""
    length = settings.sequence_length
    n_epochs = 1 if asked is None else max(1, -(-(asked * length + 1) // epoch_tokens))
    n_sequences = (n_epochs * epoch_tokens - 1) // length
    n_before_last = ((n_epochs - 1) * epoch_tokens - 1) // length
    apart = False
    if n_epochs > 1 and asked is not None:
        per_epoch = (epoch_tokens - 1) // length
        apart = asked - n_before_last < int(_FULL_LAST_EPOCH * per_epoch)
    return EpochPlan(epoch_tokens, n_epochs, apart, n_sequences, n_before_last)


@dataclass(frozen=True, eq=False)
class CorpusOrder:
    """The sequences of one split of one corpus; opens the arrays of `build_corpus_order`.

    Attributes:
        document_index: the document in each slot.
        sequence_index: slot and offset where each sequence begins, and where the last ends.
        shuffle_index: which entry of `sequence_index` the i-th sequence is.
    """

    dataset: IndexedDataset
    settings: SequenceSettings
    plan: EpochPlan
    document_index: Array
    sequence_index: Array
    shuffle_index: Array

    def __len__(self) -> int:
        """Counts the sequences."""
        return len(self.shuffle_index)

    def sequences(self, indices: Array) -> NDArray[np.int64]:
        """Reads these sequences: token ids, (len(indices), T + 1)."""
        start, n_tokens = self._pieces(indices)
        flat = (start + n_tokens - n_tokens.cumsum()).repeat(n_tokens)
        flat += np.arange(len(flat))
        rows: NDArray[np.int64] = self.dataset.stream[flat].astype(np.int64)
        return rows.reshape(len(indices), self.settings.sequence_length + 1)

    def _pieces(self, indices: Array) -> tuple[Array, Array]:
        """Returns the stretches of documents that make up sequences: first token and length."""
        entry = self.shuffle_index[indices].astype(np.int64)
        first_slot, first_offset = self.sequence_index[entry].T
        last_slot, last_offset = self.sequence_index[entry + 1].T
        n_pieces = last_slot - first_slot + 1
        ends = n_pieces.cumsum()
        first_piece = ends - n_pieces
        slot = (first_slot - first_piece).repeat(n_pieces)
        slot += np.arange(len(slot))
        document = self.document_index[slot]
        n_tokens = self.dataset.sequence_lengths[document].astype(np.int64)
        n_tokens[ends - 1] = last_offset + 1
        n_tokens[first_piece] -= first_offset
        start = self.dataset.sequence_pointers[document] // self.dataset.dtype.itemsize
        start[first_piece] += first_offset
        return start, n_tokens


def build_corpus_order(
    dataset: IndexedDataset,
    documents: range,
    asked: int | None,
    settings: SequenceSettings,
    cache: IndexCache,
) -> CorpusOrder:
    """Builds or loads the order of a range of documents of one corpus.

    Args:
        dataset: the corpus, or the split's part of it.
        documents: which of its sequences in the .idx belong to the split.
        asked: the least number of sequences needed; None makes one pass over the documents.
        settings: how they are cut and shuffled.
        cache: where the arrays are stored.

    Raises:
        DataError: there is no token, or not enough for one sequence.
    """
    lengths = dataset.load_sequence_lengths(documents)
    epoch_tokens = int(lengths.sum(dtype=np.int64))
    where = f"{dataset.prefix}: documents {documents.start} to {documents.stop} of {len(dataset)}"
    plan = plan_corpus(max(1, epoch_tokens), asked, settings)
    n_slots = plan.n_epochs * len(documents)
    is_short = epoch_tokens <= settings.sequence_length  # and repeated, if possible
    if not epoch_tokens or plan.n_sequences < 1 or (is_short and n_slots > _LARGEST_INT32):
        raise DataError(
            f"{where} hold {epoch_tokens} tokens, too few for one sequence of "
            f"{settings.sequence_length + 1}",
            "give this split a larger share of the corpus, add text, or shorten the sequence",
        )
    key = cache.key(
        content=cache.fingerprint(dataset.prefix),
        tokens=[dataset.span.start, dataset.span.stop],
        documents=[documents.start, documents.stop],
        asked=asked,
        # Options of Megatron-LM that Trainyard never changes; in the key, so caches stay valid.
        drop_last_partial=True,
        settings={**asdict(settings), "extra_token": True, "drop_last_partial": True},
    )
    shuffle_dtype = np.dtype(np.uint32 if plan.n_sequences < 2**32 - 2 else np.int64)
    stored = [
        ("document_index", (n_slots,), _index_dtype(documents.stop)),
        ("sequence_index", (plan.n_sequences + 1, 2), _index_dtype(n_slots)),
        ("shuffle_index", (plan.n_sequences,), shuffle_dtype),
    ]
    arrays = cache.load_or_build(
        key, stored, lambda: _build_arrays(lengths, documents.start, plan, settings)
    )
    return CorpusOrder(dataset, settings, plan, *arrays)


def _build_arrays(
    lengths: NDArray[np.int32], first_document: int, plan: EpochPlan, settings: SequenceSettings
) -> Iterator[Iterator[Array]]:
    """Yields the slabs of the three arrays of an order, one array after another."""
    random = np.random.RandomState(settings.seed)
    slots = _shuffled_documents(len(lengths), plan, random)
    yield (slab + first_document for slab in _slabs(slots))
    yield sequence_index_slabs(lengths, slots, plan.n_sequences, settings)
    del slots  # the next array is as large
    order = np.arange(plan.n_sequences)
    apart = plan.n_full_epoch_sequences if plan.shuffle_last_epoch_apart else plan.n_sequences
    random.shuffle(order[:apart])
    random.shuffle(order[apart:])
    yield _slabs(order)


def _shuffled_documents(
    n_documents: int, plan: EpochPlan, random: np.random.RandomState
) -> NDArray[np.int64]:
    """Lays the documents out epoch after epoch, shuffled over all epochs at once.

    A last epoch that will be little used is shuffled by itself, so that it does not take tokens
    from the others. In 64 bits, because numpy shuffles those a third faster.
    """
    slots = np.arange(n_documents * plan.n_epochs)
    slots.reshape(plan.n_epochs, n_documents)[1:] = slots[:n_documents]
    apart = len(slots) - n_documents * plan.shuffle_last_epoch_apart
    random.shuffle(slots[:apart])
    random.shuffle(slots[apart:])
    return slots


def _slabs(values: Array) -> Iterator[Array]:
    for first in range(0, len(values), _SLAB):
        yield values[first : first + _SLAB]


def sequence_index_slabs(
    lengths: NDArray[np.int32], slots: Array, n_sequences: int, settings: SequenceSettings
) -> Iterator[Array]:
    """Yields slot and offset of the beginning of every sequence, and of the end of the last.

    Sequence k begins at token k * T of the stream.

    Args:
        lengths: tokens of every document.
        slots: the documents in the order they are laid out.
        n_sequences: how many sequences to find.
        settings: how they are cut.
    """
    length, dtype = settings.sequence_length, _index_dtype(len(slots))
    yield np.zeros((1, 2), dtype)
    n_tokens = n_found = 0
    for first in range(0, len(slots), _SLAB):
        in_slot = lengths[slots[first : first + _SLAB]]
        ends = np.cumsum(in_slot, dtype=np.int64)
        ends += n_tokens
        n_tokens = int(ends[-1])
        begun = np.clip((ends - 1) // length, n_found, n_sequences)
        in_slab = np.repeat(np.arange(len(ends)), np.diff(begun, prepend=n_found))
        begins = np.arange(n_found + 1, n_found + 1 + len(in_slab)) * length
        n_found += len(in_slab)
        slab = np.empty((len(in_slab), 2), dtype)
        np.add(in_slab, first, out=slab[:, 0], casting="same_kind")
        np.subtract(begins, (ends - in_slot)[in_slab], out=slab[:, 1], casting="same_kind")
        yield slab


def _index_dtype(count: int) -> np.dtype[Any]:
    return np.dtype(np.int32 if count <= _LARGEST_INT32 else np.int64)
