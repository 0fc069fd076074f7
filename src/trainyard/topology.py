"""The coordinates of ranks in a layout: pure arithmetic.

The axes, from outermost to innermost, are `pipeline, replicate, shard, context, tensor`: tensor
ranks are neighbours, since they communicate most. 8 ranks as 2 pipeline x 2 shard x 2 tensor:

    rank        0  1  2  3  4  5  6  7
    pipeline    0  0  0  0  1  1  1  1
    shard       0  0  1  1  0  0  1  1
    tensor      0  1  0  1  0  1  0  1

    groups(["tensor"])             [0, 1] [2, 3] [4, 5] [6, 7]
    groups(["shard"])              [0, 2] [1, 3] [4, 6] [5, 7]
    groups(["pipeline", "shard"])  [0, 2, 4, 6] [1, 3, 5, 7]

`replicate` x `shard` is the data parallel size: ZeRO shards over `shard` and `context` together,
and keeps a copy in each `replicate`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

AXES = ("pipeline", "replicate", "shard", "context", "tensor")


@dataclass(frozen=True)
class Coordinates:
    """The index of one rank on each axis, from 0."""

    pipeline: int = 0
    replicate: int = 0
    shard: int = 0
    context: int = 0
    tensor: int = 0


@dataclass(frozen=True)
class Topology:
    """The number of ranks along each axis."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def n_ranks(self) -> int:
        """Total number of ranks."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def data(self) -> int:
        """Data parallel size: groups of ranks that see different sequences."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> Coordinates:
        """Returns the coordinates of a rank."""
        assert 0 <= rank < self.n_ranks, (rank, self)
        rank, tensor = divmod(rank, self.tensor)
        rank, context = divmod(rank, self.context)
        rank, shard = divmod(rank, self.shard)
        pipeline, replicate = divmod(rank, self.replicate)
        return Coordinates(pipeline, replicate, shard, context, tensor)

    def rank(self, coordinates: Coordinates) -> int:
        """Returns the rank at the given coordinates."""
        rank = 0
        for axis in AXES:
            place, size = getattr(coordinates, axis), getattr(self, axis)
            assert 0 <= place < size, (coordinates, self)
            rank = rank * size + place
        return rank

    def groups(self, axes: Sequence[str]) -> list[list[int]]:
        """Lists every group of ranks that differ only along these axes, each in rising order."""
        groups: dict[Coordinates, list[int]] = {}
        for rank in range(self.n_ranks):
            rest = replace(self.coordinates(rank), **dict.fromkeys(axes, 0))
            groups.setdefault(rest, []).append(rank)
        return list(groups.values())


def name_ranks(ranks: Sequence[int]) -> str:
    """Formats ranks, such as `ranks 0-2, 7`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"


def format_ranges(numbers: Sequence[int], separator: str = ", ") -> str:
    """Formats ascending numbers, such as `0-2, 7`."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], number]
        else:
            spans.append([number])
    return separator.join("-".join(map(str, span)) for span in spans)
