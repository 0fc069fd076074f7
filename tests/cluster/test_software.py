"""A node that lacks Python ends the job with one message, and it is not started again."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.faults.small_run import small_overrides, write_tokens

from trainyard.jobs.status import read_starts

from .launching import TRAINYARD, trainyard, write_cluster
from .machines import Machines
from .slurm import Slurm
from .test_backends import job_of, whole_log_of

pytestmark = pytest.mark.exhaustive


@pytest.mark.parametrize("start", ["tasks", "torchrun"])
def test_one_node_of_slurm(slurm: Slurm, machines: Machines, tmp_path: Path, start: str) -> None:
    python, launch = prepare(tmp_path, "slurm", start=start)
    done = trainyard(machines, tmp_path, *launch)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    ended = slurm.wait(job_of(run))
    log = whole_log_of(run)
    assert ended == {0: ("FAILED", 93)}, log
    assert_held(log, python, run)
    assert slurm.show(job_of(run))["Restarts"] == "0"
    assert "needs attention" in trainyard(machines, tmp_path, "status", "run").stdout


@pytest.mark.parametrize(("scheduler", "package"), [("mpi", "mpiexec.hydra"), ("ssh", "ssh")])
def test_one_host(machines: Machines, tmp_path: Path, scheduler: str, package: str) -> None:
    if not shutil.which(package):
        pytest.skip(f"not installed here: {package}")
    python, launch = prepare(tmp_path, scheduler)
    done = trainyard(machines, tmp_path, *launch)
    assert done.returncode == 93, done.stdout + done.stderr
    assert_held(done.stdout + done.stderr, python, tmp_path / "runs" / "run")


def prepare(tmp_path: Path, scheduler: str, **fields: str) -> tuple[Path, list[str]]:
    """Writes tokens, a Python that n2 lacks, and a cluster file; returns the words of a launch."""
    write_tokens(tmp_path)
    python = tmp_path / "python"
    has = f'[ "$(hostname)" = n1 ] && exec {TRAINYARD[0]} "$@"'
    python.write_text(f"#!/bin/bash\n{has}\nexec /opt/nothing/python\n")
    python.chmod(0o755)
    cluster = write_cluster(tmp_path / "c.toml", scheduler, 2, python=str(python), **fields)
    overrides = small_overrides(tmp_path / "corpus_text_document", 3)
    launch = ["launch", "tiny", "name=run", *overrides, "--cluster", str(cluster), "--nodes", "2"]
    return python, [*launch, "train.micro_batch_size=1"]


def assert_held(log: str, python: Path, run: Path) -> None:
    assert log.count(f": {python}: ") == log.count("hint: ") == 1, log
    assert f"error: n2: {python}: " in log
    assert "Traceback" not in log
    assert [(each.exit_code, each.then) for each in read_starts(run)] == [(93, "stay")]
