"""What a scheduler is to the rest: one object that writes, submits, follows and cancels its jobs.

    local, mpi, ssh    `Scheduler`: the script runs immediately, without a queue
    slurm, pbs         `BatchScheduler`: a queue

A further one is a class in `schedulers.py`, and its name in `config/cluster.py`. One that lists its
hosts in a file and has an mpiexec needs no bash of its own.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainyard.config.cluster import CONTROL, Launch
from trainyard.errors import LaunchError
from trainyard.jobs.job import Job

SUBMIT_SECONDS, ASK_SECONDS = 45.0, 20.0
JOB_ID = re.compile(r"(?:^|\n)([A-Za-z0-9_.\[\]-]+)(?:;[^\n]*)?$")
"""The id in what the submitter prints."""

Phase = Literal["waiting", "running", "ended", "unknown"]
Settings = dict[str, object]
"""Variables of a script's header: a word, or the lines of an array, each a list of words."""


@dataclass(frozen=True)
class JobState:
    """The state of a job in its scheduler."""

    phase: Phase
    text: str
    """In the scheduler's words."""
    nodes: str = ""
    """Its nodes, in the scheduler's list format."""


FORGOTTEN = JobState("ended", "the scheduler no longer knows it")


class Scheduler(ABC):
    """A way to start jobs."""

    title: str
    """Its name and what starts the ranks, with {mpiexec} for that of the cluster."""
    submitter: tuple[str, ...] = ("bash",)
    """The command that starts or submits a script."""
    parts: tuple[str, ...]
    """Files of `lib` that its scripts contain after rank.sh."""
    shebang = "#!/bin/bash"
    has_steps = False
    """Whether it starts one program per node (torchrun), in containers of its own (pyxis)."""

    def describe(self, launch: Launch) -> str:
        """Returns its name and what starts the ranks, such as `PBS, mpiexec of mpich`."""
        return self.title.format(mpiexec=launch.mpiexec)

    def programs(self, launch: Launch) -> Sequence[str]:
        """Returns the programs that can start a job; this machine must have one of them."""
        return self.submitter[:1]

    def check(self, job: Job) -> None:  # noqa: B027  not all reject something
        """Rejects a job that this scheduler cannot run.

        Raises:
            LaunchError: says why.
        """

    def launcher(self, launch: Launch, n_nodes: int, n_ranks: int) -> str:
        """Returns shell code that, before a command, starts it once per rank inside a job."""
        words = [f"--nnodes={n_nodes}", f"--nproc-per-node={n_ranks}", "--rdzv-backend=c10d"]
        return quote("torchrun", *words, "--rdzv-endpoint=FIRST:29500", "--no-python")

    def directives(self, job: Job) -> list[str]:
        """Returns the scheduler's options, as comments at the top of a script."""
        return []

    @abstractmethod
    def settings(self, job: Job) -> Settings:
        """Returns the variables of the header that `parts` read, besides those of all scripts."""


class BatchScheduler(Scheduler):
    """A scheduler with a queue."""

    lister: str
    ender: str
    allocator: str
    """The command that starts a shell in an allocation."""

    @abstractmethod
    def after(self, jobs: Sequence[str]) -> list[str]:
        """Returns the options with which a job waits for others, which must succeed."""

    @abstractmethod
    def count_nodes_here(self) -> int:
        """Returns the nodes of the allocation that this process is in; 0 outside."""

    @abstractmethod
    def log(self, job: str) -> str:
        """Returns the name of a job's log in the run folder."""

    @abstractmethod
    def ask(self, job: str) -> JobState:
        """Asks for a job's state.

        Raises:
            LaunchError: the scheduler does not answer.
        """

    def submit(self, script: Path, after: Sequence[str] = ()) -> str:
        """Submits a script; returns the job id.

        Args:
            script: with the scheduler's options in its header.
            after: ids of jobs that must succeed before it starts; if one fails, it never does.

        Raises:
            LaunchError: the scheduler is not here, does not answer, or refuses the job.
        """
        program, *words = self.submitter
        words += self.after(after) if after else []
        done = call([program, *words, str(script)], SUBMIT_SECONDS)
        if done.returncode != 0:
            reason = " ".join((done.stderr or done.stdout).split()) or "no reason given"
            raise LaunchError(
                f"{program} rejected {script}: {reason}",
                "its options are at the top of that script: they come from the cluster file, "
                "--account, --partition, --time and --nodes",
            )
        match = JOB_ID.search(done.stdout.strip())
        if not match:
            raise LaunchError(
                f"{program} {script} returned {done.stdout.strip()!r}, which is not a job id",
                f"check with {self.lister} whether the job exists",
            )
        return match[1]


def call(argv: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a program of a scheduler.

    Raises:
        LaunchError: it is not here, or does not answer in time.
    """
    try:
        return subprocess.run(
            argv, input="", capture_output=True, text=True, errors="replace", timeout=seconds
        )
    except FileNotFoundError:
        raise LaunchError(
            f"there is no {argv[0]} on this machine",
            "launch on a login node of the cluster, or with --dry-run and submit the script there",
        ) from None
    except OSError as error:
        raise LaunchError(f"{argv[0]} cannot be started: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"{argv[0]} has not answered within {seconds:g} s",
            "the scheduler may be down; check whether the job exists before you try again",
        ) from None


def quote(*words: object) -> str:
    """Quotes words for a shell.

    Raises:
        LaunchError: a word has a control character.
    """
    texts = [str(word) for word in words]
    for text in texts:
        if re.search(CONTROL, text):
            raise LaunchError(
                f"{text!r} has a control character, and would be a word of a job script",
                "rename the file or folder, or start in another one",
            )
    return shlex.join(texts)


def split(lines: Sequence[str]) -> list[str]:
    """Returns the words of options that may have several each."""
    return [word for line in lines for word in shlex.split(line)]
