"""`trainyard plan RUN --search` and `--deadline`: the best layouts, models, numbers of devices."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainyard.api.plan_table import RAMP_DROPPED, describe_devices, describe_step, memory_as_json
from trainyard.config import rules
from trainyard.config.edit import by_name, set_fields
from trainyard.config.load import LoadedRun, field_value, load_run, preset_names
from trainyard.config.run import Run
from trainyard.errors import ConfigError, MachineError
from trainyard.files import publish_text
from trainyard.layout.ranks import describe_layout, is_legal
from trainyard.log import align, print_lines
from trainyard.planning import ladder
from trainyard.planning.hardware import Machine
from trainyard.planning.search import (
    Candidate,
    explain_loss,
    fits,
    hint_where_none_fits,
    predict,
    rescale,
    search_with_ramp,
    with_seconds,
)
from trainyard.units import format_bytes, format_large, format_seconds, parse_duration

if TYPE_CHECKING:
    from rich.text import Text

MOST_LISTED = 10
HOW_TO_READ = (
    "in % of the first's step: tensor, context, pipeline and data are exposed communication of "
    "those axes, bubble is idle stages, overhead is kernel launches"
)


@dataclass(frozen=True)
class SearchResult:
    """The result of a search, fastest first, after measuring if requested."""

    candidates: Sequence[Candidate]
    measured: Sequence[int] = ()
    """Which of them were timed."""
    scale: float = 1.0
    """Factor from predictions to measurements."""
    as_it_is: Candidate | None = None
    """The run's own layout, predicted; None if it cannot use this number of devices."""
    fits: bool = True
    """Whether the run's own layout fits."""


def print_search(
    run: Run,
    machine: Machine,
    n_devices: int,
    n_measured: int | None,
    source: Path | None,
    *,
    as_json: bool,
) -> None:
    """Searches and prints layouts; with `n_measured`, times the best and writes the winner.

    Args:
        run: the run to find a layout for.
        machine: the devices.
        n_devices: their total number.
        n_measured: how many to time on this machine; None leaves the run file unchanged.
        source: the run file; None for a preset.
        as_json: print JSON instead of a table.

    Raises:
        MachineError: no layout fits, or this machine cannot time them.
    """
    from trainyard.launch.environment import read_process

    if n_measured is not None:
        from trainyard.bench.rounds import refuse_other_machines

        refuse_other_machines(machine, n_devices, read_process())
    candidates = search_with_ramp(run, machine, n_devices, max(MOST_LISTED, n_measured or 0))
    if not candidates:
        steady = rules.change(run, {"train.batch_ramp": None})
        raise MachineError(
            f"{run.name}: no layout fits on {describe_devices(machine, n_devices)}",
            hint_where_none_fits(steady, machine, n_devices),
        )
    result = SearchResult(candidates)
    if n_measured is not None:
        from trainyard.bench.rounds import time_layouts

        timed = time_layouts([one.run for one in candidates[:n_measured]], n_devices)
        if read_process().rank > 0:
            return
        result = _rank_again(candidates, timed)
    if is_legal(run, n_devices):
        predicted = predict(run, machine, n_devices)
        as_it_is = with_seconds(predicted, result.scale * predicted.time.seconds)
        result = replace(result, as_it_is=as_it_is, fits=fits(as_it_is.memory, machine, n_devices))
    if as_json:
        typer.echo(json.dumps(_search_as_json(run, result), indent=2))
    else:
        print_lines(_render_search(run, machine, result))
    if n_measured is not None:
        typer.echo(_keep_winner(result, run, source), err=as_json)


def _rank_again(candidates: Sequence[Candidate], timed: Sequence[float | None]) -> SearchResult:
    """Ranks layouts by the times of the first ones; drops those that could not be timed."""
    seconds = [one for one in timed if one is not None]
    if not seconds:
        raise MachineError(
            f"none of the {len(timed)} layouts could be timed on this machine",
            "see the output of their processes above",
        )
    worked = [one for one, time in zip(candidates, timed, strict=False) if time is not None]
    others = [*worked, *candidates[len(timed) :]]
    scale, ranked = rescale(others, dict(enumerate(seconds)))
    runs = {id(one.run) for one in worked}
    return SearchResult(ranked, [n for n, one in enumerate(ranked) if id(one.run) in runs], scale)


def _render_search(run: Run, machine: Machine, result: SearchResult) -> Text:
    """Renders the best layouts as a table, each with the reason it is slower than the first."""
    from rich.text import Text

    first, n = result.candidates[0], len(result.candidates)
    devices = describe_devices(machine, first.plan.n_ranks)
    count = f"the {n} fastest layouts that fit" if n >= MOST_LISTED else f"all {n} that fit"
    text = Text.assemble((run.name, "bold"), f" on {devices}: {count}")
    if first.run.train.batch_ramp != run.train.batch_ramp:
        text.append(f"\nbatch ramp {RAMP_DROPPED}")
    if result.measured:
        others = f"the others predicted x {result.scale:.3g}"
        text.append(f"\n{len(result.measured)} timed here (*), {others}")
    rows: list[tuple[str, ...]] = [
        ("", "step", "memory", "layout", "slower than the first, and why")
    ]
    for place, candidate in enumerate(result.candidates):
        mark = f"{place + 1:>2} {'*' if place in result.measured else ' '}"
        rows.append(_row(mark, candidate, first))
    if result.as_it_is is not None:
        *row, why = _row("as is", result.as_it_is, first)
        rows.append((*row, why + ("" if result.fits else "; DOES NOT FIT")))
    head, *lines = align(rows, right=(1, 2))
    text.append(f"\n{head}", "cyan").append("".join(f"\n{line}" for line in lines))
    text.append(f"\n{HOW_TO_READ}", "cyan")
    given = rules.describe(run, first.changes_from(run), " ")
    text.append("\narguments for the first: ", "cyan")
    return text.append(given or "none, the run as it is")


def _row(mark: str, candidate: Candidate, first: Candidate) -> tuple[str, ...]:
    slower = candidate.time.seconds / first.time.seconds - 1
    why = "" if candidate is first else f"{slower:+.1%}: {explain_loss(first, candidate)}"
    step = describe_step(candidate.time.seconds)
    memory = format_bytes(candidate.memory.peak_bytes)
    return mark, step, memory, describe_candidate(candidate), why


def describe_candidate(candidate: Candidate) -> str:
    """Describes a candidate's layout in one line."""
    micro = candidate.run.train.micro_batch_size
    return f"{describe_layout(candidate.run, candidate.plan.topology)}, micro batch {micro}"


def _search_as_json(run: Run, result: SearchResult) -> dict[str, Any]:
    first = result.candidates[0]

    def as_json(candidate: Candidate) -> dict[str, Any]:
        return {
            "layout": describe_candidate(candidate),
            "step": asdict(candidate.time),
            "memory": memory_as_json(candidate.memory),
            "longer_than_first": candidate.time.seconds / first.time.seconds - 1,
            "why": "" if candidate is first else explain_loss(first, candidate),
        }

    return {
        "run": run.name,
        "n_devices": first.plan.n_ranks,
        "scale": result.scale,
        "as_it_is": result.as_it_is and as_json(result.as_it_is) | {"fits": result.fits},
        "candidates": [
            {"changes": by_name(candidate.changes_from(run)), "is_measured": n in result.measured}
            | as_json(candidate)
            for n, candidate in enumerate(result.candidates)
        ],
    }


def _keep_winner(result: SearchResult, run: Run, source: Path | None) -> str:
    """Writes the fastest of the timed layouts to the run file; returns the changes as text.

    Raises:
        ConfigError: the run file cannot be edited safely, or the winner depends on command-line
            overrides.
    """
    winner = result.candidates[min(result.measured)]
    if source is None:
        given = rules.describe(run, winner.changes_from(run), " ")
        return f"presets are never changed; the fastest: {given or 'the preset as it is'}"
    in_file = load_run(str(source)).run
    changes = winner.changes_from(in_file)
    text = rules.describe(in_file, changes, ", ")
    if not changes:
        return f"{source} already has the fastest layout"
    broken = rules.broken_rules(rules.change(in_file, changes))
    if broken:
        raise ConfigError(
            f"{source} is unchanged: with {text}, {next(iter(broken.values()))}",
            "first write the command-line overrides into it",
        )
    publish_text(source, set_fields(source.read_text(encoding="utf-8"), changes, str(source)))
    return f"wrote to {source}: {text}"


def print_deadline(
    loaded: LoadedRun,
    estimator: ladder.Estimator,
    n_devices: int | None,
    deadline: str,
    *,
    as_json: bool,
) -> None:
    """Prints the largest model for `n_devices` or, if None, the fewest devices for the run.

    Raises:
        ConfigError: the deadline is malformed.
        MachineError: no candidate trains in time.
    """
    run = loaded.run
    try:
        seconds = parse_duration(deadline)
    except ValueError as error:
        raise ConfigError(f"--deadline {error}", '--deadline "1 week"') from None
    if n_devices is None:
        estimates = ladder.fewest_devices(run, estimator, seconds)[::-1]
        remarks = ("the fewest", "too few")
    else:
        origin = loaded.origins.get("train.length", "")
        keeps = bool(origin) and origin not in preset_names()
        estimates = ladder.largest_model(run, estimator, n_devices, seconds, keeps_length=keeps)
        remarks = ("the largest", "too long")
    first = estimates[0]
    if not first.seconds <= seconds:
        on = describe_devices(estimator.machine, first.n_devices)
        if n_devices is None:
            raise MachineError(
                f"{run.name} does not train within {deadline}: on {on}, the most tried, it "
                f"{first.duration}",
                "try a longer deadline, a shorter train.length or a larger train.global_batch_size",
            )
        size = format_large(ladder.count_parameters(first.run))
        raise MachineError(
            f"no model trains within {deadline} on {on}: the smallest, of {size} parameters, "
            f"{first.duration}",
            "try a longer deadline, more devices or fewer tokens, such as train.length='1B tokens'",
        )
    rows = {
        remark if estimate.cost else "does not fit": estimate
        for remark, estimate in zip(remarks, estimates, strict=False)
    }
    if as_json:
        found = [_estimate_as_json(remark, one, run) for remark, one in rows.items()]
        typer.echo(json.dumps(found, indent=2))
    else:
        print_lines(_render_deadline(run, estimator.machine, rows, deadline))


def _render_deadline(
    run: Run, machine: Machine, rows: Mapping[str, ladder.TrainingEstimate], deadline: str
) -> Text:
    from rich.text import Text

    text = Text.assemble((run.name, "bold"), f" within {deadline} on devices of {machine.name}")
    text.append(", at the slow end of predictions")
    cells = [("", "model", "tokens", "devices", "whole run", "price", "layout")]
    for remark, estimate in rows.items():
        model, cost, candidate = estimate.run.model, estimate.cost, estimate.candidate
        size = format_large(ladder.count_parameters(estimate.run))
        cells.append(
            (
                remark,
                f"{size} ({model.n_layers} x {model.d_model})",
                format_large(candidate.plan.n_tokens) if candidate else "",
                f"{estimate.n_devices:,}",
                format_seconds(cost.seconds) if cost and math.isfinite(cost.seconds) else "",
                f"{cost.price:,.0f}" if cost and cost.price is not None else "",
                describe_candidate(candidate) if candidate else "",
            )
        )
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    head, *lines = align([*zip(*columns, strict=True)])
    text.append(f"\n{head}", "cyan").append("".join(f"\n{line}" for line in lines))
    remark, first = next(iter(rows.items()))
    text.append(f"\narguments for {remark}: ", "cyan")
    return text.append(f"--gpus {first.n_devices} {_describe_changes(first.run, run)}".rstrip())


def _describe_changes(changed: Run, run: Run) -> str:
    """Formats the differences from a run as overrides."""
    return rules.describe(
        run, {name: field_value(changed, name) for name in ladder.CHANGED_FIELDS}, " "
    )


def _estimate_as_json(remark: str, estimate: ladder.TrainingEstimate, run: Run) -> dict[str, Any]:
    cost, candidate = estimate.cost, estimate.candidate
    return {
        "remark": remark,
        "parameters": ladder.count_parameters(estimate.run),
        "tokens": candidate.plan.n_tokens if candidate else None,
        "n_devices": estimate.n_devices,
        "seconds": estimate.seconds if math.isfinite(estimate.seconds) else None,
        "device_hours": cost.device_hours if cost else None,
        "price": cost.price if cost else None,
        "changes": _describe_changes(estimate.run, run),
    }
