"""The only reader of environment variables: rank, number of ranks and rendezvous.

Every launcher passes the rank to each process in its own variables:

    trainyard train --ranks 4    TRAINYARD_RANK, TRAINYARD_RANKS, and a file to meet in
    torchrun                     RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, ..PORT
    srun                         SLURM_PROCID, and the SLURM_STEP_ variables
    mpiexec of Open MPI          OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK, _LOCAL_SIZE
    mpiexec of the others        PMI_RANK, PMI_SIZE, and one of several names for the local rank

They are checked in this order, the innermost launcher first: under torchrun inside srun both sets
exist and torchrun's is right, and mpiexec may use srun to reach the machines. A shell inside an
allocation (salloc, sbatch) also has Slurm variables, but none of a step: it is one process.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shlex
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path

from trainyard import __version__
from trainyard.config.secrets import hide, secret_problems, secret_values
from trainyard.errors import ConfigError, LaunchError

MOST_FILES = 2**16
PACKAGE = Path(__file__).parent.parent
PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "gigatoken")
LOOPBACK = "127.0.0.1"
FIRST_PORT, N_PORTS = 12_000, 18_000  # below the ephemeral ports of Linux
# Variables that distinguish jobs, so that two on one machine use different ports.
JOB_NAMES = ("PMIX_NAMESPACE", "PALS_APID", "SLURM_JOB_ID", "SLURM_STEP_ID", "PBS_JOBID")
COMMAND = "TRAINYARD_COMMAND"
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
# Set by job scripts: number of GPUs that each rank must see; the job's end, in seconds since 1970.
PROMISE, END = "TRAINYARD_DEVICES", "TRAINYARD_END"
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
MEANING = "start all ranks with torchrun, srun or mpiexec, or one process without its variables"
ADDRESS_HINT = "export MASTER_ADDR, the name of the first machine, and MASTER_PORT to every rank"


@dataclass(frozen=True)
class Process:
    """This process among the ranks of a job, and their rendezvous."""

    rank: int = 0
    n_ranks: int = 1
    local_rank: int = 0
    """Its rank on this machine."""
    n_local_ranks: int = 1
    """Ranks on this machine."""
    address: str = LOOPBACK
    """Address of rank 0's machine, reachable by the others."""
    port: int = 0
    """Port on which rank 0 listens."""
    store_file: Path | None = None
    """File in which the ranks of one machine meet, without a listening port."""
    launcher_listens: bool = False
    """Whether the launcher listens at the address instead of rank 0."""
    attempt: int = 0
    """Number of restarts by the launcher."""
    parent_pipe: int | None = None
    """File descriptor that reaches its end when the parent process ends."""
    heartbeat: int | None = None
    """File descriptor of the memory for heartbeats to the parent process."""
    launcher_restarts: bool = False
    """Whether the launcher restarts all ranks if this process exits with a nonzero code."""

    @property
    def is_on_one_machine(self) -> bool:
        """Whether all ranks are on this machine."""
        return self.n_local_ranks == self.n_ranks

    def refuse_option(self, option: str, value: object) -> None:
        """Raises a LaunchError for an option with a value if a launcher has started the ranks."""
        if value and self.n_ranks > 1:
            raise LaunchError(
                f"{option}: a launcher has already started {self.n_ranks} ranks",
                f"omit {option.split()[0]}, or the launcher",
            )


_Names = tuple[str, str, str, str]
"""The names of rank, number of ranks, local rank and number of local ranks; of one value several,
from different versions of a launcher."""
OURS: _Names = ("TRAINYARD_RANK", "TRAINYARD_RANKS", "TRAINYARD_RANK", "TRAINYARD_RANKS")
TORCHRUN: _Names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPEN_MPI: _Names = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
PMI: _Names = (
    *("PMI_RANK PALS_RANKID", "PMI_SIZE"),
    *("PMI_LOCAL_RANK PALS_LOCAL_RANKID MPI_LOCALRANKID", "PMI_LOCAL_SIZE MPI_LOCALNRANKS"),
)

_OF_LAUNCHERS = re.compile(
    r"TRAINYARD_(?!END$)|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)$|MASTER_|TORCHELASTIC_"
    r"|SLURM_(STEP|PROCID|LOCALID|NODEID|TASK|NTASKS|CPU_BIND)|PMI|OMPI_|PALS_|MPI_LOCAL"
)
"""Variables of ranks; the time limit of a job is for all that it starts."""


def read_process(environment: Mapping[str, str] = os.environ) -> Process:
    """Reads the variables of the launcher; without one, this is the only process.

    Raises:
        LaunchError: variables are missing, broken, or contradict each other.
    """
    return replace(
        _read_launcher(environment),
        parent_pipe=_read_optional(environment, "TRAINYARD_PARENT_PIPE"),
        heartbeat=_read_optional(environment, "TRAINYARD_HEARTBEAT"),
        launcher_restarts="TORCHELASTIC_RUN_ID" in environment,
    )


def _read_launcher(environment: Mapping[str, str]) -> Process:
    if not {"TRAINYARD_RANK", "TRAINYARD_RANKS"}.isdisjoint(environment):
        place = _read_place(environment, OURS)
        return replace(place, store_file=Path(_text(environment, "TRAINYARD_STORE_FILE")))
    in_step = "SLURM_STEP_ID" in environment
    for names in (TORCHRUN, OPEN_MPI, PMI):
        are_set = [any(name in environment for name in each.split()) for each in names]
        # Slurm plug-ins set only some of PMI's: then the step has all values.
        if all(are_set) or (any(are_set) and not (in_step and names is PMI)):
            place = _read_place(environment, names)
            return _with_meeting_point(environment, place, is_torchrun=names is TORCHRUN)
    if in_step:
        return _with_meeting_point(environment, _read_slurm_place(environment))
    return Process()


def rank_environment(
    process: Process, n_threads: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the environment for a process on this machine, for its `read_process`.

    Args:
        process: with a `parent_pipe`; without a `store_file` its place is in the environment.
        n_threads: for its computations, below this process; a launcher divides CPUs itself.
        environment: what the process inherits; its OMP_NUM_THREADS and GLIBC_TUNABLES, which maps
            large tensors of several ranks in huge pages (`keep_freed_memory`), are kept.
    """
    given: dict[str, object] = {
        "TRAINYARD_PARENT_PIPE": process.parent_pipe,
        "TRAINYARD_HEARTBEAT": process.heartbeat,
        COMMAND: shlex.join(sys.argv),
    }
    defaults = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} if process.n_ranks > 1 else {}
    if process.store_file is not None:
        defaults["OMP_NUM_THREADS"] = str(n_threads)
        given["TRAINYARD_RANK"] = process.rank
        given["TRAINYARD_RANKS"] = process.n_ranks
        given["TRAINYARD_STORE_FILE"] = process.store_file
    return defaults | dict(environment) | {k: str(v) for k, v in given.items() if v is not None}


def visible_devices(n_devices: int, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Lists the names by which processes can choose GPUs of this one, of `n_devices` here."""
    for name in VISIBLE if n_devices else ():
        if name in environment:
            return [device for device in environment[name].split(",") if device]
    return [str(number) for number in range(n_devices)]


def own_environment(
    devices: Sequence[str], n_threads: int, pipe: int, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the environment of a command that is no rank of this process's launcher.

    Args:
        devices: GPUs that it sees, as of `visible_devices`; none: those of this process.
        n_threads: for its computations; an OMP_NUM_THREADS is kept.
        pipe: its `parent_pipe`.
        environment: what it inherits.
    """
    kept = {name: value for name, value in environment.items() if not _OF_LAUNCHERS.match(name)}
    name = next((name for name in VISIBLE if environment.get(name)), VISIBLE[0])
    kept |= {name: ",".join(devices)} if devices else {}
    return {"OMP_NUM_THREADS": str(n_threads)} | kept | {"TRAINYARD_PARENT_PIPE": str(pipe)}


def read_start(environment: Mapping[str, str] = os.environ) -> str | None:
    """Returns the job script's name of this start; None without a script."""
    return environment.get("TRAINYARD_JOB")


def seconds_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Returns the time until the scheduler's limit, or None without a limit."""
    for name in (END, "SLURM_JOB_END_TIME"):
        if name in environment:
            return _read_one(environment, name)[1] - time.time()
    if "PBS_WALLTIME" in environment:
        # From the start of the job; its script is its oldest process here.
        return _read_one(environment, "PBS_WALLTIME")[1] - _seconds_since_start(os.getsid(0))
    return None


def _seconds_since_start(pid: int) -> float:
    fields = read_process_state(pid)
    if not fields:
        return 0.0
    ticks_since_boot = int(fields[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_since_boot / os.sysconf("SC_CLK_TCK")


def read_process_state(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat after the name; empty without one, as on macOS."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def refuse_missing_devices(n_seen: int, environment: Mapping[str, str] = os.environ) -> None:
    """Rejects training on fewer GPUs than in the cluster file, or on the CPU instead.

    Args:
        n_seen: GPUs that this process sees.
        environment: of a job script, which says how many it should see; else nothing is promised.

    Raises:
        LaunchError: names the host, and both numbers.
    """
    promised = _read_optional(environment, PROMISE)
    # A launcher may show each rank only one GPU; its variables say so.
    is_own = n_seen == 1 and any(name in environment for name in VISIBLE)
    if promised is not None and n_seen < promised and not is_own:
        raise LaunchError(
            f"{socket.gethostname()}: expected {promised} GPUs, but torch sees {n_seen}",
            "check the driver, the container's GPU option (--nv, --rocm), the torch build, the "
            "scheduler options, and gpu and devices_per_node of the cluster file; "
            "diagnose with: trainyard doctor",
        )


def bound_to() -> set[int]:
    """Returns the CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def let_idle_threads_sleep() -> None:
    """Keeps OpenMP's threads from spinning while they wait; call it before torch is imported.

    On an idle machine a step takes as long as before; next to four busy processes on two cores,
    spinning made it nine times slower (docs/log.md). A policy set in the environment is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def raise_file_limit() -> None:
    """Lets this process and its children open as many files and sockets as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else most  # macOS refuses "unlimited"
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def chooses_allocator(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the user has configured torch's memory allocator."""
    return not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}.isdisjoint(environment)


def make_libraries_deterministic() -> None:
    """Rejects algorithms whose sums depend on timing; call it before cuBLAS and NCCL start."""
    # From cuBLAS's manual, and NCCL without sums inside its switches; both may be set otherwise.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "^NVLS")


def connect_late() -> None:
    """Lets gloo connect two ranks at their first message; call it before it starts.

    Else each group connects every rank with all others, and n ranks exchange 8 n^3 bytes in the
    store of rank 0: 4.4 TB for 8,192 ranks.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def keep_off_the_network() -> None:
    """Restricts gloo and NCCL to the loopback interface; call it before they start."""
    for loopback in {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback
        os.environ["NCCL_SOCKET_IFNAME"] = loopback


def read_network(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the proxies, hf_token and hf_endpoint, where set; a lower-case variable wins."""
    names = {"http_proxy", "https_proxy", "no_proxy", "hf_token", "hf_endpoint"}
    return {key.lower(): environment[key] for key in sorted(environment) if key.lower() in names}


def hide_secrets(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Hides the values of secret variables, and logins in URLs."""
    return hide(text, secret_values(environment))


def refuse_secrets(settings: Mapping[str, object]) -> None:
    """Raises a ConfigError for a setting with the value of a secret variable."""
    if problems := secret_problems(settings, secret_values(os.environ)):
        raise ConfigError("\n".join(problems.values()), "remove it from the run file, or unset it")


def read_variables(
    names: re.Pattern[str], environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Returns the variables whose whole names match, with secrets hidden."""
    matching = sorted((name, text) for name, text in environment.items() if names.fullmatch(name))
    return {name: hide_secrets(text, environment) for name, text in matching}


def read_versions(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the versions of all software that can change a result, and the user's command."""
    from importlib import metadata  # which takes 20 ms, and is needed on few starts

    versions = {
        "trainyard": __version__,
        "code": code_checksum(),
        "commit": find_commit() or "unknown",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": _processor_name(),
        "command": hide_secrets(environment.get(COMMAND, shlex.join(sys.argv))),
    }
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


@cache
def code_checksum() -> str:
    """Returns a checksum of the package's Python files; many commits have the same version."""
    digest = sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGE)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


@cache
def find_commit() -> str:
    """Returns the commit of this code, "-dirty" with changes; empty without a checkout."""
    root = PACKAGE.parent.parent
    if not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip()


def _processor_name() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:  # noqa: PTH123
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        return platform.machine()
    return f"{names[0]}, {len(names)} cores" if names else platform.machine()


def _read_place(environment: Mapping[str, str], names: _Names) -> Process:
    rank, n_ranks, local_rank, n_local_ranks = (_read_one(environment, each) for each in names)
    for (below, value), (above, limit), least in (
        (rank, n_ranks, 0),
        (local_rank, n_local_ranks, 0),
        (n_local_ranks, n_ranks, 1),
    ):
        if value - least >= limit:
            raise LaunchError(
                f"{below}={environment[below]} contradicts {above}={environment[above]}",
                "ranks count from 0 and are less than their number: let the launcher set these",
            )
    return Process(rank[1], n_ranks[1], local_rank[1], n_local_ranks[1])


def _read_slurm_place(environment: Mapping[str, str]) -> Process:
    counts = _text(environment, "SLURM_STEP_TASKS_PER_NODE")  # "2(x3),1": 2 on three nodes, then 1
    node_name, node = _read_one(environment, "SLURM_NODEID")
    n_tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not match:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE={counts!r} cannot be read", MEANING)
        n_tasks += [int(match[1])] * int(match[2] or 1)
    if node >= len(n_tasks):
        raise LaunchError(
            f"{node_name}={node} contradicts SLURM_STEP_TASKS_PER_NODE={counts}", MEANING
        )
    local = "SLURM_STEP_TASKS_PER_NODE"
    names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", local)
    return _read_place({**environment, local: str(n_tasks[node])}, names)


def _with_meeting_point(
    environment: Mapping[str, str], process: Process, *, is_torchrun: bool = False
) -> Process:
    """Adds rank 0's address and port; all ranks must derive the same one independently."""
    if process.n_ranks == 1:
        return process
    if is_torchrun:
        process = replace(
            process,
            launcher_listens=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=_read_one({ATTEMPT: "0", **environment}, ATTEMPT)[1],
        )
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
    if process.is_on_one_machine and not process.launcher_listens:
        address = LOOPBACK
    elif is_torchrun or "MASTER_ADDR" in environment or nodes is None:
        address = _text(environment, "MASTER_ADDR")
    else:
        address = first_host(nodes)
    if is_torchrun or "MASTER_PORT" in environment:
        name, port = _read_one(environment, "MASTER_PORT")
        if not 0 < port < 2**16:
            raise LaunchError(f"{name}={port} is not a port", "ports are from 1 to 65535")
    else:
        job = ".".join(environment[name] for name in JOB_NAMES if name in environment)
        port = FIRST_PORT + zlib.crc32(job.encode()) % N_PORTS
    return replace(process, address=address, port=port)


def first_host(nodes: str) -> str:
    """Returns the first host of a Slurm node list: n03 for "n[03-05,9],login1"."""
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", nodes)[0])


def _read_one(environment: Mapping[str, str], names: str) -> tuple[str, int]:
    """Reads a value with several possible names; returns the name that is set, and the number."""
    there = [name for name in names.split() if name in environment] or names.split()[:1]
    for name in there:
        if not re.fullmatch("[0-9]+", _text(environment, name)):
            raise LaunchError(f"{name}={environment[name]!r} is not a number from 0", MEANING)
    values = {name: int(environment[name]) for name in there}
    if len(set(values.values())) > 1:
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        raise LaunchError(f"{shown} contradict each other", MEANING)
    return there[0], values[there[0]]


def _read_optional(environment: Mapping[str, str], name: str) -> int | None:
    return _read_one(environment, name)[1] if name in environment else None


def _text(environment: Mapping[str, str], name: str) -> str:
    if name not in environment:
        hint = ADDRESS_HINT if name.startswith("MASTER_") else MEANING
        raise LaunchError(f"{name} is not set, but other variables of the launcher are", hint)
    return environment[name]
