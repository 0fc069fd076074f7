"""Reads a run folder for the report, and selects its key figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import DataError
from trainyard.files import parse_json, read_file
from trainyard.report.history import RunMetrics, is_finite
from trainyard.report.metrics import read_metrics
from trainyard.training.start import Ancestor, ancestry
from trainyard.units import format_bytes, format_large, format_seconds

EVALUATION = "evaluation.json"
UNKNOWN = "–"  # noqa: RUF001  (the dash that tables use)


@dataclass(frozen=True)
class ReportedRun:
    """The contents of a run folder.

    Attributes:
        name: of the run; of the folder too, where several runs have the same.
        evaluation: evaluation.json, or what the last evaluation in training found.
        plan: plan.json; empty where there is none.
        versions: versions.json; empty where there is none.
        outcome: outcome.json; empty while it runs, or when it was killed.
        ancestors: the checkpoints it descends from, oldest first.
    """

    folder: Path
    name: str
    run: Run
    metrics: RunMetrics
    evaluation: dict[str, Any]
    plan: dict[str, Any]
    versions: dict[str, Any]
    outcome: dict[str, Any]
    ancestors: Sequence[Ancestor] = ()

    @property
    def reason(self) -> str:
        """The reason why it ended; empty while it runs, or if it was killed."""
        return self.metrics.reason or str(self.outcome.get("reason", "")).split("\n")[0]


@dataclass(frozen=True)
class Figure:
    """One number of the summary, with what a newcomer needs to understand it."""

    label: str
    value: str
    meaning: str = ""
    amount: float | None = None
    """To compare runs by; None where more is neither better nor worse."""
    is_better: Literal["lower", "higher"] = "lower"
    is_per_token: bool = False
    """Comparable only with one tokenizer and one held-out text."""


def load_reported_run(folder: Path) -> ReportedRun:
    """Reads a run folder.

    Raises:
        DataError: it is no run folder, or a file in it is malformed.
        ConfigError: its run.toml is not valid.
        CheckpointError: its ancestry.json is damaged.
    """
    run = load_run_of(folder)
    metrics = read_metrics(folder / "metrics.jsonl")
    last = metrics.evaluations[-1] if metrics.evaluations else {}
    evaluation = last | load_facts(folder / EVALUATION)
    evaluation = {k: v for k, v in evaluation.items() if k == "tasks" or is_finite(v)}
    plan, versions, outcome = (
        load_facts(folder / f"{name}.json") for name in ("plan", "versions", "outcome")
    )
    known = (metrics, evaluation, plan, versions, outcome, ancestry(folder))
    return ReportedRun(folder, run.name, run, *known)


def load_run_of(folder: Path) -> Run:
    """Reads run.toml of a run folder.

    Raises:
        DataError: it is no run folder.
        ConfigError: its run.toml is not valid.
    """
    if not folder.is_dir():
        raise DataError(f"no folder {folder}", "give a run folder, such as runs/my-run")
    if not (folder / "run.toml").exists():
        raise DataError(
            f"{folder} is not a run folder: it has no run.toml",
            "give the folder that trainyard train wrote, such as runs/my-run",
        )
    return load_run(str(folder / "run.toml")).run


def load_facts(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file does not exist.

    Raises:
        DataError: it cannot be read, or is none.
    """
    try:
        content = parse_json(read_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "remove it, or restore it") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object", "remove it, or restore it")
    return {key: each for key, each in content.items() if type(each) is not int or is_finite(each)}


def summarize(reported: ReportedRun) -> list[Figure]:
    """Lists the key figures of a run, most important first."""
    metrics, evaluation, train = reported.metrics, reported.evaluation, reported.metrics.train
    step, n_steps = train.last("step"), reported.plan.get("n_steps")
    of_steps = f"of {n_steps:,}" if is_finite(n_steps) else ""
    best = min(metrics.held_out_losses, key=lambda line: line["loss"], default={})
    best_at = f"nats per token, at step {best['step']:,}" if best else ""
    test_at = f"nats per token, at step {metrics.test['step']:,}" if metrics.test else ""
    tflops = show(train.median("tflops_per_second_per_device"), "{:.3g}")
    utilization = train.median("model_flops_utilization")
    of_peak = "" if utilization is None else f", {utilization:.1%} of its peak"
    by_formula = train.median("formula_tflops_per_second_per_device")
    of_peak += "" if by_formula is None else f"; {by_formula:.4g} by log.flop_formula"
    n_restarts, n_back = metrics.count("restart"), metrics.count("rollback")
    per_second = train.median("tokens_per_second_per_device")
    bits, unigram = evaluation.get("bits_per_byte"), evaluation.get("unigram_loss")

    def loss(label: str, value: Any, meaning: str, style: str = "{:.4f}") -> Figure:
        return Figure(label, show(value, style), meaning, value, is_per_token=True)

    return [
        loss("Held-out loss", evaluation.get("loss"), "nats per token, latest"),
        Figure("Bits per byte", show(bits, "{:.4f}"), "held-out text", bits),
        loss("Training loss", metrics.last_loss, "at the last logged step"),
        Figure("Time", format_seconds(metrics.seconds), "without pauses", metrics.seconds),
        Figure("Tokens/s", large(per_second), "per device", per_second, "higher"),
        Figure("Parameters", large(reported.plan.get("n_parameters"))),
        loss("Best held-out loss", best.get("loss"), best_at),
        loss("Test loss", metrics.test.get("loss"), test_at),
        loss("Perplexity", evaluation.get("perplexity"), "on held-out text", "{:,.2f}"),
        Figure("Frequency loss", show(unigram, "{:.4f}"), "from token frequencies alone"),
        Figure("TFLOP/s", tflops, f"per device{of_peak}"),
        Figure("Steps", show(step, "{:,.0f}"), of_steps),
        Figure("Tokens", large(train.last("tokens")), "consumed"),
        Figure("Peak memory", memory(train.last("memory_bytes")), metrics.device),
        Figure("Restarts", f"{n_restarts:,}", f"rollbacks: {n_back:,}" if n_back else ""),
        Figure("Skipped steps", show(train.last("skipped_steps"), "{:,.0f}"), "no update"),
    ]


def find_best(row: list[Figure], *, comparable: bool) -> set[int]:
    """Finds the runs with the best value of a row, if any; losses per token if comparable."""
    known = [one.amount for one in row if one.amount is not None and is_finite(one.amount)]
    if len(known) < 2 or (row[0].is_per_token and not comparable):
        return set()
    best = (max if row[0].is_better == "higher" else min)(known)
    found = {number for number, one in enumerate(row) if one.amount == best}
    return found if len(found) < len(row) else set()


def have_comparable_losses(runs: list[ReportedRun]) -> bool:
    """Whether losses per token are of one tokenizer and one held-out text."""
    tokenizers = {(one.run.tokenizer.path, one.run.model.vocabulary_size) for one in runs}
    data = [one.run.data for one in runs]
    texts = [one.valid if one.valid.prefixes else (one.blend, one.split) for one in data]
    return len(tokenizers) == 1 and texts.count(texts[0]) == len(texts)


def have_equal_lengths(runs: list[ReportedRun]) -> bool:
    """Whether the runs have trained on as many tokens."""
    return len({one.metrics.train.last("tokens") for one in runs}) == 1


def unused_settings(run: Run) -> dict[str, set[str]]:
    """Names the settings that others of the run make ineffective, by section."""
    parallel, formats = run.parallel, {"loss_scale": "fp16", "fp8": "fp8"}
    no_pipeline = {"schedule", "chunks"} if parallel.pipeline == 1 else set()
    return {
        "optimizer": {"momentum"} if run.optimizer.kind == "adamw" else set(),
        "schedule": {"cooldown"} if run.schedule.kind != "warmup_stable_decay" else set(),
        "parallel": no_pipeline | ({"context_method"} if parallel.context == 1 else set()),
        "precision": {key for key, kind in formats.items() if kind not in run.precision.kind},
    }


def show(value: Any, style: str) -> str:
    """Formats a number; a dash if it is missing."""
    return style.format(value) if is_finite(value) else UNKNOWN


def large(value: Any) -> str:
    """Formats a number to three digits and a prefix; a dash if it is missing."""
    return format_large(value) if is_finite(value) else UNKNOWN


def memory(value: Any) -> str:
    """Formats a number of bytes; a dash if it is missing."""
    return format_bytes(value) if is_finite(value) else UNKNOWN
