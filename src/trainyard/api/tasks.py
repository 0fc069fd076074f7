"""`trainyard.evaluate_tasks`: a trained model on the tasks that models are compared by."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from trainyard.api.checkpoints import SavedCheckpoint
from trainyard.checkpoint.format import read_manifest
from trainyard.evaluation.inputs import TrainedRun
from trainyard.evaluation.likelihood import Answer, TaskScores, answer_tasks, score_answers
from trainyard.evaluation.ranks import open_predictor
from trainyard.evaluation.tasks import Task, read_tasks
from trainyard.launch.environment import Process
from trainyard.log import show_progress


def evaluate_tasks(
    checkpoint: SavedCheckpoint | str | Path, files: Sequence[str | Path]
) -> dict[str, TaskScores]:
    """Scores a model on tasks, on one device; writes nothing.

    Args:
        checkpoint: or its path.
        files: LAMBADA, HellaSwag, PIQA, ARC, WinoGrande or BLiMP as published; each a path, or
            KIND=PATH where its fields do not tell.

    Returns:
        the scores of each file by kind and name, such as `piqa/valid`.

    Raises:
        TrainyardError: a file is wrong, or the checkpoint is damaged or has diverged.
    """
    found = checkpoint if isinstance(checkpoint, SavedCheckpoint) else SavedCheckpoint(checkpoint)
    tasks = read_tasks(files)
    scores, _ = measure_tasks(found._trained, Process(), [], tasks)
    return scores


def measure_tasks(
    trained: TrainedRun, process: Process, overrides: Sequence[str], tasks: Sequence[Task]
) -> tuple[dict[str, TaskScores], list[list[Answer]]]:
    """Scores on one device or on all ranks of a job, as `evaluate_tasks`; the same on every rank.

    Returns the answers of each task, too.
    """
    tokenizer = trained.require_tokenizer()
    step = read_manifest(trained.checkpoint).step
    told = hashlib.sha256(repr(tasks).encode()).hexdigest()
    with (
        open_predictor(trained, process, overrides, f"tasks {told}") as predictor,
        show_progress("evaluate", plain_lines=process.rank == 0) as update,
    ):
        answers = answer_tasks(predictor, tokenizer, tasks, update)
    found = zip(tasks, answers, strict=True)
    return {task.name: score_answers(each, step) for task, each in found}, answers
