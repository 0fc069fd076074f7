"""Checks of a job, and its script: directives and variables, then the same bash for every job.

Users read job scripts and start them again by hand. From top to bottom a script has

    its job, and the command that made it
    the options of the scheduler
    the working folder, and the cluster's setup lines (modules)
    variables: what each rank runs, and on how many nodes
    files of `lib`: the program of a rank, and how its scheduler starts and restarts ranks

Every value is quoted by shlex, so that a shell reads it as one word, and has no control character.
Only the `setup` lines of the cluster file are shell code.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from importlib import resources

from trainyard.config.cluster import CONTROL
from trainyard.errors import LaunchError
from trainyard.jobs.job import Job
from trainyard.jobs.schedulers import SCHEDULERS, Scheduler, Settings, quote, split
from trainyard.launch.environment import PROMISE, hide_secrets
from trainyard.launch.restarts import LIMIT
from trainyard.launch.signals import STOP
from trainyard.units import format_number

N_COLUMNS = 100
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_job(job: Job, devices_per_node: int) -> None:
    """Rejects a job that cannot start, or would start with other settings.

    Args:
        job: what is to run.
        devices_per_node: that the cluster has.

    Raises:
        LaunchError: names the field and what to do.
    """
    launch, ranks = job.launch, job.n_ranks_per_node
    scheduler = SCHEDULERS[launch.scheduler]
    if not NAME.fullmatch(job.name):
        raise LaunchError(
            f"{job.name!r} is not a job name",
            "use letters, digits and . _ -, with a letter or digit first",
        )
    _check_container(job, scheduler)
    if ranks > devices_per_node:
        raise LaunchError(
            f"{ranks} ranks per node, but a node has {devices_per_node} devices",
            "use at most one rank per device, or correct devices_per_node in the cluster file",
        )
    scheduler.check(job)
    if launch.cpu_lists and len(launch.cpu_lists) < ranks:
        raise LaunchError(
            f"cpu_lists has {len(launch.cpu_lists)} lists for {ranks} ranks per node",
            "give one list per rank of a node, or none",
        )
    if not job.has_torchrun:
        return
    if not scheduler.has_steps:
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


def _check_container(job: Job, scheduler: Scheduler) -> None:
    container = job.launch.container
    if container.runtime == "none" and container.image:
        raise LaunchError(
            f"the image {container.image} needs a runtime, but the cluster file sets none",
            'set runtime in [launch.container] to "apptainer", "singularity" or "pyxis"',
        )
    if container.runtime == "none":
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
    if container.runtime == "pyxis" and not scheduler.has_steps:
        raise LaunchError(
            f"pyxis needs Slurm, but the scheduler is {job.launch.scheduler}",
            'set runtime = "apptainer" in [launch.container]',
        )


def check_machine(job: Job, *, is_here: bool = False) -> None:
    """Rejects an image file that does not exist, and a machine that cannot start the job.

    Args:
        job: what is to run.
        is_here: run on the nodes of this allocation, which may lack the scheduler's programs.

    Raises:
        LaunchError: names the image or the program.
    """
    launch, is_file = job.launch, job.image.startswith("/")
    if job.launch.container.runtime != "none" and is_file and not os.path.lexists(job.image):
        raise LaunchError(
            f"there is no image {job.image}",
            "build or copy it there, or set another: --image, or image in [launch.container]",
        )
    names = SCHEDULERS[launch.scheduler].programs(launch)
    if not is_here and not any(shutil.which(name) for name in names):
        raise LaunchError(
            f"there is no {names[-1]} here, which the scheduler {launch.scheduler} needs",
            "run this on a login node of the cluster; --dry-run prints the script anywhere",
        )


def render(job: Job) -> str:
    """Returns the script of a job: one file that needs no other.

    Raises:
        LaunchError: a value has a control character.
    """
    library = resources.files("trainyard.jobs") / "lib"
    parts = ("rank.sh", *SCHEDULERS[job.launch.scheduler].parts)
    return "\n".join(
        [render_header(job), *((library / name).read_text(encoding="utf-8") for name in parts)]
    )


def render_header(job: Job) -> str:
    """Returns what differs between job scripts.

    Raises:
        LaunchError: a value has a control character.
    """
    scheduler, setup = SCHEDULERS[job.launch.scheduler], job.launch.setup
    what = format_number(job.n_nodes, "task" if job.is_stage else "node")
    if job.n_array_tasks:
        what = f"{format_number(job.n_array_tasks, 'task')} of a node each"
    elif not job.is_stage:
        what += f" of {format_number(job.n_ranks_per_node, 'rank')}"
    if job.launch.scheduler == "local":
        what = "on this machine"
    lines = [
        scheduler.shebang,
        f"# {job.name}: {what}. Made by",
        f"#     {hide_secrets(re.sub(rf'({CONTROL}| )+', ' ', job.made_by))}",
        "# Started again by hand, it continues the run:",
        f"#     {quote(scheduler.submitter[0], job.script_path)}",
        *scheduler.directives(job),
        "",
        f"cd {quote(job.project)} || exit 2",
        *(["", "# Setup of the cluster.", *setup] if setup else []),
        "",
    ]
    for name, value in (_settings(job) | scheduler.settings(job)).items():
        lines += _assign(name, value)
    return "\n".join(lines) + "\n"


def _settings(job: Job) -> Settings:
    """The variables of all scripts."""
    launch = job.launch
    given = {**launch.environment}
    if job.n_nodes == 1:
        # On one node there may be no network for a plug-in, which would then fail (olcf-user-docs).
        given.pop("NCCL_NET", None)
    if not job.is_stage and not job.n_array_tasks and job.cluster.gpu != "cpu":
        devices = "1" if launch.device_variable else str(job.n_ranks_per_node)
        given = {PROMISE: devices} | given
    if job.has_torchrun:
        # Without it gloo's ranks look for those of the previous start.
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {
        "folder": job.run_folder,
        "is_stage": "yes" if job.is_stage else "",
        "is_array": "yes" if job.n_array_tasks else "",
        "n_nodes": job.n_nodes,
        "tasks_per_node": job.n_tasks_per_node,
        "restart_limit": LIMIT,
        "needs": [[path] for path in job.needs],
        "environment": [[f"{name}={value}"] for name, value in given.items()],
        "scratch": "" if job.is_stage else launch.scratch,
        "device_variable": launch.device_variable,
        "local_rank": "",
        "cpus_of_rank": [],
        "container": _container(job),
        "python": job.python,
        "command": _command(job),
    }


def _command(job: Job) -> list[Sequence[object]]:
    """The arguments of Python for each rank or task, line by line."""
    trainyard = ["-m", "trainyard.cli", *job.arguments]
    if not job.has_torchrun:
        return [trainyard]
    names = ",".join([*(number.name for number in STOP), "SIGQUIT"])
    return [
        ["-m", "torch.distributed.run", "--rdzv-backend=c10d"],
        [f"--nnodes={job.n_nodes}", f"--nproc-per-node={job.n_ranks_per_node}"],
        # It restarts ranks itself. Other signals would end it.
        [f"--max-restarts={LIMIT}", f"--signals-to-handle={names}"],
        trainyard,
    ]


def _container(job: Job) -> list[Sequence[object]]:
    """The command that enters a container, line by line; pyxis needs none."""
    container, scratch = job.launch.container, job.launch.scratch
    if container.runtime in ("none", "pyxis"):
        return []
    mounts = [f"{job.project}:{job.project}", *container.mounts]
    if scratch != "/tmp" and not job.is_stage:  # containers always mount /tmp
        mounts.insert(1, f"{scratch}:{scratch}")
    return [
        [container.runtime, "exec", *split(container.options)],
        *(["--bind", mount] for mount in mounts),
        ["--pwd", job.project, job.image],
    ]


def _assign(name: str, value: object) -> list[str]:
    if not isinstance(value, list):
        return [f"{name}={quote(value)}"]
    rows = [quote(*row) for row in value]
    line = f"{name}=({' '.join(rows)})"
    if len(line) <= N_COLUMNS:
        return [line]
    return [f"{name}=(", *(f"  {row}" for row in rows), ")"]
