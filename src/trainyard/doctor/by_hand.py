"""How to start an examination of several machines: with the launcher of their cluster.

    srun --nodes=2 --ntasks-per-node=8 --cpu-bind=mask_cpu:0xfe.. trainyard doctor --nodes 2

This is for inside a job, which has its devices from the scheduler. Ranks are bound as the cluster
file says where the launcher can do it.
"""

from __future__ import annotations

import shlex

from trainyard.config.cluster import read_cluster
from trainyard.launch.script import cpu_mask
from trainyard.plan.clusters import find_machine

MEET = "export MASTER_ADDR=$(hostname) MASTER_PORT=29500; "
"""Under mpiexec on several machines; srun says it by itself."""


def command_for(cluster: str | None, n_nodes: int) -> str:
    """Gives the shell command, to be run on the first machine of a job.

    Args:
        cluster: its name, or the path of its file; None: any Slurm, with 8 devices a node.
        n_nodes: machines.
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
