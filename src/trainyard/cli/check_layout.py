"""`trainyard check layout`: verifies on this machine that a layout computes correctly."""

from __future__ import annotations

import textwrap
import time
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import Overrides, RunFile
from trainyard.errors import MachineError
from trainyard.units import format_number

if TYPE_CHECKING:
    from trainyard.config.run import Run
    from trainyard.planning.layout_check import LayoutCheck
    from trainyard.training.layout_check import Result

WIDTH = 96


def layout(
    run_file: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of ranks whose layout to check. Default: the fewest the run's layout "
            "needs, with data parallel ranks if it uses ZeRO.",
        ),
    ] = None,
) -> None:
    """Verify that a layout computes what a single device computes.

    Trains a small model for three steps in the layout of the run, every degree reduced to 2 (the
    ring's also to 3 and 4), with up to 8 processes on this machine's CPU, and on a single device.
    Compares losses, gradient norms, all gradients and all weights, in fp64, where only a fault can
    cause a difference, and in the run's precision. Needs no data and no GPU; takes about a minute.
    Exit code 2 if they differ.

    Example: trainyard check layout recipes/azure/175b.toml --ranks 1024
    """
    from trainyard.config.load import load_run
    from trainyard.planning.layout_check import plan_layout_check

    run = load_run(run_file, overrides).run
    check = plan_layout_check(run, ranks)  # rejects impossible layouts before torch is imported
    typer.echo(describe_layout_check(run, check))
    from trainyard.training.layout_check import check_layouts, precisions_of

    precisions = precisions_of(run)
    start = time.monotonic()
    results = check_layouts(check, precisions)
    typer.echo(f"\n{render_results(results)}\n\n{time.monotonic() - start:.0f} s")
    refuse_differences(run, results)


def describe_layout_check(run: Run, check: LayoutCheck) -> str:
    """Describes the layouts under test, and what was reduced for the test."""
    from trainyard.planning.layout_check import describe_layout

    whole = f"{run.name} on {format_number(check.topology.n_ranks, 'rank')}: "
    facts = [("run", whole + describe_layout(run, check.topology))]
    n_layouts = len(check.layouts) - check.n_rings
    tried = f"{format_number(check.n_ranks, 'process')} on this machine"
    if check.n_ranks == 1:
        tried += ": no axis is sharded; --ranks N checks the layout of N ranks"
    elif check.topology.n_ranks < check.n_ranks:
        tried += ": ZeRO shards weights, which takes two data parallel ranks"
    elif n_layouts > 1:
        tried += f", in {n_layouts} layouts that together shard every pair of axes"
    if check.n_rings:
        tried += "; then rings of 3 and 4, which shift keys more than once, in fp64"
    facts.append(("tested with", tried))
    topologies = check.topologies
    for number, (small, topology) in enumerate(zip(check.layouts, topologies, strict=True), 1):
        facts.append((f"layout {number}", describe_layout(small, topology)))
    facts += [(f"  {section}", text) for section, text in check.changes.items()]
    facts.append(("  data", "token files of random ids, a fifth of the labels skipped"))
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<12}", subsequent_indent=" " * 12)
        for name, text in facts
    )


def render_results(results: list[Result]) -> str:
    """Renders the differences of all layouts, in all precisions, as a table."""
    lines = ["largest relative difference from the single device, over 3 steps"]
    titles = ("loss", "norm", "gradients", "weights", "bound")
    lines.append(f"{'':18}" + "".join(f"{title:>11}" for title in titles))
    layouts = list(dict.fromkeys(result.layout.model_dump_json() for result in results))
    for result in results:
        number = 1 + layouts.index(result.layout.model_dump_json())
        found = result.difference
        verdict = "same" if result.is_same else "DIFFERENT"
        if isinstance(found, str):
            row, verdict = f"{'-':>11}" * 5, f"{verdict}: {found}"
        else:
            numbers = (found.loss, found.norm, found.gradient, found.weight, result.bound)
            row = "".join(f"{each:>11.1e}" for each in numbers)
            if found.between_ranks:
                verdict += f", copies on two ranks by {found.between_ranks:.1e}"
        lines.append(f"layout {number:<3}{result.precision:<8}{row}   {verdict}")
    return "\n".join(lines)


def refuse_differences(run: Run, results: list[Result]) -> None:
    """Raises if a layout does not compute what the single device computes.

    Raises:
        MachineError: names the precisions, and how to find the axis at fault.
    """
    wrong = [result for result in results if not result.is_same]
    if not wrong:
        return
    kinds = list(dict.fromkeys(result.precision for result in wrong))
    parallel = run.parallel
    degrees = {"pipeline": 1, "context": 1, "tensor": 1, "data_replicate": 1, "zero_stage": 0}
    cut = [
        f"parallel.{name}={one}" for name, one in degrees.items() if getattr(parallel, name) > one
    ]
    hint = "do not train in this layout on this machine: its torch or processor is at fault"
    if cut:
        hint += f"; to find the axis, repeat with {', or '.join(cut)}"
    raise MachineError(
        f"{run.name}: the layout does not compute what a single device computes "
        f"({', '.join(kinds)})",
        hint,
    )
