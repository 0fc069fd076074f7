"""Two to five real ranks over gloo, on machines that differ by name alone."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainyard.doctor.collectives import Talk, find_partner, gather_hosts, pair_rounds
from trainyard.doctor.verdict import BETWEEN_NODES, IN_NODE, LATENCY, OF_ALL

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("n_nodes", "rounds"),
    [
        (1, []),
        (2, [[(0, 1)]]),
        (3, [[(0, 1)], [(1, 2)], [(2, 0)]]),
        (4, [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]),
        (5, [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(4, 0)]]),
    ],
)
def test_rounds_of_pairs(n_nodes: int, rounds: list[list[tuple[int, int]]]) -> None:
    assert pair_rounds(n_nodes) == rounds


@pytest.mark.parametrize("n_nodes", range(3, 9))
def test_every_node_has_two_neighbours_and_never_both_at_once(n_nodes: int) -> None:
    met: dict[int, list[int]] = {node: [] for node in range(n_nodes)}
    for pairs in pair_rounds(n_nodes):
        busy = [node for pair in pairs for node in pair]
        assert len(busy) == len(set(busy))
        for a, b in pairs:
            met[a].append(b)
            met[b].append(a)
    assert all(len(set(others)) == 2 for others in met.values())


def test_partners_are_of_the_same_number_and_mutual() -> None:
    nodes = [[0, 1, 2], [3, 4]]
    partners = [find_partner(rank, nodes, [(0, 1)]) for rank in range(5)]
    assert partners == [3, 4, None, 0, 1]
    assert find_partner(0, nodes, []) is None


def measure(hosts: list[str]) -> tuple[list[str], dict[str, float]]:
    name = hosts[dist.get_rank()]
    socket.gethostname = lambda: name
    talk = Talk(CPU, budget_seconds=0.01, n_bytes=2**16)
    return talk.hosts, {name: value for name, value, _, _ in talk.measure()}


def test_ranks_of_one_machine(run_ranks: Callable[..., list[Any]]) -> None:
    for hosts, found in run_ranks(2, measure, ["n1", "n1"]):
        assert hosts == ["n1", "n1"]
        assert list(found) == [IN_NODE, LATENCY + IN_NODE]
        assert all(value > 0 for value in found.values())


def test_ranks_of_three_machines_one_of_which_has_one_more(
    run_ranks: Callable[..., list[Any]],
) -> None:
    names = ["n1", "n1", "n2", "n3"]
    alone = [OF_ALL, LATENCY + OF_ALL, BETWEEN_NODES]
    inside = [IN_NODE, LATENCY + IN_NODE, OF_ALL, LATENCY + OF_ALL]
    results = run_ranks(4, measure, names)
    # The second rank of n1 has no partner on the others.
    assert [list(found) for _, found in results] == [
        [*inside, BETWEEN_NODES],
        inside,
        alone,
        alone,
    ]
    assert all(value > 0 for _, found in results for value in found.values())


def test_names_of_machines_longer_than_they_should_be(
    run_ranks: Callable[..., list[Any]],
) -> None:
    def gather() -> list[str]:
        socket.gethostname = lambda: f"{dist.get_rank()}" + "x" * 200
        return gather_hosts()

    for hosts in run_ranks(2, gather):
        assert hosts == ["0" + "x" * 63, "1" + "x" * 63]
