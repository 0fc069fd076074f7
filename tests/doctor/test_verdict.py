from __future__ import annotations

import pytest

from trainyard.doctor.verdict import (
    BETWEEN_NODES,
    IN_NODE,
    LATENCY,
    MEMORY,
    OF_ALL,
    PASS,
    REPLACE,
    WARN,
    WRITE,
    Finding,
    Measurement,
    Shape,
    compare_nodes,
    expect,
    judge,
    verdict_of,
    worst_of,
)
from trainyard.planning.clusters import find_machine

TWO_NODES = Shape(["n1", "n1", "n2", "n2"])


def measured(values: list[float], name: str = MEMORY) -> list[Measurement]:
    return [
        Measurement(name, value, "GB/s", rank, f"n{1 + rank // 2}")
        for rank, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(1.3, PASS), (0.9, PASS), (0.899, WARN), (2 / 3, WARN), (0.666, REPLACE), (0.0, REPLACE)],
)
def test_shares(share: float, verdict: str) -> None:
    assert verdict_of(share) == verdict


@pytest.mark.parametrize(
    ("verdicts", "worst"),
    [([], ""), (["", PASS], PASS), ([PASS, REPLACE, WARN], REPLACE), (["", ""], "")],
)
def test_the_worst_counts(verdicts: list[str], worst: str) -> None:
    assert worst_of(verdicts) == worst


@pytest.mark.parametrize(
    ("values", "expected", "verdict", "slow"),
    [
        # Against the profile.
        ([100, 100, 100, 100], 100, PASS, []),
        ([100, 100, 95, 91], 100, PASS, []),
        ([100, 100, 100, 89], 100, WARN, [3]),
        ([100, 60, 100, 80], 100, REPLACE, [1, 3]),
        # All are slow alike: no peer shows it, the profile does.
        ([60, 60, 60, 60], 100, REPLACE, [0, 1, 2, 3]),
        # All are faster than the profile, one is not as fast as the others.
        ([150, 150, 150, 110], 100, WARN, [3]),
        # Nothing is known of the machine.
        ([10, 10, 10, 10], None, PASS, []),
        ([10, 10, 6, 10], None, REPLACE, [2]),
        # One of two machines: half of the ranks are slow.
        ([10, 10, 6, 6], None, REPLACE, [2, 3]),
    ],
)
def test_rates_are_judged_by_the_profile_and_by_their_peers(
    values: list[float], expected: float | None, verdict: str, slow: list[int]
) -> None:
    (row,) = judge(measured(values), {MEMORY: expected} if expected else {}, TWO_NODES)
    assert row.verdict == verdict
    assert [each.rank for each in row.slow] == slow
    assert row.worst.value == min(values)
    assert row.share == (min(values) / expected if expected else None)


def test_processes_of_one_processor_are_no_peers() -> None:
    one_machine = Shape(["n1"] * 4, has_own_devices=False)
    (row,) = judge(measured([10, 10, 6, 10]), {}, one_machine)
    assert (row.verdict, row.slow) == ("", ())
    two_machines = Shape(["n1", "n1", "n2", "n2"], has_own_devices=False)
    (row,) = judge(measured([10, 10, 6, 6]), {}, two_machines)
    assert [each.host for each in row.slow] == ["n2", "n2"]


def test_one_rank_alone_has_no_peer() -> None:
    (row,) = judge(measured([5]), {}, Shape(["n1"]))
    assert (row.verdict, row.median, row.worst.value) == ("", 5, 5)


def test_of_a_latency_the_longest_is_the_worst_and_nothing_is_expected() -> None:
    found = measured([20, 30, 25, 22], LATENCY + IN_NODE)
    (row,) = judge(found, {LATENCY + IN_NODE: 1.0}, TWO_NODES)
    assert (row.worst.rank, row.verdict, row.expected) == (1, "", None)


def test_ranks_of_a_machine_share_its_disk_and_none_is_replaced_for_it() -> None:
    four = Shape(["n1", "n1", "n2", "n2"])
    (row,) = judge(measured([1, 3, 2, 2], WRITE), {}, four)
    assert (row.median, row.verdict) == (4, PASS)
    (row,) = judge(measured([1, 3, 0.5, 0.5], WRITE), {}, four)
    assert (row.median, row.verdict) == (2.5, WARN)
    assert [(each.host, each.value) for each in row.slow] == [("n2", 1)]


def test_what_is_expected_of_a_node_of_h100() -> None:
    found = expect(find_machine("azure-ndv5"), Shape(["n1"] * 8))
    assert found["matmuls bf16"] == pytest.approx(989 * 0.80)
    assert found[MEMORY] == pytest.approx(3350 * 0.80)
    assert found[IN_NODE] == found[OF_ALL] == pytest.approx(450 * 0.85)
    assert "matmuls fp8" not in found


def test_between_nodes_a_ring_uses_all_network_devices_of_a_node() -> None:
    polaris = find_machine("polaris")
    shape = Shape([f"n{rank // 4}" for rank in range(8)])
    found = expect(polaris, shape)
    assert found[BETWEEN_NODES] == pytest.approx(12.5 * 0.92)
    assert found[OF_ALL] == pytest.approx(4 * 12.5 * 0.92)


def test_nodes_that_differ_are_named() -> None:
    drivers = {"n1": {"driver": "550"}, "n2": {"driver": "535"}, "n3": {"driver": "550"}}
    assert compare_nodes(drivers) == [
        Finding(
            "driver", "550 on n1, n3; 535 on n2", WARN, "nodes of a job should be identical", "n2"
        )
    ]
    assert compare_nodes({"n1": {"driver": "550"}, "n3": {"driver": "550"}}) == []
