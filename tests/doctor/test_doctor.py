"""`trainyard doctor`, as a user meets it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.command import trainyard
from tests.waiting import WATCHDOG_SECONDS

from trainyard.planning.clusters import find_machine

QUICK = ("--seconds", "0.01", "--gigabytes", "0.01")
MAIN = "from trainyard.cli.main import main; main()"
# A machine is known by its name.
AS_ANOTHER = f"import os, socket; socket.gethostname = lambda: os.environ['HOST_NAME']; {MAIN}"


def environment(**variables: object) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in variables.items()}


def start(
    *arguments: str, folder: Path, code: str = MAIN, **variables: object
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, "doctor", *QUICK, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment(**variables),
    )


def doctor(*arguments: str, folder: Path, **variables: object) -> tuple[int, str, str]:
    process = start(*arguments, folder=folder, **variables)
    output, errors = process.communicate(timeout=WATCHDOG_SECONDS)
    return process.returncode, output, errors


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def rows_of(found: dict[str, Any]) -> dict[str, Any]:
    return {row["name"]: row for row in found["measured"]}


def test_a_machine_that_is_not_what_it_should_be(tmp_path: Path) -> None:
    code, output, errors = doctor(
        *("--json", "--cluster", "azure-ndv5"), folder=tmp_path, NCCL_SOCKET_IFNAME="ib7"
    )
    found = json.loads(output)
    assert (code, found["verdict"], found["device"]) == (2, "replace", "cpu")
    rows = rows_of(found)
    assert list(rows)[:3] == ["matmuls fp32", "matmuls fp16", "matmuls bf16"]
    assert list(rows)[-3:] == ["memory copies", "checkpoint write", "checkpoint read"]
    assert all(row["median"] > 0 for row in rows.values())
    assert rows["matmuls bf16"]["expected"] == pytest.approx(989 * 0.8)
    assert rows["matmuls bf16"]["verdict"] == "replace"
    host = socket.gethostname()
    facts = found["facts"][host]
    assert list(facts) == [
        *("versions", "devices", "processor", "memory", "limits", "programs"),
        *("network", "variables", "folder"),
    ]
    assert facts["folder"]["folder"] == str(tmp_path / "runs")
    assert facts["variables"]["NCCL_SOCKET_IFNAME"] == "ib7"
    tried = {each["name"]: each for each in found["findings"]}
    names = ["sync", "memory map", "rename of a folder", "rename of a file", "lock"]
    assert all(tried[name]["verdict"] == "pass" for name in names)
    assert tried["devices"]["text"] == "0 of the 8 in the cluster's profile"
    # Of one machine alone it does not matter yet.
    assert tried["network interface"]["verdict"] == "warn"
    assert errors.startswith("error: replace: matmuls fp32 on ")
    assert f"; devices on {host}\nhint: torch sees none: a login node" in errors
    assert list(tmp_path.iterdir()) == []  # nor a folder for runs


@pytest.mark.exhaustive
def test_two_ranks_talk_and_leave_a_cluster_file_that_a_plan_reads(tmp_path: Path) -> None:
    code, output, errors = doctor("--ranks", "2", "--calibrate", "vm.toml", folder=tmp_path)
    assert code == 0, errors
    host = socket.gethostname()
    assert output.startswith(f"2 ranks on 1 machine, not compared: set --cluster\n\n{host}\n")
    assert "  all-reduce in a node, GB/s " in output
    warns = "  warn     load " in output  # by whatever runs beside the tests
    assert ("\nverdict: warn\n" if warns else "\nverdict: none, no measurement") in output
    assert "wrote vm.toml: trainyard plan RUN --cluster vm.toml" in errors
    machine = find_machine(str(tmp_path / "vm.toml"))
    assert machine.devices_per_node == 2
    assert set(machine.device.peaks) >= {"fp32", "bf16"}
    sources = machine.efficiencies.sources
    measured = [name for name, source in sources.items() if source.startswith("cluster")]
    assert measured == ["matmul_share", "attention_share", "memory_share", "link_share"]
    plan = subprocess.run(
        [sys.executable, "-c", MAIN, "plan", "tiny", "--cluster", "vm.toml", "--gpus", "2"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(),
    )
    assert plan.returncode == 0, plan.stderr
    assert "vm.toml" in plan.stdout
    code, _, errors = doctor("--calibrate", "vm.toml", folder=tmp_path)
    assert code == 2
    assert "error: --calibrate vm.toml already exists" in errors


def start_machines(
    *arguments: str, folder: Path, **variables: object
) -> list[subprocess.Popen[str]]:
    """Starts one rank on each of two machines, which differ by their names alone."""
    port = free_port()
    return [
        start(
            *arguments,
            folder=folder,
            code=AS_ANOTHER,
            **{"HOST_NAME": f"n{rank + 1}", "GLOO_SOCKET_IFNAME": "lo"},
            **{"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} | variables,
        )
        for rank in range(2)
    ]


@pytest.mark.exhaustive
def test_two_machines_share_a_folder_and_each_is_seen(tmp_path: Path) -> None:
    ranks = start_machines("--json", "--nodes", "2", folder=tmp_path)
    (output, errors), (silent, other_errors) = (
        rank.communicate(timeout=WATCHDOG_SECONDS) for rank in ranks
    )
    found = json.loads(output)
    assert silent == ""
    assert found["hosts"] == ["n1", "n2"]
    assert list(found["facts"]) == ["n1", "n2"]
    rows = rows_of(found)
    assert {"all-reduce of all", "node to node", "latency of all-reduce of all"} <= set(rows)
    assert "all-reduce in a node" not in rows
    assert list(rows["node to node"]["by_rank"]) == ["0", "1"]
    shared = [each for each in found["findings"] if each["place"] == "n2"]
    assert {"shared folder", "lock between machines"} <= {each["name"] for each in shared}
    assert all(each["verdict"] == "pass" for each in shared if "shared" in each["name"])
    # Machines are compared with each other: on a busy one the verdict may be any.
    assert ranks[0].returncode == (2 if found["verdict"] == "replace" else 0), errors
    assert ranks[1].returncode == 0, other_errors
    assert list(tmp_path.iterdir()) == []


@pytest.mark.exhaustive
def test_a_network_interface_that_is_not_there_is_named_by_all(tmp_path: Path) -> None:
    ranks = start_machines(folder=tmp_path, NCCL_SOCKET_IFNAME="ib7")
    ends = [rank.communicate(timeout=WATCHDOG_SECONDS)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2]
    problem = "NCCL_SOCKET_IFNAME=ib7: there is no network interface ib7 on n"
    assert all(problem in errors for errors in ends)
    assert "export the one that reaches the other machines" in ends[0]


@pytest.mark.parametrize(
    ("arguments", "variables", "problem"),
    [
        (["--nodes", "2"], {}, "--nodes 2: this command runs on one machine"),
        (["--calibrate", "none/a.toml"], {}, "--calibrate none/a.toml: the folder "),
        (["--cluster", "lumy"], {}, "no cluster named 'lumy'"),
        (["--calibrate", "cluster"], {}, "--calibrate cluster: a cluster file ends in .toml"),
        (
            ["--ranks", "2"],
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}
            | {"SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"},
            "--ranks 2: a launcher has already started 2 ranks",
        ),
    ],
)
def test_what_is_refused(
    arguments: list[str], variables: dict[str, str], problem: str, tmp_path: Path
) -> None:
    done = trainyard("doctor", *arguments, folder=tmp_path, **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"error: {problem}" in done.stderr
    assert "hint: " in done.stderr


@pytest.mark.exhaustive
def test_without_torch_the_machine_is_described_all_the_same(tmp_path: Path) -> None:
    without = (
        "import importlib.util as util; find = util.find_spec; "
        "util.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest); "
    )
    process = start(folder=tmp_path, code=without + MAIN)
    output, errors = process.communicate(timeout=WATCHDOG_SECONDS)
    assert process.returncode == 0, errors
    assert "checkpoint write, GB/s" in output
    assert "matmuls" not in output.partition("measured")[2].partition("torch is not")[0]
    assert "torch is not installed: matmuls, memory and network are not measured" in output
    process = start("--calibrate", "a.toml", folder=tmp_path, code=without + MAIN)
    assert "measuring needs torch" in process.communicate(timeout=WATCHDOG_SECONDS)[1]
