"""`trainyard launch`: writes a cluster's job script and submits it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainyard.cli.names import CLUSTER, Overrides, RunFile


def launch(
    run_file: RunFile,
    overrides: Overrides = None,
    cluster: Annotated[str, CLUSTER] = "local",
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    ranks_per_node: Annotated[int | None, typer.Option(min=1)] = None,
    account: str = "",
    partition: str = "",
    time: str = "",
    image: str = "",
    hosts: str = "",
    stages: str = "train",
    contact: str = "",
    force: Annotated[bool, typer.Option("--force")] = False,
    here: Annotated[bool, typer.Option("--here")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
) -> None:
    """Write a run's job script and submit it to the scheduler.

    The script is runs/NAME/job.sh. The job requeues itself until the run is done: after the time
    limit, a preemption, or a failed node or rank. Without a scheduler (local, mpi, ssh) and with
    --here it runs immediately, one stage after the other. Rejects what `trainyard plan` rejects.

    Examples:
    trainyard launch recipes/lumi/13b.toml --cluster lumi --nodes 2 --account project_1 --dry-run
    trainyard launch recipes/azure/175b.toml --cluster azure-ndv5 --nodes 128 --stages all
    trainyard launch run.toml --cluster ssh --nodes 2 --hosts n1,n2
    trainyard launch run.toml --cluster polaris --here

    Nodes:
        cluster:
        nodes: Number of nodes. Default: 1; with --here all.
        ranks_per_node: Ranks per node. Default: one per device.
        hosts: Hosts, without a scheduler: n1,n2,n3. Extra hosts are spares.
        here: Run now on the nodes of this allocation (salloc, qsub -I).

    Job:
        account: Account to charge.
        partition: Slurm partition or PBS queue.
        time: Time limit of a job, such as 12:00:00.
        image: Container image: a file or a name.
        stages: train, all, or a comma-separated list: download,prepare,train.
        contact: Your e-mail address or web page, for the servers of a download.

    Options:
        force: Launch even if `trainyard plan` rejects the run.
        dry_run: Print the script; do not write or submit it.
    """
    from trainyard.api.launching import Request, plan_jobs, refuse_unfit, start_jobs
    from trainyard.jobs.script import render

    given = {
        "account": account, "partition": partition, "time": time, "image": image, "hosts": hosts
    }  # fmt: skip
    request = Request(
        run_file,
        overrides or [],
        cluster,
        nodes,
        ranks_per_node,
        stages,
        {name: value for name, value in given.items() if value},
        force,
        here,
        contact,
    )
    run, jobs = plan_jobs(request, Path.cwd())
    if "train" in jobs and not force:
        refuse_unfit(run, cluster, jobs["train"].n_ranks)
    if dry_run:
        typer.echo("\n".join(map(render, jobs.values())), nl=False)
    elif text := start_jobs(request, run, jobs):
        typer.echo(text)
