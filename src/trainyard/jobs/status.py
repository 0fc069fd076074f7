"""The status of a job, from its scheduler and from the starts recorded in the run folder.

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
from pathlib import Path

from trainyard.errors import LaunchError
from trainyard.files import read_file
from trainyard.jobs.scheduler import JobState
from trainyard.jobs.submission import Submission, read_submission
from trainyard.launch.lock import find_holder

STARTS, BAD_NODES = "starts.log", "bad_nodes"
LIMIT_BYTES = 2**20
EXCLUDED_FROM = 2
"""Failures after which a node is excluded."""


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
    found = (re.fullmatch(r"(\S+)\s+([0-9]+)\s*", line) for line in _lines(folder / BAD_NODES))
    return {match[1]: int(match[2]) for match in found if match}


def _lines(path: Path) -> list[str]:
    try:
        return read_file(path, LIMIT_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
