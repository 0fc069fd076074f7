"""The coordinates of ranks in a layout: pure arithmetic.

The axes, from outermost to innermost, are `pipeline, replicate, shard, context, tensor`: tensor
ranks are neighbours, since they communicate most. 8 ranks as 2 pipeline x 2 shard x 2 tensor:

    rank        0  1  2  3  4  5  6  7
    pipeline    0  0  0  0  1  1  1  1
    shard       0  0  1  1  0  0  1  1
    tensor      0  1  0  1  0  1  0  1

    group(5, ["tensor"])             [4, 5]
    group(5, ["shard"])              [5, 7]
    group(5, ["pipeline", "shard"])  [1, 3, 5, 7]

`replicate` x `shard` is the data parallel size: ZeRO shards over `shard` and `context` together,
and keeps a copy in each `replicate`. Of these ranks, `expert` neighbours share the experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

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
    expert: int = 1
    """Ranks that share experts: not an axis, but neighbours in `shard` x `context`."""

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

    def group(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Lists the ranks that differ from one only along these axes, in rising order."""
        here = self.coordinates(rank)
        choices = [
            range(getattr(self, axis)) if axis in axes else (getattr(here, axis),) for axis in AXES
        ]
        return [self.rank(Coordinates(*place)) for place in product(*choices)]

    def expert_rank(self, rank: int) -> int:
        """Returns a rank's index among those that share experts."""
        here = self.coordinates(rank)
        return (here.shard * self.context + here.context) % self.expert

    def expert_group(self, rank: int) -> list[int]:
        """Lists the ranks that share experts with one."""
        near = self.group(rank, ("shard", "context"))
        first = near.index(rank) // self.expert * self.expert
        return near[first : first + self.expert]

    def same_experts(self, rank: int) -> list[list[int]]:
        """Lists the ranks that have the same experts as one, replica by replica."""
        near = self.group(rank, ("replicate", "shard", "context"))
        n = self.shard * self.context
        replicas = (near[start : start + n] for start in range(0, len(near), n))
        return [ranks[self.expert_rank(rank) :: self.expert] for ranks in replicas]


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
