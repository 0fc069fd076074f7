"""Machines by name: a shipped cluster, a user's own, or a GPU in its usual node.

The figures at the top of a cluster file (`config/cluster.py`) are for plans:

    description = "Twelve nodes in the basement"
    gpu = "a100-80g"                      # a name in config/nodes.toml
    devices_per_node = 4
    network_gigabytes_per_second = 2.5    # per device, one direction

Missing figures default to the GPU's usual node. For a GPU that is not in NODES, give its figures,
preferably under torch's name for it:

    gpu = "NVIDIA GeForce RTX 3090"
    memory_gigabytes = 24
    memory_gigabytes_per_second = 936
    peaks_teraflops = { fp32 = 35.6, fp16 = 71, bf16 = 71 }

A profile measured on the machine goes into [efficiencies], with the fields of
`planning.hardware.Efficiencies`.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from trainyard.config.cluster import Cluster, read_cluster, suggest
from trainyard.config.devices import DEVICES, GIB, GIGA, TERA, Device
from trainyard.errors import UserError
from trainyard.planning.hardware import PCIE_4, Efficiencies, Machine, transfer_efficiencies

MICRO = 1e-6


@dataclass(frozen=True)
class Node:
    """The usual node of a GPU."""

    device: str
    """Its name in `config.devices.DEVICES`."""
    devices: int
    network_gigabytes_per_second: float
    """Per device, one direction."""


_FILE = resources.files("trainyard.config") / "nodes.toml"
NODES = {
    name: Node(**figures)
    for name, figures in tomllib.loads(_FILE.read_text(encoding="utf-8")).items()
}
OWN_FIGURES = ("memory_gigabytes", "memory_gigabytes_per_second", "peaks_teraflops")
"""Fields of a cluster file for a GPU that is not in NODES."""


def find_machine(cluster: str | None = None, gpu: str | None = None) -> Machine:
    """Finds a machine by cluster name or file, or by GPU.

    Without either it is this computer's CPU; with both, the cluster with other GPUs.

    Raises:
        UserError: there is no such cluster or GPU, or the file is wrong.
    """
    if cluster is None and gpu is not None and gpu != "cpu":
        _check_gpu(gpu, "--gpu")
        return build_machine(gpu, Cluster(gpu=gpu))
    found = read_cluster(cluster or "local")
    if not all(getattr(found, name) for name in OWN_FIGURES):
        _check_gpu(found.gpu, f"cluster {cluster}")
    if gpu is not None:
        _check_gpu(gpu, "--gpu")
        found = _with_other_gpus(found, gpu)
    return build_machine(cluster or "local", found)


def _with_other_gpus(cluster: Cluster, gpu: str) -> Cluster:
    """Replaces the GPUs; keeps nodes and network."""
    if gpu == cluster.gpu:
        return cluster
    return Cluster(
        description=cluster.description,
        gpu=gpu,
        devices_per_node=cluster.devices_per_node,
        network_gigabytes_per_second=cluster.network_gigabytes_per_second,
        network_latency_microseconds=cluster.network_latency_microseconds,
    )


def build_machine(name: str, cluster: Cluster) -> Machine:
    """Fills in missing figures of a cluster from its GPU's usual node."""
    node = NODES.get(cluster.gpu, Node(cluster.gpu, 8, 1.5625))
    device = _device(cluster, node)
    link = cluster.link_gigabytes_per_second
    network = cluster.network_gigabytes_per_second or node.network_gigabytes_per_second
    return Machine(
        name=name,
        device=device,
        devices_per_node=cluster.devices_per_node or node.devices,
        link_bytes_per_second=link * GIGA if link else device.link_bytes_per_second or GIGA,
        network_bytes_per_second=network * GIGA,
        link_latency_seconds=cluster.link_latency_microseconds * MICRO,
        network_latency_seconds=cluster.network_latency_microseconds * MICRO,
        efficiencies=_efficiencies(name, cluster, device),
    )


def _device(cluster: Cluster, node: Node) -> Device:
    device = next(
        (device for device in DEVICES if device.name == node.device),
        Device(cluster.gpu, f"^{re.escape(cluster.gpu)}$", {}, link_bytes_per_second=PCIE_4),
    )
    given: dict[str, Any] = {}
    if cluster.peaks_teraflops:
        given["peaks"] = {kind: peak * TERA for kind, peak in cluster.peaks_teraflops.items()}
    if cluster.memory_gigabytes:
        given["memory_bytes"] = int(cluster.memory_gigabytes * GIB)
    if cluster.memory_gigabytes_per_second:
        given["memory_bytes_per_second"] = cluster.memory_gigabytes_per_second * GIGA
    return replace(device, **given)


def _efficiencies(name: str, cluster: Cluster, device: Device) -> Efficiencies:
    measured = cluster.efficiencies.model_dump(exclude_none=True)
    transferred = transfer_efficiencies(device)
    sources = dict(transferred.sources) | dict.fromkeys(measured, f"cluster {name}")
    return replace(transferred, **measured, sources=sources)


def _check_gpu(name: str, place: str) -> None:
    if name not in NODES:
        own = f"{', '.join(OWN_FIGURES)} in a cluster file describe a new one"
        raise UserError(f"{place}: no GPU named {name!r}", f"{suggest(name, list(NODES))}; {own}")
