"""Job scripts: a header of directives and quoted variables, then the same bash for every job.

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

import re
from collections.abc import Sequence
from importlib import resources

from trainyard.config.cluster import CONTROL
from trainyard.jobs.job import Job
from trainyard.jobs.scheduler import Scheduler, Settings, quote, split
from trainyard.jobs.schedulers import SCHEDULERS
from trainyard.launch.environment import PROMISE, hide_secrets
from trainyard.launch.restarts import LIMIT
from trainyard.launch.signals import STOP

N_COLUMNS = 100


def render(job: Job) -> str:
    """Returns the script of a job: one file that needs no other.

    Raises:
        LaunchError: a value has a control character.
    """
    library = resources.files("trainyard.jobs") / "lib"
    parts = ("rank.sh", *SCHEDULERS[job.cluster.launch.scheduler].parts)
    return "\n".join(
        [render_header(job), *((library / name).read_text(encoding="utf-8") for name in parts)]
    )


def render_header(job: Job) -> str:
    """Returns what differs between job scripts.

    Raises:
        LaunchError: a value has a control character.
    """
    scheduler, setup = SCHEDULERS[job.cluster.launch.scheduler], job.cluster.launch.setup
    lines = [
        scheduler.shebang,
        *_describe(job, scheduler),
        *scheduler.directives(job),
        "",
        f"cd {quote(job.project)} || exit 2",
        *(["", "# Setup of the cluster.", *setup] if setup else []),
        "",
    ]
    for name, value in (_settings(job) | scheduler.settings(job)).items():
        lines += _assign(name, value)
    return "\n".join(lines) + "\n"


def _describe(job: Job, scheduler: Scheduler) -> list[str]:
    what = f"{job.n_nodes} {'task' if job.is_stage else 'node'}{'s' if job.n_nodes > 1 else ''}"
    if not job.is_stage:
        what += f" of {job.n_ranks_per_node} rank{'s' if job.n_ranks_per_node > 1 else ''}"
    if job.cluster.launch.scheduler == "local":
        what = "on this machine"
    return [
        f"# {job.name}: {what}. Made by",
        f"#     {hide_secrets(re.sub(rf'({CONTROL}| )+', ' ', job.made_by))}",
        "# Started again by hand, it continues the run:",
        f"#     {scheduler.by_hand(job)}",
    ]


def _settings(job: Job) -> Settings:
    """The variables of all scripts."""
    launch = job.cluster.launch
    given = job.environment
    if job.n_nodes == 1:
        # On one node there may be no network for a plug-in, which would then fail (olcf-user-docs).
        given.pop("NCCL_NET", None)
    if not job.is_stage and job.cluster.gpu != "cpu":
        devices = "1" if launch.device_variable else str(job.n_ranks_per_node)
        given = {PROMISE: devices} | given
    if job.has_torchrun:
        # Without it gloo's ranks look for those of the previous start.
        given["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return {
        "folder": job.run_folder,
        "is_stage": "yes" if job.is_stage else "",
        "n_nodes": job.n_nodes,
        "tasks_per_node": job.n_tasks_per_node,
        "restart_limit": LIMIT,
        "needs": [[each] for each in job.needs],
        "environment": [[f"{name}={value}"] for name, value in given.items()],
        "scratch": "" if job.is_stage else launch.scratch,
        "device_variable": "" if job.is_stage else launch.device_variable,
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
    names = ",".join([*(each.name for each in STOP), "SIGQUIT"])
    return [
        ["-m", "torch.distributed.run", "--rdzv-backend=c10d"],
        [f"--nnodes={job.n_nodes}", f"--nproc-per-node={job.n_ranks_per_node}"],
        # It restarts ranks itself. Other signals would end it.
        [f"--max-restarts={LIMIT}", f"--signals-to-handle={names}"],
        trainyard,
    ]


def _container(job: Job) -> list[Sequence[object]]:
    """The command that enters a container, line by line; pyxis needs none."""
    container, scratch = job.container, job.cluster.launch.scratch
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
