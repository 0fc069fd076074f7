"""Batches of a run: a function of step and offset, which goes on at the start past the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from trainyard.config.run import Blend, Run
from trainyard.data.corpus_order import SequenceSettings
from trainyard.data.index_cache import IndexCache
from trainyard.data.indexed import IndexedWriter
from trainyard.data.loader import Batch, Loader
from trainyard.data.order import SequenceOrder, build_order
from trainyard.layout.batches import BatchSchedule

N = 22  # sequences of the order
VOCABULARY_SIZE = 1000


@pytest.fixture
def order(tmp_path: Path) -> SequenceOrder:
    prefix = tmp_path / "corpus"
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        writer.add_document(np.arange(8 * N + 1, dtype=np.uint16))
    blend, cut = Blend(prefixes=(str(prefix),)), SequenceSettings(8, seed=5)
    found = build_order(blend, "1", (N, 0, 0), cut, IndexCache(tmp_path / "cache"))["train"]
    assert found is not None
    assert len(found) == N
    return found


def build_loader(order: SequenceOrder, share: tuple[int, int] = (0, 1)) -> Loader:
    run = Run.model_validate({"train": {"micro_batch_size": 1, "global_batch_size": 4}})
    return Loader(order, BatchSchedule(run), VOCABULARY_SIZE, share)


def sequences(order: SequenceOrder, *numbers: int) -> Tensor:
    return torch.from_numpy(np.concatenate([order.sequences(number, 1) for number in numbers]))


def joined(batch: Batch) -> Tensor:
    tokens, labels = batch
    assert torch.equal(tokens[:, 1:], labels[:, :-1])
    return torch.cat([tokens, labels[:, -1:]], dim=1)


@pytest.mark.parametrize("share", [0, 1])
def test_past_the_end_it_goes_on_at_the_start(order: SequenceOrder, share: int) -> None:
    loader = build_loader(order, (share, 2))
    ends = [(20, 21), (0, 1)][share]
    assert torch.equal(joined(loader.batch(5)), sequences(order, *ends))
    across = [(19, 20), (21, 0)][share]
    assert torch.equal(joined(loader.batch(4, 3)), sequences(order, *across))
    assert torch.equal(joined(loader.batch(4, 3 + 5 * N)), sequences(order, *across))


def test_a_batch_may_be_longer_than_the_order(order: SequenceOrder) -> None:
    run = Run.model_validate({"train": {"micro_batch_size": 1, "global_batch_size": 2 * N + 1}})
    loader = Loader(order, BatchSchedule(run), VOCABULARY_SIZE)
    numbers = [20, 21, *range(N), *range(N - 1)]
    assert torch.equal(joined(loader.batch(0, 20)), sequences(order, *numbers))


def test_what_was_read_ahead_for_another_offset_is_not_used(order: SequenceOrder) -> None:
    loader = build_loader(order)
    loader.batch(0)
    assert torch.equal(joined(loader.batch(2, 7)), sequences(order, 15, 16, 17, 18))
    # As a rollback does: the next step of the same number, and then an earlier one.
    assert torch.equal(joined(loader.batch(1, 4)), sequences(order, 8, 9, 10, 11))
    assert torch.equal(joined(loader.batch(2, 4)), sequences(order, 12, 13, 14, 15))
    assert torch.equal(joined(loader.batch(1, 8)), sequences(order, 12, 13, 14, 15))
    assert torch.equal(joined(loader.batch(2)), sequences(order, 8, 9, 10, 11))


def test_the_next_batch_is_read_ahead_with_the_same_offset(
    order: SequenceOrder, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    read = SequenceOrder.sequences

    def note(self: SequenceOrder, start: int, count: int) -> object:
        asked.append(start)
        return read(self, start, count)

    monkeypatch.setattr(SequenceOrder, "sequences", note)
    loader = build_loader(order)
    for step in range(4):
        loader.batch(step, 1)
    loader._reader.shutdown()
    assert asked == [1, 5, 9, 13, 17]  # each once, and one ahead
