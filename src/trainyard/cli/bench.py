"""`trainyard bench`: times the training step of a run on this machine."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.cli.names import FlopFormulaOption, Overrides, Ranks, RunFile, with_formula
from trainyard.errors import ConfigError, explain_failure
from trainyard.launch.environment import read_process

if TYPE_CHECKING:
    from trainyard.bench.record import Record
    from trainyard.bench.rounds import BenchRun
    from trainyard.config.run import Run

RECORDS_FOLDER = Path("runs/bench")
COMPARED_ROUNDS = 3


def bench(
    run_file: RunFile,
    overrides: Overrides = None,
    steps: str | None = None,
    warm_up: Annotated[int | None, typer.Option(min=0)] = None,
    ranks: Ranks = None,
    compare: str | None = None,
    rounds: Annotated[int | None, typer.Option(min=1)] = None,
    roofline: str | None = None,
    flop_formula: FlopFormulaOption = None,
    profile: Annotated[bool, typer.Option("--profile")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
    output: Path | None = None,
) -> None:
    """Time the training step: throughput, MFU, memory, its parts.

    Example: trainyard bench gpt3-350m train.micro_batch_size=8 --compare bf16,fp8

    Weights are discarded. A run without data reads random tokens. Under torchrun, srun or mpiexec
    this command is one rank: start it once per rank.

    Options:
        steps: Steps to time: a number, or a range such as 5-10 (inclusive). Default: 10.
        warm_up: Warm-up steps before those. Default: 3.
        compare: Precisions to compare, comma-separated: bf16,fp8,fp8_lowbit.
        rounds: Rounds per candidate. Default: 3 when comparing, else 1.
        roofline: Predict a step on this GPU, such as h200, kernel by kernel, instead of timing it
            here. Needs no GPU.
        profile: Also write a trace and its top operators.
        as_json: Print the record instead of a table.
        output: File to write the record to. Default: a new one in runs/bench.
    """
    from trainyard.bench.job import TIMED_STEPS, BenchJob, describe_data, parse_steps, prepare_run
    from trainyard.bench.record import build_record, render_table
    from trainyard.bench.rounds import Rounds, run_rounds
    from trainyard.config.load import load_run
    from trainyard.data.patterns import find_token_files
    from trainyard.layout.resolve import resolve

    overrides = with_formula(overrides, flop_formula)
    if roofline is not None:
        _predict(load_run(run_file, overrides).run, roofline, as_json=as_json)
        return
    job = BenchJob(parse_steps(steps or str(TIMED_STEPS), warm_up), profiles=profile)
    process = read_process()
    process.refuse_option(f"--ranks {ranks}", ranks)
    run = find_token_files(load_run(run_file, overrides).run)
    if process.n_ranks > 1:
        ranks = process.n_ranks
    plan = resolve(run, ranks)  # rejects impossible layouts before the slow import of torch
    if ranks is None:
        import torch

        plan = resolve(run, max(plan.n_ranks, torch.cuda.device_count()))
    asked = Rounds(job, rounds or (COMPARED_ROUNDS if compare else 1), plan.n_ranks)
    with tempfile.TemporaryDirectory(prefix="trainyard-bench-") as name:
        folder = Path(name)
        runs = _list_runs(prepare_run(run, job.steps, folder), compare)
        run_rounds(runs, asked, process, folder)
        if process.rank == 0:
            if output is None:
                stamp = time.strftime("%Y-%m-%d-%H%M%S")
                output = RECORDS_FOLDER / f"{stamp}-{run.name}.json"
            record = build_record(runs, asked, describe_data(run))
            _write(record, runs, output)
            typer.echo(json.dumps(record, indent=2) if as_json else render_table(record))


def _predict(run: Run, gpu: str, *, as_json: bool) -> None:
    """Prints the roofline of a step."""
    from dataclasses import asdict

    from trainyard.bench.roofline import predict, render

    roofline = predict(run, gpu)
    typer.echo(json.dumps(asdict(roofline), indent=2) if as_json else "\n".join(render(roofline)))


def _list_runs(run: Run, compare: str | None) -> list[BenchRun]:
    """Lists the run in each precision; rejects those that cannot run."""
    from trainyard.bench.rounds import BenchRun
    from trainyard.config.load import override_run
    from trainyard.config.precisions import FORMATS
    from trainyard.training.run_folder import refuse_unsupported

    kinds: list[str] = [run.precision.kind] if compare is None else compare.split(",")
    runs = []
    for kind in kinds:
        if kind not in FORMATS or kinds.count(kind) > 1:
            problem = "is listed twice" if kind in FORMATS else "is not a precision"
            raise ConfigError(
                f"--compare {compare}: {kind!r} {problem}",
                f"each at most once: {', '.join(FORMATS)}",
            )
        runs.append(BenchRun(kind, override_run(run, [f"precision.kind={kind}"])))
        refuse_unsupported(runs[-1].run)
    return runs


def _write(record: Record, runs: list[BenchRun], output: Path) -> None:
    """Writes the record, and traces beside it."""
    written = [output]
    with explain_failure(f"cannot write {output}", "choose another file with --output"):
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        for run in runs:
            for path in run.profiles:
                written.append(output.with_name(f"{output.stem}-{run.name}-{path.name}"))
                shutil.move(path, written[-1])
    for path in written:
        typer.echo(f"wrote {path}", err=True)
