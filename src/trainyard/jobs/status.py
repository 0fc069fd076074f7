"""The record of a launched job in its run folder, and its status.

runs/NAME/job.toml is the record:

    cluster = "lumi"
    scheduler = "slurm"
    n_nodes = 16
    job = "4711"
    submitted = "2026-11-22T02:30:00Z"

    [waits_for]
    prepare = "4710"

The job script logs each start, and each end unless it is killed, in runs/NAME/starts.log:

    2026-11-22T02:30:00Z start 4711 0 n[1-2]
    2026-11-22T04:29:00Z end 4711 75 requeue
    2026-11-22T04:31:00Z start 4711 1 n[1-2]
    2026-11-22T04:50:00Z lost 4711 n1
    2026-11-22T04:50:00Z start 4711 2 n[2-3]
    2026-11-22T06:50:00Z end 4711 75 requeue
    2026-11-22T06:50:01Z resubmitted 4711 4712

is a job that was stopped and restarted, then lost a node, then continued under another job id
(PBS). runs/NAME/bad_nodes counts failed nodes, one `NODE COUNT` per line; a node is excluded from
the second failure on.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import tomli_w
from pydantic import Field

from trainyard.config.load import parse_toml
from trainyard.config.section import Section
from trainyard.errors import ConfigError, LaunchError, explain_failure
from trainyard.files import publish_text, read_file
from trainyard.jobs.schedulers import SCHEDULERS, BatchScheduler, JobState
from trainyard.launch.lock import find_holder
from trainyard.units import format_number

RECORD = "job.toml"
STARTS, BAD_NODES = "starts.log", "bad_nodes"
LIMIT_BYTES = 2**20
EXCLUDED_FROM = 2
"""Failures after which a node is excluded."""


class Submission(Section):
    """A job submitted to a scheduler, or run without one."""

    cluster: str
    """Its name, or the path of its file."""
    scheduler: str
    n_nodes: int
    job: str = ""
    """The scheduler's job id; empty without a scheduler."""
    submitted: str = ""
    """When, in UTC."""
    waits_for: dict[str, str] = Field(default={})
    """Jobs that must succeed first, by stage."""

    @property
    def queue(self) -> BatchScheduler | None:
        """The scheduler that knows the job; None without one."""
        scheduler = SCHEDULERS.get(self.scheduler) if self.job else None
        return scheduler if isinstance(scheduler, BatchScheduler) else None

    @property
    def end_command(self) -> str:
        """The command that cancels the job; empty without a scheduler."""
        return f"{self.queue.ender} {self.job}" if self.queue else ""


@dataclass(frozen=True)
class Start:
    """One start of a job's script."""

    time: str
    """In UTC."""
    job: str
    nodes: str
    exit_code: int | None = None
    """None: it is running, or was killed before it could record one."""
    then: str = ""
    """The script's decision: finish, requeue, stay or cancelled."""
    ended: str = ""
    """When, in UTC."""
    lost: str = ""
    """Nodes that failed during it, as found by the next start."""


def write_submission(folder: Path, submission: Submission) -> None:
    """Writes job.toml to a run folder; the time defaults to now.

    Raises:
        MachineError: it cannot be written.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    record = submission.model_dump() | {"submitted": submission.submitted or now}
    with explain_failure(f"{folder / RECORD} cannot be written", "launch in a writable folder"):
        folder.mkdir(parents=True, exist_ok=True)
    publish_text(folder / RECORD, tomli_w.dumps(record))


def read_submission(folder: Path) -> Submission | None:
    """Reads job.toml of a run folder; None if the run was not launched.

    Raises:
        LaunchError: the file is damaged.
    """
    path = folder / RECORD
    try:
        record = parse_toml(read_file(path).decode("utf-8"), str(path))
        return Submission.model_validate(record)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, ConfigError) as error:
        problem = " ".join(str(error).split())
        raise LaunchError(
            f"{path} cannot be read: {problem}", "launch again, or remove it"
        ) from None


def describe_submission(name: str, submission: Submission, log: Path) -> str:
    """Describes how to follow and stop a job."""
    nodes = format_number(submission.n_nodes, "node")
    lines = [f"job {submission.job} is submitted to {submission.cluster}, {nodes}"]
    lines += [f"    after {stage}: job {other}" for stage, other in submission.waits_for.items()]
    steps = {
        f"trainyard status {name}": "show its status",
        f"tail -F {log}": "follow its log",
        f"touch {log.parent / 'STOP'}": "save, stop, and do not requeue",
        submission.end_command: "end it",
    }
    width = max(map(len, steps))
    return "\n".join([*lines, *(f"    {step:<{width}}   {why}" for step, why in steps.items())])


def read_current(folder: Path) -> Submission | None:
    """Reads job.toml of a run folder, with the id of the job that currently continues it.

    Raises:
        LaunchError: the file is damaged.
    """
    submission = read_submission(folder)
    if submission is None:
        return None
    for line in _lines(folder / STARTS):
        match line.split():
            case [_, "resubmitted", submission.job, job]:
                submission = submission.model_copy(update={"job": job})
    return submission


def refuse_second(folder: Path) -> None:
    """Rejects a launch if the run is training, or has a job queued or running.

    Where the scheduler does not answer, the lock alone is asked.

    Raises:
        LaunchError: says who or which job, and how to end it.
    """
    submission = job = None
    with suppress(LaunchError):  # this launch replaces a damaged record
        submission = read_current(folder)
        job = ask_scheduler(submission) if submission else None
    if submission and job and job.phase in ("waiting", "running"):
        raise LaunchError(
            f"{folder} already has job {submission.job} on {submission.cluster}: {job.text}",
            f"wait until it ends, cancel it ({submission.end_command}), or launch under another "
            "name: name=NAME",
        )
    holder = find_holder(folder)
    if holder:
        raise LaunchError(
            f"{folder} is in use: {holder}",
            "wait until it ends, cancel it, or launch under another name: name=NAME",
        )


def ask_scheduler(submission: Submission) -> JobState:
    """Asks the scheduler for a job's state, or returns why it is unknown."""
    if submission.queue is None:
        return JobState("unknown", "it runs without a scheduler")
    try:
        return submission.queue.ask(submission.job)
    except LaunchError as error:
        return JobState("unknown", error.problem)


def read_starts(folder: Path) -> list[Start]:
    """Reads the starts of a job with times and nodes; skips malformed lines."""
    starts: list[Start] = []
    for line in _lines(folder / STARTS):
        match line.split():
            case [time, "start", job, _, nodes]:
                starts.append(Start(time, job, nodes))
            case [_, "lost", job, nodes] if starts and starts[-1].job == job:
                starts[-1] = replace(starts[-1], lost=nodes)
            case [time, "end", job, code, *then] if (
                starts and starts[-1].job == job and re.fullmatch("[0-9]+", code)
            ):
                starts[-1] = replace(
                    starts[-1], exit_code=int(code), then="".join(then), ended=time
                )
    return starts


def read_bad_nodes(folder: Path) -> dict[str, int]:
    """Reads the number of failures per node."""
    matches = (re.fullmatch(r"(\S+)\s+([0-9]+)\s*", line) for line in _lines(folder / BAD_NODES))
    return {match[1]: int(match[2]) for match in matches if match}


def _lines(path: Path) -> list[str]:
    try:
        return read_file(path, LIMIT_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
