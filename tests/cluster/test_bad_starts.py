"""What is wrong with machines, ports and folders is named in a minute, and not tried again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.faults.small_run import small_overrides, write_tokens

from .launching import trainyard, write_cluster
from .machines import Machines
from .slurm import Slurm
from .test_backends import job_of, log_of

pytestmark = pytest.mark.exhaustive

LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("project")
    write_tokens(folder)
    return folder


def launch(
    machines: Machines, project: Path, name: str, *options: str, **table: object
) -> tuple[int, str]:
    """Launches two ranks on two nodes; gives the exit code, and what was said."""
    cluster = write_cluster(project / f"{name}.toml", "slurm", **table)
    settings = ["tiny", f"name={name}", *small_overrides(project / "corpus_text_document", 4)]
    where = ["--cluster", str(cluster), "--nodes", "2"]
    done = trainyard(machines, project, "launch", *settings, *where, *options)
    return done.returncode, done.stdout + done.stderr


def end_of(slurm: Slurm, project: Path, name: str) -> tuple[tuple[str, int], str]:
    """Waits for a job; gives its state and exit code, and its log."""
    folder = project / "runs" / name
    (ended,) = slurm.wait(job_of(folder), LIMIT_SECONDS).values()
    return ended, log_of(folder)


def test_an_interface_that_is_not_there(slurm: Slurm, machines: Machines, project: Path) -> None:
    launch(machines, project, "interface", environment={"GLOO_SOCKET_IFNAME": "ib7"})
    ended, log = end_of(slurm, project, "interface")
    assert ended == ("FAILED", 2), log
    assert "has met the others, but cannot connect to them: " in log
    assert "ib7" in log


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_gpus_that_are_not_there(slurm: Slurm, machines: Machines, project: Path) -> None:
    """The nodes have none, and must not train on their CPUs instead."""
    cluster = project / "gpus.toml"
    launch(machines, project, "gpus", "--dry-run")
    cluster.write_text(cluster.read_text().replace('gpu = "cpu"', 'gpu = "h100"'))
    settings = ["tiny", "name=gpus", *small_overrides(project / "corpus_text_document", 4)]
    where = ["--cluster", str(cluster), "--nodes", "2"]
    assert trainyard(machines, project, "launch", *settings, *where).returncode == 0
    ended, log = end_of(slurm, project, "gpus")
    assert ended == ("FAILED", 2), log
    assert re.search("error: n[12]: 1 GPUs were promised, and torch sees 0\n", log), log
    assert not (project / "runs" / "gpus" / "metrics.jsonl").exists()


@contextmanager
def read_only(machines: Machines, folder: Path, node: str) -> Iterator[None]:
    """A run folder that one node alone cannot write."""
    folder.mkdir(parents=True)
    machines.run(["mount", "--bind", str(folder), str(folder)], host=node)
    machines.run(["mount", "-o", "remount,bind,ro", str(folder)], host=node)
    try:
        yield
    finally:
        machines.run(["umount", str(folder)], host=node)


def test_a_run_folder_that_the_first_node_cannot_write(
    slurm: Slurm, machines: Machines, project: Path
) -> None:
    """Slurm cannot even open the log."""
    folder = project / "runs" / "first"
    with read_only(machines, folder, "n1"):
        code, said = launch(machines, project, "first")
        assert code == 0, said
        assert end_of(slurm, project, "first")[0][0] == "FAILED"
    said = trainyard(machines, project, "status", "first").stdout
    assert "never started: FAILED (JobLaunchFailure: n1 cannot start the script, or not" in said


def test_a_run_folder_that_another_node_cannot_write(
    slurm: Slurm, machines: Machines, project: Path
) -> None:
    """That node can leave no word in it, so this ends as other failures do: after three starts."""
    folder = project / "runs" / "other"
    with read_only(machines, folder, "n2"):
        launch(machines, project, "other")
        says = f"error: rank 1 of 2: n2 cannot write to {folder}\n"
        wait_for(lambda: says in log_of(folder))
        slurm.run(["scancel", str(job_of(folder))])
        end_of(slurm, project, "other")


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
