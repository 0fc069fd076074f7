"""`trainyard ladder`: small runs that predict a large one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.names import CLUSTER, Gpu, Overrides, complete_run_file
from trainyard.errors import ConfigError
from trainyard.extras import require
from trainyard.log import build_console, facts_table
from trainyard.units import format_figure, format_large, parse_count

if TYPE_CHECKING:
    from trainyard.sweeps.law import Estimate, Law, Points


def ladder(
    run_file: Annotated[
        str,
        typer.Argument(
            metavar="RUN_FILE",
            help="The large run: a run file (.toml), a preset or a run; a ladder in runs/, to "
            "continue it; or a .csv file of finished runs.",
            autocompletion=complete_run_file,
        ),
    ],
    overrides: Overrides = None,
    share: Annotated[float, typer.Option(min=0.0001, max=1)] = 0.02,
    sizes: Annotated[int, typer.Option(min=4)] = 5,
    ratio: Annotated[float, typer.Option(min=1.1)] = 2.0,
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    at_once: Annotated[int | None, typer.Option(min=1)] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    cluster: Annotated[str | None, CLUSTER] = None,
    gpu: Gpu = None,
    gpus: Annotated[int, typer.Option(min=1)] = 1,
    price: Annotated[float | None, typer.Option(min=0)] = None,
    at: Annotated[list[str] | None, typer.Option(metavar="PARAMETERS:TOKENS")] = None,
    flop: Annotated[list[float] | None, typer.Option(min=1)] = None,
    where: Annotated[list[str] | None, typer.Option(metavar="COLUMN=VALUE")] = None,
    loss: str = "loss",
    parameters: str = "parameters",
    as_json: Annotated[bool, typer.Option("--json")] = False,
    picture: Path | None = None,
) -> None:
    """Predict the loss of a large run, and its learning rate and batch, from small ones.

    Examples:
    trainyard ladder gpt3-1.3b --gpu h100-80g --gpus 8 --dry-run
    trainyard ladder web.toml --share 0.05
    trainyard ladder web-ladder
    trainyard ladder runs.csv --at 1.4B:28B --picture law.png
    trainyard ladder runs.csv --where corpus=c4 --where "multiplier>=0.5" --at 1.4e9:28e9

    Trains smaller models of the run's family, whose size, length, batch and learning rate follow by
    rules, as a set of runs, RUN-ladder; the same command continues. Then fits
    L = E + A N^-alpha + B D^-beta to their parameters N, tokens D and held-out losses L. Intervals
    hold 90 %. A prediction that cannot be trusted is a reason instead. trainyard plan then shows
    the loss of a run of the family beside its cost.

    Ladder:
        share: Share of the large run's cost that all small ones may have.
        sizes: Number of sizes.
        ratio: Of the parameters of neighbouring sizes.
        seeds: Runs of each.
        at_once: Runs to train at a time. Default: as many as fit.
        dry_run: Show the sizes and the cost; train and write nothing.

    Devices:
        cluster: A cluster, or your own cluster file: plan the cost there.
        gpu: A device name, such as h100-80g: plan the cost there. Default: this machine, by FLOP.
        gpus: Number of devices.
        price: Price per device-hour, in any currency.

    Finished runs:
        at: A run to predict, by parameters and tokens; may be repeated.
        flop: A budget to spend on the best parameters and tokens, 6 FLOP per parameter and token.
        where: Take only runs whose column has this value; >= and <= compare numbers.
        loss: The column of the loss.
        parameters: The column of the parameters; others are tokens or flop, and perhaps name.

    Output:
        as_json: Print JSON, with the law and its draws.
        picture: Draw loss over compute: .png or .svg.
    """
    if picture is not None:
        from trainyard.cli.plan import refuse_picture

        refuse_picture(picture, is_of_plan=True)
        require("matplotlib")
    if run_file.endswith(".csv"):
        from trainyard.sweeps.law import read_points

        read = read_points(Path(run_file), where or [], loss, parameters)
        _fit_points(read, at or [], flop or [], picture, as_json=as_json)
        return
    if at or flop or where:
        raise ConfigError(
            "--at, --flop and --where are for a .csv file of finished runs",
            "trainyard plan shows the expected loss of a run whose family has a ladder",
        )
    from trainyard.api.laddering import plan_ladder
    from trainyard.api.planning import find_asked_machine
    from trainyard.sweeps.execute import Execution, divide_machine
    from trainyard.sweeps.ladder import LadderSizes
    from trainyard.sweeps.law import to_json
    from trainyard.sweeps.prediction import conclude, grow_ladder, is_ladder, write_ladder
    from trainyard.sweeps.sets import read_set

    if is_ladder(run_file):
        run_set = read_set(run_file)
    else:
        machine = find_asked_machine(cluster, None, gpu)
        asked = LadderSizes(1.0, sizes, ratio, n_seeds=seeds)
        devices = (machine, gpus) if machine else None
        planned, lines = plan_ladder(run_file, overrides or [], asked, share, devices, price)
        typer.echo("\n".join(lines), err=as_json)
        if dry_run:
            return
        for package in ("torch", "scipy"):
            require(package)
        run_set = write_ladder(planned)
    slots, folder = divide_machine(run_set, at_once), run_set.folder
    # A run that diverges is a result, as its rate was too high.
    if code := Execution(run_set, slots, True, lambda: grow_ladder(folder)).run():
        raise typer.Exit(code)
    found = conclude(folder, picture)
    typer.echo(to_json(found) if as_json else f"\n{found.render()}\n", nl=False)
    if picture is not None:
        typer.echo(f"wrote {picture}", err=True)


def _fit_points(
    read: Points, at: list[str], flop: list[float], picture: Path | None, *, as_json: bool
) -> None:
    """Fits a law to finished runs, and prints what it predicts.

    Args:
        read: the runs.
        at: runs to predict: "1.4B:28B".
        flop: budgets to spend on the best parameters and tokens.
        picture: to draw.
        as_json: print JSON.
    """
    from trainyard.sweeps.law import fit_law, to_json

    asked = [_parse_run(text) for text in at]
    law = fit_law(*read)
    optima = {f"{budget:g}": law.optimum(budget) for budget in flop}
    asked += [(one["parameters"].value, one["tokens"].value) for one in optima.values()]
    if as_json:
        predictions = [law.answer(*run) for run in asked]
        found = {"estimates": law.estimates(), "optima": optima, "predictions": predictions}
        typer.echo(to_json(found | {"law": law}), nl=False)
    else:
        _print_law(law, optima, asked)
    if picture is not None:
        from trainyard.sweeps.picture import draw_law

        draw_law(picture, law, read, asked)
        typer.echo(f"wrote {picture}", err=True)


def _parse_run(text: str) -> tuple[float, float]:
    """Parses "1.4B:28B" or "1.4e9:28e9"."""
    try:
        n, d = (float(x) if "e" in x.lower() else float(parse_count(x)) for x in text.split(":"))
    except ValueError:
        n = d = 0
    if not (0 < n < float("inf") and 0 < d < float("inf")):
        raise ConfigError(f"--at {text}: not PARAMETERS:TOKENS", "such as 1.4B:28B or 1.4e9:28e9")
    return n, d


def _print_law(law: Law, optima: dict[str, Any], asked: list[tuple[float, float]]) -> None:
    console = build_console(soft_wrap=True)
    held = f" with {law.ratio:.3g} tokens per parameter" if law.ratio else ""
    facts = {name: _format(one) for name, one in law.estimates().items()}
    facts["scatter"] = f"{law.scatter:.2%} of the loss"
    for budget, best in optima.items():
        size, length = _format(best["parameters"]), _format(best["tokens"])
        facts[f"best for {budget} FLOP"] = f"{size} parameters, {length} tokens"
    title = f"{law.n_runs} runs of {law.n_sizes} sizes{held}; 90 % intervals"
    console.print(facts_table(title, facts))
    for n, d in asked:
        name = f"{format_large(n)} parameters on {format_large(d)} tokens:"
        typer.echo("\n  ".join([name, *law.describe(n, d)]))
    for name, reason in law.left_out.items():
        typer.echo(f"left out {name}: {reason}")


def _format(estimate: Estimate) -> str:
    large = max(estimate) >= 1e4
    value, low, high = (format_large(x) if large else format_figure(x, 4) for x in estimate)
    return f"{value} ({low} to {high})"
