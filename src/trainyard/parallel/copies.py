"""Compares copies of weights across ranks, to detect silent data corruption.

A faulty device or a flipped bit in memory makes copies differ, and nothing else reveals it. Copies
are replicas of data parallelism (ZeRO 0, hybrid sharding), layers that tensor ranks replicate, and
the embedding tied to the head on the last pipeline stage. They start equal, get equal gradients,
and stay bitwise equal. Weights on one rank only cannot be compared.

Each part is hashed to one number: the sum of its values' bits, each times an odd factor that
depends on the position. Modulo 2**64, an odd factor maps only 0 to 0, so any change of one value
changes the hash. Changes of several values cancel only by rare coincidence.

    weight       1.5          -2.0                     as bits      0x3fc00000   0xc0000000
    number       0x3fc00000 * factor(0) + 0xc0000000 * factor(1)    mod 2**64
"""

from __future__ import annotations

import hashlib
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from trainyard.parallel.model import EMBEDDING, LocalParameter, ParallelModel
from trainyard.parallel.placement import local_part, place

MOST_NAMED = 16
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_FACTOR = -7046029254386353131  # 2**64 / golden ratio, odd: neighbours get factors far apart
_CHUNK = 2**18  # values; temporaries fit the CPU cache: twice as fast as 2**20


def differing_copies(parallel_model: ParallelModel) -> list[str]:
    """Compares weights that several ranks hold; all ranks must call it, between two steps.

    Returns:
        a line for each part whose copies differ, ranks of the rarest copy first, such as
        "blocks.3.mlp.up.weight: rank 3 differs from ranks 0-2"; the same on every rank.
    """
    mesh = parallel_model.mesh
    if mesh.topology.n_ranks == 1:
        return []
    shared = [
        local
        for local in parallel_model.local_parameters
        if _others_may_hold(local, parallel_model)
    ]
    names = {_key(local, parallel_model): local.name for local in shared}
    table = _gather(list(names), [fingerprint(local_part(local.parameter)) for local in shared])
    # Padding is equal everywhere.
    different = np.unique(table.reshape(-1, 2), axis=0)
    keys, n_different = np.unique(different[:, 0], return_counts=True)
    suspects = set(keys[n_different > 1].tolist())
    if not suspects:
        return []
    in_order = [key for key in dict.fromkeys(table[:, :, 0].flatten().tolist()) if key in suspects]
    lines = []
    for key in in_order[:MOST_NAMED]:
        name = mesh.agree(names.get(key))  # a stage knows only its own names
        lines.append(f"{name}: {_describe(table, key)}")
    n_more = len(in_order) - MOST_NAMED
    return [*lines, f"and {n_more} more"] if n_more > 0 else lines


def fingerprint(values: Tensor) -> Tensor:
    """Hashes all bits of a tensor to one int64 on its device, without waiting for it."""
    bits = values.flatten().view(_INTEGERS[values.element_size()])
    factors = torch.arange(min(_CHUNK, len(bits)), device=values.device) * _FACTOR
    factors = (factors ^ (factors >> 31)) | 1
    number = torch.zeros((), dtype=torch.int64, device=values.device)
    for chunk in torch.split(bits, _CHUNK):
        number = number * _FACTOR + (chunk * factors[: len(chunk)]).sum()
    return number


def _others_may_hold(local: LocalParameter, parallel_model: ParallelModel) -> bool:
    is_at_an_end = parallel_model.mesh.first_and_last_stage is not None
    if local.name == EMBEDDING and is_at_an_end:
        return True
    return local.norm_weight(parallel_model.mesh.topology.tensor) < 1


def _key(local: LocalParameter, parallel_model: ParallelModel) -> int:
    """Hashes a part of a parameter's name and place; equal on all ranks that hold this part."""
    placed = place(local.parameter, local.dimension, parallel_model.tensor_shard)
    text = f"{local.name} {placed.offsets} {placed.local_shape}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _gather(keys: list[int], numbers: list[Tensor]) -> NDArray[np.int64]:
    """Gathers the keys and numbers of all ranks, (ranks, parts, 2); 0 where a rank has fewer."""
    n_parts = torch.tensor(len(keys))
    dist.all_reduce(n_parts, dist.ReduceOp.MAX)
    mine = torch.zeros(int(n_parts), 2, dtype=torch.int64)
    if keys:
        mine[: len(keys), 0] = torch.tensor(keys)
        mine[: len(keys), 1] = torch.stack(numbers).cpu()
    everyone = torch.zeros(dist.get_world_size(), *mine.shape, dtype=torch.int64)
    if mine.numel():
        dist.all_gather(list(everyone), mine)
    return everyone.numpy()


def _describe(table: NDArray[np.int64], key: int) -> str:
    """Describes which ranks' copies of a part differ from which others'."""
    ranks_of: dict[int, list[int]] = {}
    for rank, part in zip(*np.nonzero(table[:, :, 0] == key), strict=True):
        ranks_of.setdefault(int(table[rank, part, 1]), []).append(int(rank))
    rarest, *others = sorted(ranks_of.values(), key=lambda ranks: (len(ranks), ranks))
    verb = "differs" if len(rarest) == 1 else "differ"
    return f"{_list(rarest)} {verb} from {' and from '.join(_list(ranks) for ranks in others)}"


def _list(ranks: list[int]) -> str:
    """Renders "rank 3", or "ranks 0-2, 5"."""
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(ranks), key=lambda pair: pair[1] - pair[0])
    ]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(texts)
