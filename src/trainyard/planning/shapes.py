"""Lists every way to split the work of a run over devices, before memory and time.

A shape is a run with tensor, context, pipeline, schedule, chunks and micro batch set, and the
fastest settings for memory. 8 devices in nodes of 4 have, among others:

    tensor 4 x pipeline 2 (1f1b), micro batch 1        tensor 1 x pipeline 4 (interleaved, 2 chunks)
    tensor 2 x context 2 x data 2, micro batch 4       data 8, micro batch 2
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from trainyard.config import rules
from trainyard.config.run import Run
from trainyard.layout.batches import batch_sizes
from trainyard.layout.ranks import ranks_per_replica, takes_micro_batches
from trainyard.planning.hardware import Machine

CHUNKS = (2, 3, 4, 6, 8)
LARGEST_MICRO_BATCH = 16
FEWEST_TOKENS_OF_A_CONTEXT_RANK = 1024
"""Smallest shard of a sequence to propose, unless the run itself uses smaller ones."""
FASTEST: rules.Changes = {"zero_stage": 1, "data_replicate": 1, "recompute": "none"}
"""The fastest variant of a shape."""


def list_shapes(run: Run, machine: Machine, n_devices: int) -> Iterator[Run]:
    """Lists every way to split the work, each as a valid run.

    Tensor ranks stay inside a node, and sequences are not split finely, unless the run itself
    does so.
    """
    model, parallel = run.model, run.parallel
    tensors = rules.divisors(math.gcd(model.most_tensor_ranks, n_devices))
    most_tensor = max(machine.devices_per_node, parallel.tensor)
    for tensor in (tensor for tensor in tensors if tensor <= most_tensor):
        for context, method in _contexts(run, n_devices // tensor):
            for pipeline in rules.divisors(n_devices // tensor // context):
                if pipeline > model.n_layers:
                    break
                changes: rules.Changes = {
                    "tensor": tensor,
                    "context": context,
                    "context_method": method,
                    "pipeline": pipeline,
                    **FASTEST,
                }
                cut = run.model_copy(update={"parallel": parallel.model_copy(update=changes)})
                yield from _shapes_of_cut(cut, n_devices)


def _contexts(run: Run, n_ranks: int) -> list[tuple[int, str]]:
    most = max(run.model.sequence_length // FEWEST_TOKENS_OF_A_CONTEXT_RANK, run.parallel.context)
    degrees = [degree for degree in rules.divisors(n_ranks) if 1 < degree <= most]
    one: list[tuple[int, str]] = [(1, run.parallel.context_method)]
    return one + list(itertools.product(degrees, ("ulysses", "ring")))


def _shapes_of_cut(cut: Run, n_devices: int) -> Iterator[Run]:
    """Lists sequence, schedules, chunks and micro batches of one split."""
    parallel = cut.parallel
    data = n_devices // ranks_per_replica(cut)
    rest, odd = divmod(math.gcd(*rules.batch_fields(cut).values()), data)
    if odd:
        return
    micro_batches = [size for size in rules.divisors(rest) if size <= LARGEST_MICRO_BATCH]
    # Sequence parallelism sends the same bytes and keeps less, so it is used wherever allowed.
    divides = cut.model.sequence_length // parallel.context % parallel.tensor == 0
    sequences = {parallel.tensor > 1 and divides}
    for sequence, (schedule, chunks) in itertools.product(sequences, _schedules(cut)):
        update = {"sequence": sequence, "schedule": schedule, "chunks": chunks}
        parallel = cut.parallel.model_copy(update=update)
        ordered = cut.model_copy(update={"parallel": parallel})
        if rules.broken_rules(ordered, batches=False):
            continue
        for size in micro_batches:
            train = cut.train.model_copy(update={"micro_batch_size": size})
            shape = ordered.model_copy(update={"train": train})
            if all(
                takes_micro_batches(shape, batch // (size * data))
                for batch in batch_sizes(cut.train)
            ):
                yield shape


def _schedules(cut: Run) -> list[tuple[str, int]]:
    """Lists schedules with numbers of chunks, without gpipe, which is 1f1b with more memory."""
    parallel = cut.parallel
    if parallel.pipeline == 1:
        return [(parallel.schedule, 1)]
    most = cut.model.n_layers // parallel.pipeline
    return [
        ("1f1b", 1),
        *(("interleaved", chunks) for chunks in CHUNKS if chunks <= most),
        *(("zero_bubble", chunks) for chunks in (1, 2) if chunks <= most),
    ]
