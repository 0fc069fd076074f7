"""What ranks found, put together: who is named, and how it reads."""

from __future__ import annotations

import json

import pytest

from trainyard.doctor.diagnosis import (
    BETWEEN_NODES,
    IN_NODE,
    LATENCY,
    MEMORY,
    OF_ALL,
    PASS,
    REPLACE,
    WARN,
    WRITE,
    Diagnosis,
    Examination,
    Finding,
    Measurement,
    Shape,
    diagnose,
    expect,
    find_usual_machine,
    judge,
    render,
    verdict_of,
)
from trainyard.errors import MachineError
from trainyard.planning.clusters import find_machine

H100 = "NVIDIA H100 80GB HBM3"
TWO_NODES = Shape(["n1", "n1", "n2", "n2"])


def ranks(
    n_nodes: int = 2, per_node: int = 8, device: str = H100, slow: tuple[int, ...] = ()
) -> list[Examination]:
    found = []
    for rank in range(n_nodes * per_node):
        each = Examination(rank, f"n{1 + rank // per_node}", device, per_node)
        if rank % per_node == 0:
            each.facts = {"versions": {"torch": "2.13.0", "NVIDIA driver": "550.54"}}
            each.find([Finding("lock", "excludes another process", PASS)])
        rate = 480.0 if rank in slow else 770.0
        each.measure("matmuls bf16", rate, "TFLOP/s", "8192^3, median of 300")
        each.measure(WRITE, 0.5, "GB/s", "1.0 GiB, flushed")
        found.append(each)
    return found


def refusal(diagnosis: Diagnosis) -> MachineError:
    with pytest.raises(MachineError) as raised:
        diagnosis.refuse()
    return raised.value


def test_healthy_nodes_pass() -> None:
    diagnosis = diagnose(ranks(), find_machine("azure-ndv5"), 2)
    assert diagnosis.verdict == PASS
    diagnosis.refuse()
    text = render(diagnosis)
    assert text.startswith("16 ranks on 2 machines, compared with azure-ndv5\n\nn1 (all machines:")
    assert "  pass     lock                 n1 and 1 more: excludes another process" in text
    assert "slow:" not in text


def test_a_slow_device_is_named_with_its_rank_and_its_machine() -> None:
    diagnosis = diagnose(ranks(slow=(11,)), find_machine("azure-ndv5"), 2)
    assert diagnosis.verdict == REPLACE
    error = refusal(diagnosis)
    assert error.problem == "replace: matmuls bf16 on n2"
    assert error.hint.startswith("below two thirds of the expected rate: exclude the machine")
    assert error.exit_code == 2
    lines = render(diagnosis).splitlines()
    row = next(line for line in lines if line.startswith("  matmuls bf16"))
    assert row.split() == [
        *("matmuls", "bf16,", "TFLOP/s", "770", "480", "791", "61%", "replace"),
        *("8192^3,", "median", "of", "300"),
    ]
    assert lines[lines.index(row) + 1] == "    slow: rank 11 on n2 480"


def test_many_that_are_slow_are_counted() -> None:
    diagnosis = diagnose(ranks(slow=tuple(range(12))), find_machine("azure-ndv5"), 2)
    assert "rank 7 on n1 480 and 4 more" in render(diagnosis)
    assert refusal(diagnosis).problem == "replace: matmuls bf16 on n1"


def test_without_a_cluster_a_gpu_is_judged_by_its_datasheet() -> None:
    diagnosis = diagnose(ranks(1), None)
    assert diagnosis.machine == find_machine(gpu="h100")
    assert diagnosis.rows[0].expected == pytest.approx(791.2)
    unknown = diagnose(ranks(1, 1, "NVIDIA GeForce RTX 2080 Ti"), None)
    assert (unknown.as_json()["verdict"], diagnosis.as_json()["verdict"]) == (None, PASS)
    assert render(unknown).endswith(
        "verdict: none, no measurement was compared: set --cluster NAME"
    )
    assert find_usual_machine("cpu") is None
    assert find_usual_machine("NVIDIA GeForce RTX 2080 Ti") is None


def test_what_the_cluster_promises_and_is_not_there() -> None:
    few = ranks(1, 4, "NVIDIA A100-SXM4-40GB")
    diagnosis = diagnose(few, find_machine("azure-ndv5"), 2)
    found = [each for each in diagnosis.findings if each.verdict == REPLACE]
    assert [(each.name, each.text, each.place) for each in found] == [
        ("machines", "1 of 2 (--nodes) joined", "n1"),
        ("devices", "4 of the 8 in the cluster's profile", "n1"),
        ("devices", "A100 40GB, but the cluster's profile has H100", "n1"),
    ]
    error = refusal(diagnosis)
    assert error.problem.endswith("machines on n1; devices on n1")
    assert "request all from the scheduler" in error.hint


def test_ranks_that_are_shown_one_device_each_count_together() -> None:
    found = ranks()
    for each in found:
        each.n_devices = 1
    assert diagnose(found, find_machine("azure-ndv5")).verdict == PASS


def test_drivers_that_differ_are_warned_of() -> None:
    found = ranks(3)
    found[16].facts["versions"]["NVIDIA driver"] = "535.10"
    diagnosis = diagnose(found, None)
    assert diagnosis.verdict == WARN
    diagnosis.refuse()
    assert "warn     NVIDIA driver        n3: 550.54 on n1, n2; 535.10 on n3" in render(diagnosis)


def test_everything_can_be_read_as_json() -> None:
    diagnosis = diagnose(ranks(slow=(11,)), find_machine("azure-ndv5"), 2)
    found = json.loads(json.dumps(diagnosis.as_json()))
    assert found["hosts"] == ["n1"] * 8 + ["n2"] * 8
    product, write = found["measured"]
    assert (product["worst_rank"], product["worst_host"]) == (11, "n2")
    assert product["by_rank"]["11"] == 480
    assert (write["median"], write["by_rank"]["0"]) == (4.0, 0.5)  # of a machine, of a rank
    assert set(found["facts"]) == {"n1", "n2"}


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
