"""`trainyard doctor`: describes a machine, measures it, and finds what is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.errors import ConfigError, LaunchError, MachineError
from trainyard.extras import install_command
from trainyard.launch.environment import Process, read_process

if TYPE_CHECKING:
    from trainyard.doctor.diagnosis import Diagnosis, Examination
    from trainyard.doctor.examine import Settings

GIGA = 10**9


def doctor(
    cluster: str | None = None,
    nodes: Annotated[int | None, typer.Option(min=1)] = None,
    ranks: Annotated[int | None, typer.Option(min=1)] = None,
    calibrate: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    folder: Path = Path("runs"),
    seconds: Annotated[float, typer.Option(min=0.001, max=60)] = 0.5,
    gigabytes: Annotated[float, typer.Option(min=0.01, max=1000)] = 1.0,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Describe and measure this machine, and report what is wrong.

    Reports versions, devices, limits and network; tests the run folder's file system; measures
    matmuls, memory, collectives and disk and compares them with the cluster's figures: pass, warn
    (below 90 %) or replace (below two thirds). Under torchrun, srun or mpiexec this command is one
    rank: start it once per rank, and it names the slow machine. Exit code 0, or 2 if any result is
    replace.

    Example: srun trainyard doctor --cluster lumi --nodes 2

    Options:
        cluster: Expected cluster: a name or a file. Default: compare with figures of the GPU.
        nodes: Expected number of machines.
        ranks: Processes on this machine. Default: one per GPU.
        calibrate: Write a cluster file with the measured figures.
        folder: Folder of runs; its file system is tested.
        seconds: Per measurement.
        gigabytes: Size of the file each rank writes and reads.
        as_json: Print JSON instead of a table.
    """
    from trainyard.config.cluster import read_cluster
    from trainyard.doctor.diagnosis import diagnose, refuse_file, render
    from trainyard.doctor.environment import has_torch
    from trainyard.doctor.examine import Settings
    from trainyard.planning.clusters import find_machine

    process = read_process()
    _refuse_counts(process, ranks, nodes, cluster)
    profile = find_machine(cluster) if cluster else None
    cpu_lists = read_cluster(cluster).launch.cpu_lists if cluster else []
    if calibrate is not None and process.rank == 0:
        refuse_file(calibrate)
        if not has_torch():
            raise MachineError("--calibrate: measuring needs torch", install_command("train"))
    settings = Settings(str(folder), seconds, int(gigabytes * GIGA), tuple(cpu_lists))
    examinations = _examine(process, settings, ranks)
    if process.rank > 0:
        return
    diagnosis = diagnose(examinations, profile, nodes)
    typer.echo(json.dumps(diagnosis.as_json(), indent=2) if as_json else render(diagnosis))
    if calibrate is not None:
        _calibrate(diagnosis, cluster, calibrate)
    diagnosis.refuse()


def _refuse_counts(
    process: Process, ranks: int | None, nodes: int | None, cluster: str | None
) -> None:
    process.refuse_option(f"--ranks {ranks}", ranks)
    if nodes is not None and nodes > 1 and process.is_on_one_machine:
        raise LaunchError(
            f"--nodes {nodes}: this command runs on one machine",
            f"inside a job of {nodes} machines: {command_for(cluster, nodes)}",
        )


def command_for(cluster: str | None, n_nodes: int) -> str:
    """Returns the shell command to run on the first machine of a job, which has its devices.

    Args:
        cluster: its name, or the path of its file; None: any Slurm, with 8 devices per node.
        n_nodes: number of machines.
    """
    from trainyard.config.cluster import read_cluster
    from trainyard.jobs.schedulers import SCHEDULERS
    from trainyard.planning.clusters import find_machine

    name = cluster or "slurm"
    launch, n_ranks = read_cluster(name).launch, find_machine(name).devices_per_node
    words = ["trainyard", "doctor", *(["--cluster", cluster] if cluster else [])]
    start = SCHEDULERS[launch.scheduler].launcher(launch, n_nodes, n_ranks)
    return f"{start} {shlex.join([*words, '--nodes', str(n_nodes)])}"


def _examine(process: Process, settings: Settings, ranks: int | None) -> list[Examination]:
    from trainyard.doctor.environment import has_torch
    from trainyard.doctor.examine import examine, examine_in_processes

    if not has_torch():
        if ranks is not None and ranks > 1:
            raise ConfigError(
                f"--ranks {ranks}: without torch, doctor can only describe this machine",
                f"{install_command('train')}, or omit --ranks",
            )
        return examine(process, settings)
    if ranks is None and process.n_ranks == 1:
        import torch

        ranks = max(1, torch.cuda.device_count())
    if ranks is None or ranks == 1:
        return examine(process, settings)
    return examine_in_processes(ranks, settings)


def _calibrate(diagnosis: Diagnosis, base: str | None, path: Path) -> None:
    from trainyard.doctor.diagnosis import calibrate, find_usual_machine, write_cluster
    from trainyard.planning.clusters import find_machine

    gpu, machine = "", diagnosis.machine or find_machine("local")
    if base is None:
        usual = find_usual_machine(diagnosis.examinations[0].device)
        base, gpu = (None, usual[0]) if usual else ("local", "")
    write_cluster(path, base, gpu, calibrate(machine, diagnosis.rows, diagnosis.shape))
    typer.echo(f"wrote {path}: trainyard plan RUN --cluster {path}", err=True)
