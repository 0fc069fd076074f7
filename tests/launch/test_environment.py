"""What each launcher sets (as seen on real ones), and what it means; what cannot be is refused."""

from __future__ import annotations

import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest

from trainyard.errors import LaunchError
from trainyard.launch.environment import (
    FIRST_PORT,
    N_PORTS,
    Process,
    first_host,
    rank_environment,
    read_process,
    refuse_missing_devices,
    seconds_left,
)

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
BATCH_SHELL = {
    "SLURM_JOB_ID": "43629",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SALLOC_SHELL = {
    name: value
    for name, value in BATCH_SHELL.items()
    if name not in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")
}
STEP = BATCH_SHELL | {
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "2813263873",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PALS = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "PMI_LOCAL_RANK": "1",
    "PMI_LOCAL_SIZE": "4",
    "PALS_RANKID": "5",
    "PALS_LOCAL_RANKID": "1",
    "PALS_APID": "6f0f2a9c-7d0a-4d3e-8c0e-6d8f0a1b2c3d",
}


def without_port(process: Process) -> Process:
    assert FIRST_PORT <= process.port < FIRST_PORT + N_PORTS
    return replace(process, port=0)


def test_alone() -> None:
    assert read_process({}) == Process(0, 1, 0, 1)
    assert read_process({"PATH": "/bin", "OMP_NUM_THREADS": "1", "PMI": "x"}) == Process()


@pytest.mark.parametrize("shell", [BATCH_SHELL, SALLOC_SHELL])
def test_a_shell_inside_an_allocation_is_one_process(shell: dict[str, str]) -> None:
    assert read_process(shell) == Process()


def test_an_interactive_shell_in_a_step_of_its_own_is_one_process() -> None:
    one = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0"}
    assert read_process(STEP | one | {"SLURM_PROCID": "0"}) == Process()


def test_torchrun() -> None:
    assert read_process(TORCHRUN) == Process(3, 4, 1, 2, "n1", 29500)
    again = TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "2"}
    expected = Process(3, 4, 1, 2, "n1", 29500, launcher_listens=True, attempt=2)
    assert read_process(again) == expected


def test_torchrun_on_one_machine_stays_there() -> None:
    one_machine = TORCHRUN | {"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "4"}
    assert read_process(one_machine) == Process(3, 4, 3, 4, "127.0.0.1", 29500)


def test_a_step_of_slurm() -> None:
    process = read_process(STEP)
    assert without_port(process) == Process(2, 3, 0, 1, "n1")
    first = STEP | {"SLURM_NODEID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    assert read_process(first) == Process(1, 3, 1, 2, "n1", process.port)
    # Another step, and another job, meet elsewhere.
    ports = {read_process(STEP | {"SLURM_STEP_ID": str(i)}).port for i in range(10)}
    ports |= {read_process(STEP | {"SLURM_JOB_ID": str(i)}).port for i in range(10)}
    assert len(ports) == 20


def test_a_step_on_one_machine_stays_there() -> None:
    one = STEP | {"SLURM_STEP_TASKS_PER_NODE": "3", "SLURM_NODEID": "0", "SLURM_LOCALID": "2"}
    assert without_port(read_process(one)) == Process(2, 3, 2, 3, "127.0.0.1")


def test_many_nodes_of_slurm() -> None:
    many = {"SLURM_STEP_TASKS_PER_NODE": "8(x3),5", "SLURM_STEP_NUM_TASKS": "29"}
    third = {"SLURM_NODEID": "2", "SLURM_PROCID": "23", "SLURM_LOCALID": "7"}
    assert without_port(read_process(STEP | many | third)) == Process(23, 29, 7, 8, "n1")
    last = {"SLURM_NODEID": "3", "SLURM_PROCID": "28", "SLURM_LOCALID": "4"}
    assert without_port(read_process(STEP | many | last)) == Process(28, 29, 4, 5, "n1")


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


def test_open_mpi() -> None:
    somewhere = OPEN_MPI | {"MASTER_ADDR": "n7"}
    assert without_port(read_process(somewhere)) == Process(1, 4, 1, 2, "n7")
    one = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}
    assert without_port(read_process(one)) == Process(1, 4, 1, 4, "127.0.0.1")
    assert read_process(one).port != read_process(one | {"PMIX_NAMESPACE": "1"}).port


def test_mpich_and_pals() -> None:
    assert without_port(read_process(MPICH)) == Process(1, 2, 1, 2, "127.0.0.1")
    assert read_process(MPICH | {"MASTER_PORT": "999"}).port == 999
    assert without_port(read_process(PALS | {"MASTER_ADDR": "x1"})) == Process(5, 8, 1, 4, "x1")


def test_the_innermost_launcher_says_what_holds() -> None:
    assert read_process(STEP | TORCHRUN) == read_process(TORCHRUN)
    # mpiexec starts one proxy a machine as a step of Slurm, and the ranks from there.
    proxies = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
    assert without_port(read_process(STEP | proxies)) == Process(5, 8, 1, 4, "n1")
    # srun --mpi=pmi2 sets just these.
    assert read_process(STEP | {"PMI_RANK": "2", "PMI_SIZE": "3"}) == read_process(STEP)


def test_what_is_written_for_a_local_rank_is_read_there() -> None:
    process = Process(2, 4, 2, 4, store_file=Path("/tmp/x/store"), parent_pipe=5)
    environment = rank_environment(process, 3, TORCHRUN | STEP)
    assert read_process(environment) == process
    assert environment["OMP_NUM_THREADS"] == "3"
    assert rank_environment(process, 3, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"


def test_a_worker_below_a_launcher_keeps_its_place() -> None:
    process = replace(read_process(TORCHRUN), parent_pipe=5, pulse=6)
    environment = rank_environment(process, 3, TORCHRUN | {"OMP_NUM_THREADS": "2,1"})
    assert read_process(environment) == process
    assert environment["OMP_NUM_THREADS"] == "2,1"
    assert "OMP_NUM_THREADS" not in rank_environment(process, 3, TORCHRUN)


def test_torchrun_starts_again_what_does_not_end_with_0() -> None:
    assert read_process({"TORCHELASTIC_RUN_ID": "none"}).launcher_restarts
    assert not read_process(STEP).launcher_restarts


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
        (TORCHRUN | {"RANK": "4"}, "RANK=4 contradicts WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "-1"}, "RANK='-1' is not a number from 0"),
        (TORCHRUN | {"WORLD_SIZE": "four"}, "WORLD_SIZE='four' is not a number from 0"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 contradicts LOCAL_WORLD_SIZE=2"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE=5 contradicts WORLD_SIZE=4"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port"),
        ({"RANK": "0"}, "WORLD_SIZE is not set; the launcher of this process set others"),
        ({"WORLD_SIZE": "2"}, "RANK is not set; the launcher of this process set others"),
        (OPEN_MPI, "MASTER_ADDR is not set; the launcher of this process set others"),
        (PALS | {"PALS_RANKID": "6"}, "PMI_RANK=5, PALS_RANKID=6 contradict each other"),
        (
            {"PMI_RANK": "0", "PMI_SIZE": "2"},
            "PMI_LOCAL_RANK is not set; the launcher of this process set others",
        ),
        (STEP | {"SLURM_PROCID": "3"}, "SLURM_PROCID=3 contradicts SLURM_STEP_NUM_TASKS=3"),
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
    ("promised", "n_seen", "shown"), [("8", 8, ""), ("4", 8, ""), ("8", 1, "3"), ("1", 1, "3")]
)
def test_promised_devices_are_there(promised: str, n_seen: int, shown: str) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": shown} if shown else {}
    refuse_missing_devices(n_seen, {"TRAINYARD_DEVICES": promised} | visible)
    refuse_missing_devices(0, visible)  # nothing was promised


@pytest.mark.parametrize(
    ("promised", "n_seen", "shown"), [("8", 0, ""), ("8", 7, ""), ("8", 1, ""), ("1", 0, "3")]
)
def test_fewer_devices_than_promised(promised: str, n_seen: int, shown: str) -> None:
    visible = {"CUDA_VISIBLE_DEVICES": shown} if shown else {}
    says = f"^{socket.gethostname()}: {promised} GPUs were promised, and torch sees {n_seen}"
    with pytest.raises(LaunchError, match=says):
        refuse_missing_devices(n_seen, {"TRAINYARD_DEVICES": promised} | visible)
