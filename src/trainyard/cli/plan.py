"""`trainyard plan`: memory, time and cost of a run before it is queued."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import CLUSTER, FlopFormulaOption, Gpu, Overrides, RunFile, with_formula
from trainyard.errors import ConfigError

if TYPE_CHECKING:
    from trainyard.api.plan_table import Report

logger = logging.getLogger("trainyard")

PICTURES = (".png", ".svg")


def plan(
    run_file: RunFile,
    overrides: Overrides = None,
    cluster: Annotated[str | None, CLUSTER] = None,
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    gpu: Gpu = None,
    gpus: Annotated[int | None, typer.Option(min=1)] = None,
    search: Annotated[bool, typer.Option("--search")] = False,
    measure: Annotated[int | None, typer.Option(min=1)] = None,
    simulate: Annotated[bool, typer.Option("--simulate")] = False,
    rank: Annotated[int, typer.Option(min=0)] = 0,
    all_stages: Annotated[bool, typer.Option("--all-stages")] = False,
    deadline: str | None = None,
    price: Annotated[float | None, typer.Option(min=0)] = None,
    flop_formula: FlopFormulaOption = None,
    storage: str = "5,20,100",
    picture: Path | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Compute memory, time and cost of a run.

    Needs neither a GPU nor torch. Shows memory by item, against a device's memory; the time
    breakdown of a step; days, device-hours and price of the whole run, including failures; and
    the epochs over its data. Exit code 2 if it does not fit, with the smallest changes that
    make it fit.

    Examples:
    trainyard plan recipes/lumi/13b.toml --cluster lumi --nodes 2
    trainyard plan gpt3-13b --gpu h100-80g --gpus 64 --search
    trainyard plan gpt3-13b --gpu h100 --gpus 64 --deadline "1 week"
    trainyard plan recipes/benchmark64/tgs.toml --gpus 64 --simulate --all-stages

    Devices:
        cluster:
        nodes: Number of nodes.
        gpu:
        gpus: Number of devices. Default: the fewest the layout needs.
        price: Price per device-hour, in any currency.
        storage: File system speeds in GB/s; costs assume the first.

    Searching:
        search: Find the ten fastest layouts that fit.
        measure: With --search: benchmark the top N on this machine, and write the fastest to the
            run file.
        deadline: Such as "1 week": find the largest model that trains in time on the devices, on 20
            tokens per parameter unless a run file or an override sets train.length; without --nodes
            and --gpus, find the fewest devices for the run.

    Simulating:
        simulate: Run the real step of a rank on fake tensors.
        rank: With --simulate: which rank.
        all_stages: With --simulate: a rank of each pipeline stage.

    Output:
        flop_formula:
        picture: Draw memory and the timeline of a step: .png or .svg.
        as_json: Print JSON instead of a table.
    """
    from trainyard.api.planning import (
        build_report,
        choose_layout,
        count_devices,
        find_asked_machine,
    )
    from trainyard.config.load import load_run
    from trainyard.planning.shorten import describe_too_short

    asked = {"--search": search, "--simulate": simulate, "--deadline": deadline is not None}
    modes = [name for name, is_asked in asked.items() if is_asked]
    refuse_options(modes, measure=measure, rank=rank, all=all_stages)
    if picture is not None:
        refuse_picture(picture, is_of_plan=not modes)
    loaded = load_run(run_file, with_formula(overrides, flop_formula))
    machine = find_asked_machine(cluster, nodes, gpu)
    if (search or deadline is not None) and machine is None:
        raise ConfigError(f"{modes[0]} needs devices", "--cluster lumi --nodes 2")
    if deadline is not None and machine:
        from trainyard.cli.plan_search import print_deadline
        from trainyard.planning.ladder import Estimator

        n_given = count_devices(loaded.run, machine, nodes, gpus) if nodes or gpus else None
        estimator = Estimator(machine, parse_storage(storage), price)
        print_deadline(loaded, estimator, n_given, deadline, as_json=as_json)
        return
    n_devices = count_devices(loaded.run, machine, nodes, gpus)
    if search and machine:
        from trainyard.cli.plan_search import print_search

        source = Path(run_file) if run_file.endswith(".toml") else None
        print_search(loaded.run, machine, n_devices, measure, source, as_json=as_json)
    elif simulate:
        from trainyard.cli.plan_simulate import print_simulation

        print_simulation(loaded.run, n_devices, None if all_stages else rank, as_json=as_json)
    else:
        speeds = parse_storage(storage)
        try:
            is_counted = nodes is not None or gpus is not None
            chosen = choose_layout(loaded, machine, n_devices) if machine and is_counted else None
            report = build_report(loaded.run, machine, n_devices, speeds, price, chosen)
        except ConfigError as error:
            knows = machine is None or "--search" in error.hint
            more = "" if knows else "; --search lists the layouts that fit"
            raise ConfigError(error.problem, error.hint + more) from None
        _print(report, picture, as_json=as_json)
        for problem in describe_too_short(report.run, report.plan):
            logger.warning("warning: %s", problem)


def refuse_options(modes: list[str], *, measure: int | None, rank: int, all: bool) -> None:
    """Rejects options that do not combine; `modes` are alternatives to a plan.

    Raises:
        ConfigError: names them.
    """
    if len(modes) > 1:
        raise ConfigError(f"{' and '.join(modes)} cannot be combined", "pass one at a time")
    if measure is not None and "--search" not in modes:
        raise ConfigError(f"--measure {measure} needs --search", f"--search --measure {measure}")
    if (rank or all) and "--simulate" not in modes:
        name = "--all-stages" if all else f"--rank {rank}"
        raise ConfigError(f"{name} needs --simulate", f"--simulate {name}")


def refuse_picture(path: Path, *, is_of_plan: bool) -> None:
    """Rejects a picture that cannot be drawn or written, before any computation.

    Raises:
        ConfigError: says what is wrong with it.
    """
    if not is_of_plan:
        raise ConfigError(
            f"--picture {path} draws a plan, not the results of --search, --simulate or --deadline",
            "run that first, then --picture without it",
        )
    if path.suffix.lower() not in PICTURES:
        raise ConfigError(f"--picture {path}: pictures are .png or .svg", "name it plan.png")
    if not path.parent.is_dir():
        raise ConfigError(f"--picture {path}: there is no folder {path.parent}", "create it first")


def parse_storage(text: str) -> tuple[float, ...]:
    """Parses "5,20,100", in GB/s, as bytes per second.

    Raises:
        ConfigError: it is not a list of positive numbers.
    """
    from trainyard.config.devices import GIGA

    try:
        speeds = tuple(float(speed) * GIGA for speed in text.split(","))
    except ValueError:
        speeds = ()
    if not speeds or not all(0 < speed < float("inf") for speed in speeds):
        raise ConfigError(f"--storage {text!r} is not a list of GB/s", "such as 5,20,100")
    return speeds


def _print(report: Report, picture: Path | None, *, as_json: bool) -> None:
    """Prints a plan, draws it if requested, and rejects a run that does not fit.

    Raises:
        MachineError: it does not fit.
    """
    from trainyard.api.plan_table import plan_as_json, render_plan
    from trainyard.api.planning import refuse_unfit
    from trainyard.log import print_lines

    if as_json:
        typer.echo(json.dumps(plan_as_json(report), indent=2))
    else:
        print_lines(render_plan(report))
    if picture is not None:
        from trainyard.planning.search import usable_bytes
        from trainyard.report.pictures import draw_plan, save_picture

        usable = usable_bytes(report.machine) if report.machine else None
        figure = draw_plan(report.run, report.plan, report.memories, usable, report.time)
        save_picture(figure, picture)
        typer.echo(f"wrote {picture}", err=True)
    refuse_unfit(report)
