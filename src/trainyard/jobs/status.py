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
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from trainyard.config.reading import parse_json, read_file
from trainyard.errors import LaunchError
from trainyard.jobs.submit import Submission, end_command, read_submission
from trainyard.launch.environment import first_host
from trainyard.launch.lock import find_holder

STARTS, BAD_NODES = "starts.log", "bad_nodes"
ANSWER_SECONDS = 20.0
LIMIT_BYTES = 2**20
EXCLUDED_FROM = 2
"""Failures after which a node is excluded."""
# Each is as wide as the longest value plus one space.
SQUEUE_FORMAT = "State:32,Reason:96,StartTime:32,NodeList:4000"
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "SIGNALING", "STAGE_OUT")
PBS_STATES: dict[str, Literal["waiting", "running", "ended"]] = {
    **dict.fromkeys("QHTW", "waiting"),
    **dict.fromkeys("RESBU", "running"),
    **dict.fromkeys("FX", "ended"),
}

Phase = Literal["waiting", "running", "ended", "unknown"]


@dataclass(frozen=True)
class JobState:
    """The state of a job in its scheduler."""

    phase: Phase
    text: str
    """In the scheduler's words."""
    nodes: str = ""
    """Its nodes, in the scheduler's list format."""


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
            f"wait until it ends, cancel it ({end_command(submission)}), or launch under another "
            "name: name=NAME",
        )
    holder = find_holder(folder)
    if holder:
        raise LaunchError(
            f"{folder} is in use: {holder}",
            "wait until it ends, cancel it, or launch under another name: name=NAME",
        )


def ask_scheduler(submission: Submission) -> JobState:
    """Queries squeue or qstat for a job; returns the reason if they do not know it."""
    if not submission.job:
        return JobState("unknown", "it runs without a scheduler")
    ask = {"slurm": _ask_slurm, "pbs": _ask_pbs}.get(submission.scheduler)
    if ask is None:
        return JobState("unknown", "it runs without a scheduler")
    return ask(submission.job)


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


def _ask_slurm(job: str) -> JobState:
    argv = ["squeue", "--noheader", "--states=all", f"--jobs={job}", f"--Format={SQUEUE_FORMAT}"]
    said, problem = _run(argv)
    row = said.splitlines()[0] if said.strip() else ""
    if not row:
        # Slurm forgets a job some minutes after its end.
        is_gone = not problem or "Invalid job id" in problem
        return (
            JobState("ended", "the scheduler no longer knows it")
            if is_gone
            else (JobState("unknown", problem))
        )
    widths = [int(column.partition(":")[2]) for column in SQUEUE_FORMAT.split(",")]
    values = []
    for width in widths:
        values.append(row[:width].strip())
        row = row[width:]
    state, reason, starts_at, nodes = values
    if state in WAITING:
        text = state if reason in ("", "None") else f"{state} ({reason})"
        text += "" if starts_at in ("", "N/A") else f", expected to start at {starts_at}"
        return JobState("waiting", text)
    if reason == "JobLaunchFailure" and nodes:  # no line of the script ran, and there is no log
        why = f"{first_host(nodes)} cannot start the script, or cannot write its log beside it"
        return JobState("ended", f"{state} ({reason}: {why})", nodes)
    return JobState("running" if state in RUNNING else "ended", state, nodes)


def _ask_pbs(job: str) -> JobState:
    said, problem = _run(["qstat", "-x", "-f", "-F", "json", job])
    try:
        (facts,) = parse_json(said)["Jobs"].values()
        state, comment = str(facts["job_state"]), str(facts.get("comment", ""))
    except (ValueError, TypeError, KeyError, AttributeError):
        is_gone = "Unknown Job" in problem
        gone = JobState("ended", "the scheduler no longer knows it")
        return gone if is_gone else JobState("unknown", problem or "qstat did not return JSON")
    text = " ".join(f"{state} {comment}".split())
    hosts = str(facts.get("exec_host", ""))
    nodes = ",".join(dict.fromkeys(part.partition("/")[0] for part in hosts.split("+") if part))
    return JobState(PBS_STATES.get(state, "unknown"), text, nodes)


def _run(argv: Sequence[str]) -> tuple[str, str]:
    """Returns a program's output and its problem, if any; never raises."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
        )
    except FileNotFoundError:
        return "", f"there is no {argv[0]} on this machine"
    except OSError as error:
        return "", f"{argv[0]} cannot be started: {error.strerror}"
    except subprocess.TimeoutExpired:
        return "", f"{argv[0]} has not answered within {ANSWER_SECONDS:g} s"
    return done.stdout, " ".join(done.stderr.split())


def _lines(path: Path) -> list[str]:
    try:
        return read_file(path, LIMIT_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
