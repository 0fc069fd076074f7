"""Jobs without a queue: on this machine, and on hosts reached by an mpiexec or by ssh.

    Open MPI    sets ranks in OMPI_COMM_WORLD_*; does not forward variables by itself
    MPICH       PMI_* and MPI_LOCALRANKID; also Intel MPI and others with Hydra
    PALS        PMI_* and PMI_LOCAL_RANK, on HPE Cray machines; the only one with our CPU binding

All end a job when a rank is killed; if a rank only fails, Hydra lets the others continue until
their own parents notice (`launch/hang_reports.py`). None of them notices a silent host.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainyard.config.cluster import Launch
from trainyard.errors import LaunchError
from trainyard.jobs.job import Job
from trainyard.jobs.scheduler import Scheduler, Settings, options, quote, split

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


def mpiexec_settings(job: Job) -> Settings:
    """Returns the variables of lib/mpiexec.sh."""
    launch = job.cluster.launch
    binding = [] if job.is_stage else _bind(launch, job.n_ranks_per_node)
    has_taskset = launch.cpu_lists and not binding and not job.is_stage
    return {
        "local_rank": LOCAL_RANKS[launch.mpiexec],
        "cpus_of_rank": [launch.cpu_lists] if has_taskset else [],
        "mpi": launch.mpiexec,
        "mpiexecs": [MPIEXECS[launch.mpiexec]],
        "mpiexec_options": [],
        "binding": [binding] if binding else [],
    }


def mpiexec_launcher(launch: Launch, n_nodes: int, n_ranks: int) -> str:
    """Returns an mpiexec and its options, as `Scheduler.launcher`; exports a rendezvous."""
    words = ["-ppn", str(n_ranks), *_bind(launch, n_ranks)]
    if launch.mpiexec == "openmpi":
        words = ["--map-by", f"ppr:{n_ranks}:node", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
    command = quote("mpiexec", "-n", n_nodes * n_ranks, *words)
    return f"export MASTER_ADDR=$(hostname) MASTER_PORT=29500; {command}"


def _bind(launch: Launch, n_ranks: int) -> list[str]:
    """Options that bind the ranks of a node; only PALS has them."""
    lists = ":".join(launch.cpu_lists[:n_ranks])
    return ["--cpu-bind", f"list:{lists}"] if lists and launch.mpiexec == "pals" else []


class LocalScheduler(Scheduler):
    """This machine alone."""

    parts = ("local.sh",)

    def describe(self, launch: Launch) -> str:
        """Returns `this machine`."""
        return "this machine"

    def programs(self, job: Job) -> Sequence[str]:
        """Returns bash."""
        return ("bash",)

    def check(self, job: Job) -> None:
        """Rejects a second node."""
        if job.n_nodes > 1:
            raise LaunchError(
                f"{job.n_nodes} nodes, but this cluster is only this machine",
                "--nodes 1, or a cluster with a scheduler or hosts (trainyard show cluster ssh)",
            )

    def settings(self, job: Job) -> Settings:
        """Returns none: Trainyard itself starts the ranks."""
        return {"device_variable": ""}


class _Hosts(Scheduler):
    """Hosts named in the cluster file or on the command line."""

    def check(self, job: Job) -> None:
        """Rejects hosts that are too few, or named twice."""
        hosts = job.cluster.launch.hosts
        if len(set(hosts)) < len(hosts):
            twice = next(host for host in hosts if hosts.count(host) > 1)
            raise LaunchError(f"hosts names {twice} twice", "name each host once")
        if len(hosts) < job.n_nodes:
            raise LaunchError(
                f"hosts has {len(hosts)}, but --nodes is {job.n_nodes}",
                'list them in a cluster file: [launch] hosts = ["n1", "n2"]; or --hosts n1,n2',
            )


class MpiHosts(_Hosts):
    """Hosts with an mpiexec."""

    parts = ("starts.sh", "mpiexec.sh", "hosts.sh")
    launcher = staticmethod(mpiexec_launcher)

    def describe(self, launch: Launch) -> str:
        """Returns `mpiexec of ..`."""
        return f"mpiexec of {launch.mpiexec}"

    def programs(self, job: Job) -> Sequence[str]:
        """Returns the names that its mpiexec may have."""
        return MPIEXECS[job.cluster.launch.mpiexec]

    def settings(self, job: Job) -> Settings:
        """Returns the variables of mpiexec.sh and hosts.sh."""
        own = split(options(job))
        return mpiexec_settings(job) | {
            "mpiexec_options": [own] if own else [],
            "all_hosts": [job.cluster.launch.hosts],
        }


class SshHosts(_Hosts):
    """Hosts reached only by ssh: the script itself runs on each."""

    parts = ("starts.sh", "ssh.sh", "hosts.sh")

    def describe(self, launch: Launch) -> str:
        """Returns `ssh`."""
        return "ssh"

    def programs(self, job: Job) -> Sequence[str]:
        """Returns ssh."""
        return ("ssh",)

    def settings(self, job: Job) -> Settings:
        """Returns the variables of ssh.sh and hosts.sh."""
        launch, own = job.cluster.launch, split(options(job))
        return {
            "local_rank": "LOCAL_RANK",
            "cpus_of_rank": [launch.cpu_lists] if launch.cpu_lists else [],
            "script": job.script_path,
            "ssh_options": [own] if own else [],
            "all_hosts": [launch.hosts],
        }
