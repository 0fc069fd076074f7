"""What ranks found, put together: who is named, and how it reads."""

from __future__ import annotations

import json

import msgspec
import pytest

from trainyard.doctor.diagnosis import Diagnosis, diagnose, find_usual_machine, render
from trainyard.doctor.examine import Examination
from trainyard.doctor.verdict import PASS, REPLACE, WARN, WRITE, Finding
from trainyard.errors import MachineError
from trainyard.planning.clusters import find_machine

H100 = "NVIDIA H100 80GB HBM3"


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
    unknown = diagnose(ranks(1, 1, "NVIDIA GeForce RTX 3090"), None)
    assert (unknown.as_json()["verdict"], diagnosis.as_json()["verdict"]) == (None, PASS)
    assert render(unknown).endswith(
        "verdict: none, no measurement was compared: set --cluster NAME"
    )
    assert find_usual_machine("cpu") is None
    assert find_usual_machine("NVIDIA GeForce RTX 3090") is None


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


def test_no_device_at_all_is_not_a_broken_node() -> None:
    found = ranks(1, 1, "cpu")
    found[0].n_devices = 0
    error = refusal(diagnose(found, find_machine("azure-ndv5")))
    assert error.problem.endswith("devices on n1")
    assert "login node" in error.hint


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


def test_results_of_a_rank_travel_as_json() -> None:
    found = ranks(1, 2)
    assert msgspec.json.decode(msgspec.json.encode(found), type=list[Examination]) == found
