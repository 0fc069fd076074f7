"""All schedulers, by the names that `scheduler` has in a cluster file."""

from __future__ import annotations

from trainyard.jobs.hosts import LocalScheduler, MpiHosts, SshHosts
from trainyard.jobs.pbs import Pbs
from trainyard.jobs.scheduler import Scheduler
from trainyard.jobs.slurm import Slurm

SCHEDULERS: dict[str, Scheduler] = {
    "local": LocalScheduler(),
    "slurm": Slurm(),
    "pbs": Pbs(),
    "mpi": MpiHosts(),
    "ssh": SshHosts(),
}
