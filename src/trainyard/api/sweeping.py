"""Trains sets of runs: on this machine, or as one job array."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from trainyard.api.launching import Request
from trainyard.config.cluster import read_cluster
from trainyard.config.run import Run
from trainyard.errors import LaunchError
from trainyard.files import publish_text
from trainyard.jobs import status
from trainyard.jobs.job import Job
from trainyard.jobs.schedulers import SCHEDULERS, BatchScheduler
from trainyard.jobs.script import check_job, check_machine, render
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.sweeps.sets import RunSet


def plan_array(
    run_set: RunSet,
    runs: Iterable[Run],
    request: Request,
    command: str,
    options: Sequence[str] = (),
) -> Job:
    """Plans the job array that trains a set: `request.nodes` tasks, each with one node.

    Args:
        run_set: its name is that of the job.
        runs: of its members.
        request: of the cluster.
        command: the command line that asks for it.
        options: of `trainyard sweep` in each task.

    Raises:
        LaunchError: the cluster has no queue, or cannot run such a job, or a node has fewer devices
            than a member ranks.
    """
    cluster = read_cluster(request.cluster, request.launch_fields)
    if not isinstance(SCHEDULERS[cluster.launch.scheduler], BatchScheduler):
        raise LaunchError(
            f"--cluster {request.cluster} has no queue, which a job array needs",
            "omit --cluster: the runs train on this machine; or start it on each host",
        )
    n_devices = find_machine(request.cluster).devices_per_node
    n_ranks = max(resolve(run).n_ranks for run in runs)
    if n_ranks > n_devices:
        raise LaunchError(
            f"a run of {run_set.name} has {n_ranks} ranks, but a node {n_devices} devices",
            "each run of a set trains on one node: give it a layout of fewer ranks",
        )
    job = Job(
        name=run_set.name,
        cluster=cluster,
        n_nodes=1,
        n_ranks_per_node=n_devices,
        arguments=["sweep", str(run_set.folder), *options],
        folder=Path.cwd() / run_set.folder,
        made_by=command,
        n_array_tasks=min(request.nodes or 1, len(run_set.members)),
    )
    check_job(job, n_devices)
    return job


def submit_array(job: Job, cluster: str) -> str:
    """Writes the script of a job array and submits it; returns how to follow it.

    Raises:
        LaunchError: the scheduler is not here, rejects it, or has it already.
    """
    check_machine(job)
    status.refuse_second(job.folder)
    publish_text(job.script_path, render(job))
    job.script_path.chmod(0o700)
    scheduler = SCHEDULERS[job.launch.scheduler]
    assert isinstance(scheduler, BatchScheduler)
    number = scheduler.submit(job.script_path)
    record = status.Submission(
        cluster=cluster, scheduler=job.launch.scheduler, n_nodes=job.n_array_tasks, job=number
    )
    status.write_submission(job.folder, record)
    return status.describe_submission(job.name, record, job.folder / scheduler.log("*"))
