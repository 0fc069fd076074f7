"""The jobs that `trainyard launch --stages ..` builds from one run file.

    recipes/azure/175b.toml             reads data/slimpajama/train_chunk_00_text_document, ..
    recipes/azure/data/slimpajama.toml  makes them from corpora/slimpajama/train

    download-slimpajama                 trainyard prepare --fetch slimpajama -o corpora/slimpajama
    prepare-slimpajama, an array        trainyard prepare recipes/azure/data/slimpajama.toml
    train                               after all the others

The tasks of an array share the work among themselves and all wait until it ends, with merging.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainyard.cli.train import RUNS_FOLDER
from trainyard.config.cluster import Launch, read_cluster
from trainyard.config.corpus import Corpus, load_corpus
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.corpus.fetching.catalogue import corpus_names
from trainyard.errors import ConfigError, LaunchError
from trainyard.jobs.check import check_job
from trainyard.jobs.job import Job
from trainyard.jobs.scheduler import BatchScheduler
from trainyard.jobs.schedulers import SCHEDULERS
from trainyard.plan.clusters import find_machine
from trainyard.plan.layout import find_topology, ranks_per_replica

STAGES = ("download", "prepare", "train")


@dataclass(frozen=True)
class Request:
    """What the command line asks for."""

    run_file: str
    overrides: Sequence[str] = ()
    cluster: str = "local"
    nodes: int = 1
    ranks_per_node: int | None = None
    """None: one per device."""
    stages: str = "train"
    options: Mapping[str, str] = field(default_factory=dict)
    """account, partition, time, image, hosts: values that override the cluster file."""
    force: bool = False
    """Launch what the plan rejects."""

    @property
    def command(self) -> str:
        """The command line that makes this request."""
        words = ["trainyard", "launch", self.run_file, *self.overrides]
        words += ["--cluster", self.cluster, "--nodes", str(self.nodes)]
        if self.ranks_per_node is not None:
            words += ["--ranks-per-node", str(self.ranks_per_node)]
        for name, value in self.options.items():
            words += [f"--{name}", value]
        words += ["--stages", self.stages] if self.stages != "train" else []
        return shlex.join(words + (["--force"] if self.force else []))

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
    cluster = read_cluster(request.cluster, request.launch_fields)
    n_devices = find_machine(request.cluster).devices_per_node
    n_ranks, arguments = request.ranks_per_node, ["train", f"{RUNS_FOLDER}/{run.name}/run.toml"]
    if cluster.launch.scheduler == "local":  # `train` itself counts the devices
        arguments += ["--ranks", str(n_ranks)] if n_ranks else []
        n_ranks = n_ranks or find_topology(run, None).n_ranks
    training = Job(
        name=run.name,
        cluster=cluster,
        n_nodes=request.nodes,
        n_ranks_per_node=n_ranks or n_devices,
        arguments=arguments,
        folder=project / RUNS_FOLDER / run.name,
        made_by=request.command,
    )
    if "train" in stages:
        check_job(training, n_devices)
        refuse_layout(run, training)
    jobs = _data_jobs(request, run, training, stages)
    if "train" in stages:
        needs = [f"{prefix}.json" for prefix in read_prefixes(run)] if "prepare" in stages else ()
        jobs["train"] = replace(training, needs=needs)
    return run, jobs


def refuse_layout(run: Run, job: Job) -> None:
    """Rejects a number of nodes that the run's layout cannot use.

    Raises:
        ConfigError: the reason, and the nearest valid numbers.
    """
    try:
        find_topology(run, job.n_ranks)
    except ConfigError as error:
        near = nearest(_legal_nodes(run, job.n_ranks_per_node), job.n_nodes)
        where = f"{job.n_nodes} x {job.n_ranks_per_node} ranks"
        raise ConfigError(
            f"{run.name} cannot run on {where}: {error.problem}",
            f"--nodes {' or --nodes '.join(map(str, near))}" if near else error.hint,
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
    scheduler = training.cluster.launch.scheduler
    if wanted and not isinstance(SCHEDULERS[scheduler], BatchScheduler):
        raise LaunchError(
            f"--stages {request.stages} needs a scheduler with job dependencies, "
            f"and this cluster has none ({scheduler})",
            "run trainyard prepare DATA_FILE first, then launch without --stages",
        )
    jobs: dict[str, Job] = {}
    for path, corpus in find_data_files(request.run_file, run).items() if wanted else ():
        for stage in wanted:
            jobs |= _data_job(stage, path, corpus, training)
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
        if not any(_makes(corpus, prefix) for corpus in corpora.values()):
            raise ConfigError(
                f"no data file in {folder} makes {prefix}, which {run_file} reads",
                "write one (docs/corpora.md), or prepare the data yourself and omit --stages",
            )
    return {
        path: corpus
        for path, corpus in corpora.items()
        if any(_makes(corpus, prefix) for prefix in prefixes)
    }


def read_prefixes(run: Run) -> list[str]:
    """Lists the token files that a run reads."""
    data = run.data
    blends = (data.blend, data.train, data.valid, data.test)
    return [prefix for blend in blends for prefix in blend.prefixes]


def _makes(corpus: Corpus, prefix: str) -> bool:
    return prefix.startswith(f"{corpus.output}_")


def _data_job(stage: str, path: Path, corpus: Corpus, training: Job) -> dict[str, Job]:
    prepare = training.cluster.launch.prepare
    if stage == "download":
        names = _fetched(corpus)
        arguments = {
            f"download-{name}": ["prepare", "--fetch", name, "-o", f"corpora/{name}"]
            for name in names
        }
        n_tasks = 1
    else:
        workers = ["--workers", str(prepare.workers)]
        arguments = {f"prepare-{path.stem}": ["prepare", str(path), *workers]}
        n_tasks = prepare.tasks
    return {
        name: replace(
            training,
            name=name,
            arguments=words,
            n_nodes=n_tasks,
            n_ranks_per_node=1,
            is_stage=True,
        )
        for name, words in arguments.items()
    }


def _fetched(corpus: Corpus) -> list[str]:
    """Names the corpora whose folders, corpora/NAME, contain the inputs."""
    parts = [Path(each).parts for each in corpus.inputs]
    folders = {part[1] for part in parts if len(part) > 1 and part[0] == "corpora"}
    return [name for name in corpus_names() if name in folders]
