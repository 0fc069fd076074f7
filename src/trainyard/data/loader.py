"""Batches of a run: the batch of a step is a pure function of the step number.

The order of sequences is fixed before training (`data/order.py`), so resuming only needs the step
and the number of skipped sequences; the loader has no checkpoint state. One batch is prefetched.

A run that skips sequences reads past the end of its order, and wraps to the start: with 1000
sequences and 16 skipped, the last 16 of the run are sequences 0 to 15, for the second time.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trainyard.config import run as config
from trainyard.data.corpus_order import SequenceSettings
from trainyard.data.index_cache import IndexCache, Unread, describe_contents
from trainyard.data.order import (
    SPLITS,
    SequenceOrder,
    Split,
    build_order,
    drop_single_weight,
    parse_split,
    repeats_alike,
)
from trainyard.errors import ConfigError, DataError
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.resolve import Plan

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger("trainyard")

Batch = tuple["Tensor", "Tensor"]
"""Token ids and the ids that follow them, (sequences, T) each, int64."""


@dataclass(eq=False)
class Loader:
    """Reads the training batches, or an equal share of each.

    Args:
        order: the sequences of the train split.
        batches: sequences of each step.
        vocabulary_size: ids must be below this.
        share: which of how many consecutive shares of a batch.
        pin_memory: put batches where a GPU can fetch them by itself.
    """

    order: SequenceOrder
    batches: BatchSchedule
    vocabulary_size: int
    share: tuple[int, int] = (0, 1)
    pin_memory: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        """Starts the thread that reads ahead."""
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader")
        self._ahead: tuple[tuple[int, int], Future[Batch]] | None = None

    def batch(self, step: int, offset: int = 0) -> Batch:
        """Returns the batch of step `step`, counted from 0, and begins to read the next one.

        Args:
            step: says how many sequences are consumed.
            offset: sequences skipped before it; what is past the end of the order is at its start.

        Raises:
            DataError: a token id is outside the model's vocabulary.
        """
        if self._ahead is not None and self._ahead[0] == (step, offset):
            batch = self._ahead[1].result()
        else:
            batch = self._read(step, offset)
        self._ahead = ((step + 1, offset), self._reader.submit(self._read, step + 1, offset))
        return batch

    def _read(self, step: int, offset: int) -> Batch:
        number, n_shards = self.share
        count = self.batches.batch_size(step) // n_shards
        first = self.batches.position(step) + offset + number * count
        sequences = self._sequences(first % len(self.order), count)
        tokens, labels = split_labels(sequences, self.vocabulary_size)
        return (tokens.pin_memory(), labels.pin_memory()) if self.pin_memory else (tokens, labels)

    def _sequences(self, first: int, count: int) -> NDArray[np.int64]:
        parts = []
        while count > 0:
            n_here = min(count, len(self.order) - first)
            parts.append(self.order.sequences(first, n_here))
            first, count = 0, count - n_here
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def held_out_batches(
    order: SequenceOrder, n_sequences: int, batch_size: int, vocabulary_size: int
) -> Iterator[Batch]:
    """Yields the first `n_sequences` of a split in batches."""
    for first in range(0, n_sequences, batch_size):
        count = min(batch_size, n_sequences - first)
        yield split_labels(order.sequences(first, count), vocabulary_size)


def split_labels(sequences: NDArray[np.int64], vocabulary_size: int) -> Batch:
    """Cuts (count, T + 1) ids into what is read and what is to be predicted.

    Raises:
        DataError: an id is outside the vocabulary.
    """
    if sequences.size and int(sequences.max()) >= vocabulary_size:
        row = int(np.argmax(sequences.max(axis=1)))
        raise DataError(
            f"token id {int(sequences.max())} is outside the model's vocabulary of "
            f"{vocabulary_size} (sequence {row} of a batch)",
            "train with the tokenizer that made the data: its size is model.vocabulary_size",
        )
    import torch  # seconds, which the parent of ranks, that only asks for fingerprints, saves

    ids = torch.from_numpy(sequences)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_orders(
    run: config.Run,
    plan: Plan,
    wanted: Collection[Split] = SPLITS,
    cache: IndexCache | None = None,
) -> dict[Split, SequenceOrder | None]:
    """Builds the order of the wanted splits of a run, or loads it from the cache; others are None.

    Args:
        run: names the data.
        plan: its numbers of sequences.
        wanted: splits.
        cache: the run's, if none is given.

    Raises:
        ConfigError: the run names no data.
        DataError: the data is missing, damaged or too small.
    """
    data = run.data
    data_prefixes(run)
    parts = parse_split(data.split) if data.blend.prefixes else (True, True, True)
    sizes = [
        size if part and split in wanted else 0
        for split, part, size in zip(SPLITS, parts, plan.order_sequences, strict=True)
    ]
    settings = SequenceSettings(run.model.sequence_length, run.train.seed)
    return build_order(
        data.blend if data.blend.prefixes else (data.train, data.valid, data.test),
        data.split if data.blend.prefixes else None,
        (sizes[0], sizes[1], sizes[2]),
        settings,
        cache or IndexCache(Path(data.cache_folder)),
    )


def build_training_orders(
    run: config.Run, plan: Plan, cache: IndexCache | None = None
) -> dict[Split, SequenceOrder | None]:
    """Builds the orders of all splits; a share too small for a test sequence gives none.

    Raises:
        ConfigError, DataError: as `build_orders`.
    """
    train, valid = (
        set(map(os.path.realpath, blend.prefixes)) for blend in (run.data.train, run.data.valid)
    )
    if both := sorted(train & valid):
        _log.warning("%s is in data.train and data.valid: no token is held out", both[0])
    try:
        return build_orders(run, plan, cache=cache)
    except DataError as error:
        # It raises if one of these is the cause.
        orders = build_orders(run, plan, ("train", "valid"), cache)
        if run.data.test.prefixes:
            raise
        _log.info("no final evaluation: %s", error.problem)
        return orders


def keeps_passes(run: config.Run, split: Split, order: SequenceOrder | None, other: Plan) -> bool:
    """Returns whether a split's order makes as many passes over the data under another plan."""
    if order is None:
        return True
    data, size = run.data, other.order_sequences[SPLITS.index(split)]
    if data.blend.prefixes:
        return repeats_alike(order, data.blend, size)
    return repeats_alike(order, drop_single_weight(getattr(data, split)), size)


def data_prefixes(run: config.Run) -> list[str]:
    """Lists every token file prefix of a run.

    Raises:
        ConfigError: there is none.
    """
    blends = (run.data.blend, run.data.train, run.data.valid, run.data.test)
    prefixes = [prefix for blend in blends for prefix in blend.prefixes]
    if not prefixes:
        raise ConfigError(
            "data.blend.prefixes is empty: there is nothing to train on",
            "data.blend.prefixes=['PREFIX'], where trainyard prepare wrote PREFIX.bin",
        )
    return prefixes


def describe_data(run: config.Run) -> str:
    """Returns a checksum of a run's token files from records and sizes, without reading them.

    Raises:
        ConfigError: the run names no data.
        DataError: the data is missing or damaged.
    """
    contents = [describe_contents(prefix) for prefix in data_prefixes(run)]
    return hashlib.sha256("\n".join(contents).encode()).hexdigest()


def find_unread(run: config.Run) -> list[Unread]:
    """Lists the token files of a run that must be read once before their contents are known."""
    cache = IndexCache(Path(run.data.cache_folder))
    files = map(cache.look_up, data_prefixes(run))
    return [unread for unread in files if isinstance(unread, Unread)]


def data_fingerprint(run: config.Run) -> str:
    """Computes what identifies the contents of all token files of a run, wherever they lie.

    Raises:
        ConfigError: the run names no data.
        DataError: the data is missing or damaged.
    """
    cache = IndexCache(Path(run.data.cache_folder))
    checksums = [cache.fingerprint(prefix) for prefix in data_prefixes(run)]
    return hashlib.sha256("\n".join(checksums).encode()).hexdigest()
