"""Devices as data: what their datasheets promise, found by the name torch gives them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TERA = 1e12
GIGA = 1e9
GIB = 2**30


@dataclass(frozen=True)
class Device:
    """One accelerator as one process sees it; None where a figure is not known.

    Large matrix products reach less than the peak: about 0.87 of it on an A100, 0.80 on H100 and
    H200, 0.78 on a B200, 0.51 on an MI300X.
    """

    name: str
    pattern: str
    """Regular expression that finds the device in the name torch gives it."""
    peaks: dict[str, float]
    """FLOP/s of dense matrix products, by format; formats it does not have are absent."""
    memory_bytes: int | None = None
    """As sold; drivers keep up to 2 per cent of it."""
    memory_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None
    """To the other devices of its node together, one direction."""

    def peak_flops_per_second(self, kind: str) -> float | None:
        """Gives the peak at a run's `precision.kind`; None where it is unknown or not supported."""
        return self.peaks.get(kind.removesuffix("_lowbit"))


def _peaks(**tflops: float) -> dict[str, float]:
    return {kind: peak * TERA for kind, peak in tflops.items()}


# fp32 is the plain format, not TF32, which torch leaves off unless asked.
# PCIe and NVL cards are slower than the SXM modules listed; they match no pattern, so that none is
# measured against a peak it cannot reach.
VOLTA = _peaks(fp32=15.7, fp16=125)
AMPERE = _peaks(fp32=19.5, fp16=312, bf16=312)
HOPPER = _peaks(fp32=67, fp16=989, bf16=989, fp8=1979)
DEVICES = (
    # NVIDIA V100 datasheet (2018), SXM2.
    Device("V100 16GB", r"V100-SXM\d-16GB", VOLTA, 16 * GIB, 0.90 * TERA, 150 * GIGA),
    Device("V100 32GB", r"V100-SXM\d-32GB", VOLTA, 32 * GIB, 0.90 * TERA, 150 * GIGA),
    # NVIDIA A100 datasheet (2021), SXM4.
    Device("A100 40GB", r"A100-SXM4-40GB", AMPERE, 40 * GIB, 1.555 * TERA, 300 * GIGA),
    Device("A100 80GB", r"A100-SXM4-80GB", AMPERE, 80 * GIB, 2.04 * TERA, 300 * GIGA),
    # NVIDIA H100 datasheet (2023), SXM5; printed with sparsity there, halved here, as the next two.
    Device("H100", r"H100 80GB HBM3", HOPPER, 80 * GIB, 3.35 * TERA, 450 * GIGA),
    # NVIDIA H200 datasheet (2024), SXM5.
    Device("H200", r"H200(?! NVL)", HOPPER, 141 * GIB, 4.8 * TERA, 450 * GIGA),
    # NVIDIA HGX B200 datasheet (2025).
    Device(
        "B200",
        r"\bB200",
        _peaks(fp32=75, fp16=2250, bf16=2250, fp8=4500),
        180 * GIB,
        8.0 * TERA,
        900 * GIGA,
    ),
    # AMD Instinct MI250X datasheet (2021), halved: torch sees each of its two dies as a device.
    Device(
        "MI250X GCD",
        r"MI250X",
        _peaks(fp32=47.9, fp16=191.5, bf16=191.5),
        64 * GIB,
        1.6 * TERA,
        200 * GIGA,
    ),
    # AMD Instinct MI300X datasheet (2023).
    Device(
        "MI300X",
        r"MI300X",
        _peaks(fp32=163.4, fp16=1307, bf16=1307, fp8=2615),
        192 * GIB,
        5.3 * TERA,
        448 * GIGA,
    ),
    # A processor's peak depends on its cores, clock and extensions.
    Device("CPU", r"^cpu$", {}),
)


def find_device(name: str) -> Device | None:
    """Finds a device by the name torch gives it, such as "NVIDIA H200" or "cpu"."""
    return next((device for device in DEVICES if re.search(device.pattern, name)), None)


def cpu_multiplies_bf16_natively(cpu_info: Path = Path("/proc/cpuinfo")) -> bool:
    """Says whether this processor has bf16 matrix products; False where it cannot be known.

    Without them bf16 is emulated, and slower than fp32.
    """
    try:
        text = cpu_info.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)  # x86, then Arm
    return bool(flags and {"avx512_bf16", "amx_bf16", "bf16"} & set(flags[1].split()))
