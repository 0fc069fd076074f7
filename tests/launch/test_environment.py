"""What each launcher sets (as seen on real ones), and what it means; what cannot be is refused."""

from __future__ import annotations

import socket
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from trainyard.errors import LaunchError
from trainyard.launch.environment import (
    FIRST_PORT,
    N_PORTS,
    Process,
    first_host,
    own_environment,
    rank_environment,
    read_process,
    refuse_missing_devices,
    seconds_left,
    visible_devices,
)


def env(text: str) -> dict[str, str]:
    return dict(word.split("=") for word in text.split())


TORCHRUN = env(
    "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=n1 MASTER_PORT=29500"
)
SALLOC_SHELL = env(
    "SLURM_JOB_ID=43629 SLURM_JOB_NODELIST=n[1-2] SLURM_NTASKS=3 SLURM_TASKS_PER_NODE=2,1"
)
BATCH_SHELL = SALLOC_SHELL | env("SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_PROCID=0")
STEP = BATCH_SHELL | env(
    "SLURM_NODEID=1 SLURM_PROCID=2 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-2] "
    "SLURM_STEP_NUM_TASKS=3 SLURM_STEP_TASKS_PER_NODE=2,1"
)
MANY_NODES = STEP | env("SLURM_STEP_TASKS_PER_NODE=8(x3),5 SLURM_STEP_NUM_TASKS=29")
OPEN_MPI = env(
    "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=2813263873"
)
ONE_MACHINE = OPEN_MPI | env("OMPI_COMM_WORLD_LOCAL_SIZE=4")
MPICH = env("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
PALS = env(
    "PMI_RANK=5 PMI_SIZE=8 PMI_LOCAL_RANK=1 PMI_LOCAL_SIZE=4 PALS_RANKID=5 PALS_LOCAL_RANKID=1 "
    "PALS_APID=6f0f2a9c-7d0a-4d3e-8c0e-6d8f0a1b2c3d"
)
DRAWN_PORT = -1
PLACES = {
    "no launcher": (env("PATH=/bin OMP_NUM_THREADS=1 PMI=x"), Process(0, 1, 0, 1)),
    "a batch script of Slurm": (BATCH_SHELL, Process()),
    "a shell of salloc": (SALLOC_SHELL, Process()),
    "an interactive shell in a step of its own": (
        STEP | env("SLURM_STEP_NUM_TASKS=1 SLURM_STEP_TASKS_PER_NODE=1 SLURM_NODEID=0")
        | env("SLURM_PROCID=0"), Process(),
    ),
    "torchrun": (TORCHRUN, Process(3, 4, 1, 2, "n1", 29500)),
    "torchrun, second restart": (
        TORCHRUN | env("TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=2"),
        Process(3, 4, 1, 2, "n1", 29500, launcher_listens=True, attempt=2),
    ),
    "a parent of ranks below torchrun": (
        TORCHRUN | env("TORCHELASTIC_RUN_ID=none"),
        Process(3, 4, 1, 2, "n1", 29500, launcher_restarts=True),
    ),
    "torchrun on one machine": (
        TORCHRUN | env("LOCAL_RANK=3 LOCAL_WORLD_SIZE=4"), Process(3, 4, 3, 4, "127.0.0.1", 29500)
    ),
    "torchrun in a step": (STEP | TORCHRUN, Process(3, 4, 1, 2, "n1", 29500)),
    "a step": (STEP, Process(2, 3, 0, 1, "n1", DRAWN_PORT)),
    "srun --mpi=pmi2": (
        STEP | env("PMI_RANK=2 PMI_SIZE=3"), Process(2, 3, 0, 1, "n1", DRAWN_PORT)
    ),
    "a step on one machine": (
        STEP | env("SLURM_STEP_TASKS_PER_NODE=3 SLURM_NODEID=0 SLURM_LOCALID=2"),
        Process(2, 3, 2, 3, "127.0.0.1", DRAWN_PORT),
    ),
    "the third of many nodes": (
        MANY_NODES | env("SLURM_NODEID=2 SLURM_PROCID=23 SLURM_LOCALID=7"),
        Process(23, 29, 7, 8, "n1", DRAWN_PORT),
    ),
    "the last of many nodes": (
        MANY_NODES | env("SLURM_NODEID=3 SLURM_PROCID=28 SLURM_LOCALID=4"),
        Process(28, 29, 4, 5, "n1", DRAWN_PORT),
    ),
    # It starts one proxy a machine as a step of Slurm, and the ranks from there.
    "mpiexec in a step": (
        STEP | MPICH | env("PMI_RANK=5 PMI_SIZE=8 MPI_LOCALNRANKS=4"),
        Process(5, 8, 1, 4, "n1", DRAWN_PORT),
    ),
    "Open MPI": (OPEN_MPI | env("MASTER_ADDR=n7"), Process(1, 4, 1, 2, "n7", DRAWN_PORT)),
    "Open MPI on one machine": (ONE_MACHINE, Process(1, 4, 1, 4, "127.0.0.1", DRAWN_PORT)),
    "MPICH": (MPICH, Process(1, 2, 1, 2, "127.0.0.1", DRAWN_PORT)),
    "MPICH, a port": (MPICH | env("MASTER_PORT=999"), Process(1, 2, 1, 2, "127.0.0.1", 999)),
    "PALS": (PALS | env("MASTER_ADDR=x1"), Process(5, 8, 1, 4, "x1", DRAWN_PORT)),
}  # fmt: skip


@pytest.mark.parametrize(("environment", "expected"), PLACES.values(), ids=PLACES)
def test_the_place_of_a_process(environment: dict[str, str], expected: Process) -> None:
    found = read_process(environment)
    if expected.port == DRAWN_PORT:
        assert FIRST_PORT <= found.port < FIRST_PORT + N_PORTS
        found = replace(found, port=DRAWN_PORT)
    assert found == expected


def test_ranks_of_a_job_have_one_port_and_other_jobs_others() -> None:
    first = STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    assert read_process(first) == Process(1, 3, 1, 2, "n1", read_process(STEP).port)
    ports = {read_process(STEP | {"SLURM_STEP_ID": str(i)}).port for i in range(10)}
    ports |= {read_process(STEP | {"SLURM_JOB_ID": str(i)}).port for i in range(10)}
    assert len(ports) == 20
    other = ONE_MACHINE | {"PMIX_NAMESPACE": "1"}
    assert read_process(ONE_MACHINE).port != read_process(other).port


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2]", "n1"),
        ("nid[001234,001240-001243],login1", "nid001234"),
        ("gpu-7,nid[001234-5]", "gpu-7"),
        ("rack[03-05]-n[08,11].site.org", "rack03-n08.site.org"),
    ],
)
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_what_is_written_for_a_local_rank_is_read_there() -> None:
    process = Process(2, 4, 2, 4, store_file=Path("/tmp/x/store"), parent_pipe=5)
    environment = rank_environment(process, 3, TORCHRUN | STEP)
    assert read_process(environment) == process
    for name, value in (("OMP_NUM_THREADS", "3"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")):
        assert environment[name] == value
        assert rank_environment(process, 3, {name: "7"})[name] == "7"


def test_a_worker_below_a_launcher_keeps_its_place() -> None:
    process = replace(read_process(TORCHRUN), parent_pipe=5, heartbeat=6)
    environment = rank_environment(process, 3, TORCHRUN | {"OMP_NUM_THREADS": "2,1"})
    assert read_process(environment) == process
    assert environment["OMP_NUM_THREADS"] == "2,1"
    assert "OMP_NUM_THREADS" not in rank_environment(process, 3, TORCHRUN)
    assert environment["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    own = {"GLIBC_TUNABLES": "glibc.malloc.perturb=1"}
    assert own.items() <= rank_environment(process, 3, TORCHRUN | own).items()


@pytest.mark.parametrize("launcher", [TORCHRUN, STEP, {"PMI_RANK": "1", "PMI_SIZE": "2"}])
def test_a_command_of_its_own_is_no_rank_of_the_launcher(launcher: dict[str, str]) -> None:
    of_job = {"TRAINYARD_JOB": "7-0", "TRAINYARD_DEVICES": "8", "TRAINYARD_END": "99", "X": "1"}
    found = own_environment(["3", "5"], 4, 9, launcher | of_job)
    assert read_process(found) == Process(parent_pipe=9)
    assert {name for name in found if name.startswith("TRAINYARD")} == {
        "TRAINYARD_PARENT_PIPE", "TRAINYARD_END",
    }  # fmt: skip
    assert (found["CUDA_VISIBLE_DEVICES"], found["OMP_NUM_THREADS"]) == ("3,5", "4")
    assert found["X"] == "1"


def test_gpus_are_named_as_in_the_environment() -> None:
    assert visible_devices(3, {}) == ["0", "1", "2"]
    assert visible_devices(8, {"CUDA_VISIBLE_DEVICES": "GPU-ab,GPU-cd"}) == ["GPU-ab", "GPU-cd"]
    assert visible_devices(8, {"ROCR_VISIBLE_DEVICES": "4"}) == ["4"]
    assert visible_devices(8, {"CUDA_VISIBLE_DEVICES": ""}) == []  # hidden
    assert visible_devices(0, {"CUDA_VISIBLE_DEVICES": "0"}) == []
    found = own_environment(["4"], 1, 9, {"ROCR_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "7"})
    assert found["ROCR_VISIBLE_DEVICES"] == "4" and "CUDA_VISIBLE_DEVICES" not in found
    assert found["OMP_NUM_THREADS"] == "7"
    assert own_environment([], 1, 9, {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"] == ""


def test_time_until_the_limit_of_a_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    now = float(round(time.time()))
    monkeypatch.setattr(time, "time", lambda: now)
    assert seconds_left({}) is None
    assert seconds_left({"SLURM_JOB_END_TIME": f"{now + 60:.0f}"}) == 60
    of_the_script = {"TRAINYARD_END": f"{now + 30:.0f}", "PBS_WALLTIME": "3600"}
    assert seconds_left(of_the_script) == 30
    short, long = (seconds_left({"PBS_WALLTIME": limit}) for limit in ("3600", "7200"))
    assert short is not None
    assert long is not None
    assert short <= 3600  # the shell that runs this is not of this moment
    assert long - short == pytest.approx(3600, abs=2)
    with pytest.raises(LaunchError, match="PBS_WALLTIME='1:00:00' is not a number from 0"):
        seconds_left({"PBS_WALLTIME": "1:00:00"})


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        (TORCHRUN | env("RANK=4"), "RANK=4 contradicts WORLD_SIZE=4"),
        (TORCHRUN | env("RANK=-1"), "RANK='-1' is not a number from 0"),
        (TORCHRUN | env("WORLD_SIZE=four"), "WORLD_SIZE='four' is not a number from 0"),
        (TORCHRUN | env("LOCAL_RANK=2"), "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | env("LOCAL_WORLD_SIZE=5"), "LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"),
        (TORCHRUN | env("MASTER_PORT=70000"), "MASTER_PORT=70000 is not a port"),
        (env("RANK=0"), "WORLD_SIZE is not set, but other variables of the launcher are"),
        (env("WORLD_SIZE=2"), "RANK is not set, but other variables of the launcher are"),
        (OPEN_MPI, "MASTER_ADDR is not set, but other variables of the launcher are"),
        (PALS | env("PALS_RANKID=6"), "PMI_RANK=5, PALS_RANKID=6 contradict each other"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "PMI_LOCAL_RANK is not set, but other variables of the launcher are",
        ),
        (STEP | env("SLURM_PROCID=3"), "SLURM_PROCID=3 contradicts SLURM_STEP_NUM_TASKS=3"),
        (
            STEP | {"SLURM_STEP_TASKS_PER_NODE": "2,x"},
            "SLURM_STEP_TASKS_PER_NODE='2,x' cannot be read",
        ),
        (
            STEP | {"SLURM_NODEID": "2"},
            "SLURM_NODEID=2 contradicts SLURM_STEP_TASKS_PER_NODE=2,1",
        ),
    ],
)
def test_what_cannot_be_is_refused(environment: dict[str, str], problem: str) -> None:
    with pytest.raises(LaunchError) as caught:
        read_process(environment)
    assert caught.value.problem == problem
    assert caught.value.hint


@pytest.mark.parametrize(
    ("promised", "n_seen", "shown", "are_there"),
    [
        *(("8", 8, "", True), ("4", 8, "", True), ("8", 1, "3", True), ("1", 1, "3", True)),
        *(("8", 0, "", False), ("8", 7, "", False), ("8", 1, "", False), ("1", 0, "3", False)),
    ],
)
def test_promised_devices(promised: str, n_seen: int, shown: str, are_there: bool) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": shown} if shown else {}
    refuse_missing_devices(0, visible)  # nothing was promised
    says = f"^{socket.gethostname()}: expected {promised} GPUs, but torch sees {n_seen}"
    with nullcontext() if are_there else pytest.raises(LaunchError, match=says):
        refuse_missing_devices(n_seen, {"TRAINYARD_DEVICES": promised} | visible)
