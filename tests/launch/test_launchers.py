"""The same program, started by each real launcher: the ranks find each other and add up."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.slurm import Slurm
from tests.waiting import WATCHDOG_SECONDS

from trainyard.launch.local import run_ranks

pytestmark = pytest.mark.dist

PROGRAM = str(Path(__file__).parent / "sum_of_ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
FOUR_ON_ONE = [f"rank {rank} of 4, {rank} of 4: 10" for rank in range(4)]
TWO_AND_TWO = [f"rank {rank} of 4, {rank % 2} of 2: 10" for rank in range(4)]


def lines(text: str) -> list[str]:
    """The lines of all ranks, which can run into each other: each is written in one go."""
    return sorted(line for line in text.splitlines() if line.startswith("rank "))


def run(argv: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "MASTER"))
    }
    return subprocess.run(
        argv, capture_output=True, text=True, env=inherited | environment, timeout=WATCHDOG_SECONDS
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_our_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run_ranks(4, [sys.executable, PROGRAM, str(tmp_path)], tmp_path)
    logs = [path.read_text() for path in tmp_path.glob("*.log")]
    assert lines(capfd.readouterr().out + "".join(logs)) == FOUR_ON_ONE


def test_torchrun(tmp_path: Path) -> None:
    done = run([*TORCHRUN, "--standalone", "--nproc-per-node=4", PROGRAM, str(tmp_path)])
    assert lines(done.stdout) == FOUR_ON_ONE, done.stderr


@pytest.mark.parametrize("shared", ["0", "1"])
def test_torchrun_starts_them_again(tmp_path: Path, shared: str) -> None:
    one_machine = ["--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    done = run(
        [*TORCHRUN, *one_machine, PROGRAM, str(tmp_path), "1"],
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE=shared,
    )
    assert lines(done.stdout) == [f"rank {r} of 2, {r} of 2: 3" for r in range(2)], done.stderr
    assert "ValueError: this rank fails once" in done.stderr


def test_mpiexec(tmp_path: Path, mpiexec: list[str]) -> None:
    argv = [*mpiexec, "4", sys.executable, PROGRAM, str(tmp_path)]
    done = run(argv, MASTER_PORT=free_port())
    assert lines(done.stdout) == FOUR_ON_ONE, done.stderr


def test_srun(tmp_path: Path, slurm: Slurm) -> None:
    """Four tasks on two nodes, then two on one of them."""
    command = shlex.join([sys.executable, PROGRAM, str(tmp_path)])
    script = f"#!/bin/sh\nsrun {command}\nsrun --nodes=1 --ntasks=2 {command}\n"
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=2")
    ended = slurm.wait(job)
    assert ended == {0: ("COMPLETED", 0)}, slurm.output(job)
    then = [f"rank {rank} of 2, {rank} of 2: 3" for rank in range(2)]
    assert lines(slurm.output(job)) == sorted(TWO_AND_TWO + then)


def test_torchrun_on_each_node_of_slurm(tmp_path: Path, slurm: Slurm) -> None:
    agent = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    agent += [f"--rdzv-endpoint=n1:{free_port()}", PROGRAM, str(tmp_path)]
    job = slurm.submit(f"#!/bin/sh\nsrun {shlex.join(agent)}\n", "--nodes=2", "--ntasks-per-node=1")
    ended = slurm.wait(job)
    assert ended == {0: ("COMPLETED", 0)}, slurm.output(job)
    assert lines(slurm.output(job)) == TWO_AND_TWO


def test_a_batch_script_without_srun_is_one_rank(tmp_path: Path, slurm: Slurm) -> None:
    command = shlex.join([sys.executable, "-c", "from trainyard.launch.environment import *"])
    command = command[:-1] + "; print(read_process() == Process())'"
    job = slurm.submit(f"#!/bin/sh\n{command}\n", "--nodes=2", "--ntasks-per-node=2")
    assert slurm.wait(job) == {0: ("COMPLETED", 0)}, slurm.output(job)
    assert slurm.output(job) == "True\n"
    assert slurm.run(["salloc", "--ntasks=3", "sh", "-c", command]) == "True\n"


def test_a_task_of_slurm_fails(tmp_path: Path, slurm: Slurm) -> None:
    command = shlex.join([sys.executable, PROGRAM, str(tmp_path), "2"])
    script = f"#!/bin/sh\nsrun {command} 2>&1\n"
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=2")
    assert slurm.wait(job) == {0: ("FAILED", 1)}
    said = slurm.output(job)
    assert said.count("MachineError: rank 2 on ") == 3, said
    assert "failed: ValueError: this rank fails once" in said
