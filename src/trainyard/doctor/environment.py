"""Facts about this machine, without measurements; works without torch.

    describe_machine(process)  ->  {"versions": {"trainyard": "0.2.0", ..},
                                    "processor": {"cores": "64", "bound to": "1-7", ..}, ..}

Sections of named facts, all text: for people, and in JSON for programs to compare. Facts that
cannot be read (another system, a container that hides them) are omitted. Each problem is a
`Finding` with a hint.

A wrong name in GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME is the most common reason why ranks meet
but cannot communicate. NCCL takes prefixes: "hsn" is hsn0 and hsn1, "=hsn0" only hsn0, "^lo" all
but lo; gloo takes whole names.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import resource
import shutil
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from trainyard.config.cluster import expand_cpus
from trainyard.doctor.diagnosis import PASS, WARN, Facts, Finding
from trainyard.launch.environment import Process, bound_to, read_variables, read_versions
from trainyard.topology import format_ranges
from trainyard.units import format_bytes

PROGRAMS = (
    *("sbatch", "srun", "qsub", "mpiexec", "mpirun", "ssh", "torchrun"),
    *("apptainer", "singularity", "enroot"),
)
SYSTEM, PROCESSES, SHARED_MEMORY = Path("/sys"), Path("/proc"), Path("/dev/shm")
DRIVERS = {
    "NVIDIA driver": PROCESSES / "driver/nvidia/version",
    "AMD driver": SYSTEM / "module/amdgpu/version",
}
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
SETTINGS = re.compile(
    r"(NCCL|RCCL|GLOO|FI|CXI|UCX|HSA|MASTER|OMP)_\w+|(CUDA|ROCR|HIP)_VISIBLE_DEVICES"
)
"""Variables that control communication and visible devices."""
GET_ADDRESS = 0x8915  # SIOCGIFADDR of Linux
LEAST_OPEN_FILES = 1024
"""Every rank keeps its token files and a connection to other ranks open."""
LEAST_SHARED_MEMORY = 256 * 2**20
"""NCCL and RCCL use /dev/shm inside a node; containers often have 64 MiB."""
MOST_LOAD = 0.5
"""Load per core by other processes, above which measurements are not representative."""


def has_torch() -> bool:
    """Whether torch is installed, without its slow import."""
    return importlib.util.find_spec("torch") is not None


def describe_machine(process: Process) -> Facts:
    """Describes software, hardware, limits, programs, network and, with torch, devices."""
    versions = read_versions()
    processor = versions.pop("machine")
    try:
        versions["torchao"] = metadata.version("torchao")
    except metadata.PackageNotFoundError:
        versions["torchao"] = "not installed"
    for name, path in DRIVERS.items():
        if text := read(path):  # NVIDIA's first line ends in the version and the build date
            versions[name] = text.splitlines()[0]
    return {
        "versions": versions,
        "devices": _describe_devices() if has_torch() else {},
        "processor": {"model": processor} | _describe_processor(process),
        "memory": _describe_memory(),
        "limits": _describe_limits(),
        "programs": {name: found for name in PROGRAMS if (found := shutil.which(name))},
        "network": describe_network(),
        "variables": read_variables(SETTINGS),
    }


def check_machine(n_devices: int) -> Iterator[Finding]:
    """Judges limits that stop a training run in its first minute, and the load.

    Args:
        n_devices: number of GPUs of this machine.
    """
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= n_files < LEAST_OPEN_FILES:
        hint = f"ulimit -n {LEAST_OPEN_FILES} or more, before starting"
        yield Finding("open files", f"{n_files} at most", WARN, hint)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and _rdma_devices():
        hint = "ulimit -l unlimited; under a scheduler, raise the limit of its daemon"
        text = f"{format_bytes(locked)} at most, but RDMA devices need it"
        yield Finding("locked memory", text, WARN, hint)
    if n_devices > 1 and SHARED_MEMORY.is_dir():
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < LEAST_SHARED_MEMORY:
            hint = "in a container: --shm-size 8g, or --ipc host"
            yield Finding("/dev/shm", f"{format_bytes(free)} free", WARN, hint)
    yield from check_load(os.getloadavg()[0], os.cpu_count() or 1)


def check_load(load: float, n_cores: int) -> Iterator[Finding]:
    """Checks for other processes on this machine, by the load of the last minute."""
    if load > MOST_LOAD * n_cores:
        hint = "measure again on an idle machine: other processes make it look slow"
        yield Finding("load", f"{load:.1f} on {n_cores} cores in the last minute", WARN, hint)


def check_binding(
    process: Process, lists: Sequence[str], near_device: str | None
) -> Iterator[Finding]:
    """Checks the CPU binding of this rank; a single rank may use all CPUs.

    Args:
        process: this rank.
        lists: CPU lists of the cluster's profile, by local rank, such as "49-55"; may be empty.
        near_device: the CPUs next to its device; None: unknown.
    """
    if process.n_local_ranks == 1:
        return
    bound, rank = bound_to(), f"local rank {process.local_rank}"
    text = f"{rank} to {format_cpus(bound)}, but"
    if process.local_rank < len(lists):
        wanted = lists[process.local_rank]
        if bound == {*expand_cpus(wanted)}:
            yield Finding("binding", f"{rank} to {wanted}, as in the profile", PASS)
        else:
            hint = "start the ranks as `trainyard launch` does, which binds them as in the profile"
            yield Finding("binding", f"{text} the profile has {wanted}", WARN, hint)
    elif near_device and bound.isdisjoint(expand_cpus(near_device)):
        text += f" its device is next to {near_device}"
        yield Finding("binding", text, WARN, "bind each rank next to its device")


def find_wrong_interface(
    settings: Mapping[str, str], names: Sequence[str]
) -> tuple[str, str] | None:
    """Finds a variable that names a missing interface.

    Args:
        settings: environment variables.
        names: existing interfaces.

    Returns:
        problem and hint; None: no problem.
    """
    for variable in (GLOO, NCCL):
        value = settings.get(variable, "")
        if not value or value.startswith("^"):
            continue
        is_exact = variable == GLOO or value.startswith("=")
        # NCCL also takes "name:port".
        wanted = [word.partition(":")[0] for word in value.removeprefix("=").split(",")]
        missing = [
            word
            for word in wanted
            if not any(name == word if is_exact else name.startswith(word) for name in names)
        ]
        if missing and (variable == GLOO or len(missing) == len(wanted)):
            others = ", ".join(name for name in names if name != "lo") or "only lo"
            return (
                f"{variable}={value}: there is no network interface {', '.join(missing)}",
                f"available: {others}; export the one that reaches the other machines",
            )
    return None


def format_cpus(cpus: Iterable[int]) -> str:
    """Formats CPUs as Linux does: 0, 1, 2, 3 and 8 as "0-3,8"."""
    return format_ranges(sorted(cpus), separator=",")


def pci_folder(index: int) -> Path | None:
    """Returns the folder of facts about a GPU in /sys; None if torch gives no PCI address."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, device = parts
    return SYSTEM / "bus/pci/devices" / f"{domain:04x}:{bus:02x}:{device:02x}.0"


def _describe_devices() -> dict[str, str]:
    """Describes each GPU that torch sees: name, memory, PCI address and NUMA node."""
    import torch

    facts = {}
    if torch.version.cuda:
        facts["CUDA"] = torch.version.cuda
    if torch.version.hip:
        facts["ROCm"] = torch.version.hip
    if not torch.cuda.is_available():
        return facts | {"GPUs": "none visible to torch"}
    # On ROCm these are MIOpen and RCCL.
    try:
        facts["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    except RuntimeError as error:  # torch finds another version than it was built for
        facts["cuDNN"] = str(error).split(". ")[0]
    if torch.distributed.is_nccl_available():
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        facts["NCCL"] = ".".join(map(str, version))
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        words = [properties.name, format_bytes(properties.total_memory)]
        if (folder := pci_folder(index)) is not None:
            numa, near = read(folder / "numa_node"), read(folder / "local_cpulist")
            words += [folder.name, *([f"NUMA node {numa}"] if numa not in (None, "-1") else [])]
            words += [f"next to processors {near}"] if near else []
        facts[f"GPU {index}"] = ", ".join(words)
    return facts


def _describe_processor(process: Process) -> dict[str, str]:
    facts = {"cores": str(os.cpu_count() or 1)}
    facts["load"] = f"{os.getloadavg()[0]:.1f} in the last minute"
    facts["bound to"] = f"{format_cpus(bound_to())} (local rank {process.local_rank})"
    for node in sorted((SYSTEM / "devices/system/node").glob("node[0-9]*")):
        if cpus := read(node / "cpulist"):
            facts[f"NUMA {node.name}"] = cpus
    quota = _control_group("cpu.max")
    if quota and not quota.startswith("max"):
        allowed, period = quota.split()
        facts["quota"] = f"{int(allowed) / int(period):g} cores"
    return facts


def _describe_memory() -> dict[str, str]:
    facts = {}
    for line in (read(PROCESSES / "meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name in ("MemTotal", "MemAvailable"):
            facts[name.removeprefix("Mem").lower()] = format_bytes(1024 * int(value.split()[0]))
    limit = _control_group("memory.max")
    if limit and limit != "max":
        facts["limit of the job"] = format_bytes(int(limit))
    return facts


def _describe_limits() -> dict[str, str]:
    def limits(kind: int, show: Callable[[int], str] = str) -> list[str]:
        both = resource.getrlimit(kind)
        return ["unlimited" if n == resource.RLIM_INFINITY else show(n) for n in both]

    facts = {
        "open files": "{} (up to {})".format(*limits(resource.RLIMIT_NOFILE)),
        "locked memory": limits(resource.RLIMIT_MEMLOCK, format_bytes)[0],
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        facts["processes"] = limits(resource.RLIMIT_NPROC)[0]
    if SHARED_MEMORY.is_dir():
        usage = shutil.disk_usage(SHARED_MEMORY)
        facts["/dev/shm"] = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    return facts


def describe_network() -> dict[str, str]:
    """Describes each interface (state, address, speed) and each RDMA device."""
    facts = {}
    for _, name in socket.if_nameindex():
        folder = SYSTEM / "class/net" / name
        speed = read(folder / "speed") or ""
        words = [read(folder / "operstate"), _address_of(name)]
        words += [f"{int(speed) / 1000:g} Gb/s"] if speed.isdigit() else []
        facts[name] = ", ".join(filter(None, words)) or "unknown"
    for device in _rdma_devices():
        ports = sorted(device.glob("ports/*"))
        texts = [f"{read(port / 'state') or ''}, {read(port / 'rate') or ''}" for port in ports]
        facts[device.name] = "; ".join(texts) or "there"
    return facts


def _rdma_devices() -> list[Path]:
    """Lists the InfiniBand, RoCE and Slingshot devices."""
    return [
        path for kind in ("infiniband", "cxi") for path in sorted(SYSTEM.glob(f"class/{kind}/*"))
    ]


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, GET_ADDRESS, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _control_group(name: str) -> str | None:
    """Reads a limit of this process's cgroup (v2)."""
    own = (read(PROCESSES / "self/cgroup") or "").rpartition("::")[2].strip("/\n")
    return read(SYSTEM / "fs/cgroup" / own / name)


def read(path: Path) -> str | None:
    """Reads a file of the kernel; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
