"""`trainyard show cluster NAME`: what a cluster file says."""

from __future__ import annotations

from rich.console import Console

from trainyard.cli.tables import facts_table
from trainyard.config.cluster import Cluster, cluster_names, cluster_texts, cpu_mask, read_cluster
from trainyard.errors import ConfigError
from trainyard.jobs.schedulers import SCHEDULERS
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import GIGA, TERA


def show_cluster(names: list[str], console: Console) -> None:
    """Prints a cluster, or lists all clusters without a name.

    Raises:
        UserError: there is no such cluster, or its file is invalid.
    """
    if not names:
        console.print("clusters: " + ", ".join(cluster_names()), highlight=False)
        return
    if len(names) > 1:
        raise ConfigError(f"{names[1]} is a second cluster", "trainyard show cluster lumi")
    cluster = read_cluster(names[0])
    console.print(facts_table(names[0], _cluster_facts(names[0], cluster)))
    for place, text in cluster_texts(names[0]):
        console.print(f"\n{place}", style="bold")
        console.print(text.rstrip(), markup=False, highlight=False)


def _cluster_facts(name: str, cluster: Cluster) -> dict[str, str]:
    machine, launch = find_machine(name), cluster.launch
    device = machine.device
    peaks = ", ".join(f"{kind} {peak / TERA:,.4g}" for kind, peak in device.peaks.items())
    bandwidth = (device.memory_bytes_per_second or 0) / GIGA
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB, " if machine.memory_bytes else ""
    facts = {
        "what": cluster.description,
        "devices": f"{machine.devices_per_node} x {device.name} a node",
        "memory": f"{memory}{bandwidth:,.0f} GB/s",
        "TFLOP/s": peaks,
        "link": f"{machine.link_bytes_per_second / GIGA:g} GB/s inside a node",
        "network": f"{machine.network_bytes_per_second / GIGA:g} GB/s a device between nodes",
        "jobs": _describe_start(cluster),
    }
    for local_rank, cpus in enumerate(launch.cpu_lists):
        facts[f"rank {local_rank}"] = f"CPUs {cpus}, mask {cpu_mask(cpus)}"
    return facts


def _describe_start(cluster: Cluster) -> str:
    how = SCHEDULERS[cluster.launch.scheduler].describe(cluster.launch)
    container = cluster.launch.container
    image = f" with {container.image or 'an image of yours'}"
    return how + (f", {container.runtime}{image}" if container.runtime != "none" else "")
