"""PBS: OpenPBS and PBS Professional, with any mpiexec.

PBS differs from Slurm in these points:

    no signal before the time limit              the script passes the end time to training
    a job that waits for an array starts         it checks for the files of the earlier stage
    even if a task has failed
    -r y requeues a job only after a node        otherwise the script does: qrerun, or a new job if
    failure                                      that is not allowed
    it cannot exclude nodes                      bad_nodes is only for people to read
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from trainyard.config.cluster import Launch
from trainyard.errors import LaunchError
from trainyard.files import parse_json
from trainyard.jobs.hosts import mpiexec_launcher, mpiexec_settings
from trainyard.jobs.job import Job
from trainyard.jobs.scheduler import (
    ASK_SECONDS,
    FORGOTTEN,
    BatchScheduler,
    JobState,
    Phase,
    Settings,
    call,
    limits,
    options,
)
from trainyard.launch.environment import read_variables

STATES: dict[str, Phase] = {
    **dict.fromkeys("QHTW", "waiting"),
    **dict.fromkeys("RESBU", "running"),
    **dict.fromkeys("FX", "ended"),
}


class Pbs(BatchScheduler):
    """PBS."""

    parts = ("starts.sh", "mpiexec.sh", "batch.sh")
    shebang = "#!/bin/bash -l"
    """PBS starts scripts without the login environment, such as modules."""
    launcher = staticmethod(mpiexec_launcher)
    submitter, lister, ender = ("qsub",), "qstat", "qdel"
    allocator = "qsub -I -l select={nodes}"

    def describe(self, launch: Launch) -> str:
        """Returns `PBS, mpiexec of ..`."""
        return f"PBS, mpiexec of {launch.mpiexec}"

    def check(self, job: Job) -> None:
        """Rejects a path that a log cannot have."""
        if not re.fullmatch(r"[\w./+@=-]+", str(job.folder)):
            raise LaunchError(
                f"PBS cannot write its log below {job.folder}: the path has a space or a special "
                "character",
                "start in a folder whose path has only letters, digits and . _ - + @ =",
            )

    def directives(self, job: Job) -> list[str]:
        """Returns #PBS lines."""
        launch, given = job.cluster.launch, options(job)
        queue, time = limits(job)
        if not any(each.startswith("-l") and "select=" in each for each in given):
            chunk = f"1:ncpus={launch.prepare.workers}" if job.is_stage else f"{job.n_nodes}"
            given = [f"-l select={chunk}", *given]
        if not job.is_stage and not any("place=" in each for each in given):
            given.append("-l place=scatter")
        log = job.folder / "jobs" if job.is_stage else job.folder
        lines = [f"-N {job.name}", *given]
        lines += [f"-l walltime={time}"] if time else []
        lines += [f"-q {queue}"] if queue else []
        lines += [f"-A {launch.account}"] if launch.account else []
        lines += [f"-J 0-{job.n_nodes - 1}"] if job.is_stage and job.n_nodes > 1 else []
        return [f"#PBS {line}" for line in [*lines, "-j oe", f"-o {log}/", "-r y"]]

    def settings(self, job: Job) -> Settings:
        """Returns the variables of mpiexec.sh and batch.sh."""
        return mpiexec_settings(job) | {
            "job_variable": "PBS_JOBID",
            "hosts_variable": "PBS_NODEFILE",
            "limit_seconds": seconds_of(limits(job)[1]),
            "requeue": [["qrerun"]],
            "resubmit": [[*self.submitter, job.script_path]],
        }

    def after(self, jobs: Sequence[str]) -> list[str]:
        """Returns options of qsub."""
        return ["-W", f"depend=afterok:{':'.join(jobs)}"]

    def count_nodes_here(self) -> int:
        """Counts the hosts of PBS_NODEFILE, which may have several lines each."""
        path = read_variables(re.compile("PBS_NODEFILE")).get("PBS_NODEFILE")
        try:
            return len(set(Path(path).read_text(encoding="utf-8").split())) if path else 0
        except OSError:  # on another node than the first
            return 0

    def log(self, job: str) -> str:
        """Returns the name that PBS gives to a log."""
        return f"{job}.OU"

    def ask(self, job: str) -> JobState:
        """Asks qstat."""
        done = call([self.lister, "-x", "-f", "-F", "json", job], ASK_SECONDS)
        problem = " ".join(done.stderr.split())
        try:
            (facts,) = parse_json(done.stdout)["Jobs"].values()
            state, comment = str(facts["job_state"]), str(facts.get("comment", ""))
        except (ValueError, TypeError, KeyError, AttributeError):
            if "Unknown Job" in problem:
                return FORGOTTEN
            return JobState("unknown", problem or "qstat did not return JSON")
        text = " ".join(f"{state} {comment}".split())
        hosts = str(facts.get("exec_host", ""))
        nodes = ",".join(dict.fromkeys(part.partition("/")[0] for part in hosts.split("+") if part))
        return JobState(STATES.get(state, "unknown"), text, nodes)


def seconds_of(time: str) -> str:
    """Returns the seconds of HOURS:MINUTES:SECONDS; empty without a limit."""
    if not time:
        return ""
    hours, minutes, seconds = (int(part) for part in time.split(":"))
    return str(3600 * hours + 60 * minutes + seconds)
