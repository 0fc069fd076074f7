"""Machines of a plan: their devices, and the shares of datasheet figures that are reached."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from trainyard.config.devices import (
    GIGA,
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
"""Speed of cuDNN's attention, relative to flash attention 2.

On an H100, 2,048 tokens, heads of 128: 484
to 298 TFLOP/s forward if causal, 465 to 291 backward (figures 5 and 6 of arXiv:2407.08608); newer
versions are reported at 1.7 to 2.3 (huggingface/transformers pull request 48163)."""
FP8_SPEEDS: Mapping[Scaling, float] = {"tensorwise": 1.0, "rowwise": 0.5}
"""Speed of matmuls by their scales.

cuBLAS has one for a tensor; torch's kernels for rows are CUTLASS's.
Fitted: nanochat's d26 on an H100 is 1.17 times as fast as in bf16 with tensorwise scales (predicted
without a fit: 1.12) and 0.90 times with rowwise ones."""
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
        "matmul_share": "fastest matmul measured on the device",
        "sustained_share": FIT,
        "attention_share": f"assumed: {ATTENTION_SHARE} of matmul_share",
        "memory_share": FIT,
        "link_share": BOUND,
        "network_share": BOUND,
        "launch_seconds": FIT,
        "block_seconds": "assumed: both passes of a block take 1 ms, with 32 launches",
    },
)
UNMEASURED_PRODUCT_SHARE = 0.51
"""For devices without measured matmuls: the lowest measured share."""
UNMEASURED = "assumed: as an MI300X"
UNMEASURED_SHARES = (0.87, 0.41)
"""Their bounds: the best measured, an A100's, and that of steps on an MI250X."""


def transfer_efficiencies(device: Device) -> Efficiencies:
    """Estimates a device's efficiencies from those of an A100."""
    share, source = device.matmul_share, device.matmul_source
    attention = device.attention_share
    if share is None:
        share, source = UNMEASURED_PRODUCT_SHARE, UNMEASURED
    sources = dict(A100_EFFICIENCIES.sources) | {"matmul_share": source}
    if not device.name.startswith("A100"):
        fitted = [name for name, source in sources.items() if source in (FIT, BOUND)]
        sources |= dict.fromkeys(fitted, "assumed: as on an A100")
    if device.attention_share is not None:
        sources["attention_share"] = "FlashAttention-2 measured on an H100"
    if device.sustained_share != 1:
        sources["sustained_share"] = "fitted on published steps of H100s"
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

    def matmul_seconds(self, flops: float, dtype: str, speed: float = 1.0) -> float:
        """Predicts the time of the FLOP of matmuls; `memory_seconds` that of their bytes.

        Args:
            flops: of matmuls.
            dtype: of their factors.
            speed: relative to such matmuls, as in FP8_SPEEDS.
        """
        share = self.efficiencies.matmul_share * self.efficiencies.sustained_share
        return flops / (self.peak(dtype) * share * speed)

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


def find_extremes(machine: Machine) -> tuple[Machine, Machine] | None:
    """Returns upper and lower bounds of a machine; None if its matmuls were measured."""
    shares = machine.efficiencies
    if shares.sources["matmul_share"] != UNMEASURED:
        return None
    fast, slow = (
        replace(shares, matmul_share=share, attention_share=ATTENTION_SHARE * share)
        for share in UNMEASURED_SHARES
    )
    return replace(machine, efficiencies=fast), replace(machine, efficiencies=slow)


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
