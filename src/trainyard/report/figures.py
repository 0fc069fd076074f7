"""The key figures of a run: its summary, scores of tasks, plan against measured, next commands."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trainyard.architecture import block_groups, block_layers, count_idle, parameters_of
from trainyard.checkpoint.format import list_checkpoints, read_manifest, step_of
from trainyard.config.run import Run
from trainyard.errors import UserError
from trainyard.layout.batches import BatchSchedule
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.report.metrics import Line, is_finite
from trainyard.report.run_view import EVALUATION, UNKNOWN, RunView, show
from trainyard.units import format_bytes, format_large, format_seconds

Direction = Literal["lower", "higher"]
# The scores of a task: how they are written, with their standard errors, and which is better.
_STYLES: dict[str, tuple[str, Direction]] = {
    "accuracy": ("{:.2%}", "higher"),
    "normalized_accuracy": ("{:.2%}", "higher"),
    "perplexity": ("{:,.2f}", "lower"),
}
_MANY = "blimp/"
"""Beginning of the names of tasks in many files, whose mean is cited."""


@dataclass(frozen=True)
class Figure:
    """One number of the summary, with what a newcomer needs to understand it."""

    label: str
    value: str
    meaning: str = ""
    amount: float | None = None
    """To compare runs by; None where more is neither better nor worse."""
    is_better: Direction = "lower"
    is_per_token: bool = False
    """Comparable only with one tokenizer and one held-out text."""


def summarize(view: RunView) -> list[Figure]:
    """Lists the key figures of a run, most important first."""
    metrics, evaluation, train = view.metrics, view.evaluation, view.metrics.train
    utilization = train.median("model_flops_utilization")
    of_peak = "" if utilization is None else f", {utilization:.1%} of its peak"
    by_formula = train.median("formula_tflops_per_second_per_device")
    of_peak += "" if by_formula is None else f"; {by_formula:.4g} by log.flop_formula"
    tflops = show(train.median("tflops_per_second_per_device"), "{:.3g}")
    n_steps, n_parameters = view.plan.get("n_steps"), view.plan.get("n_parameters")
    n_restarts, n_back = metrics.count("restart"), metrics.count("rollback")
    per_second = train.median("tokens_per_second_per_device")
    bits, unigram = evaluation.get("bits_per_byte"), evaluation.get("unigram_loss")

    def loss(label: str, value: Any, meaning: str, style: str = "{:.4f}") -> Figure:
        return Figure(label, show(value, style), meaning, value, is_per_token=True)

    def loss_of(label: str, line: Line) -> Figure:
        at = f"nats per token, at step {line['step']:,}" if line else ""
        return loss(label, line.get("loss"), at)

    return [
        loss("Held-out loss", evaluation.get("loss"), "nats per token, latest"),
        Figure("Bits per byte", show(bits, "{:.4f}"), "held-out text", bits),
        loss("Training loss", metrics.last_loss, "at the last logged step"),
        Figure("Time", format_seconds(metrics.seconds), "without pauses", metrics.seconds),
        Figure("Tokens/s", show(per_second, format_large), "per device", per_second, "higher"),
        Figure("Parameters", show(n_parameters, format_large), describe_active(view)),
        loss_of("Best held-out loss", metrics.best),
        loss_of("Test loss", metrics.test),
        loss("Perplexity", evaluation.get("perplexity"), "on held-out text", "{:,.2f}"),
        Figure("Frequency loss", show(unigram, "{:.4f}"), "from token frequencies alone"),
        Figure("TFLOP/s", tflops, f"per device{of_peak}"),
        Figure("Steps", show(view.step, "{:,}"), f"of {n_steps:,}" if is_finite(n_steps) else ""),
        Figure("Tokens", show(view.last("tokens"), format_large), "consumed"),
        Figure("Peak memory", show(view.last("memory_bytes"), format_bytes), metrics.device),
        Figure("Restarts", f"{n_restarts:,}", f"rollbacks: {n_back:,}" if n_back else ""),
        Figure("Skipped steps", show(view.last("skipped_steps"), "{:,.0f}"), "no update"),
    ]


def describe_active(view: RunView) -> str:
    """Says how many parameters a token uses; empty if it uses all."""
    n, idle = view.plan.get("n_parameters"), count_idle(view.run.model)
    return f"{format_large(n - idle)} active" if idle and is_finite(n) and n > idle else ""


def list_scores(evaluation: Mapping[str, Any], step: int | None = None) -> list[Figure]:
    """Lists the scores in an evaluation.json; for several files of BLiMP, first their mean.

    Args:
        evaluation: its content.
        step: take only those of this step's checkpoint; None: all.
    """
    tasks = evaluation.get("tasks")
    valid: dict[str, dict[str, Any]] = {
        name: scores
        for name, scores in (tasks.items() if isinstance(tasks, dict) else ())
        if isinstance(scores, dict)
        and is_finite(scores.get("n_items"))
        and is_finite(scores.get("step"))
        and step in (None, scores["step"])
    }
    many = {name: valid.pop(name) for name in list(valid) if name.startswith(_MANY)}
    for at in sorted({scores["step"] for scores in many.values()}):
        same = [scores for scores in many.values() if scores["step"] == at]
        if len(same) > 1 and all(is_finite(scores.get("accuracy")) for scores in same):
            valid[f"blimp, mean of {len(same)} files,"] = _mean(same)
    figures = []
    for name, scores in (valid | many).items():
        meaning = f"{scores['n_items']:,} items, step {scores['step']:,}"
        for key, (style, is_better) in _STYLES.items():
            value, error = scores.get(key), scores.get(f"{key}_stderr")
            if is_finite(value):
                text = show(value, style) + (f" ± {show(error, style)}" if is_finite(error) else "")
                label = f"{name} {key.replace('_', ' ')}"
                figures.append(Figure(label, text, meaning, value, is_better))
    return figures


def _mean(tasks: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [error for scores in tasks if is_finite(error := scores.get("accuracy_stderr"))]
    return {
        "n_items": sum(scores["n_items"] for scores in tasks),
        "step": tasks[0]["step"],
        "accuracy": statistics.fmean(scores["accuracy"] for scores in tasks),
        "accuracy_stderr": math.hypot(*errors) / len(tasks) if len(errors) == len(tasks) else None,
    }


def find_best(row: list[Figure], *, comparable: bool) -> set[int]:
    """Finds the runs with the best value of a row, if any; losses per token if comparable."""
    amounts = [one.amount for one in row if one.amount is not None and is_finite(one.amount)]
    if len(amounts) < 2 or (row[0].is_per_token and not comparable):
        return set()
    best = (max if row[0].is_better == "higher" else min)(amounts)
    numbers = {number for number, one in enumerate(row) if one.amount == best}
    return numbers if len(numbers) < len(row) else set()


def have_comparable_losses(runs: Sequence[Run]) -> bool:
    """Whether losses per token are of one tokenizer and one held-out text."""
    tokenizers = {(one.tokenizer.path, one.model.vocabulary_size) for one in runs}
    data = [one.data for one in runs]
    texts = [one.valid if one.valid.prefixes else (one.blend, one.split) for one in data]
    return len(tokenizers) == 1 and texts.count(texts[0]) == len(texts)


def compare_with_plan(view: RunView) -> dict[str, tuple[str, str]]:
    """Returns the planned and the measured value by quantity.

    A missing number is NaN, and so is all that follows from it: shown as a dash.
    """

    def planned(key: str) -> float:
        value = view.plan.get(key)
        return value if is_finite(value) else math.nan

    def measured(key: str) -> float:
        return view.metrics.train.median(key) or math.nan

    def whole(value: Any) -> str:
        return show(value, "{:,.0f}")

    n_parameters, n_tokens, n_ranks = map(planned, ("n_parameters", "n_tokens", "n_ranks"))
    per_token, tokens = planned("model_flops_per_token"), view.last("tokens") or math.nan
    tflops, rate = map(measured, ("tflops_per_second_per_device", "tokens_per_second_per_device"))
    seconds = n_tokens / (rate * n_ranks or math.nan)
    size = checkpoint_bytes(view.run, int(n_parameters)) if is_finite(n_parameters) else None
    state = _state_bytes(view.run, n_parameters, view.plan.get("topology"))
    saved = view.metrics.median_of_saves("bytes")
    spent = format_seconds(view.metrics.seconds)
    return {
        "Parameters": (whole(n_parameters), _in_checkpoint(view)),
        "Steps": (whole(planned("n_steps")), whole(view.step)),
        "Tokens": (whole(n_tokens), whole(tokens)),
        "Model FLOP": (show(per_token * n_tokens, "{:.2e}"), show(per_token * tokens, "{:.2e}")),
        "Time": (
            show(seconds, lambda value: f"{format_seconds(value)} at the measured rate"),
            f"{spent}, with evaluation and saving",
        ),
        "Devices": (whole(n_ranks), view.metrics.device or UNKNOWN),
        "TFLOP/s per device": (
            show(tflops / measured("model_flops_utilization"), "{:,.4g} peak"),
            show(tflops, "{:,.4g}, median"),
        ),
        "Tokens/s per device": (UNKNOWN, show(rate, lambda x: f"{format_large(x)}, median")),
        "Memory per device": (
            show(state, lambda n_bytes: f"{format_bytes(n_bytes)} and activations"),
            f"{show(view.last('memory_bytes'), format_bytes)}, peak",
        ),
        "Checkpoint": (show(size, format_bytes), show(saved, format_bytes)),
    }


def _state_bytes(run: Run, n_parameters: float, topology: Any) -> float | None:
    """Returns the bytes of weights, gradients and both moments on each device, without buffers.

    None where the plan does not say enough.
    """
    axes = topology if isinstance(topology, dict) else {}
    sizes = [n for n in map(axes.get, ("tensor", "pipeline", "shard", "context")) if is_finite(n)]
    if not is_finite(n_parameters) or len(sizes) < 4 or min(sizes) < 1:
        return None
    tensor, pipeline, shard, context = sizes
    parts = [
        (True, len(spec.shape), n * math.prod(spec.shape), spec.of_experts)
        for kind, n in block_groups(run.model, (0, run.model.n_layers))
        for spec in parameters_of(block_layers(kind)).values()
    ]
    parts.append((False, 2, int(n_parameters) - sum(n for _, _, n, _ in parts), False))
    n_bytes, parallel = 0.0, run.parallel
    for in_block, n_dimensions, n, of_experts in parts:
        stored = run.stored(in_block, n_dimensions)
        # A converted gradient is complete, and so only of the rank's own values.
        shards_gradients = stored.converts_gradient and parallel.shards_state
        for is_sharded, size in (
            (parallel.shards_state, stored.state_bytes(n)),
            (shards_gradients or parallel.shards_gradients, stored.gradient.bytes_of(n)),
            (parallel.shards_weights, stored.weight.bytes_of(n)),
        ):
            unsharded = parallel.expert if of_experts else 1
            n_bytes += size / (shard * context if is_sharded else unsharded)
    return n_bytes / (tensor * pipeline)


def _in_checkpoint(view: RunView) -> str:
    """Counts the weights in the newest checkpoint with a readable manifest."""
    for path in list_checkpoints(view.folder / "checkpoints"):
        with suppress(UserError):  # `trainyard check checkpoint` reports the problem
            tensors = read_manifest(path).tensors
            weights = [each for name, each in tensors.items() if name.startswith("model.")]
            return f"{sum(math.prod(each.shape) for each in weights):,} in {path.name}"
    return UNKNOWN


def next_steps(runs: list[RunView]) -> list[tuple[str, str]]:
    """Lists what can be done next, each with its command, most useful first."""
    steps = []
    for view in runs:
        of = "" if len(runs) == 1 else f" {view.name}"
        folder = shlex.quote(str(view.folder))  # a preset may have the name of the run
        if view.reason != "done":
            steps.append((f"Follow{of} while it runs:", f"trainyard status {folder} --follow"))
            steps.append((f"Continue{of} where it stopped:", f"trainyard train {folder}"))
        elif not (view.folder / EVALUATION).exists():
            steps.append((f"Measure{of} on held-out text:", f"trainyard evaluate {folder}"))
    best = min(runs, key=lambda view: view.evaluation.get("loss") or math.inf)
    folder, name = (shlex.quote(text) for text in (str(best.folder), best.run.name))
    if any(line.get("loss") for line in best.metrics.evaluations):
        prompt = next(iter(best.run.evaluate.sample_prompts), "Once")
        words = f"--prompt {shlex.quote(prompt)}"
        steps.append(("Try the model:", f"trainyard generate {folder} {words}"))
    if best.reason == "done":
        steps.append(_train_longer(best, folder))
        steps.append(("Use it elsewhere:", f"trainyard export {folder} --output {name}-gpt"))
    return steps


def _train_longer(view: RunView, folder: str) -> tuple[str, str]:
    """Extends a run whose rate is at its peak; branches one whose rate has decayed."""
    train, schedule = view.metrics.train, view.run.schedule
    last = int(train.last("step") or 1)
    rates = np.nan_to_num(train["learning_rate"])
    if schedule.kind == "constant" or not len(rates) or rates[-1] >= rates.max():
        length = shlex.quote(f"{2 * last} steps")
        return "Train longer:", f"trainyard train {folder} train.length={length}"
    peak = int(train["step"][rates >= rates.max()][-1])
    saved = {step_of(path) or 0: path for path in list_checkpoints(view.folder / "checkpoints")}
    before = [step for step in saved if step <= peak]
    fields: dict[str, object] = {"name": f"{view.run.name}-longer"}
    if schedule.kind == "warmup_stable_decay" and before:
        step = max(before)
        what, start, taken = "from before the decay", saved[step], "weights_and_optimizer"
        length = f"{2 * last - step} steps"
        fields |= {"schedule.warmup": "0 steps", "schedule.decay": length, "train.length": length}
    else:
        step = max(saved, default=last)
        what, start, taken = "from these weights, with a new schedule", view.folder, "weights"
    read = BatchSchedule(view.run).position(step)
    fields |= {"train.start_from": start, "train.start_with": taken, "data.from_step": 0}
    fields |= {"data.skip": f"{read} sequences"}
    words = [shlex.quote(f"{key}={value}") for key, value in fields.items()]
    return f"Train longer, {what}:", " ".join(["trainyard train", folder, *words])
