"""The jobs that `trainyard launch --stages ..` builds from one run file.

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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainyard.cli.names import RUNS_FOLDER, refuse_moved_run
from trainyard.config.cluster import Launch, read_cluster
from trainyard.config.corpus import Corpus, load_corpus, output_prefixes
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.corpus.fetching.catalogue import corpus_names
from trainyard.data.patterns import could_match, is_pattern
from trainyard.errors import ConfigError, LaunchError
from trainyard.jobs.check import check_job
from trainyard.jobs.job import Job
from trainyard.jobs.scheduler import BatchScheduler, Scheduler
from trainyard.jobs.schedulers import SCHEDULERS
from trainyard.planning.clusters import find_machine
from trainyard.planning.layout import find_topology, ranks_per_replica

STAGES = ("download", "prepare", "train")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    run_file: str
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
        words = ["trainyard", "launch", self.run_file, *self.overrides]
        words += ["--cluster", self.cluster]
        words += ["--nodes", str(self.nodes)] if self.nodes is not None else []
        if self.ranks_per_node is not None:
            words += ["--ranks-per-node", str(self.ranks_per_node)]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        words += ["--stages", self.stages] if self.stages != "train" else []
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
            field: dict[str, Any] = {name: text.split(",") if name == "hosts" else text}
            if name == "image":
                field = {"container": field}
            try:
                Launch.model_validate(field)
            except ValidationError as error:
                problem = error.errors()[0]["msg"].removeprefix("Value error, ")
                raise ConfigError(
                    f"--{name}: {problem}", "trainyard launch --help describes each option"
                ) from None
            fields |= field
        return fields


def plan_jobs(request: Request, project: Path) -> tuple[Run, dict[str, Job]]:
    """Returns the jobs of a launch by stage, in starting order.

    Args:
        request: the command line. The data files are in the folder `data` beside its run file.
        project: absolute working folder of the jobs; the run folder is below it.

    Raises:
        UserError: the run, the cluster or their combination is invalid.
    """
    stages = parse_stages(request.stages)
    run = load_run(request.run_file, list(request.overrides)).run
    refuse_moved_run(request.run_file, run.name, request.overrides)
    cluster = read_cluster(request.cluster, request.launch_fields)
    n_nodes = count_nodes(request, SCHEDULERS[cluster.launch.scheduler])
    n_devices = find_machine(request.cluster).devices_per_node
    n_ranks, arguments = request.ranks_per_node, ["train", f"{RUNS_FOLDER}/{run.name}/run.toml"]
    if cluster.launch.scheduler == "local":  # `train` itself counts the devices
        arguments += ["--ranks", str(n_ranks)] if n_ranks else []
        n_ranks = n_ranks or find_topology(run, None).n_ranks
    training = Job(
        name=run.name,
        cluster=cluster,
        n_nodes=n_nodes,
        n_ranks_per_node=n_ranks or n_devices,
        arguments=arguments,
        folder=project / RUNS_FOLDER / run.name,
        made_by=request.command,
    )
    if "train" in stages:
        check_job(training, n_devices)
        refuse_layout(run, training, request)
    jobs = _data_jobs(request, run, training, stages)
    if "train" in stages:
        made = read_prefixes(run) if "prepare" in stages else ()
        needs = [f"{prefix}.json" for prefix in made if not is_pattern(prefix)]
        last = [name for name in jobs if name.startswith("prepare-")] or list(jobs)
        jobs["train"] = replace(training, needs=needs, after=last)
    return run, jobs


def count_nodes(request: Request, scheduler: Scheduler) -> int:
    """Returns the number of nodes to train on.

    Raises:
        LaunchError: with `is_here`, this process is in no allocation, or in one too small.
    """
    if not request.is_here:
        return request.nodes or 1
    if not isinstance(scheduler, BatchScheduler):
        raise LaunchError(
            "--here is for the allocations of Slurm and PBS, and this cluster has no scheduler",
            "omit --here: without a scheduler the run starts immediately",
        )
    found, wanted = scheduler.count_nodes_here(), request.nodes or 1
    start = scheduler.allocator.format(nodes=wanted)
    if found == 0:
        raise LaunchError(
            "--here: this shell is not inside an allocation",
            f"start one ({start} and your options), or omit --here to submit a job",
        )
    if found < wanted:
        raise LaunchError(
            f"--nodes {wanted}, but this allocation has {found}",
            f"--nodes {found}, or start a larger one: {start}",
        )
    return request.nodes or found


def refuse_layout(run: Run, job: Job, request: Request) -> None:
    """Rejects a number of nodes that the run's layout cannot use; another layout may.

    Raises:
        ConfigError: the reason, and the nearest valid numbers.
    """
    try:
        find_topology(run, job.n_ranks)
    except ConfigError as error:
        near = nearest(_legal_nodes(run, job.n_ranks_per_node), job.n_nodes)
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


def nearest(numbers: Sequence[int], wanted: int) -> list[int]:
    """Returns the neighbours, in a sorted list, of a number that is not in it."""
    below = [number for number in numbers if number < wanted]
    above = [number for number in numbers if number > wanted]
    return below[-1:] + above[:1]


def _data_jobs(request: Request, run: Run, training: Job, stages: Sequence[str]) -> dict[str, Job]:
    wanted = [stage for stage in stages if stage != "train"]
    if not isinstance(SCHEDULERS[training.cluster.launch.scheduler], BatchScheduler):
        launch = training.cluster.launch.model_copy(update={"scheduler": "local"})
        cluster = training.cluster.model_copy(update={"launch": launch})
        training = replace(training, cluster=cluster)
    jobs: dict[str, Job] = {}
    for path, corpus in find_data_files(request.run_file, run).items() if wanted else ():
        for stage in wanted:
            jobs |= _data_job(stage, path, corpus, training, request)
    for job in jobs.values():
        check_job(job, 1)
    if wanted and not jobs:
        raise LaunchError(
            f"--stages {request.stages}: there is nothing to download",
            f"known: {', '.join(corpus_names())}, each in corpora/NAME (docs/fetching.md)",
        )
    return jobs


def parse_stages(stages: str) -> list[str]:
    """Parses `all`, or comma-separated names.

    Raises:
        LaunchError: there is no such stage.
    """
    names = list(STAGES) if stages == "all" else stages.split(",")
    for name in names:
        if name not in STAGES:
            raise LaunchError(
                f"--stages {stages}: no stage named {name!r}",
                f"all, or some of {', '.join(STAGES)}",
            )
    return [name for name in STAGES if name in names]


def find_data_files(run_file: str, run: Run) -> dict[Path, Corpus]:
    """Finds the data files beside a run file that make the data of the run.

    Raises:
        ConfigError: no data file makes one of the prefixes.
    """
    folder = Path(run_file).parent / "data"
    corpora = {path: load_corpus(path, {}) for path in sorted(folder.glob("*.toml"))}
    prefixes = read_prefixes(run)
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


def _data_job(
    stage: str, path: Path, corpus: Corpus, training: Job, request: Request
) -> dict[str, Job]:
    prepare = training.cluster.launch.prepare
    has_queue = training.cluster.launch.scheduler != "local"
    names = _fetched(corpus)
    if stage == "download":
        told = ["--contact", request.contact] if request.contact else []
        arguments = {
            f"download-{name}": ["prepare", "--fetch", name, "-o", f"corpora/{name}", *told]
            for name in names
        }
        n_tasks = 1
    else:
        n_workers = prepare.workers
        if not has_queue or request.is_here:
            n_workers = min(n_workers, os.cpu_count() or 1)
        arguments = {f"prepare-{path.stem}": ["prepare", str(path), "--workers", str(n_workers)]}
        n_tasks = prepare.tasks if has_queue and not request.is_here else 1
    return {
        name: replace(
            training,
            name=name,
            arguments=words,
            n_nodes=n_tasks,
            n_ranks_per_node=1,
            is_stage=True,
            after=[f"download-{each}" for each in names] if stage == "prepare" else [],
        )
        for name, words in arguments.items()
    }


def _fetched(corpus: Corpus) -> list[str]:
    """Names the corpora whose folders, corpora/NAME, contain the inputs."""
    parts = [Path(each).parts for each in corpus.inputs]
    folders = {part[1] for part in parts if len(part) > 1 and part[0] == "corpora"}
    return [name for name in corpus_names() if name in folders]
