"""Checks of a job before it becomes a script, and of the machine before it is submitted."""

from __future__ import annotations

import os
import re
import shutil

from trainyard.errors import LaunchError
from trainyard.jobs.job import Job
from trainyard.jobs.schedulers import SCHEDULERS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_job(job: Job, devices_per_node: int) -> None:
    """Rejects a job that cannot start, or would start with other settings.

    Args:
        job: what is to run.
        devices_per_node: that the cluster has.

    Raises:
        LaunchError: names the field and what to do.
    """
    if not NAME.fullmatch(job.name):
        raise LaunchError(
            f"{job.name!r} is not a job name",
            "use letters, digits and . _ -, with a letter or digit first",
        )
    _check_container(job)
    launch, ranks = job.cluster.launch, job.n_ranks_per_node
    if not job.is_stage and ranks > devices_per_node:
        raise LaunchError(
            f"{ranks} ranks per node, but a node has {devices_per_node} devices",
            "use at most one rank per device, or correct devices_per_node in the cluster file",
        )
    SCHEDULERS[launch.scheduler].check(job)
    if job.is_stage:
        return
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
    names = SCHEDULERS[launch.scheduler].programs(job)
    if not any(shutil.which(each) for each in names):
        raise LaunchError(
            f"there is no {names[-1]} here, which the scheduler {launch.scheduler} needs",
            "run this on a login node of the cluster; --dry-run prints the script anywhere",
        )


def check_image(job: Job) -> None:
    """Rejects an image file that does not exist.

    Raises:
        LaunchError: names it.
    """
    is_file = job.image.startswith("/")
    if job.container.runtime != "none" and is_file and not os.path.lexists(job.image):
        raise LaunchError(
            f"there is no image {job.image}",
            "build or copy it there, or set another: --image, or image in [launch.container]",
        )


def _check_torchrun(job: Job) -> None:
    launch = job.cluster.launch
    if not SCHEDULERS[launch.scheduler].has_steps:
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
    container = job.container
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
    if container.runtime == "pyxis" and not SCHEDULERS[launch.scheduler].has_steps:
        raise LaunchError(
            f"pyxis needs Slurm, but the scheduler is {launch.scheduler}",
            'set runtime = "apptainer" in [launch.container]',
        )
