"""`trainyard plan RUN --search`: finds the best layouts, and can time them and keep the winner."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainyard.api.plan_table import describe_devices, describe_step, memory_as_json, time_as_json
from trainyard.config import rules
from trainyard.config.edit import set_fields
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import ConfigError, MachineError
from trainyard.files import publish_text
from trainyard.log import print_lines
from trainyard.planning.hardware import Machine
from trainyard.planning.layout_check import describe_layout
from trainyard.planning.search import (
    Candidate,
    explain_loss,
    fits,
    hint_where_none_fits,
    is_legal,
    predict,
    rescale,
    search,
    with_seconds,
)
from trainyard.units import format_bytes

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
    measured: Mapping[int, float]
    """Step seconds of the timed candidates, by index in `candidates`."""
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
    candidates = search(run, machine, n_devices, max(MOST_LISTED, n_measured or 0))
    if not candidates:
        raise MachineError(
            f"{run.name}: no layout fits on {describe_devices(machine, n_devices)}",
            hint_where_none_fits(run, machine, n_devices),
        )
    found = SearchResult(candidates, {})
    if n_measured is not None:
        found = _measure(candidates, n_measured)
        if read_process().rank > 0:
            return
    as_it_is = _predict(run, machine, n_devices, found.scale)
    if as_it_is is not None:
        found = replace(found, as_it_is=as_it_is, fits=fits(as_it_is.memory, machine))
    if as_json:
        typer.echo(json.dumps(search_as_json(run, found), indent=2))
    else:
        print_lines(render_search(run, machine, found))
    if n_measured is not None:
        typer.echo(keep_winner(found, run, source), err=as_json)


def _predict(run: Run, machine: Machine, n_devices: int, scale: float) -> Candidate | None:
    """Predicts the run's own layout, with the same scale."""
    if not is_legal(run, n_devices):
        return None
    found = predict(run, machine, n_devices)
    return with_seconds(found, scale * found.time.seconds)


def _measure(candidates: Sequence[Candidate], n_measured: int) -> SearchResult:
    """Times the best candidates, and ranks all again by the results."""
    from trainyard.bench.rounds import time_layouts
    from trainyard.launch.environment import read_process

    runs = [candidate.run for candidate in candidates[:n_measured]]
    timed = time_layouts(runs, candidates[0].plan.n_ranks)
    if read_process().rank > 0:
        return SearchResult(candidates, {})
    failed = {place for place, seconds in enumerate(timed) if seconds is None}
    if len(failed) == len(timed):
        raise MachineError(
            f"none of the {len(timed)} layouts could be timed on this machine",
            "see the output of their processes above",
        )
    kept = [each for place, each in enumerate(candidates) if place not in failed]
    seconds = [each for each in timed if each is not None]
    scale, ranked = rescale(kept, dict(enumerate(seconds)))
    by_run = dict(zip([each.run.model_dump_json() for each in kept], seconds, strict=False))
    measured = {
        place: by_run[each.run.model_dump_json()]
        for place, each in enumerate(ranked)
        if each.run.model_dump_json() in by_run
    }
    return SearchResult(ranked, measured, scale)


def render_search(run: Run, machine: Machine, found: SearchResult) -> Text:
    """Renders the best layouts as a table, each with the reason it is slower than the first."""
    from rich.text import Text

    first = found.candidates[0]
    devices = describe_devices(machine, first.plan.n_ranks)
    n = len(found.candidates)
    count = f"the {n} fastest layouts that fit" if n >= MOST_LISTED else f"all {n} that fit"
    text = Text(run.name, style="bold")
    text.append(f" on {devices}: {count}", style="not bold")
    if found.measured:
        n_measured = len(found.measured)
        text.append(
            f"\n{n_measured} timed here (*), the others predicted x {found.scale:.3g}",
            style="not bold",
        )
    shown = [*found.candidates, *filter(None, [found.as_it_is])]
    width = max(len(describe_candidate(each)) for each in shown)
    text.append(
        f"\n{'':<6}{'step':>9}  {'memory':>9}  {'layout':<{width}}  slower than the first, and why",
        style="cyan not bold",
    )
    for place, candidate in enumerate(found.candidates):
        mark = f"{place + 1:>2} {'*' if place in found.measured else ' '}"
        text.append(f"\n{_row(mark, candidate, first, width)}", style="not bold")
    if found.as_it_is is not None:
        row = _row("as is", found.as_it_is, first, width)
        text.append(f"\n{row}{'' if found.fits else '; DOES NOT FIT'}", style="not bold")
    text.append(f"\n{HOW_TO_READ}", style="cyan not bold")
    changes = first.changes_from(run)
    given = rules.describe(run, changes, " ")
    text.append("\narguments for the first: ", style="cyan not bold")
    text.append(given or "none, the run as it is", style="not bold")
    return text


def _row(mark: str, candidate: Candidate, first: Candidate, width: int) -> str:
    slower = candidate.time.seconds / first.time.seconds - 1
    why = "" if candidate is first else f"{slower:+.1%}: {explain_loss(first, candidate)}"
    row = (
        f"{mark:<6}{describe_step(candidate.time.seconds):>9}  "
        f"{format_bytes(candidate.memory.peak_bytes):>9}  {describe_candidate(candidate):<{width}}"
    )
    return f"{row}  {why}".rstrip()


def describe_candidate(candidate: Candidate) -> str:
    """Describes a candidate's layout in one line."""
    micro = candidate.run.train.micro_batch_size
    return f"{describe_layout(candidate.run, candidate.plan.topology)}, micro batch {micro}"


def search_as_json(run: Run, found: SearchResult) -> dict[str, Any]:
    """Returns the layouts as JSON values."""
    first = found.candidates[0]
    return {
        "run": run.name,
        "n_devices": first.plan.n_ranks,
        "scale": found.scale,
        "as_it_is": found.as_it_is and _as_json(found.as_it_is, first) | {"fits": found.fits},
        "candidates": [
            {"changes": candidate.changes_from(run), "is_measured": place in found.measured}
            | _as_json(candidate, first)
            for place, candidate in enumerate(found.candidates)
        ],
    }


def _as_json(candidate: Candidate, first: Candidate) -> dict[str, Any]:
    return {
        "layout": describe_candidate(candidate),
        "step": time_as_json(candidate.time),
        "memory": memory_as_json(candidate.memory),
        "longer_than_first": candidate.time.seconds / first.time.seconds - 1,
        "why": "" if candidate is first else explain_loss(first, candidate),
    }


def keep_winner(found: SearchResult, run: Run, source: Path | None) -> str:
    """Writes the fastest of the timed layouts to the run file; returns the changes as text.

    Raises:
        ConfigError: the run file cannot be edited safely, or the winner depends on command-line
            overrides.
    """
    winner = found.candidates[min(found.measured)]
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
