"""Predicts checkpoints: their size, host memory, and the best interval.

A checkpoint holds each weight and both moments in fp32, once: 12 bytes per parameter, 1.9 TiB for
175B. With Muon a matrix of a block has one momentum: 8 bytes. With low-precision state it has a
weight of 16 bits, a master weight of 16, moments of 8 and 16, and their scales: 7.1 bytes. During a
background save, each rank keeps a copy of its part in host memory.

If each save costs w seconds of training, and a failure happens every M seconds, a run that saves
every t seconds loses

    w / t          to saving
    t / 2 M        to repetition: half an interval on average, per failure

The sum is minimal at t = sqrt(2 w M) (Young 1974). For 128 nodes and w = 60 s:

    M = 86,400 s / (128 x 0.0065) = 28.8 h          t = sqrt(2 x 60 s x 28.8 h) = 59 min
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
from trainyard.planning.resolve import Plan

FAILURES_PER_NODE_DAY = 6.5e-3
"""Of a cluster of 16,000 A100 (arXiv:2410.21680). Published runs lie between the bounds below."""
FEWEST_FAILURES_PER_NODE_DAY = 2.3e-3
"""Of the other cluster in that study."""
MOST_FAILURES_PER_NODE_DAY = 1.6e-2
"""Of OPT-175B (arXiv:2205.01068)."""
RESTART_SECONDS = 15 * 60.0
"""From a failure to the next step, unattended."""
SECONDS_PER_DAY = 86_400.0


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
    if run.parallel.zero_stage == 0:
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


def host_bytes(run: Run, plan: Plan) -> int:
    """Returns the host memory of a background save, on the rank that writes most."""
    if not run.checkpoint.background:
        return 0
    # The first of the tensor ranks, replicas and shards writes most in its stage.
    step = plan.n_ranks // plan.topology.pipeline
    return max(rank_bytes(run, plan, rank) for rank in range(0, plan.n_ranks, step))


def mean_seconds_between_failures(
    n_nodes: int, failures_per_node_day: float = FAILURES_PER_NODE_DAY
) -> float:
    """Returns the time from one failure of any node to the next."""
    return SECONDS_PER_DAY / (n_nodes * failures_per_node_day)


def suggest_interval(save_seconds: float, mean_seconds_between_failures: float) -> float:
    """Returns the optimal seconds between saves.

    Args:
        save_seconds: training stall per save.
        mean_seconds_between_failures: of the whole job.
    """
    return math.sqrt(2 * save_seconds * mean_seconds_between_failures)


def useful_share(
    interval_seconds: float,
    save_seconds: float,
    mean_seconds_between_failures: float,
    restart_seconds: float = RESTART_SECONDS,
) -> float:
    """Returns the share of time in steps that need no repetition, 0 to 1.

    Source: E[ETTR] of arXiv:2410.21680.
    """
    lost = (restart_seconds + interval_seconds / 2) / mean_seconds_between_failures
    return max(0.0, 1 - lost) / (1 + save_seconds / interval_seconds)
