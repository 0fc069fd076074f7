"""What to do next with a run, as commands to paste."""

from __future__ import annotations

import shlex

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
    rates = train["learning_rate"]
    if schedule.kind == "constant" or not len(rates) or rates[-1] >= rates.max():
        length = shlex.quote(f"{2 * last} steps")
        return "Train longer:", f"trainyard train {folder} train.length={length}"
    name = shlex.quote(f"name={reported.run.name}-longer")
    peak = int(train["step"][rates >= rates.max()][-1])
    saved = sorted((reported.folder / "checkpoints").glob("step-????????"))
    before = [path for path in saved if int(path.name[5:]) <= peak]
    if schedule.kind != "warmup_stable_decay" or not before:
        command = f"trainyard train {folder} {name} train.start_from={folder}"
        return "Train longer, from these weights with the schedule begun anew:", command
    step = int(before[-1].name[5:])
    lengths = {"train.length": 2 * last - step, "schedule.decay": 2 * last - step}
    fields = {"schedule.warmup": 0, "data.skip": step, **lengths}
    words = " ".join(shlex.quote(f"{key}={value} steps") for key, value in fields.items())
    start = (
        f"train.start_from={shlex.quote(str(before[-1]))} train.start_with=weights_and_optimizer"
    )
    return (
        "Train longer, from before the decay:",
        f"trainyard train {folder} {name} {start} {words}",
    )
