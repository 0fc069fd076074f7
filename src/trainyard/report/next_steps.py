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
        length = shlex.quote(f"{2 * int(best.metrics.train.last('step') or 1)} steps")
        steps.append(("Train longer:", f"trainyard train {folder} train.length={length}"))
        steps.append(("Use it elsewhere:", f"trainyard export {folder} --output {name}-gpt"))
    return steps
