"""Which part of a whole parameter this rank holds, and whether this rank writes it.

A parameter is first split equally over tensor ranks, and each part over data ranks by the rule of
`torch.chunk`: parts of ceil(n / ranks) rows, the last ones shorter or empty.

    attention.out.weight, (10, 8); dimension 1 over 2 tensor ranks, rows over 4 data ranks

                         columns 0:4         columns 4:8
    data rank 0          rows 0:3            rows 0:3
    data rank 1          rows 3:6            rows 3:6
    data rank 2          rows 6:9            rows 6:9
    data rank 3          row  9              row  9

Experts are first split over the ranks that share them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Shard:
    """The part of a rank, of several that shard a dimension equally."""

    dimension: int
    rank: int
    n_ranks: int


@dataclass(frozen=True)
class Placement:
    """The position of a part in a whole tensor."""

    shape: Shape
    """Shape of the whole tensor."""
    offsets: Shape
    """Index of the part's first value in the whole tensor."""
    local_shape: Shape
    """Shape of the part; a zero means that this rank holds nothing."""

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this part of a whole tensor, as a view."""
        for dimension, (start, length) in enumerate(
            zip(self.offsets, self.local_shape, strict=True)
        ):
            tensor = tensor.narrow(dimension, start, length)
        return tensor

    def cut(self, dimension: int, rank: int, n_ranks: int) -> Placement:
        """Splits this part by the rule of `torch.chunk`; returns that of `rank` of `n_ranks`."""
        length = self.local_shape[dimension]
        longest = -(-length // n_ranks)
        start = min(rank * longest, length)
        offsets, local_shape = list(self.offsets), list(self.local_shape)
        offsets[dimension] += start
        local_shape[dimension] = min(longest, length - start)
        return Placement(self.shape, tuple(offsets), tuple(local_shape))


def whole(shape: Shape) -> Placement:
    """Returns the placement of an unsharded tensor."""
    return Placement(tuple(shape), (0,) * len(shape), tuple(shape))


def place(parameter: Tensor, shards: Sequence[Shard] = ()) -> Placement:
    """Returns which part of the whole parameter this rank holds.

    Args:
        parameter: plain, or as FSDP2 made it: a DTensor over a mesh of one or two dimensions.
        shards: of this rank among those of tensors and of experts.
    """
    shape = list(parameter.shape)
    for each in shards:
        shape[each.dimension] *= each.n_ranks
    placement = whole(tuple(shape))
    for each in shards:
        placement = placement.cut(each.dimension, each.rank, each.n_ranks)
    for cut, rank, n_ranks in _cuts(parameter):
        if cut is not None:
            placement = placement.cut(cut, rank, n_ranks)
    return placement


def is_first_holder(parameter: Tensor) -> bool:
    """Whether this rank is the first of the data ranks that hold the same part of a parameter."""
    return all(rank == 0 for cut, rank, _ in _cuts(parameter) if cut is None)


def local_part(parameter: Tensor) -> Tensor:
    """Returns this rank's values, detached, sharing their memory."""
    part = parameter.detach()
    return part.to_local() if is_distributed(part) else part


def is_distributed(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether it is a DTensor, whose import takes half a second: without it there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _cuts(parameter: Tensor) -> Iterator[tuple[int | None, int, int]]:
    """Yields for each axis of a mesh: the dimension it shards (None: replicates), rank, ranks."""
    if is_distributed(parameter):
        from torch.distributed.tensor import Replicate, Shard

        mesh = parameter.device_mesh
        for axis, cut in enumerate(parameter.placements):
            assert type(cut) in (Shard, Replicate), cut
            dimension = cut.dim if isinstance(cut, Shard) else None
            yield dimension, mesh.get_local_rank(axis), mesh.size(axis)
