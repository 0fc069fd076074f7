"""`trainyard launch`: writes a cluster's job script and submits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import CLUSTER, Overrides, RunFile
from trainyard.errors import MachineError

if TYPE_CHECKING:
    from trainyard.config.run import Run


def launch(
    run_file: RunFile,
    overrides: Overrides = None,
    cluster: Annotated[str, CLUSTER] = "local",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Number of nodes. Default: 1; with --here all.")
    ] = None,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Ranks per node. Default: one per device.")
    ] = None,
    account: Annotated[str, typer.Option(help="Account to charge.")] = "",
    partition: Annotated[str, typer.Option(help="Slurm partition or PBS queue.")] = "",
    time: Annotated[str, typer.Option(help="Time limit of a job, such as 12:00:00.")] = "",
    image: Annotated[str, typer.Option(help="Container image: a file or a name.")] = "",
    hosts: Annotated[
        str, typer.Option(help="Hosts, without a scheduler: n1,n2,n3. Extra hosts are spares.")
    ] = "",
    stages: Annotated[
        str, typer.Option(help="train, all, or a comma-separated list: download,prepare,train.")
    ] = "train",
    contact: Annotated[
        str, typer.Option(help="Your e-mail address or web page, for the servers of a download.")
    ] = "",
    force: Annotated[
        bool, typer.Option("--force", help="Launch even if `trainyard plan` rejects the run.")
    ] = False,
    here: Annotated[
        bool,
        typer.Option("--here", help="Run now on the nodes of this allocation (salloc, qsub -I)."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the script; do not write or submit it.")
    ] = False,
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
    """
    from trainyard.api.launching import Request, plan_jobs, start_jobs
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


def refuse_unfit(run: Run, cluster: str, n_ranks: int) -> None:
    """Rejects what `trainyard plan` rejects: too little memory, or an unsupported precision.

    Raises:
        MachineError: the plan's message.
    """
    from trainyard.api.planning import build_report
    from trainyard.cli.plan import refuse
    from trainyard.planning.clusters import find_machine
    from trainyard.planning.search import is_gpu

    machine = find_machine(cluster)
    if not is_gpu(machine):
        return
    try:
        refuse(build_report(run, machine, n_ranks))
    except MachineError as error:
        raise MachineError(error.problem, f"{error.hint}; to launch anyway: --force") from None
