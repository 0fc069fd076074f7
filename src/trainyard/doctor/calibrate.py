"""Writes measurements to a cluster file, so that `trainyard plan` uses them.

    [efficiencies]
    matmul_share = 0.797          # 788 TFLOP/s in bf16 of the 989 in the datasheet
    link_share = 0.81

For a GPU, the datasheet's figures stay and the shares are measured. A CPU has no known datasheet:
its figures are the measurements, and its shares are 1. If a measurement exceeds the figure
(in-network reduction), the measurement replaces the figure.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli_w

from trainyard.config.cluster import cluster_names, read_cluster
from trainyard.doctor.verdict import (
    ATTENTION,
    BETWEEN_NODES,
    IN_NODE,
    LATENCY,
    MATMULS,
    MEMORY,
    OF_ALL,
    Row,
    Shape,
)
from trainyard.errors import MachineError, explain_failure
from trainyard.planning.hardware import GIGA, TERA, Machine

HALF_KINDS = ("bf16", "fp16", "fp32")
"""Formats whose matmul sets the share: the first one measured that has a peak."""


def refuse_file(path: Path) -> None:
    """Rejects a file that cannot be written, before any measurement.

    Raises:
        MachineError: it already exists, has the wrong name, or its folder cannot be written.
    """
    if path.suffix != ".toml":
        raise MachineError(f"--calibrate {path}: a cluster file ends in .toml", "rename it")
    if path.exists():
        raise MachineError(f"--calibrate {path} already exists", "use a new name, or remove it")
    folder = path.resolve().parent
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise MachineError(
            f"--calibrate {path}: the folder {folder} does not exist, or cannot be written to",
            "choose a file in a writable folder",
        )


def write_cluster(path: Path, base: str | None, gpu: str, values: Mapping[str, Any]) -> None:
    """Writes a cluster file with measured values.

    Args:
        path: the file to write.
        base: the cluster it extends; None: none, only the GPU is known.
        gpu: its name.
        values: the result of `calibrate`.

    Raises:
        MachineError: it cannot be written.
    """
    content: dict[str, Any] = {"gpu": gpu}
    if base in cluster_names():
        content = {"extends": base}
    elif base is not None:  # a file, which may itself extend another
        content = read_cluster(base).model_dump(exclude_defaults=True)
    shares = {**content.get("efficiencies", {}), **values["efficiencies"]}
    content |= {**values, "efficiencies": shares}
    day = time.strftime("%Y-%m-%d")
    text = f"# Measured on {day} by trainyard doctor.\n{tomli_w.dumps(content)}"
    with explain_failure(f"cannot write {path}", "use another file"):
        path.write_text(text, encoding="utf-8")


def calibrate(machine: Machine, rows: Sequence[Row], shape: Shape) -> dict[str, Any]:
    """Returns the fields of a cluster file that make a plan use the medians of all ranks.

    Args:
        machine: its figures stay where a share expresses the measurement.
        rows: the measurements.
        shape: the placement of the measuring ranks on nodes.
    """
    medians = {row.name: row.median for row in rows}
    device, is_cpu = machine.device, machine.device.name == "CPU"
    figures: dict[str, Any] = {"devices_per_node": shape.ranks_per_node} if is_cpu else {}
    shares: dict[str, float] = {}
    matmuls = {
        name.removeprefix(f"{MATMULS} "): rate
        for name, rate in medians.items()
        if name.startswith(MATMULS)
    }
    peaks = {kind: peak / TERA for kind, peak in device.peaks.items()}
    if is_cpu:
        figures["peaks_teraflops"] = {kind: _round(rate) for kind, rate in matmuls.items()}
        peaks = matmuls
    kind = next((kind for kind in HALF_KINDS if kind in matmuls and kind in peaks), None)
    if kind is not None:
        shares["matmul_share"] = _share(matmuls[kind], peaks[kind])
    for kind, peak in peaks.items():
        if f"{ATTENTION} {kind}" in medians:
            shares["attention_share"] = _share(medians[f"{ATTENTION} {kind}"], peak)
    for name, field, figure in (
        (MEMORY, "memory", device.memory_bytes_per_second),
        (IN_NODE, "link", machine.link_bytes_per_second),
        (BETWEEN_NODES, "network", machine.network_bytes_per_second),
    ):
        if name in medians:
            datasheet = math.inf if is_cpu or figure is None else figure / GIGA
            if is_cpu or medians[name] > datasheet:
                datasheet = medians[name]
                figures[f"{field}_gigabytes_per_second"] = _round(datasheet)
            shares[f"{field}_share"] = _share(medians[name], datasheet)
    # Latencies of small all-reduces in hops, the inverse of `planning.time`: a ring inside a node
    # has n - 1, a tree between nodes log2 n; each is passed twice.
    n_hops = shape.ranks_per_node - 1
    inside = medians.get(LATENCY + IN_NODE, 0.0) / 2
    if inside and n_hops:
        figures["link_latency_microseconds"] = _round(inside / n_hops)
    if LATENCY + OF_ALL in medians:
        between = max(0.0, medians[LATENCY + OF_ALL] / 2 - inside)
        figures["network_latency_microseconds"] = _round(between / math.log2(shape.n_nodes))
    return figures | {"efficiencies": shares}


def _share(measured: float, figure: float) -> float:
    return min(1.0, max(1e-4, _round(measured / figure)))


def _round(number: float) -> float:
    return float(f"{number:.3g}")
