"""`trainyard train` as the command of each rank, under each real launcher: one run, as ever."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.conftest import token_prefix
from tests.waiting import WATCHDOG_SECONDS

from trainyard.config.load import load_run
from trainyard.train.run_folder import write_run_folder
from trainyard.train.worker import run_worker

from .slurm import Slurm

__all__ = ["token_prefix"]
pytestmark = pytest.mark.dist

PROGRAM = "import sys; from trainyard.cli.main import main; main(sys.argv[1:])\n"
N_STEPS = 4


def overrides(prefix: str) -> list[str]:
    return [
        "name=run",
        f"data.blend.prefixes=['{prefix}']",
        "data.split='80,10,10'",
        f"train.length='{N_STEPS} steps'",
        "train.micro_batch_size=2",
        f"schedule.decay='{N_STEPS} steps'",
        "schedule.warmup='1 steps'",
        "evaluate.batches=1",
        "log.interval=1",
        "log.tensorboard=false",
    ]


@pytest.fixture(scope="module")
def expected(token_prefix: str, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    cache = f"data.cache_folder='{folder / 'cache'}'"
    write_run_folder(folder, load_run("tiny", [*overrides(token_prefix), cache]).run, "auto")
    run_worker(folder)
    return losses(folder)


def losses(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = map(json.loads, lines)
    return [each["loss"] for each in records if each["kind"] in ("train", "evaluate")]


def command(folder: Path, prefix: str, *more: str) -> list[str]:
    """What every rank runs, in `folder`; Python is not named, as torchrun wants it."""
    program = folder / "trainyard.py.txt"
    program.write_text(PROGRAM, encoding="utf-8")
    return [str(program), "train", "tiny", *overrides(prefix), "data.cache_folder=cache", *more]


def run(argv: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "MASTER"))
    }
    return subprocess.run(
        argv,
        cwd=folder,
        capture_output=True,
        text=True,
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        timeout=WATCHDOG_SECONDS,
    )


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def assert_trained_once(folder: Path, screen: str, expected: list[float]) -> None:
    """The losses are right, and rank 0 alone has spoken."""
    assert losses(folder / "runs" / "run") == pytest.approx(expected, rel=3e-6), screen
    assert screen.count(f"step {1:>{len(str(N_STEPS))}} of {N_STEPS}") == 1, screen
    assert screen.count(f"done: step {N_STEPS} is saved in") == 1, screen


def test_torchrun(tmp_path: Path, token_prefix: str, expected: list[float]) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    layout = ["parallel.tensor=2", "parallel.pipeline=2"]
    argv = [*launcher, "--nproc-per-node=4", *command(tmp_path, token_prefix, *layout)]
    done = run(argv, tmp_path)
    assert done.returncode == 0, done.stderr
    assert_trained_once(tmp_path, done.stderr, expected)


def test_mpiexec(
    tmp_path: Path, mpiexec: list[str], token_prefix: str, expected: list[float]
) -> None:
    program = command(tmp_path, token_prefix, "parallel.zero_stage=3")
    done = run([*mpiexec, "2", sys.executable, *program], tmp_path, MASTER_PORT=free_port())
    assert done.returncode == 0, done.stderr
    assert_trained_once(tmp_path, done.stderr, expected)


def test_srun(tmp_path: Path, slurm: Slurm, token_prefix: str, expected: list[float]) -> None:
    """One rank on each of two nodes, with half of every sequence each."""
    rank = shlex.join([sys.executable, *command(tmp_path, token_prefix, "parallel.context=2")])
    script = f"#!/bin/sh\ncd {tmp_path}\nexport OMP_NUM_THREADS=1\nsrun {rank} 2>&1\n"
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=1")
    ended = slurm.wait(job)
    assert ended == {0: ("COMPLETED", 0)}, slurm.output(job)
    assert_trained_once(tmp_path, slurm.output(job), expected)


def test_other_overrides_on_one_rank(tmp_path: Path, token_prefix: str) -> None:
    """A rank that was given another run refuses, and torchrun ends them all."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    argv = [*launcher, "--nproc-per-node=2", *command(tmp_path, token_prefix)]
    program = tmp_path / "trainyard.py.txt"
    differs = (
        "import os, sys, time\nfrom trainyard.cli import train\n"
        "train.wait_for_run_folder.__defaults__ = (1.0,)\n"
        "if os.environ['RANK'] == '1':\n"
        "    sys.argv += ['train.seed=7']\n"
        "    while not os.path.exists('runs/run/run.toml'):\n"
        "        time.sleep(0.1)\n"
    )
    program.write_text(differs + PROGRAM, encoding="utf-8")
    done = run(argv, tmp_path)
    assert done.returncode != 0
    assert "run.toml holds another run than this rank was given" in done.stderr, done.stderr
