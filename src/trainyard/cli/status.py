"""`trainyard status`: a run's status, from its folder and its scheduler, on a login node."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainyard.cli.train import RUNS_FOLDER
from trainyard.units import format_bytes, format_large, format_number, format_seconds

if TYPE_CHECKING:
    from trainyard.jobs.scheduler import JobState
    from trainyard.jobs.status import Start
    from trainyard.jobs.submission import Submission
    from trainyard.report.history import Metrics

UNKNOWN = "not known yet"
N_STARTS, N_EVENTS = 10, 10
THEN = {
    "finish": "done",
    "requeue": "started again",
    "stay": "needs attention",
    "cancelled": "cancelled",
}


def status(
    run: Annotated[str, typer.Argument(help="The name of a run, or its folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Show a run's status: state, step, loss, speed, ETA, last checkpoint, restarts and why.

    Example: trainyard status gpt3-13b

    Reads the run folder, and queries squeue or qstat if present: run it where you launched from.
    `trainyard watch` shows the same run live.
    """
    report = read_status(find_folder(run))
    typer.echo(json.dumps(report.as_json(), indent=2) if as_json else report.render())


@dataclass(frozen=True)
class Status:
    """The known status of a run."""

    name: str
    state: str
    """One of waiting, starting, training, done, stopped, held, lost, new."""
    text: str
    """The reason, in one sentence."""
    n_steps: int | None
    n_ranks: int
    metrics: Metrics | None
    checkpoint: Checkpoint | None
    submission: Submission | None
    job: JobState | None
    starts: list[Start]
    bad_nodes: dict[str, int]

    @property
    def step(self) -> int | None:
        """The last logged step."""
        step = self.metrics.train.last("step") if self.metrics else None
        return None if step is None else int(step)

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of all ranks together."""
        rate = self._last("tokens_per_second_per_device")
        return None if rate is None else rate * self.n_ranks

    @property
    def seconds_left(self) -> float | None:
        """Time left from now, while it trains."""
        left, at = self._last("seconds_left"), self._last("time")
        if self.state != "training" or left is None or at is None:
            return None
        return max(0.0, left - (time.time() - at))

    @property
    def events(self) -> list[str]:
        """Interruptions, such as `step 40: resumed from step 40`."""
        events = self.metrics.events if self.metrics else []
        return [f"step {event.step:,}: {event.text}" for event in events]

    @property
    def n_restarts(self) -> int:
        """Number of restarts."""
        resumed = self.metrics.count("restart") if self.metrics else 0
        return max(len(self.starts) - 1, resumed, 0)

    def _last(self, key: str) -> float | None:
        return self.metrics.train.last(key) if self.metrics else None

    def as_json(self) -> dict[str, Any]:
        """Returns the status for programs; unknown values are null."""
        held_out = self.metrics.held_out_losses if self.metrics else []
        return {
            "name": self.name,
            "state": self.state,
            "text": self.text,
            "step": self.step,
            "n_steps": self.n_steps,
            "loss": self._last("loss"),
            "held_out_loss": held_out[-1]["loss"] if held_out else None,
            "tokens_per_second": self.tokens_per_second,
            "seconds_left": self.seconds_left,
            "checkpoint": asdict(self.checkpoint) if self.checkpoint else None,
            "submission": self.submission.model_dump() if self.submission else None,
            "job": asdict(self.job) if self.job else None,
            "n_restarts": self.n_restarts,
            "starts": [asdict(start) for start in self.starts],
            "events": self.events,
            "bad_nodes": self.bad_nodes,
        }

    def render(self) -> str:
        """Returns the status for people."""
        from trainyard.report.screen import printable

        lines = [f"{self.name}: {self.text}"]
        facts = {"job": self._describe_job(), **self._describe_training()}
        lines += [f"{label:<12}{text}" for label, text in facts.items() if text]
        lines.append(f"{'restarts':<12}{self.n_restarts}")
        for start in self.starts[-N_STARTS:]:
            lines.append(f"    {self._describe_start(start)}")
        lines += [f"    {event}" for event in self.events[-N_EVENTS:]]
        lines += [f"    {_describe_bad(*item)}" for item in self.bad_nodes.items()]
        return "\n".join(map(printable, lines))

    def _describe_job(self) -> str:
        submission, job = self.submission, self.job
        if submission is None:
            return ""
        size = format_number(submission.n_nodes, "node")
        if job is None or not submission.job:
            return f"{size} of {submission.cluster}, since {submission.submitted}"
        text = f"{submission.job} on {submission.cluster}, {size}: {job.text}"
        text += f" on {job.nodes}" if job.nodes else ""
        before = ", ".join(f"{stage} {id_}" for stage, id_ in submission.waits_for.items())
        return text + (f"; after {before}" if before and job.phase == "waiting" else "")

    def _describe_training(self) -> dict[str, str]:
        step, loss, rate = self.step, self._last("loss"), self.tokens_per_second
        total = "" if self.n_steps is None else f" of {self.n_steps:,}"
        share = f" ({(step or 0) / self.n_steps:.0%})" if self.n_steps else ""
        left = self.seconds_left
        held_out = self.metrics.held_out_losses[-1:] if self.metrics else []
        return {
            "step": UNKNOWN if step is None else f"{step:,}{total}{share}",
            "loss": (UNKNOWN if loss is None else f"{loss:.4f}")
            + "".join(f"; held out {e['loss']:.4f} at step {e['step']:,}" for e in held_out),
            "speed": UNKNOWN if rate is None else f"{format_large(rate)} tokens/s",
            "ETA": "" if left is None else format_seconds(left),
            "checkpoint": self.checkpoint.describe() if self.checkpoint else "none",
        }

    def _describe_start(self, start: Start) -> str:
        is_last = start is self.starts[-1]
        if start.lost:
            how = f"was lost with {start.lost}"
        elif start.exit_code is not None:
            then = THEN.get(start.then, "not started again")
            how = f"ended {start.ended} with {start.exit_code}: {then}"
        elif is_last and self.state in ("training", "starting"):
            how = "runs"
        else:
            how = "was killed: a lost node, or the scheduler"
        return f"{start.time} job {start.job} on {start.nodes}: {how}"


@dataclass(frozen=True)
class Checkpoint:
    """The newest complete one."""

    step: int
    seconds_ago: float
    n_bytes: int

    def describe(self) -> str:
        """Such as `step 1,200, 3m 20s ago, 1.9 TiB`."""
        ago = format_seconds(max(0.0, self.seconds_ago))
        return f"step {self.step:,}, {ago} ago, {format_bytes(self.n_bytes)}"


def find_folder(run: str) -> Path:
    """Returns the folder of a run by its name or path."""
    named = RUNS_FOLDER / run
    return named if named.is_dir() else Path(run)


def read_status(folder: Path) -> Status:
    """Reads a run folder and asks the scheduler of its job.

    Raises:
        UserError: it is not a run folder, or a file in it is damaged.
    """
    from trainyard.jobs.status import ask_scheduler, read_bad_nodes, read_current, read_starts
    from trainyard.report.metrics import read_metrics
    from trainyard.report.summary import load_facts, load_run_of

    name = load_run_of(folder).name
    submission = read_current(folder)
    job = ask_scheduler(submission) if submission else None
    plan = load_facts(folder / "plan.json")
    metrics = folder / "metrics.jsonl"
    starts = read_starts(folder)
    state, text = _find_state(folder, job, starts)
    n_steps, n_ranks = plan.get("n_steps"), plan.get("n_ranks")
    return Status(
        name=name,
        state=state,
        text=text,
        n_steps=n_steps if isinstance(n_steps, int) and n_steps > 0 else None,
        n_ranks=n_ranks if isinstance(n_ranks, int) else 1,
        metrics=read_metrics(metrics) if metrics.exists() else None,
        checkpoint=_find_checkpoint(folder),
        submission=submission,
        job=job,
        starts=starts,
        bad_nodes=read_bad_nodes(folder),
    )


def _find_state(folder: Path, job: JobState | None, starts: list[Start]) -> tuple[str, str]:
    """Combines the scheduler, the lock and outcome.json into one state."""
    from trainyard.errors import EXIT_HOLD
    from trainyard.report.liveness import find_liveness
    from trainyard.report.summary import load_facts

    liveness = find_liveness(folder)
    if job is not None and job.phase == "waiting":
        again = " to be started again" if starts else ""
        if "held" in job.text.lower():
            return "held", f"held: {_reason(liveness.text)}"
        return "waiting", f"waits{again}: {job.text}"
    if liveness.is_training:
        return "training", liveness.text
    if job is not None and job.phase == "running":
        return "starting", "its job is running; training has not started yet or has just ended"
    outcome = load_facts(folder / "outcome.json")
    if not outcome:
        if not (folder / "metrics.jsonl").exists() and not starts:
            return "new", "it was never started" if job is None else f"never started: {job.text}"
        return "lost", liveness.text
    states: dict[object, str] = {0: "done", EXIT_HOLD: "held"}
    return states.get(outcome.get("exit_code"), "stopped"), liveness.text


def _reason(text: str) -> str:
    return text.removeprefix("ended: ")


def _describe_bad(node: str, n_failures: int) -> str:
    from trainyard.jobs.status import EXCLUDED_FROM

    left_out = ", and is excluded" if n_failures >= EXCLUDED_FROM else ""
    times = "once" if n_failures == 1 else f"{n_failures} times"
    return f"node {node} failed {times}{left_out}"


def _find_checkpoint(folder: Path) -> Checkpoint | None:
    found = {}
    for manifest in (folder / "checkpoints").glob("step-*/manifest.json"):
        if match := re.fullmatch(r"step-(\d+)", manifest.parent.name):
            found[int(match[1])] = manifest
    for step in sorted(found, reverse=True):
        try:
            ago = time.time() - found[step].stat().st_mtime
            n_bytes = sum(path.stat().st_size for path in found[step].parent.iterdir())
        except OSError:  # removed meanwhile, because there is a newer one
            continue
        return Checkpoint(step, ago, n_bytes)
    return None
