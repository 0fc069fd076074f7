"""Datasheet figures of devices (`devices.toml`), and what drivers and /proc say of this machine's.

Nothing here needs torch.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from trainyard.config.precisions import FORMATS, PrecisionKind

TERA = 1e12
GIGA = 1e9
GIB = 2**30
MEASURED = "fastest matmul measured on the device"


@dataclass(frozen=True)
class Device:
    """One accelerator as one process sees it; None for unknown figures."""

    name: str
    pattern: str
    """Regular expression for torch's name of the device."""
    peaks: dict[str, float]
    """FLOP/s of dense matmuls, by format; unsupported formats are absent."""
    memory_bytes: int | None = None
    """Nominal; drivers reserve up to 2 per cent."""
    memory_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None
    """Total to the other devices of its node, one direction."""
    matmul_share: float | None = None
    """Share of its peak reached by the best matmuls."""
    sustained_share: float = 1.0
    """Share of that reached in a whole step, which heats the device."""
    sustained_source: str = "fitted on published steps of H100s"
    """Source of `sustained_share`, if it is not 1."""
    attention_share: float | None = None
    """Share of its peak reached by fused attention."""
    matmul_source: str = "assumed: between other devices"
    """Source of `matmul_share`."""
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability, where a kernel depends on it."""

    def peak_flops_per_second(self, kind: PrecisionKind) -> float | None:
        """Returns the peak of a precision's block matmuls; None if unknown or unsupported."""
        return self.peaks.get(FORMATS[kind].block_matmuls.name)


def _read_devices() -> Iterator[Device]:
    path = resources.files("trainyard.config") / "devices.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    for name, figures in table.items():
        table[name] = table.get(figures.pop("like", ""), {}) | figures
        figures = {"matmul_source": MEASURED} | table[name]
        capability = figures.pop("capability", None)
        yield Device(
            name,
            peaks={kind: peak * TERA for kind, peak in figures.pop("peaks").items()},
            memory_bytes=figures.pop("memory") * GIB,
            memory_bytes_per_second=figures.pop("memory_bandwidth") * TERA,
            link_bytes_per_second=figures.pop("link") * GIGA,
            capability=capability and tuple(capability),
            **figures,
        )


# A CPU's peak depends on its cores, clock and extensions.
DEVICES = (*_read_devices(), Device("CPU", r"^cpu$", {}))


def list_gpus(system: Path = Path("/")) -> list[str]:
    """Names NVIDIA and AMD GPUs; none if torch is a CPU-only build."""
    try:
        if version("torch").endswith("+cpu"):
            return []
    except PackageNotFoundError:
        pass  # prepare needs no torch
    names = []
    for path in sorted(system.glob("proc/driver/nvidia/gpus/*/information")):
        found = re.search(r"^Model:\s*(.+)$", path.read_text(errors="replace"), re.MULTILINE)
        names.append(found[1].strip() if found else "NVIDIA GPU")
    for path in sorted(system.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        if re.search(r"^simd_count [1-9]", path.read_text(errors="replace"), re.MULTILINE):
            names.append("AMD GPU")
    return names


def find_device(name: str) -> Device | None:
    """Finds a device by torch's name, such as "NVIDIA H200" or "cpu"."""
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)


def cpu_multiplies_bf16_natively(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this CPU has bf16 matmuls; False if unknown.

    Without them bf16 is emulated, and slower than fp32.
    """
    return bool({"avx512_bf16", "amx_bf16", "bf16"} & _cpu_flags(cpu_info))


def is_cpu_of_amd(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this CPU is AMD's; False if unknown."""
    text = _read_cpu_info(cpu_info)
    return bool(re.search(r"^vendor_id\s*: AuthenticAMD$", text, re.MULTILINE))


def is_amd_with_avx512(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Returns whether this CPU is AMD's of Zen 4 or later; False if unknown."""
    return is_cpu_of_amd(cpu_info) and "avx512f" in _cpu_flags(cpu_info)


def _cpu_flags(cpu_info: Path) -> set[str]:
    text = _read_cpu_info(cpu_info)
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)  # x86, then Arm
    return set(flags[1].split()) if flags else set()


def _read_cpu_info(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
