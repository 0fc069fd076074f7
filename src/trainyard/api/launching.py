"""Plans and starts the jobs of `trainyard launch`, all from one run file.

    recipes/azure/175b.toml             reads data/slimpajama/train_chunk_*_text_document[:-30], ..
    recipes/azure/data/slimpajama.toml  makes them from corpora/slimpajama/train

    download-slimpajama                 trainyard prepare --fetch slimpajama -o corpora/slimpajama
    prepare-slimpajama, an array        trainyard prepare recipes/azure/data/slimpajama.toml
    train                               after all the others

The tasks of an array share the work among themselves and all wait until it ends, with merging.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError

from trainyard.api import planning
from trainyard.config.cluster import Launch, read_cluster
from trainyard.config.corpus import Corpus, load_corpus, output_prefixes
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.corpus.fetching.catalogue import corpus_names
from trainyard.data.patterns import could_match, find_token_files, is_pattern
from trainyard.data.vocabulary import load_vocabulary
from trainyard.errors import ConfigError, DataError, LaunchError, MachineError, explain_failure
from trainyard.files import publish_text
from trainyard.jobs import status
from trainyard.jobs.job import Job
from trainyard.jobs.schedulers import SCHEDULERS, BatchScheduler
from trainyard.jobs.script import check_job, check_machine, render
from trainyard.launch.environment import refuse_secrets
from trainyard.launch.local import POLL_SECONDS, signal_name
from trainyard.launch.signals import note_signals
from trainyard.layout.ranks import find_topology, ranks_per_replica
from trainyard.planning.clusters import find_machine
from trainyard.planning.search import is_gpu
from trainyard.training.run_folder import RUNS, refuse_moved_run
from trainyard.training.stop import refuse_stopped

STAGES = ("download", "prepare", "train")


@dataclass(frozen=True)
class Request:
    """What to launch, and where."""

    run_file: str
    """The data files are in the folder `data` beside it."""
    overrides: Sequence[str] = ()
    cluster: str = "local"
    nodes: int | None = None
    """None: 1, or all of the allocation with `is_here`."""
    ranks_per_node: int | None = None
    """None: one per device."""
    stages: str = "train"
    options: Mapping[str, str] = field(default_factory=dict)
    """account, partition, time, image, hosts: values that override the cluster file."""
    force: bool = False
    """Launch what the plan rejects."""
    is_here: bool = False
    """Run in the allocation that this process is in."""
    contact: str = ""
    """Told to the servers of a download."""

    @property
    def command(self) -> str:
        """The command line that makes this request."""
        options = {
            "cluster": self.cluster,
            "nodes": self.nodes,
            "ranks-per-node": self.ranks_per_node,
            **self.options,
            "stages": "" if self.stages == "train" else self.stages,
        }
        words = ["trainyard", "launch", self.run_file, *self.overrides]
        for name, value in options.items():
            words += [f"--{name}", str(value)] if value else []
        words += ["--force"] if self.force else []
        words += ["--contact", self.contact] if self.contact else []
        return shlex.join(words + (["--here"] if self.is_here else []))

    @property
    def launch_fields(self) -> dict[str, Any]:
        """The options as fields of [launch].

        Raises:
            ConfigError: names the option whose value is wrong.
        """
        fields: dict[str, Any] = {}
        for name, text in self.options.items():
            value: dict[str, Any] = {name: text.split(",") if name == "hosts" else text}
            if name == "image":
                value = {"container": value}
            try:
                Launch.model_validate(value)
            except ValidationError as error:
                problem = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ConfigError(
                    f"--{name}: {problem}", "trainyard launch --help describes each option"
                ) from None
            fields |= value
        return fields


def plan_jobs(request: Request, project: Path) -> tuple[Run, dict[str, Job]]:
    """Returns the jobs of a launch by stage, in starting order.

    Args:
        request: what to launch.
        project: absolute working folder of the jobs; the run folder is below it.

    Raises:
        UserError: the run, the cluster or their combination is invalid.
    """
    stages = _parse_stages(request.stages)
    run = load_run(request.run_file, list(request.overrides)).run
    refuse_moved_run(request.run_file, run.name, request.overrides)
    cluster = read_cluster(request.cluster, request.launch_fields)
    n_devices = find_machine(request.cluster).devices_per_node
    n_ranks, arguments = request.ranks_per_node, ["train", f"{RUNS}/{run.name}/run.toml"]
    if cluster.launch.scheduler == "local":  # `train` itself counts the devices
        arguments += ["--ranks", str(n_ranks)] if n_ranks else []
        n_ranks = n_ranks or find_topology(run, None).n_ranks
    training = Job(
        name=run.name,
        cluster=cluster,
        n_nodes=_count_nodes(request, cluster.launch),
        n_ranks_per_node=n_ranks or n_devices,
        arguments=arguments,
        folder=project / RUNS / run.name,
        made_by=request.command,
    )
    if "train" in stages:
        check_job(training, n_devices)
        _refuse_layout(run, training, request)
    wanted = [stage for stage in stages if stage != "train"]
    corpora = _find_data_files(request.run_file, run) if wanted else {}
    jobs: dict[str, Job] = {}
    for path, corpus in corpora.items():
        for stage in wanted:
            jobs |= _data_jobs(stage, path, corpus, training, request)
    for job in jobs.values():
        check_job(job, 1)
    if wanted and not jobs:
        raise LaunchError(
            f"--stages {request.stages}: there is nothing to download",
            f"known: {', '.join(corpus_names())}, each in corpora/NAME (docs/fetching.md)",
        )
    if "train" in stages:
        made = read_prefixes(run) if "prepare" in stages else ()
        needs = [f"{prefix}.json" for prefix in made if not is_pattern(prefix)]
        last = [name for name in jobs if name.startswith("prepare-")] or list(jobs)
        jobs["train"] = replace(training, needs=needs, after=last)
    return run, jobs


def refuse_unfit(run: Run, cluster: str, n_ranks: int) -> None:
    """Rejects what `trainyard plan` rejects: too little memory, or an unsupported precision.

    Raises:
        MachineError: the plan's message.
    """
    machine = find_machine(cluster)
    try:
        if is_gpu(machine):
            planning.refuse_unfit(planning.build_report(run, machine, n_ranks))
    except MachineError as error:
        raise MachineError(error.problem, f"{error.hint}; to launch anyway: --force") from None


def start_jobs(request: Request, run: Run, jobs: dict[str, Job]) -> str:
    """Submits the jobs, or runs them in turn: in this allocation, or without a scheduler.

    Args:
        request: what to launch.
        run: as `plan_jobs` returned it.
        jobs: as well.

    Returns:
        how to follow them. Does not return if the training script takes over this process.

    Raises:
        UserError: the run cannot be trained here, or is already launched.
        LaunchError: the scheduler rejects a job, or a stage failed.
    """
    scripts = {stage: render(job) for stage, job in jobs.items()}
    for job in jobs.values():
        check_machine(job, is_here=request.is_here)
        if job.arguments[0] == "prepare" and job.arguments[1] != "--fetch":
            _make_data_folder(Path(job.arguments[1]))
    _write_folder(run, jobs, scripts)
    *_, last = jobs.values()
    name = last.cluster.launch.scheduler
    scheduler = SCHEDULERS[name]
    record = status.Submission(cluster=request.cluster, scheduler=name, n_nodes=last.n_nodes)
    if not isinstance(scheduler, BatchScheduler) or request.is_here:
        status.write_submission(last.folder, record)
        words = ["here"] if request.is_here else []
        for stage, job in jobs.items():
            if stage == "train":
                run_here(job.script_path, *words)
            run_stage(stage, job.script_path, *words)
        return ""
    ids: dict[str, str] = {}
    for stage, job in jobs.items():
        before = [ids[other] for other in job.after if other in ids]
        ids[stage] = scheduler.submit(job.script_path, before)
    if "train" not in ids:
        return "\n".join(f"{stage}: job {number}" for stage, number in ids.items())
    number = ids.pop("train")
    record = record.model_copy(update={"job": number, "waits_for": ids})
    status.write_submission(last.folder, record)
    return status.describe_submission(last.name, record, last.folder / scheduler.log(number))


def _make_data_folder(data_file: Path) -> None:
    """Makes the output folder of the data; rejects a tokenizer that no stage makes."""
    from trainyard.corpus.preparation.prepare import make_output_folder

    corpus = load_corpus(data_file, {})
    try:
        load_vocabulary(corpus.tokenizer)
    except DataError as error:
        raise DataError(
            f"{data_file}: {error.problem}",
            f"{error.hint}; or train one: trainyard prepare {data_file} --train-tokenizer 4096",
        ) from None
    make_output_folder(corpus)


def _write_folder(run: Run, jobs: dict[str, Job], scripts: dict[str, str]) -> None:
    """Checks the run, and writes it and its scripts into the run folder."""
    from trainyard.api.running import convert_start
    from trainyard.training.run_folder import begun_run, open_run, write_run_folder

    folder = next(iter(jobs.values())).folder
    status.refuse_second(folder)
    hint = "launch in a writable folder that every node of the cluster sees"
    with explain_failure(f"{folder} cannot be written", hint):
        for job in jobs.values():
            job.script_path.parent.mkdir(parents=True, exist_ok=True)
        (folder / "logs").mkdir(exist_ok=True)
        (folder / "logs" / "vain").unlink(missing_ok=True)
    begun = begun_run(folder)
    if list(jobs) == ["train"]:
        if begun is None:
            convert_start(run, folder)
        write_run_folder(open_run(folder, run=find_token_files(run, begun)), "auto")
    else:  # the data may not exist yet
        refuse_stopped(folder)
        refuse_secrets(run.model_dump())
        run = find_token_files(run, begun) if begun else run
        publish_text(folder / "run.toml", render_run(run))
    for stage, job in jobs.items():
        publish_text(job.script_path, scripts[stage])
        job.script_path.chmod(0o700)  # a proxy of the cluster file may have a password


def _count_nodes(request: Request, launch: Launch) -> int:
    """Returns the number of nodes to train on; refuses `is_here` without such an allocation."""
    wanted, scheduler = request.nodes or 1, SCHEDULERS[launch.scheduler]
    if not request.is_here:
        return wanted
    if not isinstance(scheduler, BatchScheduler):
        raise LaunchError(
            "--here is for the allocations of Slurm and PBS, and this cluster has no scheduler",
            "omit --here: without a scheduler the run starts immediately",
        )
    n_here, start = scheduler.count_nodes_here(), scheduler.allocator.format(nodes=wanted)
    if n_here == 0:
        raise LaunchError(
            "--here: this shell is not inside an allocation",
            f"start one ({start} and your options), or omit --here to submit a job",
        )
    if n_here < wanted:
        raise LaunchError(
            f"--nodes {wanted}, but this allocation has {n_here}",
            f"--nodes {n_here}, or start a larger one: {start}",
        )
    return request.nodes or n_here


def _refuse_layout(run: Run, job: Job, request: Request) -> None:
    """Rejects a number of nodes that the run's layout cannot use; another layout may."""
    try:
        find_topology(run, job.n_ranks)
    except ConfigError as error:
        legal = _legal_nodes(run, job.n_ranks_per_node)
        fewer = [number for number in legal if number < job.n_nodes]
        near = [*fewer[-1:], *legal[len(fewer) :][:1]]
        where = f"{job.n_nodes} x {job.n_ranks_per_node} ranks"
        words = ["trainyard", "plan", request.run_file, *request.overrides]
        words += ["--cluster", request.cluster, "--nodes", str(job.n_nodes), "--search"]
        hint = f"--nodes {' or --nodes '.join(map(str, near))}" if near else error.hint
        raise ConfigError(
            f"{run.name} cannot run on {where}: {error.problem}",
            f"{hint}; or another layout: {shlex.join(words)}",
        ) from None


def _legal_nodes(run: Run, n_ranks_per_node: int) -> list[int]:
    n_micro_batches = run.train.global_batch_size // run.train.micro_batch_size
    per_replica = ranks_per_replica(run)
    legal = []
    # The data parallel size must at least divide the batch.
    for size in range(1, n_micro_batches + 1):
        n_nodes, rest = divmod(size * per_replica, n_ranks_per_node)
        if n_micro_batches % size == 0 and rest == 0:
            with suppress(ConfigError):
                find_topology(run, n_nodes * n_ranks_per_node)
                legal.append(n_nodes)
    return legal


def _parse_stages(stages: str) -> list[str]:
    """Parses `all`, or comma-separated names."""
    names = list(STAGES) if stages == "all" else stages.split(",")
    if unknown := [name for name in names if name not in STAGES]:
        raise LaunchError(
            f"--stages {stages}: no stage named {unknown[0]!r}",
            f"all, or some of {', '.join(STAGES)}",
        )
    return [name for name in STAGES if name in names]


def _find_data_files(run_file: str, run: Run) -> dict[Path, Corpus]:
    """Finds the data files beside a run file that make the data of the run."""
    folder, prefixes = Path(run_file).parent / "data", read_prefixes(run)
    corpora = {path: load_corpus(path, {}) for path in sorted(folder.glob("*.toml"))}
    for prefix in prefixes:
        if not any(makes(corpus, prefix) for corpus in corpora.values()):
            raise ConfigError(
                f"no data file in {folder} makes {prefix}, which {run_file} reads",
                "write one (docs/corpora.md), or prepare the data yourself and omit --stages",
            )
    return {
        path: corpus
        for path, corpus in corpora.items()
        if any(makes(corpus, prefix) for prefix in prefixes)
    }


def read_prefixes(run: Run) -> list[str]:
    """Lists the token files that a run reads."""
    data = run.data
    blends = (data.blend, data.train, data.valid, data.test)
    return [prefix for blend in blends for prefix in blend.prefixes]


def makes(corpus: Corpus, prefix: str) -> bool:
    """Returns whether preparing a corpus makes this token file, or one of this pattern."""
    # How many outputs there will be, and so their digits, is known once the inputs are.
    return any(
        could_match(prefix, made) for n in (100, 1000) for made in output_prefixes(corpus, n)
    )


def _data_jobs(
    stage: str, path: Path, corpus: Corpus, training: Job, request: Request
) -> dict[str, Job]:
    """Plans the jobs that download or prepare a corpus."""
    launch = training.cluster.launch
    has_queue = isinstance(SCHEDULERS[launch.scheduler], BatchScheduler)
    if not has_queue:
        launch = launch.model_copy(update={"scheduler": "local"})
    is_array = has_queue and not request.is_here
    # The corpora whose folders, corpora/NAME, contain the inputs.
    parts = [Path(each).parts for each in corpus.inputs]
    folders = {part[1] for part in parts if len(part) > 1 and part[0] == "corpora"}
    names = [name for name in corpus_names() if name in folders]
    if stage == "download":
        told = ["--contact", request.contact] if request.contact else []
        arguments = {
            f"download-{name}": ["prepare", "--fetch", name, "-o", f"corpora/{name}", *told]
            for name in names
        }
    else:
        n_workers = launch.prepare.workers
        if not is_array:
            n_workers = min(n_workers, os.cpu_count() or 1)
        arguments = {f"prepare-{path.stem}": ["prepare", str(path), "--workers", str(n_workers)]}
    return {
        name: replace(
            training,
            name=name,
            cluster=training.cluster.model_copy(update={"launch": launch}),
            arguments=words,
            n_nodes=launch.prepare.tasks if is_array and stage == "prepare" else 1,
            n_ranks_per_node=1,
            is_stage=True,
            after=[f"download-{each}" for each in names] if stage == "prepare" else [],
        )
        for name, words in arguments.items()
    }


def run_here(script: Path, *arguments: str) -> NoReturn:
    """Replaces this process with the script, including output, exit code and signals.

    Raises:
        LaunchError: bash is not installed.
    """
    with explain_failure(f"bash {script} cannot be started", kind=LaunchError):
        os.execvp("bash", ["bash", str(script), *arguments])


def run_stage(stage: str, script: Path, *arguments: str) -> None:
    """Runs the script of a data stage to its end; forwards SIGINT, SIGTERM and SIGHUP to it.

    Raises:
        LaunchError: bash is not installed, or the stage failed and has printed why.
    """
    with note_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as received:
        with explain_failure(f"bash {script} cannot be started", kind=LaunchError):
            # In its own process group Ctrl-C on a terminal does not reach it twice.
            running = subprocess.Popen(
                ["bash", str(script), *arguments], stdin=subprocess.DEVNULL, process_group=0
            )
        n_sent = 0
        while running.poll() is None:
            for number in received[n_sent:]:
                os.killpg(running.pid, number)
                n_sent += 1
            time.sleep(POLL_SECONDS)
    code = running.returncode
    if code != 0 or received:
        end = f"exit code {code}" if code >= 0 else signal_name(-code)
        raise LaunchError(
            f"{stage} ended with {end}: later stages are not started",
            "see its message above; after a fix, launch again: finished work is skipped",
        )
