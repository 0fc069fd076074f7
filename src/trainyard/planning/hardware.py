"""Machines of a plan: their devices, and the shares of datasheet figures that are reached."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.config.devices import (
    GIGA,
    MEASURED,
    Device,
    cpu_multiplies_bf16_natively,
    find_device,
    list_gpus,
)
from trainyard.config.precisions import PrecisionKind, Scaling
from trainyard.errors import MachineError

PCIE_4 = 32 * GIGA
"""Bytes per second of a x16 slot, one direction."""


@dataclass(frozen=True)
class Efficiencies:
    """Achieved shares of datasheet figures.

    A profile measured on a machine replaces them, by `dataclasses.replace`.
    """

    matmul_share: float
    """Share of the peak that matmuls reach, if so large that memory traffic does not matter."""
    sustained_share: float
    """Share of the speed of isolated matmuls and attention that a whole step reaches."""
    attention_share: float
    """Share of the peak that flash attention reaches; its bytes are included."""
    memory_share: float
    """Share of the memory bandwidth that all other kernels reach."""
    link_share: float
    """Share of the bandwidth inside a node that collectives reach."""
    network_share: float
    """Share of the bandwidth between nodes that collectives reach."""
    launch_seconds: float
    """Host time to launch a kernel."""
    block_seconds: float
    """Host time of a pass through a compiled block, besides that of its launches."""
    sources: Mapping[str, str]
    """Source of each figure, by name."""


ATTENTION_SHARE = 0.6
"""Speed of fused attention, relative to that of matmuls."""
CUDNN_SPEED = 1.6
"""Speed of cuDNN's attention, relative to flash attention 2: 1.62 forward, 1.60 backward on an H100
(figures 5 and 6 of arXiv:2407.08608); one gave us 1.59 to 1.81, and 5 per cent of a step."""
CAST_SPEEDS: Mapping[Scaling, float] = {"tensorwise": 1.0, "rowwise": 0.3}
"""Speed of casts to fp8 relative to other kernels; by rows they reduce along columns and transpose.
Fitted: so nanochat's d26 is 0.90 times as fast as in bf16, Llama 3 8B 1.11 times (torchao)."""
ALONE = 1 / 0.95
"""Speed of a device alone: the share of a step was fitted where all wait for the slowest. One H100
takes 4 per cent less time than planned so, over six models in bf16, and 5 to 9 more in fp8."""
BLOCK_SECONDS = 0.3e-3
"""Host time to call a compiled block. A forward and a backward pass took 0.5 ms of CPU on the fake
GPU, with a Xeon of unknown model."""
HIDING = 3
"""Host and device work overlap, but kernels are unequal: each waits for the other at times. A sum
of high powers is a little more than the longer, most where both are alike."""
FIT = "fitted on measured steps of A100s (docs/planning-accuracy.md)"
BOUND = "upper bound of that fit, which it reached"
A100_EFFICIENCIES = Efficiencies(
    matmul_share=0.87,
    sustained_share=1.0,
    attention_share=ATTENTION_SHARE * 0.87,
    memory_share=0.80,
    link_share=0.85,
    network_share=0.92,
    launch_seconds=14e-6,
    block_seconds=BLOCK_SECONDS,
    sources={
        "matmul_share": MEASURED,
        "sustained_share": FIT,
        "attention_share": f"assumed: {ATTENTION_SHARE} of matmul_share",
        "memory_share": FIT,
        "link_share": BOUND,
        "network_share": BOUND,
        "launch_seconds": FIT,
        "block_seconds": "assumed: both passes of a block take 1 ms, with 32 launches",
    },
)
UNMEASURED_MATMUL_SHARE = 0.6
"""For devices of a user's own: between 0.45 of cards that lack power and 0.87 of an A100."""


def transfer_efficiencies(device: Device) -> Efficiencies:
    """Estimates a device's efficiencies from those of an A100."""
    share = device.matmul_share or UNMEASURED_MATMUL_SHARE
    attention = device.attention_share
    sources = dict(A100_EFFICIENCIES.sources) | {"matmul_share": device.matmul_source}
    if not device.name.startswith("A100"):
        fitted = [name for name, source in sources.items() if source in (FIT, BOUND)]
        sources |= dict.fromkeys(fitted, "assumed: as on an A100")
    if attention is not None:
        sources["attention_share"] = "FlashAttention-2 measured on an H100"
    if device.sustained_share != 1:
        sources["sustained_share"] = device.sustained_source
    return replace(
        A100_EFFICIENCIES,
        matmul_share=share,
        sustained_share=device.sustained_share,
        attention_share=ATTENTION_SHARE * share if attention is None else attention,
        sources=sources,
    )


@dataclass(frozen=True)
class Machine:
    """Nodes of equal devices; bandwidths are those of one device, in one direction."""

    name: str
    device: Device
    devices_per_node: int
    link_bytes_per_second: float
    """To the other devices of its node."""
    network_bytes_per_second: float
    """To other nodes."""
    link_latency_seconds: float
    """Per hop inside a node; n ranks form a ring of n - 1 hops."""
    network_latency_seconds: float
    """Per hop between nodes; n nodes form a tree of log2 n hops."""
    efficiencies: Efficiencies
    host_memory_bytes: float = math.inf
    """Host memory of a node; infinite if unknown."""

    def at_speed(self, speed: float) -> Machine:
        """Scales the speed of matmuls and attention, to at most that of isolated ones."""
        share = min(1.0, self.efficiencies.sustained_share * speed)
        return replace(self, efficiencies=replace(self.efficiencies, sustained_share=share))

    @property
    def memory_bytes(self) -> int | None:
        """Nominal memory of a device; None if unknown."""
        return self.device.memory_bytes

    def peak(self, dtype: str) -> float:
        """Returns the FLOP/s of dense matmuls in a format.

        Raises:
            MachineError: it is unknown or unsupported.
        """
        peak = self.device.peaks.get(dtype)
        if peak is None:
            known = ", ".join(self.device.peaks) or "none"
            raise MachineError(
                f"{self.name}: {self.device.name} has no known peak for {dtype} matmuls",
                f"set precision.kind to one with a known peak: {known}",
            )
        return peak

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second of a device's memory.

        Raises:
            MachineError: it is unknown.
        """
        bandwidth = self.device.memory_bytes_per_second
        if bandwidth is None:
            raise MachineError(
                f"{self.name}: the memory bandwidth of {self.device.name} is unknown",
                "give memory_gigabytes_per_second in a cluster file of your own",
            )
        return bandwidth

    def matmul_seconds(self, flops: float, dtype: str) -> float:
        """Predicts the time of the FLOP of matmuls; `memory_seconds` that of their bytes.

        Args:
            flops: of matmuls.
            dtype: of their factors.
        """
        share = self.efficiencies.matmul_share * self.efficiencies.sustained_share
        return flops / (self.peak(dtype) * share)

    def attention_seconds(self, flops: float, dtype: str, speed: float) -> float:
        """Predicts the time of fused attention, its bytes included.

        Args:
            flops: of its matmuls; of causal attention half of the square.
            dtype: of queries, keys and values.
            speed: relative to flash attention, such as CUDNN_SPEED.
        """
        share = self.efficiencies.attention_share * self.efficiencies.sustained_share
        return flops / (self.peak(dtype) * share * speed)

    def memory_seconds(self, n_bytes: float) -> float:
        """Predicts the time of bytes that kernels other than attention read and write."""
        return n_bytes / (self.memory_bandwidth * self.efficiencies.memory_share)

    def with_host(self, device_seconds: float, launches: float, block_passes: float) -> float:
        """Adds to the time of kernels the host's to launch them.

        Args:
            device_seconds: of all kernels.
            launches: of kernels.
            block_passes: through compiled blocks.
        """
        shares = self.efficiencies
        host_seconds = launches * shares.launch_seconds + block_passes * shares.block_seconds
        return float((device_seconds**HIDING + host_seconds**HIDING) ** (1 / HIDING))


@dataclass(frozen=True)
class LocalMachine:
    """The devices of this machine, detected without torch."""

    name: str
    count: int
    """Devices; all CPU cores count as one."""
    is_gpu: bool
    flops_per_second: float
    """Total of all devices, estimated for a small model."""
    precision: str


# Models of 0.3M to 4M parameters, which spend much of their time outside matmuls, were measured at
# 20 to 45 GFLOP/s a core. On a GPU such models reach a fraction of its peak.
_CORE_FLOPS_PER_SECOND = 30e9
_SMALL_MODEL_SHARE = 0.2
_UNKNOWN_GPU_PEAK = 50e12


def find_local_machine(system: Path = Path("/")) -> LocalMachine:
    """Finds the GPUs listed by drivers, else counts the CPU cores.

    Args:
        system: the root of the file system.
    """
    names = list_gpus(system)
    if names:
        device = find_device(names[0])
        kind: PrecisionKind = "bf16" if device is None or "bf16" in device.peaks else "fp16"
        peak = (device.peak_flops_per_second(kind) if device else None) or _UNKNOWN_GPU_PEAK
        name = f"{len(names)} x {names[0]}" if len(names) > 1 else names[0]
        return LocalMachine(name, len(names), True, len(names) * peak * _SMALL_MODEL_SHARE, kind)
    affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    precision = "bf16" if cpu_multiplies_bf16_natively(system / "proc/cpuinfo") else "fp32"
    name = f"{cores} CPU core{'s' if cores > 1 else ''}"
    return LocalMachine(name, 1, False, cores * _CORE_FLOPS_PER_SECOND, precision)


def free_memory_bytes(system: Path = Path("/"), line: str = "MemAvailable") -> int | None:
    """Returns the available memory of this machine, or this job's limit if lower.

    Args:
        system: the root of the file system.
        line: of /proc/meminfo: "MemTotal" counts what is in use, too.
    """
    try:
        text = (system / "proc/meminfo").read_text()
        own = (system / "proc/self/cgroup").read_text().rpartition("::")[2].strip("/\n")
    except OSError:  # macOS
        return None
    limits = [1024 * int(kib) for kib in re.findall(rf"^{line}:\s*(\d+) kB$", text, re.M)]
    groups = system / "sys/fs/cgroup"
    for group in [groups, *(groups / each for each in (Path(own), *Path(own).parents))]:
        path = group / "memory.max"  # Slurm limits a job's group, above that of its processes
        if path.exists() and (limit := path.read_text().strip()).isdigit():
            limits.append(int(limit))
    return min(limits, default=None)
