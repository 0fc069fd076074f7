"""What was measured, written as a cluster file, and read back by the planner."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from trainyard.config.cluster import read_cluster
from trainyard.config.load import load_run
from trainyard.doctor.diagnosis import (
    BETWEEN_NODES,
    IN_NODE,
    LATENCY,
    MEMORY,
    OF_ALL,
    Measurement,
    Row,
    Shape,
    calibrate,
    refuse_file,
    write_cluster,
)
from trainyard.errors import MachineError
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Machine
from trainyard.planning.time import step_time

OWN = """
description = "twelve nodes in the basement"
gpu = "a100-80g"
devices_per_node = 4

[efficiencies]
launch_seconds = 2e-5
matmul_share = 0.5

[launch]
scheduler = "slurm"
"""


SHARES = ("matmul", "attention", "memory", "link", "network")


def rows(**medians: float) -> list[Row]:
    names = {
        "memory": MEMORY,
        "in_node": IN_NODE,
        "between": BETWEEN_NODES,
        "small": LATENCY + IN_NODE,
        "small_of_all": LATENCY + OF_ALL,
    }
    found = []
    for key, median in medians.items():
        name = names.get(key, key.replace("_", " "))
        worst = Measurement(name, median / 2, "", 0, "n1")
        found.append(Row(name, "", median, worst, None, ""))
    return found


def write(path: Path, base: str | None, gpu: str, found: list[Row], shape: Shape) -> Machine:
    machine = find_machine(base) if base else find_machine(gpu=gpu)
    write_cluster(path, base, gpu, calibrate(machine, found, shape))
    return find_machine(str(path))


def test_of_a_gpu_the_figures_stay_and_the_shares_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    shape = Shape([f"n{rank // 4}" for rank in range(8)])
    found = rows(
        matmuls_fp32=18.0,
        matmuls_bf16=262.08,
        attention_bf16=156.0,
        memory=1244.0,
        in_node=240.0,
        between=10.0,
        small=60.0,
        small_of_all=140.0,
    )
    machine = write(path, "polaris", "", found, shape)
    before = find_machine("polaris")
    assert machine.device == before.device
    assert machine.link_bytes_per_second == before.link_bytes_per_second
    assert machine.network_bytes_per_second == before.network_bytes_per_second
    shares = machine.efficiencies
    found_shares = [getattr(shares, f"{name}_share") for name in SHARES]
    assert found_shares == [0.84, 0.5, 0.8, 0.8, 0.8]
    assert shares.launch_seconds == before.efficiencies.launch_seconds
    assert shares.sources["matmul_share"] == f"cluster {path}"
    # An all-reduce of nothing passes 3 hops twice; then a tree of one level.
    assert machine.link_latency_seconds == pytest.approx(10e-6)
    assert machine.network_latency_seconds == pytest.approx(40e-6)
    text = path.read_text()
    assert text.startswith("# Measured on 20")
    assert 'extends = "polaris"' in text
    assert read_cluster(str(path)).launch == read_cluster("polaris").launch


def test_a_processor_has_no_figures_but_the_measured_ones(tmp_path: Path) -> None:
    shape = Shape(["vm", "vm"], has_own_devices=False)
    found = rows(
        matmuls_fp32=0.075,
        matmuls_fp16=0.02,
        matmuls_bf16=0.15,
        attention_bf16=0.06,
        memory=12.0,
        in_node=2.5,
        small=90.0,
    )
    machine = write(tmp_path / "vm.toml", "local", "", found, shape)
    assert machine.device.peaks == pytest.approx({"fp32": 75e9, "fp16": 20e9, "bf16": 150e9})
    assert machine.devices_per_node == 2
    assert machine.efficiencies.matmul_share == 1
    assert machine.efficiencies.attention_share == 0.4
    assert machine.device.memory_bytes_per_second == 12e9
    assert machine.efficiencies.memory_share == 1
    assert machine.link_bytes_per_second == 2.5e9
    assert machine.link_latency_seconds == pytest.approx(45e-6)
    assert machine.network_bytes_per_second == find_machine("local").network_bytes_per_second


def test_a_plan_counts_with_it(tmp_path: Path) -> None:
    """Products of half the speed take twice as long in the plan, and nothing else changes."""
    path = tmp_path / "slow.toml"
    machine = find_machine("azure-ndv5")
    peak = machine.device.peaks["bf16"] / 1e12
    half = machine.efficiencies.matmul_share / 2
    write(path, "azure-ndv5", "", rows(matmuls_bf16=half * peak), Shape(["n1"] * 8))
    run = load_run("gpt3-1.3b", ["train.batch_ramp=none"]).run
    plan = resolve(run, 8)
    before, after = (step_time(run, plan, find_machine(name)) for name in ("azure-ndv5", str(path)))
    product = before.parts["matmuls"]
    assert after.parts["attention"] == before.parts["attention"]
    assert after.parts["memory-bound"] == before.parts["memory-bound"]
    # Some of it is moving operands, which takes as long as before.
    assert 1.6 * product < after.parts["matmuls"] < 2 * product


def test_more_than_the_figure_becomes_the_figure(tmp_path: Path) -> None:
    # Switches of NVLink that add up: 480 GB/s on links of 450.
    machine = write(tmp_path / "h.toml", None, "h100", rows(in_node=480.0), Shape(["n1"] * 8))
    assert machine.link_bytes_per_second == 480e9
    assert machine.efficiencies.link_share == 1
    assert machine.device.name == "H100"


def test_a_file_of_the_user_keeps_what_was_not_measured(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(OWN)
    found = rows(matmuls_bf16=249.6)
    machine = write(tmp_path / "new.toml", str(own), "", found, Shape(["n1"] * 4))
    assert machine.efficiencies.matmul_share == 0.8
    assert machine.efficiencies.launch_seconds == 2e-5
    assert machine.devices_per_node == 4
    assert read_cluster(str(tmp_path / "new.toml")).launch.scheduler == "slurm"


def test_nothing_measured_is_still_a_cluster_file(tmp_path: Path) -> None:
    machine = write(tmp_path / "same.toml", "lumi", "", [], Shape(["n1"]))
    before = find_machine("lumi")
    assert machine.efficiencies == before.efficiencies
    assert not math.isnan(machine.link_bytes_per_second)


def test_files_that_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"cluster\.json: a cluster file ends in \.toml"):
        refuse_file(tmp_path / "cluster.json")
    (tmp_path / "there.toml").touch()
    with pytest.raises(MachineError, match=r"there\.toml already exists") as raised:
        refuse_file(tmp_path / "there.toml")
    assert raised.value.hint == "use a new name, or remove it"
    refuse_file(tmp_path / "new.toml")
    with pytest.raises(
        MachineError, match=r"the folder .*none does not exist, or cannot be written"
    ):
        refuse_file(tmp_path / "none" / "new.toml")
    with pytest.raises(MachineError, match=r"cannot write .*none/new\.toml: No such file"):
        write_cluster(tmp_path / "none" / "new.toml", "local", "", {"efficiencies": {}})
