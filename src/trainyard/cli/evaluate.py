"""`trainyard evaluate`: how well a trained model predicts held-out text, and solves tasks."""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.names import Trained, find_trained
from trainyard.errors import DataError
from trainyard.extras import require
from trainyard.files import publish_text
from trainyard.launch.environment import Process, read_process

if TYPE_CHECKING:
    from trainyard.evaluation.tasks import Task
    from trainyard.evaluation.trained import TrainedRun

logger = logging.getLogger("trainyard")


def evaluate(
    source: Trained,
    overrides: Annotated[list[str] | None, typer.Argument()] = None,
    tasks: Annotated[list[str] | None, typer.Option(metavar="FILE...")] = None,
    items: Path | None = None,
    data: str = "",
    batches: Annotated[int, typer.Option(min=0)] = 0,
    stride: Annotated[int, typer.Option(min=0)] = 0,
    ranks: Annotated[int, typer.Option(min=1)] = 1,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Measure loss and bits per byte on held-out text, or scores on tasks.

    Example: trainyard evaluate runs/tiny

    Example: trainyard evaluate runs/tiny/checkpoints/step-00000100 --data book.txt --json

    Example: trainyard evaluate runs/big --ranks 8 parallel.tensor=8 parallel.pipeline=1

    Example: trainyard evaluate runs/web --tasks hellaswag_val.jsonl blimp/*.jsonl

    On one device the whole model must fit there. With --ranks, or under torchrun, srun or mpiexec,
    each rank loads its part of it, from a checkpoint of any layout. For a run folder, writes the
    result to its evaluation.json, for the report. The scores of tasks are those of lm-eval.

    Options:
        overrides: With ranks: another layout than in training, parallel.field=value ...
        tasks: Instead of held-out text: LAMBADA, HellaSwag, PIQA, ARC, WinoGrande or BLiMP, as
            published; KIND=FILE where the fields of its lines do not tell.
        items: With --tasks: write one JSON object per question.
        data: A text file or a token file prefix; default: the test split.
        batches: Global batches of the test split; 0: the run's setting.
        stride: With --data: tokens between windows; 0: no overlap.
        ranks: Processes on this machine, in the run's layout.
        as_json: Print one JSON object.
    """
    from trainyard.evaluation.tasks import read_tasks

    source = find_trained(source)
    layout = [word for word in overrides or [] if not tasks or word.startswith("parallel.")]
    files = [*(tasks or []), *(word for word in overrides or [] if word not in layout)]
    if data and not any(Path(data + ending).exists() for ending in ("", ".idx")):
        raise DataError(f"--data: {data} does not exist", "name a text file or a token file prefix")
    if data and files:
        raise DataError("--data and --tasks are two evaluations", "give one of them")
    if items and not files:
        raise DataError("--items needs --tasks", "add --tasks FILE")
    questions, process = read_tasks(files), read_process()  # before torch is imported
    if ranks > 1:
        words = ["--data", data, "--batches", str(batches), "--stride", str(stride)]
        words += [word for file in files for word in ("--tasks", file)]
        words += ["--items", str(items)] if items else []
        words += ["--json"] if as_json else []
        _start_ranks(ranks, process, [*words, "--", str(source), *layout])
        return
    if process.rank > 0:
        logger.setLevel(logging.ERROR)  # rank 0 logs for all
    from trainyard.api.checkpoints import measure
    from trainyard.evaluation.trained import read_trained_run
    from trainyard.report.figures import list_scores
    from trainyard.report.run_view import EVALUATION, load_facts

    trained = read_trained_run(source)
    known = load_facts(source / EVALUATION)
    if files:
        result = _measure_tasks(trained, process, layout, questions, items)
        rendered = {one.label: f"{one.value} ({one.meaning})" for one in list_scores(result)}
        before = known.get("tasks")
        known["tasks"] = (before if isinstance(before, dict) else {}) | result["tasks"]
    else:
        figures = measure(trained, process, layout, data, batches, stride)
        result = asdict(figures) if figures else {}
        rendered = _render(result, data or "test split") if figures else {}
        known |= result
    if process.rank > 0:
        return
    if source != trained.checkpoint:
        publish_text(source / EVALUATION, json.dumps(known) + "\n")
    rows = {"checkpoint": str(trained.checkpoint), **rendered}
    width = max(map(len, rows)) + 1
    table = "\n".join(f"{name:<{width}}{value}" for name, value in rows.items())
    typer.echo(json.dumps(result) if as_json else table)


def _measure_tasks(
    trained: TrainedRun, process: Process, layout: list[str], tasks: list[Task], items: Path | None
) -> dict[str, Any]:
    """Scores tasks, and writes their items on rank 0."""
    from trainyard.api.checkpoints import measure_tasks

    scores, answers = measure_tasks(trained, process, layout, tasks)
    if items and process.rank == 0:
        lines = (
            {"task": task.name, "place": question.place, "gold": question.gold, **asdict(answer)}
            for task, answers_of_task in zip(tasks, answers, strict=True)
            for question, answer in zip(task.questions, answers_of_task, strict=True)
        )
        publish_text(items, "".join(f"{json.dumps(line)}\n" for line in lines))
    return {"tasks": {name: each.as_dict() for name, each in scores.items()}}


def _start_ranks(n_ranks: int, process: Process, words: list[str]) -> None:
    """Runs this verb once per rank."""
    from trainyard.launch.local import run_ranks

    process.refuse_option("--ranks", n_ranks)
    require("torch")
    with tempfile.TemporaryDirectory(prefix="trainyard-") as logs:
        command = [sys.executable, "-P", "-m", "trainyard.cli", "evaluate", *words]
        run_ranks(n_ranks, command, Path(logs))


def _render(result: dict[str, Any], data: str) -> dict[str, str]:
    def number(key: str, digits: int) -> str:
        return "unknown" if result[key] is None else f"{result[key]:,.{digits}f}"

    return {
        "text": f"{data}, {number('n_tokens', 0)} tokens, {number('n_bytes', 0)} bytes",
        "loss": f"{number('loss', 4)} nats per token",
        "perplexity": number("perplexity", 2),
        "bits per byte": number("bits_per_byte", 4),
        "unigram loss": f"{number('unigram_loss', 4)} (from token frequencies alone)",
    }
