"""`launch --here` inside allocations of a real Slurm, and in what PBS gives to a job.

The losses must be those of the same run by `trainyard train`, to the last bit.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
from tests.faults.small_run import small_overrides, write_tokens
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.jobs.status import read_starts, read_submission

from .launching import TRAINYARD, read_losses, trainyard, write_cluster
from .machines import Machines
from .project import write_project
from .slurm import Slurm

pytestmark = pytest.mark.exhaustive

N_STEPS = 3


def prepare(folder: Path, scheduler: str, n_steps: int = N_STEPS) -> list[str]:
    write_tokens(folder)
    cluster = write_cluster(folder / "here.toml", scheduler)
    overrides = small_overrides(folder / "corpus_text_document", n_steps)
    return ["tiny", "name=run", *overrides, "--cluster", str(cluster), "--here"]


def expected(machines: Machines, folder: Path) -> dict[tuple[str, int], float]:
    overrides = small_overrides(folder / "corpus_text_document", N_STEPS)
    done = trainyard(machines, folder, "train", "tiny", "name=alone", *overrides, "--ranks", "2")
    assert done.returncode == 0, done.stderr
    return read_losses(folder / "runs" / "alone")


def test_in_an_allocation_of_slurm(slurm: Slurm, machines: Machines, tmp_path: Path) -> None:
    launch = [*TRAINYARD, "launch", *prepare(tmp_path, "slurm")]
    done = machines.run(["salloc", "--nodes=2", *launch], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "run"
    assert read_losses(run) == expected(machines, tmp_path)
    submission = read_submission(run)
    assert submission is not None
    assert (submission.job, submission.n_nodes) == ("", 2), "all nodes, and nothing in the queue"
    (start,) = read_starts(run)
    assert (start.nodes, start.exit_code) == ("n[1-2]", 0)
    refused = machines.run(["salloc", "--nodes=1", *launch, "--nodes", "2"], folder=tmp_path)
    assert refused.returncode == 2
    assert "error: --nodes 2, but this allocation has 1\nhint: --nodes 1, or" in refused.stderr


def replace_python(folder: Path, before: str) -> None:
    """Lets the cluster's Python be a script with a line before the real one."""
    python = folder / "python"
    text = (folder / "here.toml").read_text()
    old = next(line for line in text.splitlines() if line.startswith("python = "))
    (folder / "here.toml").write_text(text.replace(old, f'python = "{python}"'))
    python.write_text(f'#!/bin/bash\n{before}\nexec {TRAINYARD[0]} "$@"\n')
    python.chmod(0o755)


def test_a_failed_rank_starts_again_in_the_allocation(
    slurm: Slurm, machines: Machines, tmp_path: Path
) -> None:
    launch = [*TRAINYARD, "launch", *prepare(tmp_path, "slurm"), "--nodes", "2"]
    # The first training process of n2 is killed before it starts.
    is_first = '[ "$3" = trainyard.cli ] && [ "$(hostname)" = n2 ] && mkdir killed 2> /dev/null'
    replace_python(tmp_path, f"if {is_first}; then kill -9 $$; fi")
    done = machines.run(["salloc", "--nodes=2", *launch], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    starts = read_starts(tmp_path / "runs" / "run")
    assert [start.then for start in starts] == ["requeue", "finish"]
    assert len({start.job for start in starts}) == 1
    assert read_losses(tmp_path / "runs" / "run") == expected(machines, tmp_path)


def test_a_spare_node_replaces_a_bad_one(slurm: Slurm, machines: Machines, tmp_path: Path) -> None:
    launch = [*TRAINYARD, "launch", *prepare(tmp_path, "slurm"), "--nodes", "1"]
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "bad_nodes").write_text("n1 2\n")
    replace_python(tmp_path, "hostname >> hosts")
    done = machines.run(["salloc", "--nodes=2", *launch], folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set((tmp_path / "hosts").read_text().split()) == {"n2"}


def test_stages_run_in_turn_in_the_allocation(
    slurm: Slurm, machines: Machines, tmp_path: Path
) -> None:
    write_project(tmp_path)
    short = ["train.length='3 steps'", "schedule.decay='3 steps'"]
    launch = [*TRAINYARD, "launch", "run.toml", *short, "--cluster", "basement.toml", "--here"]
    argv = ["salloc", "--nodes=2", *launch, "--stages", "prepare,train"]
    done = machines.run(argv, folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "prepared" / "slim_01_text_document.json").exists()
    (start,) = read_starts(tmp_path / "runs" / "story")
    assert (start.nodes, start.exit_code) == ("n[1-2]", 0)


def has_stepped(run: Path) -> bool:
    """Whether every rank is training: before the first step there is nothing to save."""
    metrics = run / "metrics.jsonl"
    return metrics.exists() and '"kind": "train"' in metrics.read_text()


def test_ctrl_c_saves(slurm: Slurm, machines: Machines, tmp_path: Path) -> None:
    launch = [*TRAINYARD, "launch", *prepare(tmp_path, "slurm", 10**6), "log.interval=1"]
    shell = f"echo $$ > pid; exec {shlex.join(launch)}"
    argv = machines.on("login", ["salloc", "--nodes=2", "bash", "-c", shell], tmp_path)
    run = tmp_path / "runs" / "run"
    with subprocess.Popen(argv, env=machines.environment) as running:
        wait_until(lambda: has_stepped(run))
        pid = (tmp_path / "pid").read_text().strip()
        machines.run(["kill", "-INT", pid])
        assert running.wait(WATCHDOG_SECONDS) == 75
    assert list((run / "checkpoints").glob("step-*/manifest.json"))
    (start,) = read_starts(run)
    assert (start.exit_code, start.then) == (75, "cancelled")


@pytest.mark.parametrize("wanted", ["1", "2"])
def test_in_an_allocation_of_pbs(machines: Machines, tmp_path: Path, wanted: str) -> None:
    """PBS_NODEFILE of three nodes, one of which does not exist and is not used."""
    launch = [*TRAINYARD, "launch", *prepare(tmp_path, "pbs"), "--nodes", wanted]
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\nn3\n")
    given = {"PBS_NODEFILE": str(tmp_path / "nodes"), "PBS_JOBID": "7.login"}
    done = machines.run(launch, host="n1", folder=tmp_path, environment=given)
    assert done.returncode == 0, done.stdout + done.stderr
    (start,) = read_starts(tmp_path / "runs" / "run")
    assert start.nodes == ("n1,n2" if wanted == "2" else "n1")
    if wanted == "2":
        assert read_losses(tmp_path / "runs" / "run") == expected(machines, tmp_path)
