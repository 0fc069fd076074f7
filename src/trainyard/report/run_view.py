"""One view of a run: what its folder and its scheduler say, read once, for text and for HTML.

lock is held    outcome.json             the run
yes             (of an earlier start)    is training
no              exists                   has ended, for the reason there
no              missing                  was killed, or lost its machine
unknown         missing                  is training if its metrics are recent
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainyard.checkpoint.format import MANIFEST, list_checkpoints, step_of
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import EXIT_HOLD, EXIT_REQUEUE, DataError
from trainyard.files import parse_json, read_file
from trainyard.jobs import status as jobs
from trainyard.jobs.schedulers import JobState
from trainyard.launch.lock import find_holder
from trainyard.report.metrics import (
    History,
    Line,
    MetricsFile,
    RunMetrics,
    is_finite,
    read_metrics,
)
from trainyard.training.run_folder import Ancestor, ancestry
from trainyard.training.stop import INTERRUPTED

EVALUATION = "evaluation.json"
UNKNOWN = "–"  # noqa: RUF001  (the dash that tables use)
N_LINES = 10
SLOW_INTERVAL_SECONDS = 20.0
"""Between two questions to the scheduler, and two looks for checkpoints."""
YOUNG_SECONDS = 600.0
ENDS = {
    "0": ("done", ""),
    str(EXIT_REQUEUE): ("stopped", "; the same command continues"),
    str(EXIT_HOLD): ("held", "; needs attention before it is started again"),
}
"""State and its meaning, by exit code; other codes mean stopped."""


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest complete checkpoint."""

    step: int
    seconds_ago: float
    n_bytes: int


@dataclass(frozen=True)
class RunView:
    """The contents of a run folder, and its job.

    Attributes:
        name: of the run; with the folder, where several runs have the same.
        state: waiting, starting, training, done, stopped, held, lost or new.
        text: the reason for the state, in one sentence.
        plan: plan.json; empty if missing.
        outcome: outcome.json; empty while it runs, or when it was killed.
        evaluation: the numbers and tasks of evaluation.json, and of the last evaluation in
            training.
        ancestors: the checkpoints it descends from, oldest first.
        bad_nodes: failures by node.
    """

    folder: Path
    name: str
    run: Run
    state: str
    text: str
    metrics: RunMetrics
    plan: dict[str, Any]
    outcome: dict[str, Any]
    evaluation: dict[str, Any]
    ancestors: list[Ancestor]
    starts: list[jobs.Start]
    bad_nodes: dict[str, int]
    submission: jobs.Submission | None = None
    job: JobState | None = None
    checkpoint: NewestCheckpoint | None = None

    @property
    def reason(self) -> str:
        """The reason why it ended; empty while it runs, or if it was killed."""
        return self.metrics.reason or _first_line(self.outcome.get("reason", ""))

    @property
    def n_steps(self) -> int | None:
        """The planned steps; None if unknown."""
        n_steps = self.plan.get("n_steps")
        return n_steps if isinstance(n_steps, int) and n_steps > 0 else None

    @property
    def n_ranks(self) -> int:
        """The number of ranks; 1 if unknown."""
        n_ranks = self.plan.get("n_ranks")
        return n_ranks if isinstance(n_ranks, int) else 1

    @property
    def step(self) -> int | None:
        """The last logged step."""
        step = self.last("step")
        return None if step is None else int(step)

    @property
    def tokens_per_second(self) -> float | None:
        """Throughput of all ranks together."""
        rate = self.last("tokens_per_second_per_device")
        return None if rate is None else rate * self.n_ranks

    @property
    def seconds_left(self) -> float | None:
        """Time left from now, while it trains."""
        left, ago = self.last("seconds_left"), self.seconds_ago
        if self.state != "training" or left is None or ago is None:
            return None
        return max(0.0, left - ago)

    @property
    def seconds_ago(self) -> float | None:
        """Time since the last logged step."""
        at = self.last("time")
        return None if at is None else time.time() - at

    @property
    def n_restarts(self) -> int:
        """Number of restarts."""
        return max(len(self.starts) - 1, self.metrics.count("restart"), 0)

    def last(self, key: str) -> float | None:
        """Returns the newest number of a column of the metrics."""
        return self.metrics.train.last(key)


def read_run(folder: Path) -> RunView:
    """Reads a run folder without its job.

    Raises:
        DataError: it is no run folder, or a file in it is missing or malformed.
        ConfigError: its run.toml is not valid.
        CheckpointError: its ancestry.json is damaged.
    """
    return _read_view(folder, _load_run_of(folder), lambda: read_metrics(folder))


class RunReader:
    """Reads a run and its job, once or repeatedly.

    Args:
        folder: of the run.

    Raises:
        UserError: it is not a run folder, or a file in it is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._run = _load_run_of(folder)
        self._file = MetricsFile(folder / "metrics.jsonl")
        self._metrics = History().metrics()
        self._asked = -math.inf
        self._slow: dict[str, Any] = {}
        """Job, submission and checkpoint, as they were when last asked for."""
        self.new_lines: list[Line] = []
        """The newest lines of metrics.jsonl since the previous reading."""

    def read(self) -> RunView:
        """Reads the folder; asks the scheduler if it has not for a while.

        Raises:
            UserError: a file in the folder is damaged.
        """
        if time.monotonic() - self._asked > SLOW_INTERVAL_SECONDS:
            submission = jobs.read_current(self._folder)
            self._slow = {
                "submission": submission,
                "job": jobs.ask_scheduler(submission) if submission else None,
                "checkpoint": _find_checkpoint(self._folder),
            }
            self._asked = time.monotonic()
        return _read_view(self._folder, self._run, self._read_metrics, **self._slow)

    def _read_metrics(self) -> RunMetrics:
        self.new_lines = []
        if (self._folder / "metrics.jsonl").exists():
            self.new_lines = list(deque(self._file.new_lines(), maxlen=N_LINES))
            if self.new_lines:
                self._metrics = self._file.metrics()
        return self._metrics


def _load_run_of(folder: Path) -> Run:
    problem = "" if folder.is_dir() else f"no folder {folder}"
    if not problem and not (folder / "run.toml").exists():
        problem = f"{folder} is not a run folder: it has no run.toml"
    if problem:
        raise DataError(problem, "give a folder that trainyard train wrote, such as runs/my-run")
    return load_run(str(folder / "run.toml")).run


def _read_view(
    folder: Path,
    run: Run,
    read: Callable[[], RunMetrics],
    job: JobState | None = None,
    **others: Any,
) -> RunView:
    starts = jobs.read_starts(folder)
    state, text, outcome = find_state(folder, job, starts)
    metrics = read()  # after the state: an ended run has written its last lines
    last = metrics.evaluations[-1] if metrics.evaluations else {}
    figures = (last | load_facts(folder / EVALUATION)).items()
    return RunView(
        folder,
        run.name,
        run,
        state,
        text,
        metrics,
        plan=load_facts(folder / "plan.json"),
        outcome=outcome,
        evaluation={key: value for key, value in figures if key == "tasks" or is_finite(value)},
        ancestors=ancestry(folder),
        starts=starts,
        bad_nodes=jobs.read_bad_nodes(folder),
        job=job,
        **others,
    )


def load_facts(path: Path) -> dict[str, Any]:
    """Reads a JSON object; empty if the file does not exist.

    Raises:
        DataError: it cannot be read, or is not an object.
    """
    try:
        content = parse_json(read_file(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}", "remove it, or restore it") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} is not a JSON object", "remove it, or restore it")
    return {k: value for k, value in content.items() if type(value) is not int or is_finite(value)}


def unused_settings(run: Run) -> dict[str, set[str]]:
    """Names the settings that others of the run make ineffective, by section."""
    parallel, formats = run.parallel, {"loss_scale": "fp16", "fp8": "fp8"}
    no_pipeline = {"schedule", "chunks"} if parallel.pipeline == 1 else set()
    return {
        "optimizer": {"momentum"} if run.optimizer.kind != "muon" else set(),
        "schedule": _unused_of_schedule(run.schedule.kind),
        "parallel": no_pipeline | ({"context_method"} if parallel.context == 1 else set()),
        "precision": {key for key, kind in formats.items() if kind not in run.precision.kind},
    }


def _unused_of_schedule(kind: str) -> set[str]:
    if kind == "points":
        return {"warmup", "decay", "cooldown", "minimum_learning_rate"}
    return {"points"} | ({"cooldown"} if kind != "warmup_stable_decay" else set())


def find_state(
    folder: Path, job: JobState | None = None, starts: list[jobs.Start] | None = None
) -> tuple[str, str, dict[str, Any]]:
    """Combines scheduler, lock and outcome.json into a state, its reason, and the outcome.

    Raises:
        DataError: its outcome.json is damaged.
    """
    holder = find_holder(folder)
    outcome = {} if holder else load_facts(folder / "outcome.json")
    metrics = folder / "metrics.jsonl"
    age = time.time() - metrics.stat().st_mtime if metrics.exists() else None
    if holder:
        state, text = "training", f"training: {holder}"
    elif outcome:
        reason = _first_line(outcome.get("reason", "unknown reason"))
        state, meaning = ENDS.get(str(outcome.get("exit_code")), ("stopped", ""))
        if reason == INTERRUPTED.reason:
            reason, (state, meaning) = "stopped by Ctrl-C", ENDS[str(EXIT_REQUEUE)]
        text = f"ended: {reason}{meaning}"
    elif holder is None and age is not None and age < YOUNG_SECONDS:
        state, text = "training", "probably training: its file system has no locks to check"
    elif age is None and not starts:
        state, text = "new", f"not started: {job.text}" if job else "not started yet"
    else:
        state, text = "lost", "not running, reason unknown: killed, or its machine failed"
    if job and job.phase == "waiting":
        if "held" in job.text.lower():
            state, text = "held", f"held: {text.removeprefix('ended: ')}"
        else:
            again = " to be started again" if starts else ""
            state, text = "waiting", f"waits{again}: {job.text}"
    elif job and job.phase == "running" and state != "training":
        state = "starting"
        text = "its job is running; training has not started yet or has just ended"
    return state, text, outcome


def _find_checkpoint(folder: Path) -> NewestCheckpoint | None:
    for path in list_checkpoints(folder / "checkpoints"):
        try:
            ago = time.time() - (path / MANIFEST).stat().st_mtime
            n_bytes = sum(file.stat().st_size for file in path.iterdir())
        except OSError:  # incomplete, or removed meanwhile because there is a newer one
            continue
        return NewestCheckpoint(step_of(path) or 0, ago, n_bytes)
    return None


def _first_line(value: object) -> str:
    return str(value).split("\n")[0]


def show(value: Any, style: str | Callable[[float], str]) -> str:
    """Formats a number by a format string or a function; a dash if it is missing."""
    if not is_finite(value):
        return UNKNOWN
    return style.format(value) if isinstance(style, str) else style(value)
