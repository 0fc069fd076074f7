"""Rates of a device, and of two to five real ranks over gloo, on machines that differ by name."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainyard.doctor import measure
from trainyard.doctor.diagnosis import BETWEEN_NODES, IN_NODE, LATENCY, OF_ALL
from trainyard.doctor.measure import (
    ROUNDS,
    Size,
    find_partner,
    gather_hosts,
    measure_collectives,
    measure_device,
    pair_rounds,
    time_call,
)

CPU = torch.device("cpu")
TINY = Size(64, 32, 2, copied_bytes=2**16, reduced_bytes=2**16, sent_bytes=2**16)


def test_what_is_measured_of_a_processor() -> None:
    found = {name: (value, unit) for name, value, unit, _ in measure_device(CPU, 0.005, TINY)}
    matmuls = ["matmuls fp32", "matmuls fp16", "matmuls bf16"]
    assert list(found)[:3] == matmuls
    fastest = max(matmuls, key=found.__getitem__).removeprefix("matmuls ")
    assert list(found)[3] == f"attention {fastest}"
    assert list(found)[4] == "memory copies"
    assert len(found) == 5  # no fp8, which a processor emulates
    assert all(value > 0 for value, _ in found.values())
    assert [unit for _, unit in found.values()] == ["TFLOP/s"] * 4 + ["GB/s"]


class Clock:
    """Stands still, but for what is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(measure, "time", made)
    return made


def test_a_call_is_timed_as_long_as_it_takes_or_there_is_time(clock: Clock) -> None:
    for each, budget, n in ((0.004, 0.0121 * ROUNDS, 3 * ROUNDS), (0.02, 0.001, 1)):
        seconds, n_calls = time_call(lambda: clock.take(each), CPU, budget)  # noqa: B023
        assert (seconds, n_calls) == (pytest.approx(each), n)


def test_ranks_agree_how_often_they_call(clock: Clock) -> None:
    calls: list[int] = []
    seconds, n_calls = time_call(lambda: calls.append(1), CPU, 0.05, agree=lambda mine: 0.005)
    assert n_calls == 2 * ROUNDS  # as the slowest needs 5 ms a call
    assert len(calls) == 2 + n_calls
    assert seconds == 0


@pytest.mark.gpu
def test_what_is_measured_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    device = torch.device("cuda", 0)
    found = {name: value for name, value, _, _ in measure_device(device, 0.2)}
    assert {"matmuls fp32", "matmuls fp16", "matmuls bf16", "memory copies"} <= set(found)
    assert found["matmuls bf16"] > found["matmuls fp32"]


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


def measure_as(hosts: list[str]) -> tuple[list[str], dict[str, float]]:
    name = hosts[dist.get_rank()]
    socket.gethostname = lambda: name
    measured = measure_collectives(CPU, budget_seconds=0.01, size=TINY)
    return gather_hosts(), {name: value for name, value, _, _ in measured}


def test_ranks_of_three_machines_one_of_which_has_one_more(
    run_ranks: Callable[..., list[Any]],
) -> None:
    names = ["n1", "n1", "n2", "n3"]
    alone = [OF_ALL, LATENCY + OF_ALL, BETWEEN_NODES]
    inside = [IN_NODE, LATENCY + IN_NODE, OF_ALL, LATENCY + OF_ALL]
    results = run_ranks(4, measure_as, names)
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
