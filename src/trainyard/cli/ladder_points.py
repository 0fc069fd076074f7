"""The part of `trainyard ladder` that fits a file of finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import typer

from trainyard.errors import ConfigError
from trainyard.log import build_console, facts_table
from trainyard.sweeps.law import Estimate, Law, fit_law
from trainyard.sweeps.points import Points
from trainyard.units import format_figure, format_large, parse_count


def print_points(
    read: Points, at: list[str], flop: list[float], picture: Path | None, *, as_json: bool
) -> None:
    """Fits a law to runs, and prints what it predicts.

    Args:
        read: the runs.
        at: runs to predict: "1.4B:28B".
        flop: budgets to spend on the best parameters and tokens.
        picture: to draw.
        as_json: print JSON.

    Raises:
        UserError: an option is wrong, or the runs are too few.
    """
    asked = [_parse_run(text) for text in at]
    law = fit_law(*read)
    optima = {f"{budget:g}": law.optimum(budget) for budget in flop}
    asked += [(one["parameters"].value, one["tokens"].value) for one in optima.values()]
    predictions: list[dict[str, Any]] = []
    for run in asked:
        problems = law.problems(*run)
        loss = None if problems else law.predict(*run)
        said = {"loss": loss, "reach": law.reach(*run), "problems": problems}
        predictions.append({"parameters": run[0], "tokens": run[1]} | said)
    if as_json:
        found = {"estimates": law.estimates(), "optima": optima, "predictions": predictions}
        text = msgspec.json.encode(found | {"law": law})
        typer.echo(msgspec.json.format(text, indent=2))
    else:
        _print(law, optima, predictions)
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


def _print(law: Law, optima: dict[str, Any], predictions: list[dict[str, Any]]) -> None:
    console = build_console(soft_wrap=True)
    held = f" with {law.ratio:.3g} tokens per parameter" if law.ratio else ""
    facts = {name: _format(one) for name, one in law.estimates().items()}
    facts["scatter"] = f"{law.scatter:.2%} of the loss"
    for budget, best in optima.items():
        n, d = _format(best["parameters"]), _format(best["tokens"])
        facts[f"best for {budget} FLOP"] = f"{n} parameters, {d} tokens"
    title = f"{law.n_runs} runs of {law.n_sizes} sizes{held}; 90 % intervals"
    console.print(facts_table(title, facts))
    for one in predictions:
        name = f"{format_large(one['parameters'])} on {format_large(one['tokens'])} tokens"
        answer = f"loss {_format(one['loss'])}" if one["loss"] else "not predicted"
        n, d, c = (f"{times:.3g}" for times in one["reach"].values())
        typer.echo(f"{name}: {answer}; {n} times the largest parameters, {d} tokens, {c} FLOP")
        for problem in one["problems"]:
            typer.echo(f"  {problem}")
    for name, reason in law.left_out.items():
        typer.echo(f"left out {name}: {reason}")


def _format(estimate: Estimate) -> str:
    large = max(estimate) >= 1e4
    value, low, high = (format_large(x) if large else format_figure(x, 4) for x in estimate)
    return f"{value} ({low} to {high})"
