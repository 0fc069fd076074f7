"""Bytes of a checkpoint, and of each rank's part of it.

A checkpoint holds each weight and both moments in fp32, once: 12 bytes per parameter, 1.9 TiB for
175B. With Muon a matrix of a block has one momentum: 8 bytes. With low-precision state it has a
weight of 16 bits, a master weight of 16, moments of 8 and 16, and their scales: 7.1 bytes.
"""

from __future__ import annotations

import math

from trainyard.architecture import (
    Layers,
    Shape,
    block_groups,
    block_layers,
    parameters_of,
    rest_layers,
    shard_dimension,
)
from trainyard.config.precisions import Stored
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan


def checkpoint_bytes(run: Run, n_parameters: int) -> int:
    """Returns the size of a checkpoint without its headers and manifest.

    Args:
        run: its precision says what is kept.
        n_parameters: of the model, including the padding rows when saved.
    """
    n_bytes, n_outside = 0, n_parameters
    for kind, n in block_groups(run.model, (0, run.model.n_layers)):
        for name, each in parameters_of(block_layers(kind)).items():
            n_outside -= n * math.prod(each.shape)
            n_bytes += n * _bytes_of(run, f"blocks.{name}", each.shape, each.is_trained)
    return n_bytes + run.stored(False, 2).saved_bytes(n_outside)


def _bytes_of(run: Run, name: str, shape: Shape, is_trained: bool = True) -> int:
    """Returns the checkpoint bytes of a parameter, or of a part of it."""
    stored = run.stored(name.startswith("blocks."), len(shape)) if is_trained else Stored()
    return stored.saved_bytes(math.prod(shape))


def rank_bytes(run: Run, plan: Plan, rank: int) -> int:
    """Returns the bytes one rank writes; of ranks with the same part, the first writes."""
    topology = plan.topology
    place = topology.coordinates(rank)
    if place.replicate:
        return 0
    n_copies, own = topology.shard * topology.context, place.shard * topology.context
    own += place.context

    def written(layers: Layers, prefix: str = "") -> int:
        n_bytes = 0
        for name, parameter in parameters_of(layers).items():
            shape = parameter.shape
            if place.tensor and parameter.dimension is None:
                continue
            is_sharded = run.parallel.shards_state and parameter.is_trained
            n_owners = topology.expert if parameter.of_experts else 1
            n_shards, share = n_copies // n_owners if is_sharded else 1, own // n_owners
            if share and not is_sharded:
                continue
            dimension = shard_dimension(shape, n_shards)
            n_rows = math.ceil(shape[dimension] / n_shards)  # of the first; the last may have none
            n_rows = max(0, min(n_rows, shape[dimension] - share * n_rows))
            part = (*shape[:dimension], n_rows, *shape[dimension + 1 :])
            n_bytes += _bytes_of(run, prefix + name, part, parameter.is_trained)
        return n_bytes

    n_bytes = 0
    for blocks in plan.stages[place.pipeline :: topology.pipeline]:
        rest = rest_layers(run.model, plan.padded_vocabulary_size, blocks, topology.tensor)
        # The last stage's embedding is a copy.
        kept = {name: rest[name] for name in rest if name != "embedding" or blocks[0] == 0}
        n_bytes += written(kept)
        for kind, n in block_groups(run.model, blocks):
            layers = block_layers(kind, topology.tensor, topology.expert)
            n_bytes += n * written(layers, "blocks.")
    return n_bytes
