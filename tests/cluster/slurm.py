"""A real Slurm for tests: its controller and a few "nodes" as processes of this machine.

Everything lives in one temporary folder and everything it starts carries that folder's `SLURM_CONF`
in its environment: commands find this Slurm by it, and `stop` finds what is left to end by it, jobs
included. `/etc/slurm` plays no part, so several Slurms can run side by side.

    with Slurm(folder, n_nodes=2) as slurm:
        job = slurm.submit("#!/bin/sh\\necho task $SLURM_ARRAY_TASK_ID", "--array=1-2")
        slurm.wait(job)       # {1: ("COMPLETED", 0), 2: ("COMPLETED", 0)}
        slurm.output(job, 2)  # "task 2\\n"

Where the machine lets us unshare namespaces (CAP_SYS_ADMIN), each node has a host name of its own,
`n1`, `n2`, ..., which every node resolves to 127.0.0.1: tasks of a job meet by name, as on a
cluster. Elsewhere (a plain container) all nodes share the name and the address of the machine.
Either way they share one file system, one process table, one network and the machine's true CPUs.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
N_CPUS = 4
WAIT_SECONDS = 20.0
POLL_SECONDS = 0.05

# Runs a program as host $1 whose /etc/hosts is $2, seen by that program and its children alone.
AS_HOST = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={controller}({address})
SlurmctldPort={port}
# Two Slurms of one machine give different job ids, so ports derived from them differ as well.
FirstJobId={port}
SlurmUser=root
SlurmdUser=root
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
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
# Nodes have the CPUs written here, not those of the machine.
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=1
SlurmdTimeout=15
MessageTimeout=5
KillWait=2
ReturnToService=2
# Ended jobs stay visible to `scontrol show job`.
MinJobAge=3600
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """Runs a Slurm cluster from `with` to the end of its block; needs root.

    Args:
        folder: an empty folder for all of its files; its path must be short (a socket lies in it).
        n_nodes: nodes `n1`, `n2`, ..., of `N_CPUS` CPUs each.
    """

    def __init__(self, folder: Path, n_nodes: int = 2) -> None:
        self.folder = folder
        self.nodes = [f"n{i}" for i in range(1, n_nodes + 1)]
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH"))}
        self.environment = inherited | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._own_hosts = _can_have_hosts()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all daemons and returns when every node takes jobs."""
        (self.folder / "state").mkdir()
        (self.folder / "jobs").mkdir()
        self._write_configuration()
        socket_path = self.folder / "munge.socket"
        files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "seed-file": "seed"}
        options = [f"--{name}={self.folder}/munge.{end}" for name, end in files.items()]
        self._start_daemon("munged", "--foreground", "--force", *options)
        self.wait_until("munged listens", socket_path.exists)
        self._start_daemon("slurmctld", "-D", host="localhost")
        for node in self.nodes:
            self._start_daemon("slurmd", "-D", "-N", node, host=node)
        self.wait_until("all nodes are idle", self._are_all_idle)

    def stop(self) -> None:
        """Ends the daemons and every process of every job, at once."""
        marker = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        # A process may start another between our look and our signal: look until there is none.
        while found := [pid for pid in _process_ids() if marker in _environment_of(pid)]:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for daemon in self._daemons:
            daemon.wait()

    def run(self, argv: list[str], stdin: str = "") -> str:
        """Runs a command of Slurm (or one that calls them) in the jobs' folder; gives its stdout.

        Raises:
            AssertionError: the command failed; carries its stderr.
        """
        done = subprocess.run(
            argv,
            input=stdin,
            capture_output=True,
            text=True,
            env=self.environment,
            cwd=self.folder / "jobs",
            timeout=60,
        )
        assert done.returncode == 0, f"{argv} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str) -> int:
        """Submits the text of a batch script and gives the job's id.

        Args:
            options: of sbatch, such as `--array=0-4`; they override the `#SBATCH` lines.
        """
        return int(self.run(["sbatch", "--parsable", *options], stdin=script))

    def wait(self, job: int, timeout_seconds: float = 30.0) -> dict[int, tuple[str, int]]:
        """Waits until every task of a job has ended; gives each one's state and exit code.

        Returns:
            By array index (0 for a job that is no array): such as `("FAILED", 3)`; the code is
            negative where a signal ended the task, as in `subprocess`.

        Raises:
            TimeoutError: carries the job as Slurm shows it, and the ends of the daemons' logs.
        """
        deadline = time.monotonic() + timeout_seconds
        while True:
            tasks = self.tasks(job)
            if all(state in ENDED for state, _ in tasks.values()):
                return tasks
            if time.monotonic() > deadline:
                shown = self.run(["scontrol", "show", "job", str(job)])
                raise TimeoutError(f"job {job} has not ended: {tasks}\n{shown}\n{self._log_ends()}")
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
        shown = self.run(["scontrol", "show", "job", "--oneliner", task])
        (path,) = re.findall(r" StdOut=(\S+)", shown)
        return Path(path).read_text()

    def wait_until(self, what: str, holds: Callable[[], bool]) -> None:
        """Waits until a condition holds.

        Raises:
            TimeoutError: it did not within `WAIT_SECONDS`, or a daemon has ended.
        """
        deadline = time.monotonic() + WAIT_SECONDS
        while not holds():
            ended = [daemon.args for daemon in self._daemons if daemon.poll() is not None]
            if ended or time.monotonic() > deadline:
                raise TimeoutError(f"not so: {what}; ended: {ended}\n{self._log_ends()}")
            time.sleep(POLL_SECONDS)

    def _write_configuration(self) -> None:
        machine = socket.gethostname().partition(".")[0]
        ports = _free_ports(1 + len(self.nodes))
        text = CONFIGURATION.format(
            folder=self.folder,
            port=ports[0],
            controller="localhost" if self._own_hosts else machine,
            address="127.0.0.1" if self._own_hosts else machine,
        )
        for node, port in zip(self.nodes, ports[1:], strict=True):
            host, address = (node, "127.0.0.1") if self._own_hosts else (machine, machine)
            text += f"NodeName={node} NodeHostname={host} NodeAddr={address} Port={port}"
            text += f" CPUs={N_CPUS} State=UNKNOWN\n"
        (self.folder / "slurm.conf").write_text(text)
        # proctrack/linuxproc touches no control group, yet 22.05 wants a plug-in for them named.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        hosts = Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(self.nodes)}\n"
        (self.folder / "hosts").write_text(hosts)
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(1024))

    def _start_daemon(self, *argv: str, host: str = "") -> None:
        own = bool(host) and self._own_hosts
        as_host = _as_host(host, str(self.folder / "hosts")) if own else []
        with (self.folder / "daemons.log").open("ab") as log:
            daemon = subprocess.Popen(
                [*as_host, *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is for pytest, which then calls `stop`
            )
        self._daemons.append(daemon)

    def _are_all_idle(self) -> bool:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"],
            capture_output=True,
            text=True,
            env=self.environment,
        )
        return answer.stdout.strip() == str(len(self.nodes))

    def _log_ends(self) -> str:
        texts = [f"{p.name}:\n{p.read_text()[-2000:]}" for p in sorted(self.folder.glob("*.log"))]
        return "\n".join(texts)


def _as_host(name: str, hosts: str) -> list[str]:
    return ["unshare", "--uts", "--mount", "sh", "-c", AS_HOST, "sh", name, hosts]


def _can_have_hosts() -> bool:
    attempt = [*_as_host("n1", "/etc/hosts"), "true"]
    return subprocess.run(attempt, capture_output=True).returncode == 0


def _free_ports(n_ports: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n_ports)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _process_ids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _environment_of(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return []
