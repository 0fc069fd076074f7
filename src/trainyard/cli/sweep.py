"""`trainyard sweep`: trains and compares a set of runs."""

from __future__ import annotations

import json
import shlex
import sys
from typing import Annotated

import typer

from trainyard.cli.names import CLUSTER, RunFileOrSet
from trainyard.errors import ConfigError
from trainyard.extras import require


def sweep(
    run_file: RunFileOrSet,
    values: Annotated[
        list[str] | None,
        typer.Argument(help="Fields with their values: section.field=value,value ..."),
    ] = None,
    name: str = "",
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    draw: Annotated[int, typer.Option(min=0)] = 0,
    at_once: Annotated[int | None, typer.Option(min=1)] = None,
    stop_hopeless: Annotated[bool, typer.Option("--stop-hopeless")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    cluster: Annotated[str, CLUSTER] = "",
    nodes: Annotated[int, typer.Option(min=1)] = 1,
    account: str = "",
    partition: str = "",
    time: str = "",
    image: str = "",
) -> None:
    """Train a set of runs, one for each combination of values, and compare them.

    Examples:
    trainyard sweep web.toml optimizer.learning_rate=1e-3,2e-3,4e-3 model.dropout=0,0.1 --seeds 2
    trainyard sweep web.toml optimizer.learning_rate=1e-4..1e-2 --draw 12 --stop-hopeless
    trainyard sweep web.toml optimizer.learning_rate=1e-3,2e-3 --cluster lumi --nodes 4
    trainyard sweep web-sweep

    The runs are RUN-sweep-01, RUN-sweep-02, ... in runs/, each like any other run. The same command
    continues: it takes up runs that have stopped, and does not repeat those that are done; with
    more values it adds runs. trainyard status RUN-sweep shows the table; trainyard report
    RUN-sweep, a page.

    Options:
        name: Name of the set. Default: the run's name and "-sweep".
        seeds: Number of seeds of each combination.
        draw: Draw this many combinations at random instead of all; a range such as 1e-4..1e-2 is
            drawn evenly by its logarithm.
        at_once: Runs to train at a time on a machine. Default: as many as fit.
        stop_hopeless: Stop a run early whose held-out loss is above the median of the others, after
            a quarter of its steps; do not try one again that aborts.
        as_json: Print the results as JSON for programs.
        dry_run: Show the runs, or with --cluster the job script; train and write nothing.

    Job array:
        cluster: A cluster with Slurm or PBS, or your own cluster file: mine.toml.
        nodes: Number of tasks of the array, of one node each.
        account: Account to charge.
        partition: Slurm partition or PBS queue.
        time: Time limit of a task, such as 12:00:00.
        image: Container image: a file or a name.
    """
    from trainyard.api.launching import Request
    from trainyard.api.sweeping import plan_array, submit_array
    from trainyard.jobs.script import render
    from trainyard.sweeps.execute import Execution, divide_machine
    from trainyard.sweeps.results import describe_values, read_results, render_results
    from trainyard.sweeps.sets import build_set, is_set, read_set, write_set

    if is_set(run_file):
        if values or name or seeds > 1 or draw:
            raise ConfigError(
                f"{run_file} is a set of runs, whose values are given",
                "name its run file to add values, or omit them to continue it",
            )
        run_set = read_set(run_file)
        runs = run_set.load_members()
    else:
        run_set, runs = build_set(run_file, values or [], name, seeds, draw)
        if not dry_run:
            if not cluster:
                require("torch")
            write_set(run_set, runs)
    given = {"account": account, "partition": partition, "time": time, "image": image}
    options = {option: value for option, value in given.items() if value}
    if cluster:
        request = Request(run_file, cluster=cluster, nodes=nodes, options=options)
        command = shlex.join(["trainyard", *sys.argv[1:]])
        words = ["--stop-hopeless"] if stop_hopeless else []
        words += ["--at-once", str(at_once)] if at_once else []
        job = plan_array(run_set, runs.values(), request, command, words)
        typer.echo(render(job) if dry_run else submit_array(job, cluster), nl=not dry_run)
        return
    if options or nodes > 1:
        raise ConfigError(f"--{next(iter(options), 'nodes')} is for a job array", "--cluster NAME")
    if dry_run:
        for member in run_set.members:
            typer.echo(f"{member.name}  {describe_values(member.values)}")
        return
    slots = divide_machine(run_set, at_once)
    code = Execution(run_set, slots, stop_hopeless).run()
    results = read_results(run_set)
    typer.echo(json.dumps(results.as_json(), indent=2) if as_json else render_results(results))
    if code:
        raise typer.Exit(code)
