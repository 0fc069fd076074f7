"""Every option of a cluster file: the machine's hardware, and how to start jobs on it.

A cluster is a TOML file: one of `config/clusters/`, or a user's own, whose name ends in .toml:

    extends = "lumi"                      # the base of every field not set here
    description = "LUMI, our project"

    [launch]
    account = "project_465000000"
    time = "12:00:00"

    [launch.container]
    image = "/projappl/project_465000000/trainyard.sif"

Tables are merged field by field; lists are replaced. The figures at the top are for planning; the
defaults are those of the GPU's usual node (`planning/clusters.py`). [launch] is for job scripts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from trainyard.config.load import (
    explain_problems,
    find_name,
    merge_tables,
    parse_toml,
    read_settings,
    suggest,
)
from trainyard.config.section import ListOf, Section
from trainyard.errors import ConfigError, MachineError
from trainyard.units import parse_duration

FILES_LIMIT = 4
CONTROL = r"[\x00-\x1f\x7f]"
"""Control characters, including line breaks: bash and schedulers interpret them."""


def _matching(pattern: str, problem: str) -> AfterValidator:
    """Validates a text by a regular expression; `problem` follows the text in the message."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} {problem}")
        return text

    return AfterValidator(check)


def _as_clock(text: str) -> str:
    """Writes '24 hours', or Slurm's 1-00:00:00, as HOURS:MINUTES:SECONDS; leaves other texts."""
    match = re.fullmatch(r"(\d{1,3})-(\d{1,2}):([0-5]\d):([0-5]\d)", text)
    if match:
        return f"{24 * int(match[1]) + int(match[2])}:{match[3]}:{match[4]}"
    try:
        seconds = round(parse_duration(text))
    except ValueError:
        return text
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def _check_option(text: str) -> str:
    unknown = [name for name in re.findall(r"\{([^}]*)\}", text) if name not in ("nodes", "ranks")]
    if unknown:
        raise ValueError(f"{{{unknown[0]}}} in {text!r} is unknown: use {{nodes}} or {{ranks}}")
    try:
        shlex.split(text)
    except ValueError as error:
        raise ValueError(f"unbalanced quotes in {text!r} ({error})") from None
    return text


_VARIABLE, _NO_VARIABLE = "[A-Za-z_][A-Za-z0-9_]*", "is not the name of an environment variable"
Line = Annotated[
    str, _matching(r"[^\x00-\x1f\x7f]*", "contains a line break or another control character")
]
Word = Annotated[
    str,
    _matching(
        "([A-Za-z0-9][A-Za-z0-9._@:+-]*)?", "is not a name: use letters, digits and . _ - + @ :"
    ),
]
Time = Annotated[
    str,
    AfterValidator(_as_clock),
    _matching(
        r"(\d{1,4}:[0-5]\d:[0-5]\d)?", "is not a time: write 12:00:00, 1-00:00:00 or '24 hours'"
    ),
    _matching("(.*[1-9].*)?", "leaves the job no time"),
]
Option = Annotated[
    Line,
    _matching("-.*", "is not a scheduler option: those begin with -"),
    AfterValidator(_check_option),
]
Variable = Annotated[str, _matching(_VARIABLE, _NO_VARIABLE)]
Cpus = Annotated[
    str,
    _matching(r"\d+(-\d+)?(,\d+(-\d+)?)*", "is not a list of CPUs, such as 48-55 or 0-7,64-71"),
]
Mount = Annotated[
    Line,
    _matching(
        "[^:,]+(:[^:,]*){0,2}", "is not a mount: write SOURCE, SOURCE:PLACE or SOURCE:PLACE:ro"
    ),
]


class Container(Section):
    """The container that ranks run in."""

    runtime: Literal["none", "pyxis", "apptainer", "singularity"] = "none"
    """pyxis is a plugin of srun that uses enroot; the others are programs on the nodes."""
    image: Line = ""
    """Image file, or a name such as registry.example.org#lab/trainyard:1.0; it needs Trainyard and
    torch."""
    mounts: ListOf[Mount] = ()
    """SOURCE:PLACE or SOURCE:PLACE:ro; the launch folder is always mounted."""
    environment: ListOf[Variable] = ()
    """Environment variables that override those of the image."""
    options: ListOf[Option] = ()
    """Options of the runtime, such as --rocm or --container-writable."""


class Prepare(Section):
    """Jobs that download and prepare data: one node each, CPU only.

    What is absent here is as for training.
    """

    partition: Word = ""
    """Slurm partition or PBS queue; absent: that of training."""
    time: Time = ""
    """Time limit; absent: that of training."""
    options: ListOf[Option] = ()
    """Scheduler options, replacing those of training."""
    tasks: int = Field(default=4, ge=1)
    """Nodes that prepare a corpus in parallel."""
    workers: int = Field(default=32, ge=1)
    """Processes per node, one core each; without a scheduler at most the CPUs of this machine."""
    environment: dict[Variable, Line] = Field(default={})
    """Environment variables, besides those of training."""
    python: Line = ""
    """Python with Trainyard installed; torch is not needed."""
    container: Container = Container()
    """Fields that differ from training's container; runtime = "none" runs on the host."""


class Launch(Section):
    """How to start jobs."""

    scheduler: Literal["local", "slurm", "pbs", "mpi", "ssh"] = "local"
    """local: this machine; mpi, ssh: the hosts below, without a scheduler."""
    start: Literal["torchrun", "tasks"] = "tasks"
    """Slurm only: one torchrun per node, or one task per rank."""
    mpiexec: Literal["openmpi", "mpich", "pals"] = "mpich"
    """Which mpiexec starts the ranks (pbs and mpi)."""
    hosts: ListOf[Word] = ()
    """Hosts of mpi and ssh; the others must reach the first by this name."""
    account: Word = ""
    """Account to charge."""
    partition: Word = ""
    """Slurm partition or PBS queue."""
    time: Time = ""
    """Time limit of a job, such as 12:00:00 or "24 hours"; a run may span many jobs."""
    options: ListOf[Option] = ()
    """Scheduler options, one per entry: "--exclusive", "-l filesystems=home"; {nodes} and {ranks}
    (per node) are filled in. They replace those of the file that `extends` names."""
    setup: ListOf[Line] = ()
    """Shell lines to run before the ranks start, such as "module load cray-python"; copied
    verbatim."""
    environment: dict[Variable, Line] = Field(default={})
    """Environment variables of every rank, mostly for the network. Jobs on one node omit NCCL_NET;
    jobs on GPUs have NCCL_DEBUG=WARN unless it is set here or where they are launched."""
    cpu_lists: ListOf[Cpus] = ()
    """CPUs of local ranks 0, 1, .., near their devices, such as "48-55"."""
    device_variable: Annotated[str, _matching(f"({_VARIABLE})?", _NO_VARIABLE)] = ""
    """Variable to set to the local rank, such as ROCR_VISIBLE_DEVICES; each rank then sees only its
    own device."""
    scratch: Line = "/tmp"
    """Folder on each node's local disk; compiled kernels go there, in one folder per job."""
    python: Line = ""
    """Python with Trainyard; absent: the one that runs `launch`, and python3 in a container."""
    container: Container = Container()
    """The container that ranks run in."""
    prepare: Prepare = Prepare()
    """Data jobs."""


class Measured(Section):
    """Efficiencies measured on a machine; absent ones keep their value."""

    matmul_share: float | None = Field(default=None, gt=0, le=1)
    attention_share: float | None = Field(default=None, gt=0, le=1)
    memory_share: float | None = Field(default=None, gt=0, le=1)
    link_share: float | None = Field(default=None, gt=0, le=1)
    network_share: float | None = Field(default=None, gt=0, le=1)
    launch_seconds: float | None = Field(default=None, gt=0)


class Cluster(Section):
    """A cluster file."""

    description: str = ""
    """What it is, and where."""
    gpu: str
    """Device name, as for --gpu; any other name, if the figures below describe it."""
    devices_per_node: int | None = Field(default=None, ge=1)
    """Devices as processes see them: a package with two counts as two."""
    link_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth from a device to all others of its node together, one direction."""
    network_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """Bandwidth from a device to other nodes, one direction."""
    link_latency_microseconds: float = Field(default=5.0, ge=0)  # upper bound of a fit
    """Latency of a hop inside a node."""
    network_latency_microseconds: float = Field(default=20.0, ge=0)  # assumed
    """Latency of a hop between nodes."""
    memory_gigabytes: float | None = Field(default=None, gt=0)
    """Memory of a device, as sold (2^30 bytes each); absent: the datasheet's."""
    memory_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """Memory bandwidth of a device; absent: the datasheet's."""
    host_memory_gigabytes: float | None = Field(default=None, gt=0)
    """Memory of a node that a job may use (2^30 bytes each); absent: unknown."""
    peaks_teraflops: dict[Literal["fp32", "fp16", "bf16", "fp8"], Annotated[float, Field(gt=0)]] = (
        Field(default={})
    )
    """Peak of dense matmuls with fp32 accumulation per device, by format; omit formats it lacks.
    Empty: the datasheet's."""
    efficiencies: Measured = Measured()
    """Efficiencies measured on the machine."""
    launch: Launch = Launch()
    """How to start jobs."""


def cluster_names() -> list[str]:
    """Lists the shipped clusters."""
    folder = resources.files("trainyard.config") / "clusters"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir())


def read_cluster(name: str, launch: Mapping[str, Any] | None = None) -> Cluster:
    """Reads a shipped cluster, or a file if the name ends in .toml.

    Args:
        name: of the cluster, or the path of its file.
        launch: fields of [launch] to override.

    Raises:
        MachineError: there is no such cluster.
        ConfigError: the file is unreadable or invalid.
    """
    texts = cluster_texts(name)
    merged: dict[str, Any] = {}
    for place, text in reversed(texts):
        values = parse_toml(text, place)
        values.pop("extends", None)
        merge_tables(merged, values, place, {})
    if launch:
        merge_tables(merged, {"launch": dict(launch)}, place, {})
    place = texts[0][0]
    try:
        return Cluster.model_validate(merged)
    except ValidationError as error:
        problem = explain_problems(error, Cluster, {}, place).problem
        fields = ", ".join(["extends", *Cluster.model_fields])
        launch_fields = ", ".join(Launch.model_fields)
        hint = f"a cluster file may have {fields}; its [launch] table {launch_fields}"
        raise ConfigError(problem.replace(f"the cluster {place}", place), hint) from None


def cluster_texts(name: str) -> list[tuple[str, str]]:
    """Reads the files of a cluster: its own, then the chain of files it extends.

    Returns:
        the display name and the text of each.

    Raises:
        MachineError: there is no such cluster.
        ConfigError: a file cannot be read, or too many extend each other.
    """
    texts = [_read(name, Path())]
    folder = Path(name).parent
    while base := parse_toml(texts[-1][1], texts[-1][0]).get("extends"):
        texts.append(_read(str(base), folder))
        folder /= Path(str(base)).parent
        if len(texts) > FILES_LIMIT:
            raise ConfigError(
                f"{texts[0][0]} extends {texts[1][0]}: a chain of more than {FILES_LIMIT} files",
                "extend a file that extends no other",
            )
    return texts


def cpu_mask(cpus: str) -> str:
    """Returns the mask of a list of CPUs, one bit each: "0-2,5" is 0x27."""
    return hex(sum(1 << cpu for cpu in expand_cpus(cpus)))


def expand_cpus(cpus: str) -> list[int]:
    """Returns the CPUs of a list: "0-2,5" is 0, 1, 2 and 5."""
    found: list[int] = []
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _read(name: str, folder: Path) -> tuple[str, str]:
    if name.endswith(".toml"):
        path = folder / name
        hint = suggest(name, cluster_names())
        return str(path), read_settings(path, "cluster file", hint)
    known = find_name(name, cluster_names())
    if known is None:
        raise MachineError(
            f"no cluster named {name!r}",
            suggest(name, cluster_names()) + "; a file of your own ends in .toml",
        )
    name = known
    entry = resources.files("trainyard.config") / "clusters" / f"{name}.toml"
    return f"cluster {name}", entry.read_text(encoding="utf-8")
