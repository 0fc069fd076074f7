"""`trainyard launch`: writes a cluster's job script and submits it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import CLUSTER, Overrides, RunFile
from trainyard.errors import DataError, MachineError

if TYPE_CHECKING:
    from trainyard.config.run import Run
    from trainyard.jobs.job import Job
    from trainyard.jobs.scheduler import BatchScheduler
    from trainyard.jobs.submission import Submission


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
    from trainyard.cli.launch_jobs import Request, plan_jobs
    from trainyard.jobs.check import check_image, check_programs
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
        refuse_unfit(run, jobs["train"], cluster)
    scripts = {stage: render(job) for stage, job in jobs.items()}
    if dry_run:
        typer.echo("\n".join(scripts.values()), nl=False)
        return
    for job in jobs.values():
        check_image(job)
        if not here:  # the nodes of an allocation may lack them
            check_programs(job)
        if job.arguments[0] == "prepare" and job.arguments[1] != "--fetch":
            make_ready(Path(job.arguments[1]))
    write_folder(run, jobs, scripts)
    start_jobs(cluster, jobs, here)


def refuse_unfit(run: Run, job: Job, cluster: str) -> None:
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
        refuse(build_report(run, machine, job.n_ranks))
    except MachineError as error:
        raise MachineError(error.problem, f"{error.hint}; to launch anyway: --force") from None


def make_ready(data_file: Path) -> None:
    """Creates the output folder of the data; rejects a tokenizer that no stage makes.

    Raises:
        DataError: the tokenizer is missing or malformed.
        MachineError: the folder cannot be created.
    """
    from trainyard.config.corpus import load_corpus
    from trainyard.corpus.preparation.prepare import make_output_folder
    from trainyard.data.vocabulary import load_vocabulary

    corpus = load_corpus(data_file, {})
    try:
        load_vocabulary(corpus.tokenizer)
    except DataError as error:
        raise DataError(
            f"{data_file}: {error.problem}",
            f"{error.hint}; or train one: trainyard prepare {data_file} --train-tokenizer 4096",
        ) from None
    make_output_folder(corpus)


def write_folder(run: Run, jobs: dict[str, Job], scripts: dict[str, str]) -> None:
    """Checks the run, and writes it and its scripts into the run folder.

    Raises:
        UserError: the run cannot be trained, is already launched, or cannot be written.
    """
    from trainyard.cli.train import convert_start
    from trainyard.config.load import render_run
    from trainyard.data.patterns import find_token_files
    from trainyard.files import publish_text
    from trainyard.jobs.status import refuse_second
    from trainyard.launch.environment import refuse_secrets
    from trainyard.training.run_folder import begun_run, write_run_folder
    from trainyard.training.stop import refuse_stopped

    folder = next(iter(jobs.values())).folder
    refuse_second(folder)
    try:
        for job in jobs.values():
            job.script_path.parent.mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "vain").unlink(missing_ok=True)
    except OSError as error:
        raise MachineError(
            f"{error.filename} cannot be written: {error.strerror}",
            "launch in a writable folder that every node of the cluster sees",
        ) from None
    begun = begun_run(folder)
    if list(jobs) == ["train"]:
        if begun is None:
            convert_start(run, folder)
        write_run_folder(folder, find_token_files(run, begun), "auto")
    else:  # the data may not exist yet
        refuse_stopped(folder)
        refuse_secrets(run.model_dump())
        run = find_token_files(run, begun) if begun else run
        publish_text(folder / "run.toml", render_run(run))
    for stage, job in jobs.items():
        publish_text(job.script_path, scripts[stage])
        job.script_path.chmod(0o700)  # a proxy of the cluster file may have a password


def start_jobs(cluster: str, jobs: dict[str, Job], is_here: bool) -> None:
    """Submits the scripts, or runs them in turn: in this allocation, or without a scheduler.

    Raises:
        LaunchError: the scheduler rejects one of them, or a stage failed.
    """
    from trainyard.jobs.scheduler import BatchScheduler
    from trainyard.jobs.schedulers import SCHEDULERS
    from trainyard.jobs.submission import Submission, run_here, run_stage, write_submission

    last = list(jobs.values())[-1]
    name = last.cluster.launch.scheduler
    scheduler = SCHEDULERS[name]
    record = Submission(cluster=cluster, scheduler=name, n_nodes=last.n_nodes)
    if isinstance(scheduler, BatchScheduler) and not is_here:
        submit_jobs(scheduler, jobs, record)
        return
    write_submission(last.folder, record)
    arguments = ["here"] if is_here else []
    for stage, job in jobs.items():
        if stage == "train":
            run_here(job.script_path, *arguments)
        run_stage(stage, job.script_path, *arguments)


def submit_jobs(scheduler: BatchScheduler, jobs: dict[str, Job], record: Submission) -> None:
    """Submits the scripts in order of their dependencies; prints how to follow them.

    Raises:
        LaunchError: the scheduler rejects one of them.
    """
    from trainyard.jobs.submission import describe_submission, write_submission

    ids: dict[str, str] = {}
    for stage, job in jobs.items():
        before = [ids[other] for other in job.after if other in ids]
        ids[stage] = scheduler.submit(job.script_path, before)
    waits_for = {stage: number for stage, number in ids.items() if stage != "train"}
    if "train" in ids:
        record = record.model_copy(update={"job": ids["train"], "waits_for": waits_for})
        folder = jobs["train"].folder
        write_submission(folder, record)
        log = folder / scheduler.log(ids["train"])
        typer.echo(describe_submission(jobs["train"].name, record, log))
    else:
        for stage, number in ids.items():
            typer.echo(f"{stage}: job {number}")
