"""`trainyard bench`: how fast a run trains on this machine, what of, and beside what."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.errors import LaunchError
from trainyard.launch.environment import Process, read_process

if TYPE_CHECKING:
    from trainyard.bench.rounds import Candidate, Order, Outcome
    from trainyard.config.run import Run

RECORDS_FOLDER = Path("runs/bench")
COMPARED_ROUNDS = 3


def bench(
    run_file: Annotated[str, typer.Argument(help="A run file (.toml) or the name of a preset.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.field=value, as many as needed.")
    ] = None,
    steps: Annotated[
        str,
        typer.Option(help="How many steps count, or which: 5-10 is the fifth to the tenth."),
    ] = "10",
    warm_up: Annotated[
        int | None, typer.Option(min=0, help="Steps before those. Default: 3.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes on this machine. Default: one for each GPU, or as many as the run "
            "is cut into.",
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(help="Precisions to time in turn, with commas: bf16,fp8,fp8_lowbit."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            help="A peer to time in turn: gpt2-transformers, plain-torch or megatron-core."
        ),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="How often each is timed. Default: 3 with others, else 1."),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Leave a trace and its top operators too.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the record instead of a table.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="The record to write. Default: a new one in runs/bench."),
    ] = None,
) -> None:
    """Time the training step of a run: throughput, MFU, memory, and what a step is made of.

    Example: trainyard bench gpt3-350m train.micro_batch_size=8 --compare bf16,fp8

    Nothing is trained: weights are thrown away. A run that names no data reads random tokens. Below
    torchrun, srun or mpiexec this command is one rank: start it once for each.
    """
    from trainyard.bench.job import describe_data, parse_steps, prepare_run
    from trainyard.bench.rounds import Order
    from trainyard.config.load import load_run
    from trainyard.plan.resolve import resolve

    counted = parse_steps(steps, warm_up)
    process = read_process()
    if ranks is not None and process.n_ranks > 1:
        raise LaunchError(
            f"--ranks {ranks}: a launcher has started {process.n_ranks} ranks already",
            "leave out --ranks, or the launcher",
        )
    run = load_run(run_file, overrides).run
    if process.n_ranks > 1:
        ranks = process.n_ranks
    plan = resolve(run, ranks)  # refuses what cannot be before torch takes its seconds to import
    if ranks is None:
        import torch

        plan = resolve(run, max(plan.n_ranks, torch.cuda.device_count()))
    n_rounds = rounds or (COMPARED_ROUNDS if compare or against else 1)
    order = Order(counted, n_rounds, plan.n_ranks, profile)
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        prepared = prepare_run(run, counted, folder)
        candidates = _list_candidates(prepared, compare, against, plan.n_ranks)
        outcomes = _time(candidates, order, process, folder)
        if process.rank == 0:
            if output is None:
                stamp = time.strftime("%Y-%m-%d-%H%M%S")
                output = RECORDS_FOLDER / f"{stamp}-{run.name}.json"
            _write(outcomes, order, describe_data(run), output, as_json=as_json)


def _list_candidates(
    run: Run, compare: str | None, against: str | None, n_ranks: int
) -> list[Candidate]:
    """Lists what is to be timed, all of which can be."""
    from typing import get_args

    from trainyard.bench.baselines import peer_run, refuse_peer
    from trainyard.bench.rounds import Candidate
    from trainyard.config.run import Precision, Run
    from trainyard.errors import ConfigError
    from trainyard.train.run_folder import refuse_what_is_not_built

    kinds: list[str] = [run.precision.kind] if compare is None else compare.split(",")
    known = get_args(Precision.model_fields["kind"].annotation)
    candidates = []
    for kind in kinds:
        if kind not in known or kinds.count(kind) > 1:
            problem = "is listed twice" if kind in known else "is not a precision"
            raise ConfigError(
                f"--compare {compare}: {kind!r} {problem}", f"each at most once: {', '.join(known)}"
            )
        precision = run.precision.model_copy(update={"kind": kind})
        ours = Run.model_validate(run.model_copy(update={"precision": precision}).model_dump())
        refuse_what_is_not_built(ours)
        candidates.append(Candidate(kind, ours))
    if against is not None:
        refuse_peer(against, run, n_ranks)
        candidates.append(Candidate(against, peer_run(against, run), against))
    return candidates


def _time(
    candidates: list[Candidate], order: Order, process: Process, folder: Path
) -> list[Outcome]:
    from trainyard.bench.rounds import run_rounds

    return run_rounds(candidates, order, process, folder)


def _write(
    outcomes: list[Outcome], order: Order, data: str, output: Path, *, as_json: bool
) -> None:
    """Writes the record, and traces beside it; prints it or the table."""
    from trainyard.bench.record import build_record, render_table
    from trainyard.errors import MachineError

    record = build_record(outcomes, order, data)
    text = json.dumps(record, indent=2) + "\n"
    written = [output]
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
        for outcome in outcomes:
            for path in filter(None, (outcome.trace, outcome.operators)):
                beside = output.with_name(f"{output.stem}-{outcome.candidate.name}-{path.name}")
                shutil.move(path, beside)
                written.append(beside)
    except OSError as error:
        raise MachineError(
            f"cannot write {output}: {error}", "name another file: --output"
        ) from error
    typer.echo(text if as_json else render_table(record), nl=not as_json)
    for path in written:
        typer.echo(f"wrote {path}", err=True)
