"""Reads a run folder for the report, and picks the numbers that sum it up."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import DataError
from trainyard.report.metrics import Metrics, read_metrics
from trainyard.units import format_bytes, format_large, format_seconds

UNKNOWN = "–"  # noqa: RUF001  (the dash that tables use)


@dataclass(frozen=True)
class ReportedRun:
    """Everything a run folder says about its run.

    Attributes:
        name: of the run; of the folder too, where several runs have the same.
        evaluation: evaluation.json, or what the last evaluation in training found.
        plan: plan.json; empty where there is none.
        versions: versions.json; empty where there is none.
    """

    folder: Path
    name: str
    run: Run
    metrics: Metrics
    evaluation: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number of the summary, with what a newcomer needs to understand it."""

    label: str
    value: str
    meaning: str = ""


def load_reported_run(folder: Path) -> ReportedRun:
    """Reads a run folder.

    Raises:
        DataError: it is no run folder, or a file in it is malformed.
        ConfigError: its run.toml is not valid.
    """
    if not folder.is_dir():
        raise DataError(f"no folder {folder}", "give a run folder, such as runs/my-run")
    if not (folder / "run.toml").exists():
        raise DataError(
            f"{folder} is not a run folder: it has no run.toml",
            "give the folder that trainyard train wrote, such as runs/my-run",
        )
    run = load_run(str(folder / "run.toml")).run
    metrics = read_metrics(folder / "metrics.jsonl")
    last = metrics.evaluations[-1] if metrics.evaluations else {}
    evaluation = _load_json(folder / "evaluation.json") or last
    plan, versions = (_load_json(folder / f"{name}.json") for name in ("plan", "versions"))
    return ReportedRun(folder, run.name, run, metrics, evaluation, plan, versions)


def summarise(reported: ReportedRun) -> list[Figure]:
    """Lists the numbers of a run, the most telling first."""
    metrics, evaluation = reported.metrics, reported.evaluation
    last = metrics.train[-1] if metrics.train else {}
    step, n_steps = last.get("step"), reported.plan.get("n_steps")
    rate = _median(reported, "sequences_per_second")
    tokens_per_second = rate and rate * reported.run.model.sequence_length
    utilisation = _median(reported, "model_flops_utilisation")
    frequencies = "what token frequencies alone reach"
    tflops = _show(_median(reported, "tflops_per_second_per_device"), "{:.3g}")
    skipped = last.get("skipped_steps")
    return [
        Figure("Held-out loss", _show(evaluation.get("loss"), "{:.4f}"), "nats per token"),
        Figure("Perplexity", _show(evaluation.get("perplexity"), "{:,.2f}"), "on held-out text"),
        Figure("Bits per byte", _show(evaluation.get("bits_per_byte"), "{:.4f}"), "held-out text"),
        Figure("Frequency loss", _show(evaluation.get("unigram_loss"), "{:.4f}"), frequencies),
        Figure("Training loss", _show(last.get("loss"), "{:.4f}"), "at the last logged step"),
        Figure("Parameters", _large(reported.plan.get("n_parameters"))),
        Figure("Tokens", _large(last.get("tokens")), "consumed"),
        Figure("Steps", _show(step, "{:,}"), f"of {n_steps:,}" if n_steps else ""),
        Figure("Time", format_seconds(metrics.seconds), _time_meaning(metrics)),
        Figure("Tokens/s", _large(tokens_per_second), "median, all devices"),
        Figure("TFLOP/s", tflops, _utilisation(utilisation)),
        Figure("Peak memory", _memory(last.get("memory_bytes")), metrics.device),
        Figure("Skipped steps", _show(skipped, "{:,}"), "gradients not finite"),
    ]


def _load_json(path: Path) -> dict[str, Any]:
    """Reads an object; one that is not there is empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "remove it, or restore it") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no JSON object", "remove it, or restore it")
    return content


def _median(reported: ReportedRun, key: str) -> float | None:
    values = [line[key] for line in reported.metrics.train if line.get(key) is not None]
    return statistics.median(values) if values else None


def _show(value: Any, style: str) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return UNKNOWN
    return style.format(value)


def _large(value: Any) -> str:
    return format_large(value) if isinstance(value, int | float) else UNKNOWN


def _memory(value: Any) -> str:
    return format_bytes(value) if isinstance(value, int | float) else UNKNOWN


def _utilisation(value: float | None) -> str:
    return "per device" if value is None else f"per device, {value:.1%} of its peak"


def _time_meaning(metrics: Metrics) -> str:
    n_restarts = len(metrics.restarts)
    if not n_restarts:
        return "without a restart"
    return f"with {n_restarts} restart{'s' if n_restarts > 1 else ''}, pauses left out"
