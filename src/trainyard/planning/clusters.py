"""Machines by name: a shipped cluster, a user's own, or a GPU in its usual node.

The figures at the top of a cluster file (`config/cluster.py`) are for plans:

    description = "Twelve nodes in the basement"
    gpu = "a100-80g"                      # a name in config/nodes.toml
    devices_per_node = 4
    network_gigabytes_per_second = 2.5    # per device, one direction

Missing figures default to the GPU's usual node. For a GPU that is not in NODES, give its figures,
preferably under torch's name for it:

    gpu = "NVIDIA RTX A5000"
    memory_gigabytes = 24
    memory_gigabytes_per_second = 768
    peaks_teraflops = { fp32 = 27.8, fp16 = 111, bf16 = 111 }

A profile measured on the machine goes into [efficiencies], with the fields of
`planning.hardware.Efficiencies`.
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from trainyard.config.cluster import Cluster, read_cluster
from trainyard.config.devices import DEVICES, GIB, GIGA, TERA, Device, find_device
from trainyard.config.load import find_name, suggest
from trainyard.errors import UserError
from trainyard.planning.hardware import PCIE_4, Machine, free_memory_bytes, transfer_efficiencies

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
NODE_FIGURES = {
    *("description", "devices_per_node", "host_memory_gigabytes"),
    *("network_gigabytes_per_second", "network_latency_microseconds"),
}
"""Those of its nodes and network, which other GPUs keep."""


def find_machine(cluster: str | None = None, gpu: str | None = None) -> Machine:
    """Finds a machine by cluster name or file, or by GPU.

    Without either it is this computer's CPU; with both, the cluster with other GPUs.

    Raises:
        UserError: there is no such cluster or GPU, or the file is wrong.
    """
    if gpu is not None:
        gpu = _find_gpu(gpu, "--gpu")
    if cluster is None and gpu is not None and gpu != "cpu":
        return build_machine(gpu, Cluster(gpu=gpu))
    found = read_cluster(cluster or "local")
    if not all(getattr(found, name) for name in OWN_FIGURES):
        found = found.model_copy(update={"gpu": _find_gpu(found.gpu, f"cluster {cluster}")})
    if gpu is not None and gpu != found.gpu:
        found = Cluster(gpu=gpu, **found.model_dump(include=NODE_FIGURES))
    return build_machine(cluster or "local", found)


def build_machine(name: str, cluster: Cluster) -> Machine:
    """Fills in missing figures, from the usual node of the GPU, and the memory of `local`."""
    node = NODES.get(cluster.gpu, Node(cluster.gpu, 8, 1.5625))
    device = _device(cluster, node)
    transferred = transfer_efficiencies(device)
    measured = cluster.efficiencies.model_dump(exclude_none=True)
    sources = dict(transferred.sources) | dict.fromkeys(measured, f"cluster {name}")
    link = cluster.link_gigabytes_per_second
    available = free_memory_bytes(line="MemTotal") if name == "local" else None
    network = cluster.network_gigabytes_per_second or node.network_gigabytes_per_second
    return Machine(
        name=name,
        device=device,
        devices_per_node=cluster.devices_per_node or node.devices,
        link_bytes_per_second=link * GIGA if link else device.link_bytes_per_second or GIGA,
        network_bytes_per_second=network * GIGA,
        link_latency_seconds=cluster.link_latency_microseconds * MICRO,
        network_latency_seconds=cluster.network_latency_microseconds * MICRO,
        efficiencies=replace(transferred, **measured, sources=sources),
        host_memory_bytes=(cluster.host_memory_gigabytes or 0) * GIB or available or math.inf,
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
    found = replace(device, **given)
    if device not in DEVICES:
        return found
    # The same chip with other memory may be a listed card of other power.
    figures = operator.attrgetter("peaks", "memory_bytes", "memory_bytes_per_second")
    return next((each for each in (device, *DEVICES) if figures(each) == figures(found)), found)


def _find_gpu(name: str, place: str) -> str:
    """Finds the name in NODES of a GPU that is named as people or torch name it.

    "a100" is the one with most memory, "NVIDIA H100 80GB HBM3" an h100.
    """
    found = find_name(name, NODES) or find_name(f"rtx-{name}", NODES)
    if found is None:
        sizes = [each for each in NODES if find_name(name, [each.rpartition("-")[0]])]
        device = find_device(name)
        of_device = [each for each, node in NODES.items() if device and node.device == device.name]
        found = next(iter(sizes[-1:] + of_device), None)
    if found is None:
        own = f"{', '.join(OWN_FIGURES)} in a cluster file describe a new one"
        raise UserError(f"{place}: no GPU named {name!r}", f"{suggest(name, list(NODES))}; {own}")
    return found
