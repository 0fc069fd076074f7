"""Slurm: one task for each rank, or one torchrun on each node.

before the time limit     Slurm sends SIGUSR1 only to the script; it asks the ranks to save,
                          and requeues the job
a node fails              Slurm itself requeues the job (--requeue)
a rank fails              the step ends, and the script requeues the job: three times, unless
                          checkpoints got newer
scancel, preemption       SIGTERM also reaches the script: it leaves the job to Slurm
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainyard.config.cluster import Launch, cpu_mask
from trainyard.errors import LaunchError
from trainyard.jobs.job import Job
from trainyard.jobs.scheduler import (
    ASK_SECONDS,
    FORGOTTEN,
    BatchScheduler,
    JobState,
    Settings,
    call,
    limits,
    options,
    quote,
    split,
)
from trainyard.launch.environment import first_host, read_variables

WARNING_SECONDS = 180
"""Before the time limit; Slurm checks every 30 s."""
# Each is as wide as the longest value plus one space.
SQUEUE_FORMAT = "State:32,Reason:96,StartTime:32,NodeList:4000"
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "SIGNALING", "STAGE_OUT")


class Slurm(BatchScheduler):
    """Slurm."""

    parts = ("starts.sh", "slurm.sh")
    has_steps = True
    submitter, lister, ender = ("sbatch", "--parsable"), "squeue", "scancel"
    allocator = "salloc --nodes={nodes}"

    def describe(self, launch: Launch) -> str:
        """Returns `Slurm, srun`, or with torchrun."""
        return f"Slurm, {'one torchrun a node' if launch.start == 'torchrun' else 'srun'}"

    def check(self, job: Job) -> None:
        """Rejects a path that a log cannot have."""
        if "\\" in str(job.folder):
            raise LaunchError(
                f"Slurm cannot write its log below {job.folder}: the path has a backslash",
                "start in a folder without one",
            )

    def directives(self, job: Job) -> list[str]:
        """Returns #SBATCH lines."""
        partition, time = limits(job)
        given: dict[str, object] = {"job-name": job.name}
        # A % of the path is not one of sbatch's.
        log = str(job.folder).replace("%", "%%")
        if job.is_stage:
            is_array = job.n_nodes > 1
            log += f"/jobs/{job.name}-{'%A_%a' if is_array else '%j'}.log"
            given |= {"array": f"0-{job.n_nodes - 1}"} if is_array else {}
            given |= {"nodes": 1, "ntasks-per-node": 1}
            prepare = job.cluster.launch.prepare
            if not any(each.startswith(("-c", "--cpus-per-task")) for each in prepare.options):
                given |= {"cpus-per-task": prepare.workers}
        else:
            log += f"/{self.log('%j')}"
            given |= {"nodes": job.n_nodes, "ntasks-per-node": job.n_tasks_per_node}
        account = job.cluster.launch.account
        given |= {"account": account, "partition": partition, "time": time, "output": log}
        lines = [quote(f"--{name}={value}") for name, value in given.items() if value != ""]
        lines += [*options(job), "--requeue", "--open-mode=append"]
        lines += [] if job.is_stage else [f"--signal=B:USR1@{WARNING_SECONDS}"]
        return [f"#SBATCH {line}" for line in lines]

    def settings(self, job: Job) -> Settings:
        """Returns the options of srun."""
        binding = [] if job.is_stage else _bind(job.cluster.launch, job.n_ranks_per_node)
        return {
            "local_rank": "SLURM_LOCALID",
            "is_torchrun": "yes" if job.has_torchrun else "",
            "step_options": [*_pyxis(job), *([word] for word in binding)],
        }

    def launcher(self, launch: Launch, n_nodes: int, n_ranks: int) -> str:
        """Returns srun and its options."""
        sizes = [f"--nodes={n_nodes}", f"--ntasks-per-node={n_ranks}"]
        return quote("srun", *sizes, *_bind(launch, n_ranks))

    def after(self, jobs: Sequence[str]) -> list[str]:
        """Returns options of sbatch."""
        return [f"--dependency=afterok:{':'.join(jobs)}", "--kill-on-invalid-dep=yes"]

    def count_nodes_here(self) -> int:
        """Reads Slurm's variables."""
        said = read_variables(re.compile("SLURM_JOB_ID|SLURM_JOB_NUM_NODES"))
        return int(said.get("SLURM_JOB_NUM_NODES", "1")) if "SLURM_JOB_ID" in said else 0

    def log(self, job: str) -> str:
        """Returns the name of `--output`."""
        return f"job-{job}.log"

    def ask(self, job: str) -> JobState:
        """Asks squeue."""
        argv = [self.lister, "--noheader", "--states=all", f"--jobs={job}"]
        done = call([*argv, f"--Format={SQUEUE_FORMAT}"], ASK_SECONDS)
        row, problem = done.stdout.partition("\n")[0], " ".join(done.stderr.split())
        if not row.strip():
            # Slurm forgets a job some minutes after its end.
            is_gone = not problem or "Invalid job id" in problem
            return FORGOTTEN if is_gone else JobState("unknown", problem)
        values = []
        for column in SQUEUE_FORMAT.split(","):
            width = int(column.partition(":")[2])
            values.append(row[:width].strip())
            row = row[width:]
        state, reason, starts_at, nodes = values
        if state in WAITING:
            text = state if reason in ("", "None") else f"{state} ({reason})"
            text += "" if starts_at in ("", "N/A") else f", expected to start at {starts_at}"
            return JobState("waiting", text)
        if reason == "JobLaunchFailure" and nodes:  # no line of the script ran: there is no log
            why = f"{first_host(nodes)} cannot start the script, or cannot write its log beside it"
            return JobState("ended", f"{state} ({reason}: {why})", nodes)
        return JobState("running" if state in RUNNING else "ended", state, nodes)


def _bind(launch: Launch, n_ranks: int) -> list[str]:
    """Options of srun that bind the ranks of a node."""
    masks = ",".join(cpu_mask(cpus) for cpus in launch.cpu_lists[:n_ranks])
    return [f"--cpu-bind=mask_cpu:{masks}"] if masks else []


def _pyxis(job: Job) -> list[Sequence[object]]:
    """Options of pyxis; none without it."""
    container, scratch = job.container, job.cluster.launch.scratch
    if container.runtime != "pyxis":
        return []
    mounts = [f"{job.project}:{job.project}", f"{scratch}:{scratch}", *container.mounts]
    rows: list[Sequence[object]] = [
        [f"--container-image={job.image}"],
        [f"--container-mounts={','.join(mounts)}"],
        [f"--container-workdir={job.project}"],
        *([word] for word in split(container.options)),
    ]
    if container.environment:
        rows.append([f"--container-env={','.join(container.environment)}"])
    return rows
