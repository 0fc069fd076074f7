"""Results of the simulated step of a rank: text and JSON of `trainyard plan --simulate`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

import typer

from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.layout.resolve import Plan, resolve
from trainyard.planning.memory import rank_memory
from trainyard.simulate.simulation import Simulation, simulate
from trainyard.units import format_bytes


def print_simulation(run: Run, n_ranks: int, rank: int | None, *, as_json: bool) -> None:
    """Simulates ranks as on a GPU, and prints each result when it is done.

    Args:
        run: the run.
        n_ranks: total number of processes.
        rank: the rank to simulate; None for the first of each pipeline stage.
        as_json: print one object with a list, at the end.

    Raises:
        ConfigError: there is no such rank, or the run cannot train on this number of ranks.
    """
    plan = resolve(run, n_ranks)
    n_places = plan.topology.pipeline
    ranks = [place * n_ranks // n_places for place in range(n_places)] if rank is None else [rank]
    if ranks[-1] >= n_ranks:
        raise ConfigError(
            f"--rank {rank} of {n_ranks} rank{'s' if n_ranks > 1 else ''}, counted from 0",
            f"--rank {n_ranks - 1} is the last, --all-stages shows one rank per stage",
        )
    found = []
    for each in ranks:
        simulation = simulate(run, n_ranks, each)
        planned = _planned_bytes(run, plan, each)
        if as_json:
            found.append(asdict(simulation) | {"planned_bytes": planned})
        else:
            typer.echo("\n".join(render_simulation(simulation, planned)) + "\n")
    if as_json:
        typer.echo(json.dumps({"n_ranks": n_ranks, "ranks": found}, indent=2))


def _planned_bytes(run: Run, plan: Plan, rank: int) -> int:
    """Returns the bytes of the same tensors by the formulas, not compiled either."""
    uncompiled = change(run, {"train.compile": "never"})
    memory = rank_memory(uncompiled, plan, plan.topology.coordinates(rank).pipeline)
    return memory.peak_bytes - memory.items["context and libraries"]


def render_simulation(found: Simulation, planned_bytes: int) -> Iterator[str]:
    """Yields the lines on one rank.

    Args:
        found: the result of the simulation.
        planned_bytes: the peak by the formulas.
    """
    difference = planned_bytes / found.peak_bytes - 1
    run_of = f"{found.n_simulated} of {found.n_micro_batches} micro batches"
    yield f"rank {found.rank} of {found.n_ranks}: {run_of} run in {found.seconds:.0f} s"
    yield _row("peak", f"{format_bytes(found.peak_bytes)} in the {found.moment}")
    yield _row("formulas", f"{format_bytes(planned_bytes)} ({difference:+.1%})")
    yield _row("between steps", format_bytes(found.held_bytes))
    for number, (name, n_bytes) in enumerate(found.largest):
        yield _row("largest" if number == 0 else "", f"{format_bytes(n_bytes):>10}  {name}")
    total = sum(found.flops.values())
    yield _row("operations", f"{total:.3e} FLOP per step")
    for name, flops in sorted(found.flops.items(), key=lambda pair: -pair[1]):
        yield _row("", f"{flops / total:>10.1%}  {name}")
    for number, message in enumerate(found.messages):
        yield _row(
            "messages" if number == 0 else "",
            f"{format_bytes(message.n_bytes):>10}  {message.axis} {message.collective}, "
            f"{message.calls:,} calls",
        )
    for number, text in enumerate(found.differences):
        yield _row("" if number else "differs there", text)


def _row(title: str, text: str) -> str:
    return f"  {title:<14} {text}"
