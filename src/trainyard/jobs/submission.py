"""The record of a submitted job in its run folder, so that `trainyard status` can ask for it.

runs/NAME/job.toml:

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
import signal
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

import tomli_w
from pydantic import Field

from trainyard.config.load import parse_toml
from trainyard.config.section import Section
from trainyard.errors import ConfigError, LaunchError, explain_failure
from trainyard.files import read_file
from trainyard.jobs.scheduler import BatchScheduler
from trainyard.jobs.schedulers import SCHEDULERS
from trainyard.launch.local import POLL_SECONDS, signal_name
from trainyard.launch.signals import note_signals
from trainyard.units import format_number

RECORD = "job.toml"


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


def run_here(script: Path, *arguments: str) -> NoReturn:
    """Replaces this process with the script, including output, exit code and signals.

    Raises:
        LaunchError: bash is not installed.
    """
    with explain_failure(f"bash {script} cannot be started", kind=LaunchError):
        os.execvp("bash", ["bash", str(script), *arguments])


def run_stage(stage: str, script: Path, *arguments: str) -> None:
    """Runs the script of a data stage to its end; forwards SIGINT, SIGTERM and SIGHUP to it.

    Raises:
        LaunchError: bash is not installed, or the stage failed and has printed why.
    """
    with note_signals((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as received:
        with explain_failure(f"bash {script} cannot be started", kind=LaunchError):
            # In its own process group Ctrl-C on a terminal does not reach it twice.
            running = subprocess.Popen(
                ["bash", str(script), *arguments], stdin=subprocess.DEVNULL, process_group=0
            )
        n_sent = 0
        while running.poll() is None:
            for number in received[n_sent:]:
                os.killpg(running.pid, number)
                n_sent += 1
            time.sleep(POLL_SECONDS)
    code = running.returncode
    if code != 0 or received:
        end = f"exit code {code}" if code >= 0 else signal_name(-code)
        raise LaunchError(
            f"{stage} ended with {end}: later stages are not started",
            "see its message above; after a fix, launch again: finished work is skipped",
        )


def write_submission(folder: Path, submission: Submission) -> None:
    """Writes job.toml to a run folder; the time defaults to now.

    Raises:
        MachineError: it cannot be written.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    record = submission.model_dump() | {"submitted": submission.submitted or now}
    path = folder / RECORD
    new = path.with_suffix(f".{os.getpid()}.new")
    with explain_failure(f"{path} cannot be written", "launch in a writable folder"):
        folder.mkdir(parents=True, exist_ok=True)
        new.write_text(tomli_w.dumps(record), encoding="utf-8")
        new.replace(path)


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
