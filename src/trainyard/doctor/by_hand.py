"""The command that runs doctor on several machines, with their cluster's launcher.

    srun --nodes=2 --ntasks-per-node=8 --cpu-bind=mask_cpu:0xfe.. trainyard doctor --nodes 2

Run it inside a job, which has its devices from the scheduler. The launcher binds ranks as in the
cluster file, if it can.
"""

from __future__ import annotations

import shlex

from trainyard.config.cluster import cpu_mask, read_cluster
from trainyard.plan.clusters import find_machine

MEET = "export MASTER_ADDR=$(hostname) MASTER_PORT=29500; "
"""Needed under mpiexec on several machines; srun provides the address."""


def command_for(cluster: str | None, n_nodes: int) -> str:
    """Returns the shell command to run on the first machine of a job.

    Args:
        cluster: its name, or the path of its file; None: any Slurm, with 8 devices per node.
        n_nodes: number of machines.
    """
    name = cluster or "slurm"
    launch, n_ranks = read_cluster(name).launch, find_machine(name).devices_per_node
    lists, kind = launch.cpu_lists, launch.scheduler
    doctor = ["trainyard", "doctor", *(["--cluster", cluster] if cluster else [])]
    doctor += ["--nodes", str(n_nodes)]
    if kind == "slurm":
        words = ["srun", f"--nodes={n_nodes}", f"--ntasks-per-node={n_ranks}"]
        words += [f"--cpu-bind=mask_cpu:{','.join(map(cpu_mask, lists))}"] if lists else []
        return shlex.join([*words, *doctor])
    if kind in ("pbs", "mpi"):
        words = ["mpiexec", "-n", str(n_nodes * n_ranks)]
        if launch.mpiexec == "openmpi":
            words += ["--map-by", f"ppr:{n_ranks}:node", "-x", "MASTER_ADDR", "-x", "MASTER_PORT"]
        else:
            words += ["-ppn", str(n_ranks)]
        if launch.mpiexec == "pals" and lists:
            words += ["--cpu-bind", f"list:{':'.join(lists)}"]
        return MEET + shlex.join([*words, *doctor])
    each = [f"--nnodes={n_nodes}", f"--nproc-per-node={n_ranks}", "--rdzv-backend=c10d"]
    return shlex.join(["torchrun", *each, "--rdzv-endpoint=FIRST:29500", "--no-python", *doctor])
