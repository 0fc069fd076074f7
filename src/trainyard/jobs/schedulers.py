"""All schedulers, by the names that `scheduler` has in a cluster file.

    local, mpi, ssh    `Scheduler`: the script runs immediately, without a queue
    slurm, pbs         `BatchScheduler`: a queue

To the rest of the code each is one object that writes, submits, follows and cancels its jobs. A
further one is a class here, and its name in `config/cluster.py`; with a file of hosts and an
mpiexec it needs no bash of its own.

Slurm starts one task for each rank, or one torchrun on each node.

    before the time limit     Slurm sends SIGUSR1 only to the script; it asks the ranks to save,
                              and requeues the job
    a node fails              Slurm itself requeues the job (--requeue)
    a rank fails              the step ends, and the script requeues the job: three times, unless
                              checkpoints got newer
    scancel, preemption       SIGTERM also reaches the script: it leaves the job to Slurm

PBS (OpenPBS and PBS Professional, with any mpiexec) differs from Slurm in these points:

    no signal before the time limit              the script passes the end time to training
    a job that waits for an array starts         it checks for the files of the earlier stage
    even if a task has failed
    -r y requeues a job only after a node        otherwise the script does: qrerun, or a new job if
    failure                                      that is not allowed
    it cannot exclude nodes                      bad_nodes is only for people to read

There are three kinds of mpiexec:

    Open MPI    sets ranks in OMPI_COMM_WORLD_*; does not forward variables by itself
    MPICH       PMI_* and MPI_LOCALRANKID; also Intel MPI and others with Hydra
    PALS        PMI_* and PMI_LOCAL_RANK, on HPE Cray machines; the only one with our CPU binding

All end a job when a rank is killed; if a rank only fails, Hydra lets the others continue until
their own parents notice (`launch/supervise.py`). None of them notices a silent host.
"""

from __future__ import annotations

import logging
import re
import shlex
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainyard.config.cluster import CONTROL, Launch, cpu_mask
from trainyard.errors import LaunchError
from trainyard.files import parse_json
from trainyard.jobs.job import Job
from trainyard.launch.environment import first_host, read_variables

Phase = Literal["waiting", "running", "ended", "unknown"]
SUBMIT_SECONDS, ASK_SECONDS = 45.0, 20.0
JOB_ID = re.compile(r"(?:^|\n)([A-Za-z0-9_.\[\]-]+)(?:;[^\n]*)?$")
"""The id in what the submitter prints."""
WARNING_SECONDS = 180
"""Before the time limit; Slurm checks every 30 s."""
# Each is as wide as the longest value plus one space.
SQUEUE_WIDTHS = {"State": 32, "Reason": 96, "StartTime": 32, "NodeList": 4000}
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
RUNNING = ("RUNNING", "COMPLETING", "CONFIGURING", "SUSPENDED", "SIGNALING", "STAGE_OUT")
PBS_STATES: dict[str, Phase] = {
    **dict.fromkeys("QHTW", "waiting"),
    **dict.fromkeys("RESBU", "running"),
    **dict.fromkeys("FX", "ended"),
}
MPIEXECS = {
    "openmpi": ("mpiexec.openmpi", "mpiexec"),
    "mpich": ("mpiexec.hydra", "mpiexec"),
    "pals": ("mpiexec",),
}
LOCAL_RANKS = {
    "openmpi": "OMPI_COMM_WORLD_LOCAL_RANK",
    "mpich": "MPI_LOCALRANKID",
    "pals": "PMI_LOCAL_RANK",
}

logger = logging.getLogger("trainyard")

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


def _bind_tasks(launch: Launch, n_ranks: int) -> list[str]:
    """Options of srun that bind the ranks of a node."""
    masks = ",".join(cpu_mask(cpus) for cpus in launch.cpu_lists[:n_ranks])
    return [f"--cpu-bind=mask_cpu:{masks}"] if masks else []


def _pyxis_options(job: Job) -> list[str]:
    """Options of pyxis; none without it."""
    container, scratch = job.launch.container, job.launch.scratch
    if container.runtime != "pyxis":
        return []
    mounts = [f"{job.project}:{job.project}", f"{scratch}:{scratch}", *container.mounts]
    names = ",".join(container.environment)
    return [
        f"--container-image={job.image}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={job.project}",
        *split(container.options),
        *([f"--container-env={names}"] if names else []),
    ]


def _bind_pals(launch: Launch, n_ranks: int) -> list[str]:
    """Options of PALS's mpiexec that bind the ranks of a node; the others have none."""
    lists = ":".join(launch.cpu_lists[:n_ranks])
    return ["--cpu-bind", f"list:{lists}"] if lists and launch.mpiexec == "pals" else []


def _mpiexec_settings(job: Job) -> Settings:
    """The variables of mpiexec.sh."""
    launch = job.launch
    binding = _bind_pals(launch, job.n_ranks_per_node)
    if job.n_array_tasks and launch.mpiexec == "pals":
        binding = ["--cpu-bind", "none"]  # its process starts all ranks of the node
    has_taskset = launch.cpu_lists and not binding
    return {
        "local_rank": LOCAL_RANKS[launch.mpiexec],
        "cpus_of_rank": [launch.cpu_lists] if has_taskset else [],
        "mpi": launch.mpiexec,
        "mpiexecs": [MPIEXECS[launch.mpiexec]],
        "mpiexec_options": [],
        "binding": [binding] if binding else [],
    }


def _mpiexec_launcher(launch: Launch, n_nodes: int, n_ranks: int) -> str:
    """An mpiexec and its options, as `Scheduler.launcher`; exports a rendezvous."""
    words = ["-ppn", str(n_ranks), *_bind_pals(launch, n_ranks)]
    if launch.mpiexec == "openmpi":
        words = ["--map-by", f"ppr:{n_ranks}:node", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
    command = quote("mpiexec", "-n", n_nodes * n_ranks, *words)
    return f"export MASTER_ADDR=$(hostname) MASTER_PORT=29500; {command}"


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
        """Rejects a path that a log cannot have; warns of a job without GPUs."""
        asks = any(word in option for option in job.options for word in ("gpu", "gres", "tres"))
        if not job.is_stage and "cpu" not in job.cluster.gpu and not asks:
            logger.warning(
                "no option asks Slurm for GPUs: launch.options replaces the defaults, so it needs "
                "--gpus-per-node={ranks} or --gres too, unless nodes come with all their GPUs"
            )
        if "\\" in str(job.folder):
            raise LaunchError(
                f"Slurm cannot write its log below {job.folder}: the path has a backslash",
                "start in a folder without one",
            )

    def directives(self, job: Job) -> list[str]:
        """Returns #SBATCH lines."""
        launch = job.launch
        given: dict[str, object] = {"job-name": job.name}
        # A % of the path is not one of sbatch's.
        log = str(job.folder).replace("%", "%%")
        if job.is_stage:
            is_array = job.n_nodes > 1
            log += f"/jobs/{job.name}-{'%A_%a' if is_array else '%j'}.log"
            given |= {"array": f"0-{job.n_nodes - 1}"} if is_array else {}
            given |= {"nodes": 1, "ntasks-per-node": 1}
            if not any(option.startswith(("-c", "--cpus-per-task")) for option in launch.options):
                given |= {"cpus-per-task": launch.prepare.workers}
        else:
            log += f"/{self.log('%A_%a' if job.n_array_tasks else '%j')}"
            given |= {"array": f"0-{job.n_array_tasks - 1}"} if job.n_array_tasks else {}
            given |= {"nodes": job.n_nodes, "ntasks-per-node": job.n_tasks_per_node}
        given |= {"account": launch.account, "partition": launch.partition, "time": launch.time}
        given["output"] = log
        lines = [quote(f"--{name}={value}") for name, value in given.items() if value != ""]
        lines += [*job.options, "--requeue", "--open-mode=append"]
        lines += [] if job.is_stage else [f"--signal=B:USR1@{WARNING_SECONDS}"]
        return [f"#SBATCH {line}" for line in lines]

    def settings(self, job: Job) -> Settings:
        """Returns the options of srun."""
        binding = _bind_tasks(job.launch, job.n_ranks_per_node)
        return {
            "local_rank": "SLURM_LOCALID",
            "is_torchrun": "yes" if job.has_torchrun else "",
            "step_options": [[word] for word in [*_pyxis_options(job), *binding]],
        }

    def launcher(self, launch: Launch, n_nodes: int, n_ranks: int) -> str:
        """Returns srun and its options."""
        sizes = [f"--nodes={n_nodes}", f"--ntasks-per-node={n_ranks}"]
        return quote("srun", *sizes, *_bind_tasks(launch, n_ranks))

    def after(self, jobs: Sequence[str]) -> list[str]:
        """Returns options of sbatch."""
        return [f"--dependency=afterok:{':'.join(jobs)}", "--kill-on-invalid-dep=yes"]

    def count_nodes_here(self) -> int:
        """Reads Slurm's variables."""
        variables = read_variables(re.compile("SLURM_JOB_ID|SLURM_JOB_NUM_NODES"))
        return int(variables.get("SLURM_JOB_NUM_NODES", "1")) if "SLURM_JOB_ID" in variables else 0

    def log(self, job: str) -> str:
        """Returns the name of `--output`."""
        return f"job-{job}.log"

    def ask(self, job: str) -> JobState:
        """Asks squeue."""
        columns = ",".join(f"{name}:{width}" for name, width in SQUEUE_WIDTHS.items())
        argv = [self.lister, "--noheader", "--states=all", f"--jobs={job}", f"--Format={columns}"]
        done = call(argv, ASK_SECONDS)
        rows, problem = done.stdout.splitlines(), " ".join(done.stderr.split())
        if not rows:
            # Slurm forgets a job some minutes after its end.
            is_gone = not problem or "Invalid job id" in problem
            return FORGOTTEN if is_gone else JobState("unknown", problem)
        # The tasks of an array: one that runs says more than one that waits, or has ended.
        order = ("running", "waiting", "ended")
        return min(map(self._read_row, rows), key=lambda state: order.index(state.phase))

    def _read_row(self, row: str) -> JobState:
        values = []
        for width in SQUEUE_WIDTHS.values():
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


class Pbs(BatchScheduler):
    """PBS."""

    title = "PBS, mpiexec of {mpiexec}"
    parts = ("starts.sh", "mpiexec.sh", "batch.sh")
    shebang = "#!/bin/bash -l"
    """PBS starts scripts without the login environment, such as modules."""
    launcher = staticmethod(_mpiexec_launcher)
    submitter, lister, ender = ("qsub",), "qstat", "qdel"
    allocator = "qsub -I -l select={nodes}"

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
        launch, given = job.launch, job.options
        if not any(option.startswith("-l") and "select=" in option for option in given):
            chunk = f"1:ncpus={launch.prepare.workers}" if job.is_stage else f"{job.n_nodes}"
            given = [f"-l select={chunk}", *given]
        if not job.is_stage and not any("place=" in option for option in given):
            given.append("-l place=scatter")
        log = job.folder / "jobs" if job.is_stage else job.folder
        lines = [f"-N {job.name}", *given]
        lines += [f"-l walltime={launch.time}"] if launch.time else []
        lines += [f"-q {launch.partition}"] if launch.partition else []
        lines += [f"-A {launch.account}"] if launch.account else []
        n_tasks = job.n_nodes if job.is_stage else job.n_array_tasks
        lines += [f"-J 0-{n_tasks - 1}"] if n_tasks > 1 else []
        return [f"#PBS {line}" for line in [*lines, "-j oe", f"-o {log}/", "-r y"]]

    def settings(self, job: Job) -> Settings:
        """Returns the variables of mpiexec.sh and batch.sh."""
        hours, minutes, seconds = (int(part) for part in (job.launch.time or "0:0:0").split(":"))
        is_array = job.n_array_tasks > 1
        return _mpiexec_settings(job) | {
            "job_variable": "PBS_JOBID",
            "hosts_variable": "PBS_NODEFILE",
            "limit_seconds": 3600 * hours + 60 * minutes + seconds or "",
            "requeue": [["qrerun"]],
            # A task of an array cannot be submitted alone.
            "resubmit": [["false"] if is_array else [*self.submitter, job.script_path]],
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
        return JobState(PBS_STATES.get(state, "unknown"), text, nodes)


class LocalScheduler(Scheduler):
    """This machine alone; Trainyard itself starts the ranks."""

    title = "this machine"
    parts = ("local.sh",)

    def check(self, job: Job) -> None:
        """Rejects a second node."""
        if job.n_nodes > 1:
            raise LaunchError(
                f"{job.n_nodes} nodes, but this cluster is only this machine",
                "--nodes 1, or a cluster with a scheduler or hosts (trainyard show cluster ssh)",
            )

    def settings(self, job: Job) -> Settings:
        """Returns none."""
        return {"device_variable": ""}


class SshHosts(Scheduler):
    """Hosts of the cluster file or the command line, by ssh: the script itself runs on each."""

    title = "ssh"
    parts = ("starts.sh", "ssh.sh", "hosts.sh")

    def programs(self, launch: Launch) -> Sequence[str]:
        """Returns ssh."""
        return ("ssh",)

    def check(self, job: Job) -> None:
        """Rejects hosts that are too few, or named twice."""
        hosts = job.launch.hosts
        if len(set(hosts)) < len(hosts):
            twice = next(host for host in hosts if hosts.count(host) > 1)
            raise LaunchError(f"hosts names {twice} twice", "name each host once")
        if len(hosts) < job.n_nodes:
            raise LaunchError(
                f"hosts has {len(hosts)}, but --nodes is {job.n_nodes}",
                'list them in a cluster file: [launch] hosts = ["n1", "n2"]; or --hosts n1,n2',
            )

    def settings(self, job: Job) -> Settings:
        """Returns the variables of ssh.sh and hosts.sh."""
        launch, own = job.launch, split(job.options)
        return {
            "local_rank": "LOCAL_RANK",
            "cpus_of_rank": [launch.cpu_lists] if launch.cpu_lists else [],
            "script": job.script_path,
            "ssh_options": [own] if own else [],
            "all_hosts": [launch.hosts],
        }


class MpiHosts(SshHosts):
    """Such hosts, with an mpiexec."""

    title = "mpiexec of {mpiexec}"
    parts = ("starts.sh", "mpiexec.sh", "hosts.sh")
    launcher = staticmethod(_mpiexec_launcher)

    def programs(self, launch: Launch) -> Sequence[str]:
        """Returns the names that its mpiexec may have."""
        return MPIEXECS[launch.mpiexec]

    def settings(self, job: Job) -> Settings:
        """Returns the variables of mpiexec.sh and hosts.sh."""
        own = split(job.options)
        return _mpiexec_settings(job) | {
            "mpiexec_options": [own] if own else [],
            "all_hosts": [job.launch.hosts],
        }


SCHEDULERS: dict[str, Scheduler] = {
    "local": LocalScheduler(),
    "slurm": Slurm(),
    "pbs": Pbs(),
    "mpi": MpiHosts(),
    "ssh": SshHosts(),
}
