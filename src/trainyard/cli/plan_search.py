"""`trainyard plan RUN --search`: the best layouts, timed here if asked, and the winner kept."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from trainyard.cli.plan_table import describe_devices, describe_step, memory_as_json, time_as_json
from trainyard.config import rules
from trainyard.config.edit import set_fields
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.publish import publish_text
from trainyard.errors import ConfigError, MachineError
from trainyard.plan.hardware import Machine
from trainyard.plan.rehearsal import describe_layout
from trainyard.plan.remedies import fewest_devices
from trainyard.plan.search import Candidate, explain_loss, rescale, search
from trainyard.units import format_bytes

if TYPE_CHECKING:
    from rich.text import Text

MOST_LISTED = 10


@dataclass(frozen=True)
class Found:
    """What a search gave, fastest first, after measuring if that was asked for."""

    candidates: Sequence[Candidate]
    measured: Mapping[int, float]
    """Seconds of a step by place in `candidates`, of those that were timed."""
    scale: float = 1.0
    """What predictions were multiplied by to agree with what was measured."""


def print_search(
    run: Run,
    machine: Machine,
    n_devices: int,
    n_measured: int | None,
    source: Path | None,
    *,
    as_json: bool,
) -> None:
    """Searches, times the best if asked, prints, and writes the winner of those into the run file.

    Args:
        run: whose layout is sought.
        machine: the devices.
        n_devices: all of them.
        n_measured: how many to time on this machine; None leaves the run file alone.
        source: the run file; None for a preset.
        as_json: print JSON instead of a table.

    Raises:
        MachineError: nothing fits, or this machine cannot time it.
    """
    from trainyard.launch.environment import read_process

    if n_measured is not None:
        from trainyard.bench.trial import refuse_other_machines

        refuse_other_machines(machine, n_devices, read_process())
    candidates = search(run, machine, n_devices, max(MOST_LISTED, n_measured or 0))
    if not candidates:
        raise MachineError(
            f"{run.name}: no layout fits on {describe_devices(machine, n_devices)}",
            fewest_devices(run, machine, n_devices),
        )
    found = Found(candidates, {})
    if n_measured is not None:
        found = _measure(candidates, n_measured)
        if read_process().rank > 0:
            return
    if as_json:
        typer.echo(json.dumps(search_as_json(run, found), indent=2))
    else:
        from rich.console import Console

        text = render_search(run, machine, found)
        Console(soft_wrap=True, highlight=False).print(text)
    if n_measured is not None:
        typer.echo(keep_winner(found, run, source), err=as_json)


def _measure(candidates: Sequence[Candidate], n_measured: int) -> Found:
    """Times the best, and ranks all again by what that says."""
    from trainyard.bench.trial import time_runs
    from trainyard.launch.environment import read_process

    runs = [candidate.run for candidate in candidates[:n_measured]]
    timed = time_runs(runs, candidates[0].plan.n_ranks)
    if read_process().rank > 0:
        return Found(candidates, {})
    failed = {place for place, seconds in enumerate(timed) if seconds is None}
    if len(failed) == len(timed):
        raise MachineError(
            f"none of the {len(timed)} layouts could be timed on this machine",
            "what their processes said is above",
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
    return Found(ranked, measured, scale)


def render_search(run: Run, machine: Machine, found: Found) -> Text:
    """Lays the best layouts out as a table, each with why it loses to the first."""
    from rich.text import Text

    first = found.candidates[0]
    devices = describe_devices(machine, first.plan.n_ranks)
    text = Text(run.name, style="bold")
    text.append(f" on {devices}: layouts that fit, fastest first", style="not bold")
    if found.measured:
        n_measured = len(found.measured)
        text.append(
            f"\n{n_measured} timed here (*), the others predicted x {found.scale:.3g}",
            style="not bold",
        )
    width = max(len(describe_candidate(each)) for each in found.candidates)
    text.append(
        f"\n    {'step':>9}  {'memory':>9}  {'layout':<{width}}  longer than the first",
        style="cyan not bold",
    )
    for place, candidate in enumerate(found.candidates):
        star = "*" if place in found.measured else " "
        slower = candidate.time.seconds / first.time.seconds - 1
        why = f"{slower:.1%}: {explain_loss(first, candidate)}" if place else ""
        text.append(
            f"\n{place + 1:>2} {star}{describe_step(candidate.time.seconds):>9}  "
            f"{format_bytes(candidate.memory.peak_bytes):>9}  "
            f"{describe_candidate(candidate):<{width}}  {why}",
            style="not bold",
        )
    changes = first.changes_from(run)
    given = rules.describe(run, changes).replace(" with ", " ")
    text.append("\nthe first    ", style="cyan not bold")
    text.append(given or "is the run as it is", style="not bold")
    return text


def describe_candidate(candidate: Candidate) -> str:
    """Says how a candidate is cut, in one line."""
    micro = candidate.run.train.micro_batch_size
    return f"{describe_layout(candidate.run, candidate.plan.topology)}, micro batch {micro}"


def search_as_json(run: Run, found: Found) -> dict[str, Any]:
    """Gives the layouts as JSON can hold them."""
    first = found.candidates[0]
    return {
        "run": run.name,
        "n_devices": first.plan.n_ranks,
        "scale": found.scale,
        "candidates": [
            {
                "changes": candidate.changes_from(run),
                "layout": describe_candidate(candidate),
                "step": time_as_json(candidate.time),
                "memory": memory_as_json(candidate.memory),
                "is_measured": place in found.measured,
                "longer_than_first": candidate.time.seconds / first.time.seconds - 1,
                "why": explain_loss(first, candidate) if place else "",
            }
            for place, candidate in enumerate(found.candidates)
        ],
    }


def keep_winner(found: Found, run: Run, source: Path | None) -> str:
    """Writes the fastest of the timed layouts into the run file; says what changed.

    Raises:
        ConfigError: the run file is written in a way that cannot be changed safely, or the winner
            needs what was given on the command line.
    """
    winner = found.candidates[min(found.measured)]
    if source is None:
        given = rules.describe(run, winner.changes_from(run)).replace(" with ", " ")
        return f"a preset is not changed; the fastest: {given or 'the preset as it is'}"
    in_file = load_run(str(source)).run
    changes = winner.changes_from(in_file)
    text = rules.describe(in_file, changes).replace(" with ", ", ")
    if not changes:
        return f"{source} has the fastest layout already"
    broken = rules.broken_rules(rules.change(in_file, changes))
    if broken:
        raise ConfigError(
            f"{source} is left as it is: with {text}, {next(iter(broken.values()))}",
            "write into it first what was given on the command line",
        )
    publish_text(source, set_fields(source.read_text(encoding="utf-8"), changes, str(source)))
    return f"wrote into {source}: {text}"
