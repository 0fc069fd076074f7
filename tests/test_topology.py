"""Ranks and their places, against enumeration."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.topology import AXES, Coordinates, Topology

sizes = st.integers(1, 4)
topologies = st.builds(Topology, sizes, sizes, sizes, sizes, sizes)
some_axes = st.lists(st.sampled_from(AXES), unique=True)


def test_the_worked_example() -> None:
    topology = Topology(pipeline=2, shard=2, tensor=2)
    assert (topology.n_ranks, topology.data) == (8, 2)
    assert topology.group(5, ["tensor"]) == [4, 5]
    assert topology.group(5, ["shard"]) == [5, 7]
    assert topology.group(5, ["pipeline", "shard"]) == [1, 3, 5, 7]
    assert topology.coordinates(5) == Coordinates(pipeline=1, tensor=1)
    assert Topology(replicate=3, shard=2).data == 6


@given(topologies)
def test_ranks_count_the_places_with_tensor_fastest(topology: Topology) -> None:
    ranges = [range(getattr(topology, axis)) for axis in AXES]
    places = [Coordinates(*place) for place in itertools.product(*ranges)]
    assert [topology.coordinates(rank) for rank in range(topology.n_ranks)] == places
    assert [topology.rank(place) for place in places] == list(range(topology.n_ranks))


@given(topologies, some_axes)
def test_groups_part_the_ranks_and_differ_in_their_axes_alone(
    topology: Topology, axes: list[str]
) -> None:
    left = set(range(topology.n_ranks))
    while left:
        group = topology.group(min(left), axes)
        assert left.issuperset(group)
        left -= set(group)
        assert topology.group(group[-1], axes) == group
        assert group == sorted(group)
        places = [topology.coordinates(rank) for rank in group]
        for axis in AXES:
            found = {getattr(place, axis) for place in places}
            assert len(found) == (getattr(topology, axis) if axis in axes else 1)


def test_places_that_do_not_exist() -> None:
    with pytest.raises(AssertionError):
        Topology(tensor=2).coordinates(2)
    with pytest.raises(AssertionError):
        Topology(tensor=2).rank(Coordinates(tensor=2))
