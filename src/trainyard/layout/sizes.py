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
    block_layers,
    parameters_of,
    rest_layers,
    shapes_of,
)
from trainyard.config.run import Run
from trainyard.layout.resolve import Plan


def checkpoint_bytes(run: Run, n_parameters: int) -> int:
    """Returns the size of a checkpoint without its headers and manifest.

    Args:
        run: its precision says what is kept.
        n_parameters: of the model, including the padding rows when saved.
    """
    blocks = {f"blocks.{name}": shape for name, shape in shapes_of(block_layers(run.model)).items()}
    n_in_block = sum(math.prod(shape) for shape in blocks.values())
    block_bytes = sum(_bytes_of(run, name, shape) for name, shape in blocks.items())
    n_layers = run.model.n_layers
    outside = run.stored(False, 2).saved_bytes(n_parameters - n_layers * n_in_block)
    return outside + n_layers * block_bytes


def _bytes_of(run: Run, name: str, shape: Shape) -> int:
    """Returns the checkpoint bytes of a parameter, or of a part of it."""
    return run.stored(name.startswith("blocks."), len(shape)).saved_bytes(math.prod(shape))


def rank_bytes(run: Run, plan: Plan, rank: int) -> int:
    """Returns the bytes one rank writes; of ranks with the same part, the first writes."""
    topology = plan.topology
    place = topology.coordinates(rank)
    if place.replicate:
        return 0
    n_shards = topology.shard * topology.context
    share = place.shard * topology.context + place.context
    if not run.parallel.shards_state:
        if share:
            return 0
        n_shards = 1

    def written(layers: Layers, prefix: str = "") -> int:
        n_bytes = 0
        for name, parameter in parameters_of(layers).items():
            shape = parameter.shape
            if place.tensor and parameter.dimension is None:
                continue
            n_rows = math.ceil(shape[0] / n_shards)  # of the first shares; the last may have none
            n_rows = max(0, min(n_rows, shape[0] - share * n_rows))
            n_bytes += _bytes_of(run, prefix + name, (n_rows, *shape[1:]))
        return n_bytes

    block_bytes = written(block_layers(run.model, topology.tensor), "blocks.")
    n_bytes = 0
    for blocks in plan.stages[place.pipeline :: topology.pipeline]:
        rest = rest_layers(run.model, plan.padded_vocabulary_size, blocks, topology.tensor)
        # The last stage's embedding is a copy.
        own = {name: rest[name] for name in rest if name != "embedding" or blocks[0] == 0}
        n_bytes += (blocks[1] - blocks[0]) * block_bytes + written(own)
    return n_bytes
