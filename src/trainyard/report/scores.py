"""Scores of tasks, as `evaluate --tasks` leaves them in evaluation.json."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any, Literal

from trainyard.report.history import is_finite
from trainyard.report.summary import Figure

# The scores of a task: how they are written, with their standard errors, and which is better.
_STYLES: dict[str, tuple[str, Literal["lower", "higher"]]] = {
    "accuracy": ("{:.2%}", "higher"),
    "normalized_accuracy": ("{:.2%}", "higher"),
    "perplexity": ("{:,.2f}", "lower"),
}
_MANY = "blimp/"
"""Beginning of the names of tasks in many files, whose mean is cited."""


def list_scores(evaluation: Mapping[str, Any], step: int | None = None) -> list[Figure]:
    """Lists the scores in an evaluation.json; of several files of BLiMP, first their mean.

    Args:
        evaluation: its content.
        step: take only those of this step's checkpoint; None: all.
    """
    tasks = evaluation.get("tasks")
    known: dict[str, dict[str, Any]] = {
        name: scores
        for name, scores in (tasks.items() if isinstance(tasks, dict) else ())
        if isinstance(scores, dict)
        and is_finite(scores.get("n_items"))
        and is_finite(scores.get("step"))
        and step in (None, scores["step"])
    }
    many = {name: known.pop(name) for name in list(known) if name.startswith(_MANY)}
    for of_step in sorted({scores["step"] for scores in many.values()}):
        same = [one for one in many.values() if one["step"] == of_step]
        if len(same) > 1 and all(is_finite(one.get("accuracy")) for one in same):
            known[f"blimp, mean of {len(same)} files,"] = _mean(same)
    return [one for name, scores in (known | many).items() for one in _list(name, scores)]


def render_scores(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """Returns the scores as texts, by their labels."""
    return {one.label: f"{one.value} ({one.meaning})" for one in list_scores(evaluation)}


def _list(name: str, scores: Mapping[str, Any]) -> list[Figure]:
    meaning = f"{scores['n_items']:,} items, step {scores['step']:,}"
    figures = []
    for key, (style, is_better) in _STYLES.items():
        value, error = scores.get(key), scores.get(f"{key}_stderr")
        if is_finite(value):
            text = style.format(value) + (f" ± {style.format(error)}" if is_finite(error) else "")
            label = f"{name} {key.replace('_', ' ')}"
            figures.append(Figure(label, text, meaning, value, is_better))
    return figures


def _mean(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [one.get("accuracy_stderr") for one in tasks]
    known = [error for error in errors if error is not None and is_finite(error)]
    return {
        "n_items": sum(one["n_items"] for one in tasks),
        "step": tasks[0]["step"],
        "accuracy": statistics.fmean(one["accuracy"] for one in tasks),
        "accuracy_stderr": math.hypot(*known) / len(tasks) if len(known) == len(tasks) else None,
    }
