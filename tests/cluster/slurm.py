"""A real Slurm for tests, on machines of `machines.py`: controller on `login`, slurmd on the nodes.

    with Machines(folder, n_nodes=2) as machines:
        slurm = Slurm(machines)
        slurm.start()
        job = slurm.submit("#!/bin/sh\\necho task $SLURM_ARRAY_TASK_ID", "--array=1-2")
        slurm.wait(job)       # {1: ("COMPLETED", 0), 2: ("COMPLETED", 0)}
        slurm.output(job, 2)  # "task 2\\n"

`/etc/slurm` plays no part: everything on the machines finds this Slurm by `SLURM_CONF`.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from tests.waiting import WATCHDOG_SECONDS

from .machines import LOGIN, Machines

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
N_CPUS = 4
GPUS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")
"""Any devices will do."""
POLL_SECONDS = 0.05
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}

CONFIGURATION = """\
ClusterName=test
SlurmctldHost=login({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits until its old credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
# Nodes have the CPUs written here, not those of the machine.
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
# So long a node may be silent until its jobs are started elsewhere.
SlurmdTimeout=15
KillWait=2
ReturnToService=2
# Ended jobs stay visible to `scontrol show job`.
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# Whom a job of "urgent" pushes aside gets the signal of its --signal first, and GraceTime.
SlurmctldParameters=preempt_send_user_signal
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


class Slurm:
    """A Slurm cluster on machines of its own; nothing is left of it once those have ended.

    Args:
        machines: booted; their folder must have a short path (a socket lies in it).
    """

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.folder = machines.folder
        self.nodes = machines.nodes
        machines.environment["SLURM_CONF"] = str(self.folder / "slurm.conf")

    def start(self) -> None:
        """Starts all daemons and returns when every node takes jobs."""
        (self.folder / "state").mkdir()
        (self.folder / "jobs").mkdir()
        self._write_configuration()
        socket_path = self.folder / "munge.socket"
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        self.machines.start_daemon(LOGIN, ["munged", "--foreground", "--force", *options])
        self.wait_until("munged listens", socket_path.exists)
        self.machines.start_daemon(LOGIN, ["slurmctld", "-D"])
        for node in self.nodes:
            self._start_slurmd(node)
        self.wait_until("all nodes are idle", self._are_all_idle)

    def boot(self, node: str) -> None:
        """Starts a node again that was killed; returns when it takes jobs."""
        self.machines.boot(node)
        self._start_slurmd(node)
        self.wait_until(f"{node} is idle", lambda: self.state_of(node) == "idle")

    def run(self, argv: list[str], stdin: str = "") -> str:
        """Runs a command of Slurm (or one that calls them) in the jobs' folder; gives its stdout.

        Raises:
            AssertionError: the command failed; carries its stderr.
        """
        done = self.machines.run(argv, folder=self.folder / "jobs", stdin=stdin)
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Submits the text of a batch script and gives the job's id.

        Args:
            options: of sbatch, such as `--array=0-4`; they override the `#SBATCH` lines.
        """
        return int(self.run(["sbatch", "--parsable", *options], stdin=script))

    def wait(self, job: int) -> dict[int, tuple[str, int]]:
        """Waits until every task of a job has ended; gives each one's state and exit code.

        Returns:
            By array index (0 for a job that is no array): such as `("FAILED", 3)`; the code is
            negative where a signal ended the task, as in `subprocess`.

        Raises:
            TimeoutError: carries the job as Slurm shows it, and the ends of the daemons' logs.
        """
        deadline = time.monotonic() + WATCHDOG_SECONDS
        while True:
            tasks = self.tasks(job)
            if all(state in ENDED for state, _ in tasks.values()):
                return tasks
            if time.monotonic() > deadline:
                shown = self.run(["scontrol", "show", "job", str(job)])
                logs = self.machines.log_ends()
                raise TimeoutError(f"job {job} has not ended: {tasks}\n{shown}\n{logs}")
            time.sleep(POLL_SECONDS)

    def tasks(self, job: int) -> dict[int, tuple[str, int]]:
        """The state and exit code of each task of a job as of now, as `wait` gives them."""
        columns = "--Format=ArrayTaskID:30,State:30,exit_code:30"
        argv = ["squeue", "--array", "--states=all", "--noheader", f"--jobs={job}", columns]
        rows = [line.split() for line in self.run(argv).splitlines() if line]
        return {
            0 if index == "N/A" else int(index): (state, os.waitstatus_to_exitcode(int(status)))
            for index, state, status in rows
        }

    def output(self, job: int, index: int | None = None) -> str:
        """What a job, or the task of an array with that index, wrote to its output file so far."""
        task = str(job) if index is None else f"{job}_{index}"
        return Path(self.show(task)["StdOut"]).read_text()

    def show(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` says, by field."""
        shown = self.run(["scontrol", "show", "job", "--oneliner", str(job)])
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def state_of(self, node: str) -> str:
        """Such as `idle`, `alloc` or `down*`."""
        return self.run(["sinfo", "--noheader", f"--nodes={node}", "--format=%t", "-pmain"]).strip()

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits until a condition holds, as `Machines.wait_until` does."""
        self.machines.wait_until(what, holds)

    def _write_configuration(self) -> None:
        address = self.machines.address(LOGIN)
        text = CONFIGURATION.format(folder=self.folder, address=address)
        for node in self.nodes:
            text += f"NodeName={node} NodeAddr={self.machines.address(node)}"
            text += f" CPUs={N_CPUS} Gres=gpu:{len(GPUS)} State=UNKNOWN\n"
            (self.folder / f"spool.{node}").mkdir()
        (self.folder / "slurm.conf").write_text(text)
        # proctrack/linuxproc touches no control group, yet 22.05 wants a plug-in for them named.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        gpus = "".join(f"Name=gpu File={path}\n" for path in GPUS)
        (self.folder / "gres.conf").write_text(gpus)
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))

    def _start_slurmd(self, node: str) -> None:
        self.machines.start_daemon(node, ["slurmd", "-D", "-N", node])

    def _are_all_idle(self) -> bool:
        answer = self.machines.run(["sinfo", "-h", "-pmain", "--states=idle", "--format=%D"])
        return answer.stdout.strip() == str(len(self.nodes))
