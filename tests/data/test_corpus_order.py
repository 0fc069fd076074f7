"""One corpus's order against the definition followed one token at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainyard.data import corpus_order as subject
from trainyard.data.corpus_order import SequenceSettings, build_corpus_order
from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import IndexedDataset, IndexedWriter, write_index
from trainyard.errors import DataError


def write_corpus(prefix: Path, lengths: list[int]) -> IndexedDataset:
    """Token j of the whole file is j + 1."""
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        first = 1
        for length in lengths:
            writer.add_document(np.arange(first, first + length))
            first += length
    return IndexedDataset(prefix)


def walk_index(
    lengths: list[int], slots: list[int], n_sequences: int, settings: SequenceSettings
) -> list[list[int]]:
    """Where sequences begin, by counting tokens off document by document."""
    index, slot, offset = [[0, 0]], 0, 0
    for _ in range(n_sequences):
        wanted = settings.sequence_length + 1
        while wanted > lengths[slots[slot]] - offset:
            wanted -= lengths[slots[slot]] - offset
            slot, offset = slot + 1, 0
        offset += wanted - 1
        index.append([slot, offset])
    return index


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda x: sum(x) > 1),
    length=st.integers(1, 12),
)
@example(lengths=np.random.RandomState(0).randint(1, 30, 70_000).tolist(), length=64)  # two slabs
@settings(max_examples=200)
def test_sequences_begin_where_counting_says(lengths: list[int], length: int) -> None:
    cut = SequenceSettings(length, 1)
    slots = [int(slot) for slot in np.random.RandomState(0).permutation(len(lengths))]
    n_sequences = (sum(lengths) - 1) // length
    numbers = np.array(lengths, np.int32), np.array(slots)
    found = np.concatenate(list(subject.sequence_index_slabs(*numbers, n_sequences, cut)))
    assert found.tolist() == walk_index(lengths, slots, n_sequences, cut)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(lambda x: sum(x) > 1),
    length=st.integers(1, 12),
    asked=st.integers(1, 40),
)
@settings(max_examples=50)
def test_rows_are_the_stream_cut_up(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, asked: int
) -> None:
    tmp_path = tmp_path_factory.mktemp("rows")
    dataset = write_corpus(tmp_path / "corpus", lengths)
    cut = SequenceSettings(length, 5)
    order = build_corpus_order(dataset, range(len(dataset)), asked, cut, IndexCache(tmp_path))
    assert len(order) >= asked
    stream = np.concatenate([dataset.tokens(int(slot)) for slot in order.document_index])
    assert sorted(order.shuffle_index.tolist()) == list(range(len(order)))
    rows = order.sequences(np.arange(len(order)))
    for row, number in zip(rows, order.shuffle_index.tolist(), strict=True):
        assert row.tolist() == stream[number * length : (number + 1) * length + 1].tolist()


@pytest.mark.parametrize(
    ("epoch_tokens", "asked", "n_epochs", "apart"),
    [
        (101, None, 1, False),
        (101, 10, 1, False),
        (101, 11, 2, True),  # 1 of the 10 sequences of the second epoch
        (101, 17, 2, True),
        (101, 18, 2, False),  # 8 of 10: 80 %
        (101, 20, 2, False),
        (3, 20, 67, False),  # less than one sequence an epoch
    ],
)
def test_a_little_used_last_epoch_stands_apart(
    epoch_tokens: int, asked: int | None, n_epochs: int, apart: bool
) -> None:
    plan = subject.plan_corpus(epoch_tokens, asked, SequenceSettings(10, 1))
    assert (plan.n_epochs, plan.shuffle_last_epoch_apart) == (n_epochs, apart)


def test_a_last_epoch_apart_comes_last_and_another_order_has_the_same_size(tmp_path: Path) -> None:
    dataset = write_corpus(tmp_path / "corpus", [5] * 40)
    arguments = (SequenceSettings(10, 7), IndexCache(tmp_path / "cache"))
    apart = build_corpus_order(dataset, range(40), 20, *arguments)
    assert sorted(apart.document_index[-40:].tolist()) == list(range(40))
    first = apart.plan.n_full_epoch_sequences
    assert sorted(apart.shuffle_index[:first].tolist()) == list(range(first))
    whole = build_corpus_order(dataset, range(40), 39, *arguments)
    assert (apart.plan.shuffle_last_epoch_apart, whole.plan.shuffle_last_epoch_apart) == (1, 0)
    assert len(apart) == len(whole)
    assert (apart.document_index != whole.document_index).any()


def test_too_little_text_is_refused_with_its_numbers(tmp_path: Path) -> None:
    dataset = write_corpus(tmp_path / "corpus", [3, 4])
    cut = SequenceSettings(10, 1)
    problem = r"corpus: documents 0 to 2 of 2 hold 7 tokens, too few for one sequence of 11"
    for asked in (None, 2**34):
        with pytest.raises(DataError, match=problem):
            build_corpus_order(dataset, range(2), asked, cut, IndexCache(tmp_path))


def test_no_text_is_refused(tmp_path: Path) -> None:
    slab = np.zeros(3, np.int32), np.ones(3, np.int32)  # as other tools write empty documents
    write_index(tmp_path / "corpus.idx", np.dtype(np.uint16), (3, 3), lambda: [slab])
    (tmp_path / "corpus.bin").touch()
    dataset = IndexedDataset(tmp_path / "corpus")
    with pytest.raises(DataError, match="documents 1 to 3 of 3 hold 0 tokens, too few"):
        build_corpus_order(dataset, range(1, 3), 5, SequenceSettings(4, 1), IndexCache(tmp_path))
