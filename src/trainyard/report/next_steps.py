"""What to do next with a run, as commands to paste."""

from __future__ import annotations

import shlex

import numpy as np

from trainyard.planning.batches import BatchSchedule
from trainyard.report.summary import ReportedRun


def next_steps(runs: list[ReportedRun]) -> list[tuple[str, str]]:
    """Lists what can be done next, each with its command, most useful first."""
    steps = []
    for reported in runs:
        of = "" if len(runs) == 1 else f" {reported.name}"
        folder = shlex.quote(str(reported.folder))  # a preset may have the name of the run
        if reported.reason != "done":
            steps.append((f"Follow{of} while it runs:", f"trainyard status {folder} --follow"))
            steps.append((f"Continue{of} where it stopped:", f"trainyard train {folder}"))
        elif not (reported.folder / "evaluation.json").exists():
            steps.append((f"Measure{of} on held-out text:", f"trainyard evaluate {folder}"))
    best = min(runs, key=lambda run: run.evaluation.get("loss") or float("inf"))
    folder, name = (shlex.quote(text) for text in (str(best.folder), best.run.name))
    if any(line.get("loss") for line in best.metrics.evaluations):
        prompt = next(iter(best.run.evaluate.sample_prompts), "Once")
        words = f"--prompt {shlex.quote(prompt)}"
        steps.append(("Try the model:", f"trainyard generate {folder} {words}"))
    if best.reason == "done":
        steps.append(_train_longer(best, folder))
        steps.append(("Use it elsewhere:", f"trainyard export {folder} --output {name}-gpt"))
    return steps


def _train_longer(reported: ReportedRun, folder: str) -> tuple[str, str]:
    """Extends a run whose rate is at its peak; branches one whose rate has decayed."""
    train, schedule = reported.metrics.train, reported.run.schedule
    last = int(train.last("step") or 1)
    rates = np.nan_to_num(train["learning_rate"])
    if schedule.kind == "constant" or not len(rates) or rates[-1] >= rates.max():
        length = shlex.quote(f"{2 * last} steps")
        return "Train longer:", f"trainyard train {folder} train.length={length}"
    peak = int(train["step"][rates >= rates.max()][-1])
    saved = sorted((reported.folder / "checkpoints").glob("step-????????"))
    before = [path for path in saved if int(path.name[5:]) <= peak]
    fields: dict[str, object] = {"name": f"{reported.run.name}-longer"}
    if schedule.kind == "warmup_stable_decay" and before:
        what, start, taken = "from before the decay", before[-1], "weights_and_optimizer"
        step = int(start.name[5:])
        length = f"{2 * last - step} steps"
        fields |= {"schedule.warmup": "0 steps", "schedule.decay": length, "train.length": length}
    else:
        what, start, taken = "from these weights, with a new schedule", reported.folder, "weights"
        step = int(saved[-1].name[5:]) if saved else last
    read = BatchSchedule(reported.run).position(step)
    fields |= {"train.start_from": start, "train.start_with": taken, "data.from_step": 0}
    fields |= {"data.skip": f"{read} sequences"}
    words = [shlex.quote(f"{key}={value}") for key, value in fields.items()]
    return f"Train longer, {what}:", " ".join(["trainyard train", folder, *words])
