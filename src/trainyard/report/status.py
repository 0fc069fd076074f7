"""The status of a run: from its folder and its scheduler."""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainyard.errors import EXIT_HOLD, printable
from trainyard.jobs.scheduler import JobState
from trainyard.jobs.status import (
    EXCLUDED_FROM,
    Start,
    ask_scheduler,
    read_bad_nodes,
    read_current,
    read_starts,
)
from trainyard.jobs.submission import Submission
from trainyard.planning import saving
from trainyard.report.history import History, Line, RunMetrics, is_finite
from trainyard.report.liveness import find_liveness
from trainyard.report.metrics import MetricsFile
from trainyard.report.scores import list_scores
from trainyard.report.summary import EVALUATION, large, load_facts, load_run_of, memory, show
from trainyard.training.start import Ancestor, ancestry, describe_ancestry
from trainyard.training.stop import INTERRUPTED
from trainyard.units import format_bytes, format_large, format_number, format_seconds

NOT_KNOWN_YET = "not known yet"
N_STARTS, N_EVENTS, N_LINES, N_SCORES = 10, 10, 10, 10
SLOW_INTERVAL_SECONDS = 20.0
"""Between two questions to the scheduler, and two looks for checkpoints."""
RANKS_PER_NODE = 8
LEAST_GAIN = 0.005
"""Share of the time that another interval must save to be worth a line."""
THEN = {
    "finish": "done",
    "requeue": "started again",
    "stay": "needs attention",
    "cancelled": "cancelled",
}


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
    metrics: RunMetrics
    checkpoint: NewestCheckpoint | None
    submission: Submission | None
    job: JobState | None
    starts: list[Start]
    bad_nodes: dict[str, int]
    interval: int
    """Steps between saves; 0 for none."""
    ancestors: Sequence[Ancestor] = ()
    """The checkpoints it descends from, oldest first."""
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    """evaluation.json."""

    @property
    def step(self) -> int | None:
        """The last logged step."""
        step = self.metrics.train.last("step")
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
        return [f"step {event.step:,}: {event.text}" for event in self.metrics.events]

    @property
    def n_restarts(self) -> int:
        """Number of restarts."""
        return max(len(self.starts) - 1, self.metrics.count("restart"), 0)

    def _last(self, key: str) -> float | None:
        return self.metrics.train.last(key)

    def as_json(self) -> dict[str, Any]:
        """Returns the status for programs; unknown values are null."""
        held_out = self.metrics.held_out_losses
        return {
            "name": self.name,
            "state": self.state,
            "text": self.text,
            "step": self.step,
            "n_steps": self.n_steps,
            "loss": self.metrics.last_loss,
            "held_out_loss": held_out[-1]["loss"] if held_out else None,
            "tokens_per_second": self.tokens_per_second,
            "seconds_left": self.seconds_left,
            "tasks": {one.label: one.amount for one in list_scores(self.evaluation)},
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
        lines = [f"{self.name}: {self.text}"]
        lines += [f"{label:<12}{text}" for label, text in self.facts().items()]
        for start in self.starts[-N_STARTS:]:
            lines.append(f"    {self._describe_start(start)}")
        lines += [f"    {event}" for event in self.events[-N_EVENTS:]]
        lines += [f"    {_describe_bad(*item)}" for item in self.bad_nodes.items()]
        return "\n".join(map(printable, lines))

    def row(self) -> tuple[str, ...]:
        """Returns state, step, loss and the age of the last logged step, for a list of runs."""
        facts, at = self.facts(), self._last("time")
        age = "" if at is None else f"{format_seconds(max(0.0, time.time() - at))} ago"
        return self.state, facts["step"], facts["loss"].partition(";")[0], age

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

    def facts(self) -> dict[str, str]:
        """Returns the known facts as texts, by their labels."""
        step, loss, rate = self.step, self.metrics.last_loss, self.tokens_per_second
        no_loss = NOT_KNOWN_YET if step is None else "none: the newest steps were skipped"
        total = "" if self.n_steps is None else f" of {self.n_steps:,}"
        share = f" ({(step or 0) / self.n_steps:.0%})" if self.n_steps else ""
        left = self.seconds_left
        held_out, test = self.metrics.held_out_losses[-1:], self.metrics.test
        scores = list_scores(self.evaluation)
        facts = {
            "job": self._describe_job(),
            "ancestry": describe_ancestry(self.ancestors),
            "step": NOT_KNOWN_YET if step is None else f"{step:,}{total}{share}",
            "loss": (no_loss if loss is None else f"{loss:.4f}")
            + "".join(f"; held out {e['loss']:.4f} at step {e['step']:,}" for e in held_out)
            + (
                f"; test {test['loss']:.4f} at step {test['step']:,}"
                if is_finite(test.get("loss"))
                else ""
            ),
            "tasks": "; ".join(f"{one.label} {one.value}" for one in scores[:N_SCORES])
            + (f"; {len(scores) - N_SCORES} more" if len(scores) > N_SCORES else ""),
            "speed": NOT_KNOWN_YET if rate is None else f"{format_large(rate)} tokens/s",
            "ETA": "" if left is None else format_seconds(left),
            "checkpoint": self.checkpoint.describe() if self.checkpoint else "none",
            "save every": self._suggest_interval(),
            "restarts": f"{self.n_restarts}",
        }
        return {label: text for label, text in facts.items() if text}

    def facts_in_detail(self) -> dict[str, str]:
        """Returns the facts with what else is known of the last logged step."""
        metrics, last, facts = self.metrics, self._last, self.facts()
        if not len(metrics.train):
            return facts
        best = min(metrics.held_out_losses, key=lambda line: line["loss"], default=None)
        ago = max(0.0, time.time() - (last("time") or time.time()))
        tflops = show(last("tflops_per_second_per_device"), "{:.3g}")
        facts["step"] += f", {format_seconds(ago)} ago"
        facts["loss"] += f", best {best['loss']:.4f} at step {best['step']:,}" if best else ""
        facts["speed"] += f", {tflops} TFLOP/s per device"
        if by_formula := last("formula_tflops_per_second_per_device"):
            facts["speed"] += f" ({by_formula:.4g} by log.flop_formula)"
        facts["restarts"] += (
            f"; {show(last('skipped_steps'), '{:.0f}')} skipped steps, "
            f"{metrics.count('rollback')} rollbacks, {metrics.count('save failed')} failed saves"
        )
        return facts | {
            "gradient": f"norm {show(last('gradient_norm'), '{:.3f}')}, "
            f"learning rate {show(last('learning_rate'), '{:.3e}')}",
            "memory": memory(last("memory_bytes")),
            "consumed": f"{large(last('tokens'))} tokens in {format_seconds(metrics.seconds)}",
        }

    def _suggest_interval(self) -> str:
        """Suggests how often to save, from the newest saves; empty if little is to be won."""
        metrics = self.metrics
        stall, write = map(metrics.median_of_saves, ("stall_seconds", "seconds"))
        step = (metrics.train.median("milliseconds_per_step") or 0) / 1000
        if not (stall and write and min(stall, write, step) > 0):
            return ""
        n_nodes = math.ceil(self.n_ranks / RANKS_PER_NODE)
        between_failures = saving.mean_seconds_between_failures(n_nodes)
        # A save waits for the previous one, so the interval cannot be shorter than a write.
        best = max(saving.suggest_interval(stall, between_failures), write)
        n_steps = max(1, round(best / step))
        set_to = self.interval or self.n_steps or n_steps
        useful, useful_as_set = (
            saving.useful_share(n * step, stall, between_failures) for n in (n_steps, set_to)
        )
        if useful - useful_as_set < LEAST_GAIN:
            return ""
        return (
            f"{n_steps:,} steps ({format_seconds(best)}) lose least, set is {set_to:,}: "
            f"{useful:.1%} and {useful_as_set:.1%} of the time are useful, if training stalls "
            f"for {stall:.2g} s per save as measured and {format_number(n_nodes, 'node')} of "
            f"{RANKS_PER_NODE} ranks fail {saving.FAILURES_PER_NODE_DAY:g} times per day each"
        )

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
class NewestCheckpoint:
    """The newest complete one."""

    step: int
    seconds_ago: float
    n_bytes: int

    def describe(self) -> str:
        """Such as `step 1,200, 3m 20s ago, 1.9 TiB`."""
        ago = format_seconds(max(0.0, self.seconds_ago))
        return f"step {self.step:,}, {ago} ago, {format_bytes(self.n_bytes)}"


class StatusReader:
    """Reads the status of a run, once or repeatedly.

    Args:
        folder: of the run.

    Raises:
        UserError: it is not a run folder, or a file in it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = load_run_of(folder)
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._metrics = History().metrics("")
        self._asked = -math.inf
        self._submission: Submission | None = None
        self._job: JobState | None = None
        self._checkpoint: NewestCheckpoint | None = None
        self.new_lines: list[Line] = []
        """The newest lines of metrics.jsonl since the previous reading."""

    def read(self) -> Status:
        """Reads the folder; asks the scheduler if it has not for a while.

        Raises:
            UserError: a file in the folder is damaged.
        """
        folder = self._folder
        if time.monotonic() - self._asked > SLOW_INTERVAL_SECONDS:
            self._submission = read_current(folder)
            self._job = ask_scheduler(self._submission) if self._submission else None
            self._checkpoint = _find_checkpoint(folder)
            self._asked = time.monotonic()
        plan, starts = load_facts(folder / "plan.json"), read_starts(folder)
        # Before the metrics: so the last lines of an ended run are read below.
        state, text = _find_state(folder, self._job, starts)
        self._read_metrics()
        n_steps, n_ranks = plan.get("n_steps"), plan.get("n_ranks")
        return Status(
            name=self._run.name,
            state=state,
            text=text,
            n_steps=n_steps if isinstance(n_steps, int) and n_steps > 0 else None,
            n_ranks=n_ranks if isinstance(n_ranks, int) else 1,
            metrics=self._metrics,
            checkpoint=self._checkpoint,
            submission=self._submission,
            job=self._job,
            starts=starts,
            bad_nodes=read_bad_nodes(folder),
            interval=self._run.checkpoint.interval,
            ancestors=ancestry(folder),
            evaluation=load_facts(folder / EVALUATION),
        )

    def _read_metrics(self) -> None:
        self.new_lines = []
        if (self._folder / "metrics.jsonl").exists():
            self.new_lines = list(deque(self._file.new_lines(), maxlen=N_LINES))
            if self.new_lines:
                self._metrics = self._file.metrics()


def _find_state(folder: Path, job: JobState | None, starts: list[Start]) -> tuple[str, str]:
    """Combines the scheduler, the lock and outcome.json into one state."""
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
            return "new", "not started yet" if job is None else f"not started: {job.text}"
        return "lost", liveness.text
    states = {"0": "done", str(EXIT_HOLD): "held"}
    if outcome.get("reason") == INTERRUPTED.reason:
        return "stopped", liveness.text
    return states.get(str(outcome.get("exit_code")), "stopped"), liveness.text


def _reason(text: str) -> str:
    return text.removeprefix("ended: ")


def _describe_bad(node: str, n_failures: int) -> str:
    left_out = ", and is excluded" if n_failures >= EXCLUDED_FROM else ""
    times = "once" if n_failures == 1 else f"{n_failures} times"
    return f"node {node} failed {times}{left_out}"


def _find_checkpoint(folder: Path) -> NewestCheckpoint | None:
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
        return NewestCheckpoint(step, ago, n_bytes)
    return None
