"""A job before it becomes a script: command, nodes and cluster, with checks.

There are two kinds. Training takes all nodes at once, one rank per device, and is requeued until
the run is done. A data stage takes nodes one by one, as an array of equal tasks that share the work
among themselves.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainyard.config.cluster import Cluster
from trainyard.errors import LaunchError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SUBMITTERS = {"slurm": "sbatch", "pbs": "qsub", "ssh": "ssh"}
MPIEXECS = {
    "openmpi": ("mpiexec.openmpi", "mpiexec"),
    "mpich": ("mpiexec.hydra", "mpiexec"),
    "pals": ("mpiexec",),
}
IMAGE_ENDINGS = (".sif", ".sqsh", ".img")


@dataclass(frozen=True)
class Job:
    """The inputs of a script."""

    name: str
    """Job name in the scheduler."""
    cluster: Cluster
    n_nodes: int
    """For a data stage: number of nodes that work in parallel, each in its own task."""
    n_ranks_per_node: int
    """1 for a data stage."""
    arguments: Sequence[str]
    """Arguments of `trainyard`, for each rank or task."""
    folder: Path
    """Absolute run folder: PROJECT/runs/NAME; jobs start in PROJECT."""
    made_by: str
    """The command that made the script."""
    is_stage: bool = False
    """Whether it is a data stage."""
    needs: Sequence[str] = ()
    """Files from earlier stages that must exist when it starts."""

    @property
    def n_ranks(self) -> int:
        """Total number of ranks."""
        return self.n_nodes * self.n_ranks_per_node

    @property
    def project(self) -> Path:
        """Its working folder: paths of the run file are relative to it."""
        return self.folder.parents[1]

    @property
    def run_folder(self) -> str:
        """The run folder relative to `project`."""
        return str(self.folder.relative_to(self.project))

    @property
    def image(self) -> str:
        """Container image; a file by its absolute path, since pyxis takes `x.sqsh` for a name."""
        image = self.cluster.launch.container.image
        is_file = image.startswith(("/", "./")) or image.endswith(IMAGE_ENDINGS)
        return str(self.project / image) if is_file else image

    @property
    def mounts(self) -> Sequence[str]:
        """Mounts of its container, besides the launch folder."""
        launch = self.cluster.launch
        own = launch.prepare.mounts if self.is_stage else None
        return launch.container.mounts if own is None else own

    @property
    def script_path(self) -> Path:
        """Path of its script."""
        return self.folder / "jobs" / f"{self.name}.sh" if self.is_stage else self.folder / "job.sh"


def check_job(job: Job, devices_per_node: int) -> None:
    """Rejects a job that cannot start, or would start with other settings.

    Args:
        job: what is to run.
        devices_per_node: that the cluster has.

    Raises:
        LaunchError: names the field and what to do.
    """
    _check_names(job)
    _check_container(job)
    if job.is_stage:
        return
    launch, ranks = job.cluster.launch, job.n_ranks_per_node
    if ranks > devices_per_node:
        raise LaunchError(
            f"{ranks} ranks per node, but a node has {devices_per_node} devices",
            "use at most one rank per device, or correct devices_per_node in the cluster file",
        )
    if launch.scheduler == "local" and job.n_nodes > 1:
        raise LaunchError(
            f"{job.n_nodes} nodes, but this cluster is only this machine",
            "--nodes 1, or a cluster with a scheduler or hosts (trainyard show cluster ssh)",
        )
    if launch.scheduler in ("mpi", "ssh"):
        _check_hosts(job)
    if launch.cpu_lists and len(launch.cpu_lists) < ranks:
        raise LaunchError(
            f"cpu_lists has {len(launch.cpu_lists)} lists for {ranks} ranks per node",
            "give one list per rank of a node, or none",
        )
    if launch.start == "torchrun":
        _check_torchrun(job)


def check_programs(job: Job) -> None:
    """Rejects a machine without the programs that start a job.

    Raises:
        LaunchError: names the program.
    """
    launch = job.cluster.launch
    choices: tuple[str, ...] = (SUBMITTERS.get(launch.scheduler, "bash"),)
    if launch.scheduler == "mpi":
        choices = MPIEXECS[launch.mpiexec]
    if not any(shutil.which(each) for each in choices):
        raise LaunchError(
            f"there is no {choices[-1]} here, which the scheduler {launch.scheduler} needs",
            "run this on a login node of the cluster; --dry-run prints the script anywhere",
        )
    is_file = job.image.startswith("/")
    if launch.container.runtime != "none" and is_file and not os.path.lexists(job.image):
        raise LaunchError(
            f"there is no image {job.image}",
            "build or copy it there, or set another: --image, or image in [launch.container]",
        )


def _check_names(job: Job) -> None:
    if not NAME.fullmatch(job.name):
        raise LaunchError(
            f"{job.name!r} is not a job name",
            "use letters, digits and . _ -, with a letter or digit first",
        )
    path = str(job.folder)
    if job.cluster.launch.scheduler == "slurm" and "\\" in path:
        raise LaunchError(
            f"Slurm cannot write its log below {path}: the path has a backslash",
            "start in a folder without one",
        )
    if job.cluster.launch.scheduler == "pbs" and not re.fullmatch(r"[\w./+@=-]+", path):
        raise LaunchError(
            f"PBS cannot write its log below {path}: the path has a space or a special character",
            "start in a folder whose path has only letters, digits and . _ - + @ =",
        )


def _check_hosts(job: Job) -> None:
    launch = job.cluster.launch
    if len(set(launch.hosts)) < len(launch.hosts):
        twice = next(host for host in launch.hosts if launch.hosts.count(host) > 1)
        raise LaunchError(f"hosts names {twice} twice", "name each host once")
    if len(launch.hosts) < job.n_nodes:
        raise LaunchError(
            f"hosts has {len(launch.hosts)}, but --nodes is {job.n_nodes}",
            'list them in a cluster file: [launch] hosts = ["n1", "n2"]; or --hosts n1,n2',
        )


def _check_torchrun(job: Job) -> None:
    launch = job.cluster.launch
    if launch.scheduler != "slurm":
        raise LaunchError(
            f'start = "torchrun" needs Slurm, but the scheduler is {launch.scheduler}',
            'set start = "tasks"',
        )
    if launch.cpu_lists or launch.device_variable:
        field = "cpu_lists" if launch.cpu_lists else "device_variable"
        raise LaunchError(
            f'{field} needs one task per rank, but start = "torchrun" has one per node',
            f'set start = "tasks", or omit {field}',
        )


def _check_container(job: Job) -> None:
    launch = job.cluster.launch
    container = launch.container
    if container.runtime == "none":
        if container.image:
            raise LaunchError(
                f"the image {container.image} needs a runtime, but the cluster file sets none",
                'set runtime in [launch.container] to "apptainer", "singularity" or "pyxis"',
            )
        return
    if not container.image:
        raise LaunchError(
            f"{container.runtime} needs an image, but none is set",
            "set --image, or image in [launch.container], to one with Trainyard and torch",
        )
    if re.search("[,:]", str(job.project)):
        raise LaunchError(
            f"{job.project} cannot be mounted: the path has a comma or a colon",
            "start in a folder without them",
        )
    if container.runtime == "pyxis" and launch.scheduler != "slurm":
        raise LaunchError(
            f"pyxis needs Slurm, but the scheduler is {launch.scheduler}",
            'set runtime = "apptainer" in [launch.container]',
        )
