from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.config.devices import (
    cpu_multiplies_bf16_natively,
    find_device,
    is_amd_with_avx512,
    is_cpu_of_amd,
)
from trainyard.planning.hardware import A100_EFFICIENCIES, find_local_machine, transfer_efficiencies


@pytest.mark.parametrize(
    ("torch_name", "device", "bf16_peak"),
    [
        ("Tesla V100-SXM2-16GB", "V100 16GB", None),
        ("Tesla V100-SXM2-32GB", "V100 32GB", None),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB", 312e12),
        ("NVIDIA H100 80GB HBM3", "H100", 989e12),
        ("NVIDIA H200", "H200", 989e12),
        ("NVIDIA H100 PCIe", "H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", "H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", "GH200 96GB", 989e12),
        ("NVIDIA H800", "H800", 989e12),
        ("NVIDIA H20", "H20", 148e12),
        ("NVIDIA A800-SXM4-80GB", "A800 80GB", 312e12),
        ("NVIDIA B300 SXM6 AC", "B300", 2250e12),
        ("NVIDIA GB200", "GB200", 2500e12),
        ("NVIDIA GB300", "GB300", 2500e12),
        ("AMD Instinct MI325X", "MI325X", 1307e12),
        ("AMD Instinct MI355X", "MI355X", 2516e12),
        ("NVIDIA GeForce RTX 3090", "RTX 3090", 71e12),
        ("NVIDIA A40", "A40", 149.7e12),
        ("NVIDIA B200", "B200", 2250e12),
        ("AMD Instinct MI250X", "MI250X GCD", 191.5e12),
        ("AMD Instinct MI300X", "MI300X", 1307e12),
        ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2e12),
        ("NVIDIA GeForce RTX 5090", "RTX 5090", 209.5e12),
        ("NVIDIA L4", "L4", 121e12),
        ("NVIDIA L40S", "L40S", 362e12),
        ("NVIDIA A10G", "A10G", 70e12),
        ("NVIDIA RTX A6000", "RTX A6000", 154.8e12),
        ("Tesla T4", "T4", None),
        ("cpu", "CPU", None),
    ],
)
def test_devices_are_found_by_torchs_name(
    torch_name: str, device: str, bf16_peak: float | None
) -> None:
    found = find_device(torch_name)
    assert found is not None
    assert found.name == device
    assert found.peak_flops_per_second("bf16") == bf16_peak


@pytest.mark.parametrize(
    "name",
    [
        *(
            "NVIDIA H200 NVL",
            "NVIDIA L40",
            "NVIDIA GeForce RTX 4090 Laptop GPU",
        ),
        *("NVIDIA A100-PCIE-40GB", "", "x"),
    ],
)
def test_other_devices_have_no_peak_to_be_measured_against(name: str) -> None:
    assert find_device(name) is None


@pytest.mark.parametrize(
    ("flags", "has_bf16", "is_of_amd", "has_avx512"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16\n", True, False, False),
        ("flags : fpu amx_tile amx_bf16\n", True, False, False),
        ("processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n", True, False, False),
        ("model name : bf16 in its name\nflags : fpu\n", False, False, False),
        ("processor : 0\nvendor_id\t: AuthenticAMD\nflags : fpu avx2\n", False, True, False),
        ("vendor_id\t: AuthenticAMD\nflags\t\t: fpu avx2 avx512f\n", False, True, True),
        ("vendor_id : GenuineIntel\nmodel name : AuthenticAMD\nflags : avx512f\n", *3 * [False]),
        ("", False, False, False),
        (None, False, False, False),
    ],
)
def test_the_processor_is_read_from_its_flags(
    tmp_path: Path, flags: str | None, has_bf16: bool, is_of_amd: bool, has_avx512: bool
) -> None:
    path = tmp_path / "cpuinfo"
    if flags is not None:
        path.write_text(flags)
    assert cpu_multiplies_bf16_natively(path) is has_bf16
    assert (is_cpu_of_amd(path), is_amd_with_avx512(path)) == (is_of_amd, has_avx512)


def test_efficiencies_of_other_devices_say_that_they_are_assumed() -> None:
    h100 = find_device("NVIDIA H100 80GB HBM3")
    gcd = find_device("AMD Instinct MI250X")
    assert h100 is not None
    assert gcd is not None
    assert transfer_efficiencies(h100).matmul_share == 0.80
    assert transfer_efficiencies(h100).sources["matmul_share"].startswith("fastest matmul")
    assert transfer_efficiencies(h100).sources["memory_share"].startswith("assumed")
    assert transfer_efficiencies(gcd).sources["matmul_share"].startswith("assumed")
    a100 = find_device("NVIDIA A100-SXM4-80GB")
    assert a100 is not None
    assert transfer_efficiencies(a100) == A100_EFFICIENCIES


def write_machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text(text)
    return root


NVIDIA = "proc/driver/nvidia/gpus/0000:{}:00.0/information"
AMD = "sys/class/kfd/kfd/topology/nodes/{}/properties"
H100 = {NVIDIA.format(1): "Model: \t NVIDIA H100 80GB HBM3\n"}
V100S = {NVIDIA.format(n): "Model: Tesla V100-SXM2-16GB\nIRQ: 7\n" for n in (1, 2)}
UNKNOWN = {NVIDIA.format(1): "IRQ: 7\n"}
MI300X = {AMD.format(0): "cpu_cores_count 8\nsimd_count 0\n", AMD.format(1): "simd_count 304\n"}


@pytest.mark.parametrize(
    ("files", "name", "count", "precision"),
    [
        (H100, "NVIDIA H100 80GB HBM3", 1, "bf16"),
        (V100S, "2 x Tesla V100-SXM2-16GB", 2, "fp16"),
        (UNKNOWN, "NVIDIA GPU", 1, "bf16"),
        (MI300X, "AMD GPU", 1, "bf16"),
    ],
)
def test_gpus_are_found_without_torch(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: dict[str, str],
    name: str,
    count: int,
    precision: str,
) -> None:
    write_machine(tmp_path, files)
    monkeypatch.setattr("trainyard.config.devices.version", lambda _: "2.9.0")
    machine = find_local_machine(tmp_path)
    assert (machine.name, machine.count, machine.precision) == (name, count, precision)
    assert machine.is_gpu
    assert machine.flops_per_second > 1e12


@pytest.mark.parametrize("torch", ["2.9.0+cpu", "2.9.0"])
def test_a_gpu_that_torch_cannot_use_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str
) -> None:
    monkeypatch.setattr("trainyard.config.devices.version", lambda _: torch)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    files = {NVIDIA.format(1): "Model: NVIDIA H200\n"} if torch.endswith("+cpu") else {}
    machine = find_local_machine(write_machine(tmp_path, files))
    assert (machine.name, machine.count, machine.is_gpu) == ("3 CPU cores", 1, False)
    assert (machine.precision, machine.flops_per_second) == ("fp32", 90e9)
