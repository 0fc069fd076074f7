"""Facts about this machine, without measurements; works without torch.

    describe_environment(process)  ->  {"versions": {"trainyard": "0.1.0", ..},
                                        "processor": {"cores": "64", "bound to": "1-7", ..}, ..}

Sections of named facts, all text: for people, and in JSON for programs to compare. Facts that
cannot be read (another system, a container that hides them) are omitted. Each problem is a
`Finding` with a hint.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shutil
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path

from trainyard.doctor.verdict import PASS, REPLACE, WARN, Finding
from trainyard.launch.environment import Process, bound_to, read_versions
from trainyard.units import format_bytes

Facts = dict[str, dict[str, str]]

PROGRAMS = (
    *("sbatch", "srun", "qsub", "mpiexec", "mpirun", "ssh", "torchrun"),
    *("apptainer", "singularity", "enroot"),
)
SYSTEM = Path("/sys")
PROCESSES = Path("/proc")
DRIVERS = {
    "NVIDIA driver": PROCESSES / "driver/nvidia/version",
    "AMD driver": SYSTEM / "module/amdgpu/version",
}
LEAST_OPEN_FILES = 1024
"""Every rank keeps its token files and a connection to other ranks open."""
LEAST_SHARED_MEMORY = 256 * 2**20
"""Of /dev/shm, which NCCL and RCCL use inside a node; containers often have 64 MiB."""


MOST_LOAD = 0.5
"""Load per core by other processes, above which measurements are not representative."""


def describe_environment(process: Process) -> Facts:
    """Describes software, processor, memory, limits, programs and, with torch, devices."""
    versions = read_versions()
    versions.pop("machine")
    versions["torchao"] = _version_of("torchao")
    return {
        "versions": versions | _driver_versions(),
        "devices": _describe_devices() if has_torch() else {},
        "processor": _describe_processor(process),
        "memory": _describe_memory(),
        "limits": _describe_limits(),
        "programs": {name: path for name in PROGRAMS if (path := shutil.which(name))},
    }


def has_torch() -> bool:
    """Whether torch is installed, without its slow import."""
    return importlib.util.find_spec("torch") is not None


def check_limits(n_devices: int, has_rdma: bool) -> list[Finding]:
    """Judges limits that stop a training run in its first minute.

    Args:
        n_devices: number of devices of this machine.
        has_rdma: whether it has RDMA devices, which need locked memory.
    """
    found = []
    n_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= n_files < LEAST_OPEN_FILES:
        hint = f"ulimit -n {LEAST_OPEN_FILES} or more, before starting"
        found.append(Finding("open files", f"{n_files} at most", WARN, hint))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if has_rdma and locked != resource.RLIM_INFINITY:
        hint = "ulimit -l unlimited; under a scheduler, raise the limit of its daemon"
        text = f"{format_bytes(locked)} at most, but RDMA devices need it"
        found.append(Finding("locked memory", text, WARN, hint))
    shared = Path("/dev/shm")
    if n_devices > 1 and shared.is_dir():
        free = shutil.disk_usage(shared).free
        if free < LEAST_SHARED_MEMORY:
            hint = "in a container: --shm-size 8g, or --ipc host"
            found.append(Finding("/dev/shm", f"{format_bytes(free)} free", WARN, hint))
    return found


def check_load(load: float, n_cores: int) -> list[Finding]:
    """Checks for other processes on this machine, by the load of the last minute."""
    if load <= MOST_LOAD * n_cores:
        return []
    hint = "measure again on an idle machine: other processes make it look slow"
    return [Finding("load", f"{load:.1f} on {n_cores} cores in the last minute", WARN, hint)]


def check_binding(process: Process, lists: Sequence[str], near_device: str | None) -> list[Finding]:
    """Checks the CPU binding of this rank; a single rank may use all CPUs.

    Args:
        process: this rank.
        lists: CPU lists of the cluster's profile, by local rank, such as "49-55"; may be empty.
        near_device: the CPUs next to its device; None: unknown.
    """
    if process.n_local_ranks == 1:
        return []
    bound, rank = bound_to(), f"local rank {process.local_rank}"
    if process.local_rank < len(lists):
        wanted = lists[process.local_rank]
        if bound != parse_cpus(wanted):
            text = f"{rank} to {format_cpus(bound)}, but the profile has {wanted}"
            hint = "start the ranks as `trainyard launch` does, which binds them as in the profile"
            return [Finding("binding", text, WARN, hint)]
        return [Finding("binding", f"{rank} to {wanted}, as in the profile", PASS)]
    if near_device and not bound & parse_cpus(near_device):
        text = f"{rank} to {format_cpus(bound)}, but its device is next to {near_device}"
        return [Finding("binding", text, WARN, "bind each rank next to its device")]
    return []


def check_devices(
    n_found: int, names: Iterable[str], n_promised: int, wanted: str
) -> list[Finding]:
    """Compares the devices of a node with the cluster's profile.

    Args:
        n_found: devices of this node that its ranks see.
        names: their kinds, as named in `planning.hardware`.
        n_promised: number in the profile.
        wanted: kind in the profile.
    """
    found = []
    if n_found < n_promised:
        problem = f"{n_found} of the {n_promised} in the cluster's profile"
        hint = "request all from the scheduler; if it granted them, one has failed: drain the node"
        if n_found == 0:
            hint = "torch sees none: a login node, a job without GPUs, or a CPU-only torch"
        found.append(Finding("devices", problem, REPLACE, hint))
    others = sorted(set(names) - {wanted})
    if n_found and others:
        problem = f"{', '.join(others)}, but the cluster's profile has {wanted}"
        found.append(Finding("devices", problem, REPLACE, "set the right cluster with --cluster"))
    return found


def parse_cpus(text: str) -> set[int]:
    """Parses a CPU list in Linux format: "0-3,8" is 0, 1, 2, 3 and 8."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus |= set(range(int(first), int(last or first) + 1))
    return cpus


def format_cpus(cpus: Iterable[int]) -> str:
    """Formats CPUs as Linux does: 0, 1, 2, 3 and 8 as "0-3,8"."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def cpus_near(bus_id: str) -> str | None:
    """Returns the CPUs next to a device, by its PCI address such as "0000:c1:00.0"."""
    return read(SYSTEM / "bus/pci/devices" / bus_id / "local_cpulist")


def bus_id_of(index: int) -> str | None:
    """Returns the PCI address of a GPU; None if torch does not provide it."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return None
    domain, bus, device = parts
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


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
        text = f"{properties.name}, {format_bytes(properties.total_memory)}"
        bus_id = bus_id_of(index)
        if bus_id is not None:
            numa = read(SYSTEM / "bus/pci/devices" / bus_id / "numa_node")
            near = cpus_near(bus_id)
            text += f", {bus_id}" + (f", NUMA node {numa}" if numa not in (None, "-1") else "")
            text += f", next to processors {near}" if near else ""
        facts[f"GPU {index}"] = text
    return facts


def _describe_processor(process: Process) -> dict[str, str]:
    facts = {"model": read_versions()["machine"], "cores": str(os.cpu_count() or 1)}
    facts["load"] = f"{os.getloadavg()[0]:.1f} in the last minute"
    facts["bound to"] = f"{format_cpus(bound_to())} (local rank {process.local_rank})"
    for node in sorted((SYSTEM / "devices/system/node").glob("node[0-9]*")):
        cpus = read(node / "cpulist")
        if cpus:
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
    def text_of(number: int, *, is_size: bool = False) -> str:
        if number == resource.RLIM_INFINITY:
            return "unlimited"
        return format_bytes(number) if is_size else str(number)

    files, locked = resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK
    facts = {
        "open files": "{} (up to {})".format(*map(text_of, resource.getrlimit(files))),
        "locked memory": text_of(resource.getrlimit(locked)[0], is_size=True),
    }
    if hasattr(resource, "RLIMIT_NPROC"):
        facts["processes"] = text_of(resource.getrlimit(resource.RLIMIT_NPROC)[0])
    shared = Path("/dev/shm")
    if shared.is_dir():
        usage = shutil.disk_usage(shared)
        facts["/dev/shm"] = f"{format_bytes(usage.free)} free of {format_bytes(usage.total)}"
    return facts


def _driver_versions() -> dict[str, str]:
    # NVIDIA's first line ends in the version and the build date.
    texts = {name: read(path) for name, path in DRIVERS.items()}
    return {name: text.splitlines()[0] for name, text in texts.items() if text}


def _control_group(name: str) -> str | None:
    """Reads a limit of this process's cgroup (v2)."""
    own = (read(PROCESSES / "self/cgroup") or "").rpartition("::")[2].strip("/\n")
    return read(SYSTEM / "fs/cgroup" / own / name)


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def read(path: Path) -> str | None:
    """Reads a file of the kernel; None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
