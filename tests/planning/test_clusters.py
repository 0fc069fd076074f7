from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from trainyard.config.cluster import cluster_names
from trainyard.config.devices import find_device
from trainyard.config.load import load_run
from trainyard.errors import UserError
from trainyard.planning import clusters
from trainyard.planning.clusters import NODES, find_machine

OWN = """
description = "two nodes in the basement"
gpu = "a100-80g"
devices_per_node = 4
network_gigabytes_per_second = 2.5

[efficiencies]
matmul_share = 0.75
"""


@pytest.mark.parametrize("name", cluster_names())
def test_shipped_clusters_have_all_figures(name: str) -> None:
    machine = find_machine(name)
    assert machine.name == name
    assert machine.link_bytes_per_second >= machine.network_bytes_per_second > 0


@pytest.mark.parametrize("gpu", NODES)
def test_every_gpu_has_a_machine_with_all_figures(gpu: str) -> None:
    machine = find_machine(gpu=gpu)
    assert machine.device.memory_bytes_per_second
    assert machine.device.peaks
    assert set(machine.efficiencies.sources) == {
        *("matmul_share", "sustained_share", "attention_share", "memory_share"),
        *("link_share", "network_share", "launch_seconds", "block_seconds"),
    }


def test_the_page_on_planning_lists_all_gpus_and_describes_another() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "planning.md").read_text(encoding="utf-8")
    assert [name for name in NODES if f"`{name}`" not in page] == ["cpu"]
    (described,) = re.findall(r'^gpu = "(.+?)"', page, re.MULTILINE)
    assert find_device(described) is None


def test_a_cluster_with_other_gpus_keeps_its_network() -> None:
    machine = find_machine("perlmutter", "a100-80g")
    assert machine.device.name == "A100 80GB"
    assert machine.memory_bytes == 80 * 2**30
    assert machine.devices_per_node == 4
    h100 = find_machine("polaris", "h100")
    assert h100.network_bytes_per_second == find_machine("polaris").network_bytes_per_second
    assert h100.link_bytes_per_second == find_machine(gpu="h100").link_bytes_per_second
    # What was measured with the cluster's own devices says nothing of others.
    measured = find_machine(gpu="h100").efficiencies
    assert find_machine("local", "h100").efficiencies == measured


def test_this_computer_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, so that a plan does not depend on what else runs."""
    for total in (3 * 2**30, None):
        monkeypatch.setattr(
            clusters, "free_memory_bytes", lambda line, n=total: n if line == "MemTotal" else 1
        )
        assert find_machine("local").host_memory_bytes == (total or math.inf)
        assert find_machine(gpu="h100").host_memory_bytes == math.inf


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "basement.toml"
    path.write_text(OWN)
    machine = find_machine(str(path))
    assert machine.devices_per_node == 4
    assert machine.network_bytes_per_second == 2.5e9
    assert machine.link_bytes_per_second == 300e9, "the datasheet's"
    assert machine.efficiencies.matmul_share == 0.75
    assert machine.efficiencies.sources["matmul_share"] == f"cluster {path}"
    assert (
        machine.efficiencies.memory_share == find_machine(gpu="a100-80g").efficiencies.memory_share
    )


def test_gpus_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "own.toml"
    figures = """memory_gigabytes = 24
memory_gigabytes_per_second = 936
peaks_teraflops = { fp32 = 35.6, fp16 = 71, bf16 = 71 }"""
    path.write_text(f'gpu = "NVIDIA GeForce RTX 3090"\n{figures}\ndevices_per_node = 2')
    machine = find_machine(str(path))
    assert machine.device.name == "NVIDIA GeForce RTX 3090"
    assert (machine.memory_bytes, machine.devices_per_node) == (24 * 2**30, 2)
    assert machine.device.memory_bytes_per_second == 936e9
    assert machine.device.peak_flops_per_second("bf16") == 71e12
    assert machine.device.peak_flops_per_second("fp8") is None
    assert machine.link_bytes_per_second == 32e9, "a slot of PCIe 4.0"
    assert 8 * machine.network_bytes_per_second == 12.5e9, "100 Gbit/s for a usual node"
    assert machine.efficiencies.sources["matmul_share"].startswith("assumed")
    # Of a GPU that is known, the file corrects figures.
    path.write_text('gpu = "h100"\nmemory_gigabytes = 96\nmemory_gigabytes_per_second = 2400')
    assert find_machine(str(path)).device.name == "H100 96GB", "the same chip with less power"
    assert find_machine(gpu="h800").device.name == "H800"
    path.write_text('gpu = "a100-80g"\nmemory_gigabytes = 96')
    assert find_machine(str(path)).memory_bytes == 96 * 2**30


@pytest.mark.parametrize(
    ("cluster", "gpu", "problem", "hint"),
    [
        ("polari", None, "no cluster named 'polari'", "did you mean polaris?"),
        ("zzz", None, "no cluster named 'zzz'", "known: azure-ndv5, "),
        (None, "A100-60g", "--gpu: no GPU named 'A100-60g'", "did you mean a100-"),
        (None, "4090-24g", "--gpu: no GPU named '4090-24g'", "did you mean rtx-4090?; memory_gig"),
        (None, "2080-11g", "--gpu: no GPU named '2080-11g'", "known: v100-16g, "),
        ("polaris", "a100x", "--gpu: no GPU named 'a100x'", "did you mean a100-"),
        ("missing/lumi.toml", None, "cannot read the cluster file missing/lumi.toml: No", "lumi"),
    ],
)
def test_unknown_names(cluster: str | None, gpu: str | None, problem: str, hint: str) -> None:
    with pytest.raises(UserError) as caught:
        find_machine(cluster, gpu)
    assert caught.value.problem.startswith(problem)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('gpu = "a100-8g"', "no GPU named 'a100-8g'"),
        ('gpu = "mine"\nmemory_gigabytes = 24', "no GPU named 'mine'"),
        ('gpu = "h100"\npeaks_teraflops = { bf61 = 9 }', "peaks_teraflops"),
        ('gpu = "h100"\nnodes = 3', "nodes"),
        ('gpu = "h100"\n[efficiencies]\nlink_share = 1.5', "link_share"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        find_machine(str(path))
    assert problem in caught.value.problem
    assert str(path) in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("H100", "h100"),
        ("rtx 4090", "rtx-4090"),
        ("RTX_4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("v100", "v100-32g"),
        ("A100", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
    ],
)
def test_gpus_are_found_as_people_and_torch_name_them(asked: str, found: str) -> None:
    assert find_machine(None, asked).name == found


def test_a_name_is_another_where_its_number_is() -> None:
    """So "gpt3-13b" is not "gpt3-1.3b"."""
    assert load_run("GPT3 13B").run.name == "gpt3-13b"
    assert load_run("gpt3_1.3b").run.name == "gpt3-1.3b"
    with pytest.raises(UserError) as refused:
        find_machine(None, "m300x")
    assert "mi300x" in refused.value.hint
    with pytest.raises(UserError) as refused:
        find_machine(None, "x300")
    assert "did you mean" not in refused.value.hint
