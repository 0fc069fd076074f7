"""Submits a job script to its scheduler, and records the job in the run folder.

    slurm           sbatch --parsable JOB.SH       returns 4711, or 4711;cluster
    pbs             qsub JOB.SH                    returns 4711.server
    local mpi ssh   bash JOB.SH                    runs immediately, without a scheduler

runs/NAME/job.toml records the job, so that `trainyard status` can query the scheduler:

    cluster = "lumi"
    scheduler = "slurm"
    n_nodes = 16
    job = "4711"
    submitted = "2026-11-22T02:30:00Z"

    [waits_for]
    prepare = "4710"
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import tomli_w
from pydantic import Field

from trainyard.config.load import parse_toml
from trainyard.config.reading import read_file
from trainyard.config.run import Section
from trainyard.errors import ConfigError, LaunchError, MachineError
from trainyard.units import format_number

RECORD = "job.toml"
ANSWER_SECONDS = 45.0
SUBMITTERS = {"slurm": ("sbatch", "--parsable"), "pbs": ("qsub",)}
LISTERS = {"slurm": "squeue", "pbs": "qstat"}
ENDERS = {"slurm": "scancel", "pbs": "qdel"}
JOB_ID = re.compile(r"[A-Za-z0-9_.\[\]-]+")


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


def submit(script: Path, scheduler: str, after: Sequence[str] = ()) -> str:
    """Submits a script to the scheduler; returns the job id.

    Args:
        script: with the scheduler's options in its header.
        scheduler: `slurm` or `pbs`.
        after: ids of jobs that have to end well before it starts; if one fails, it never does.

    Raises:
        LaunchError: the scheduler is not here, does not answer, or refuses the job.
    """
    program, *options = SUBMITTERS[scheduler]
    if after and scheduler == "slurm":
        options += [f"--dependency=afterok:{':'.join(after)}", "--kill-on-invalid-dep=yes"]
    elif after:
        options += ["-W", f"depend=afterok:{':'.join(after)}"]
    said = _ask([program, *options, str(script)], script).strip().splitlines()
    job = said[-1].partition(";")[0] if said else ""
    if not JOB_ID.fullmatch(job):
        raise LaunchError(
            f"{program} {script} returned {job!r}, which is not a job id",
            f"check with {LISTERS[scheduler]} whether the job exists",
        )
    return job


def run_here(script: Path) -> NoReturn:
    """Replaces this process with the script, including output, exit code and signals.

    Raises:
        LaunchError: there is no bash.
    """
    try:
        os.execvp("bash", ["bash", str(script)])
    except OSError as error:
        raise LaunchError(f"bash {script} cannot be started: {error.strerror}") from None


def write_submission(folder: Path, submission: Submission) -> None:
    """Writes job.toml to a run folder; the time defaults to now.

    Raises:
        MachineError: it cannot be written.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    record = submission.model_dump() | {"submitted": submission.submitted or now}
    path = folder / RECORD
    new = path.with_suffix(f".{os.getpid()}.new")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        new.write_text(tomli_w.dumps(record), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be written: {error.strerror}", "launch in a writable folder"
        ) from None


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


def end_command(submission: Submission) -> str:
    """Returns the command that cancels a job."""
    return f"{ENDERS[submission.scheduler]} {submission.job}"


def describe_submission(name: str, submission: Submission, log: Path) -> str:
    """Describes how to follow and stop a job."""
    nodes = format_number(submission.n_nodes, "node")
    lines = [f"job {submission.job} is submitted to {submission.cluster}, {nodes}"]
    lines += [f"    after {stage}: job {other}" for stage, other in submission.waits_for.items()]
    steps = {
        f"trainyard status {name}": "show its status",
        f"tail -F {log}": "follow its log",
        f"touch {log.parent / 'STOP'}": "save, stop, and do not requeue",
        end_command(submission): "end it",
    }
    width = max(map(len, steps))
    return "\n".join([*lines, *(f"    {step:<{width}}   {why}" for step, why in steps.items())])


def _ask(argv: Sequence[str], script: Path) -> str:
    program = argv[0]
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
        raise LaunchError(
            f"there is no {program} on this machine",
            f"launch on a login node of the cluster, or with --dry-run and submit {script} there",
        ) from None
    except OSError as error:
        raise LaunchError(f"{program} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{program} has not answered within {ANSWER_SECONDS:g} s",
            "the scheduler may be down; check whether the job exists before you try again",
        ) from None
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or "no reason given"
        raise LaunchError(
            f"{program} rejected {script}: {said}",
            "its options are at the top of that script: they come from the cluster file, "
            "--account, --partition, --time and --nodes",
        )
    return done.stdout
