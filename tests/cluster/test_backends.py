"""The same run file by every way of starting ranks: the same losses, to the last bit.

Two ranks each time, on one machine or on two; PBS is not packaged for Debian, so its script runs
here with what PBS gives to a job: PBS_NODEFILE and a few more variables, on the first node of it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import small_overrides, write_tokens
from tests.waiting import wait_until

from .conftest import need_slurm
from .launching import read_losses, trainyard, write_cluster
from .machines import Machines
from .stand_in_pbs import Pbs

pytestmark = pytest.mark.exhaustive

N_STEPS = 3


# How ranks are started: the scheduler, fields of its [launch] table, and a program of a package.
WAYS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "local": ("local", {}, "bash", ""),
    "slurm, a task for each rank": ("slurm", {}, "bash", ""),
    "slurm, torchrun on each node": ("slurm", {"start": "torchrun"}, "bash", ""),
    "pbs, mpiexec of MPICH": ("pbs", {"mpiexec": "mpich"}, "mpiexec.hydra", "mpich"),
    "mpiexec of MPICH": ("mpi", {"mpiexec": "mpich"}, "mpiexec.hydra", "mpich"),
    "mpiexec of Open MPI": (
        *("mpi", {"mpiexec": "openmpi", "options": ["--allow-run-as-root"]}),
        *("mpiexec.openmpi", "openmpi-bin"),
    ),
    "ssh": ("ssh", {}, "bash", ""),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small corpus, where all of them are launched."""
    folder: Path = tmp_path_factory.mktemp("project")
    write_tokens(folder)
    return folder


@pytest.fixture(scope="module")
def expected(project: Path, machines: Machines) -> dict[tuple[str, int], float]:
    """Losses of two ranks that `trainyard train` starts by itself."""
    done = trainyard(machines, project, "train", *settings(project, "alone"), "--ranks", "2")
    assert done.returncode == 0, done.stderr
    return read_losses(project / "runs" / "alone")


def settings(project: Path, name: str) -> list[str]:
    tokens = project / "corpus_text_document"
    return ["tiny", f"name={name}", *small_overrides(tokens, N_STEPS)]


@pytest.mark.parametrize("name", WAYS)
def test_losses_are_equal(
    name: str,
    project: Path,
    machines: Machines,
    expected: dict[tuple[str, int], float],
    request: pytest.FixtureRequest,
) -> None:
    scheduler, fields, program, package = WAYS[name]
    if not shutil.which(program):
        pytest.skip(f"not installed here: {package}")
    run = "-".join(name.replace(",", "").split())
    n_nodes = 1 if scheduler == "local" else 2
    devices = 2 // n_nodes
    cluster = write_cluster(project / f"{run}.toml", scheduler, devices, **fields)
    launch = ["launch", *settings(project, run), "--cluster", str(cluster)]
    launch += ["--nodes", str(n_nodes), "--ranks-per-node", str(devices)]
    if scheduler == "slurm":
        need_slurm()
        slurm = request.getfixturevalue("slurm")
        said = trainyard(machines, project, *launch)
        assert said.returncode == 0, said.stderr
        ended = slurm.wait(job_of(project / "runs" / run))
        assert ended == {0: ("COMPLETED", 0)}, whole_log_of(project / "runs" / run)
    elif scheduler == "pbs":
        run_as_pbs_does(machines, project, run, launch)
    else:
        done = trainyard(machines, project, *launch)
        assert done.returncode == 0, done.stderr
    assert read_losses(project / "runs" / run) == expected
    assert trainyard(machines, project, "status", run).stdout.startswith(f"{run}: ended: done\n")


def run_as_pbs_does(machines: Machines, project: Path, run: str, launch: list[str]) -> None:
    (project / "bin").mkdir()
    pbs = Pbs(machines, project)
    path = f"{project}/bin:{machines.environment['PATH']}"
    said = trainyard(machines, project, *launch, path=path)
    assert said.returncode == 0, said.stderr
    running = pbs.run_next(run, ["n1", "n2"])
    assert running.wait() == 0, log_of(project / "runs" / run)


def job_of(folder: Path) -> int:
    from trainyard.jobs.status import read_submission

    submission = read_submission(folder)
    assert submission is not None
    return int(submission.job)


def log_of(folder: Path) -> str:
    """The log of a job, so far."""
    return "\n".join(path.read_text() for path in sorted(folder.glob("job-*.log")))


def whole_log_of(folder: Path) -> str:
    """That of a job that has ended, once it is closed: the last lines may come late."""
    logs = set(map(str, folder.glob("job-*.log")))

    def is_open() -> bool:
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            with suppress(OSError):
                if os.readlink(link) in logs:  # noqa: PTH115  a path could not be compared as fast
                    return True
        return False

    wait_until(lambda: not is_open(), "the log of a job is closed")
    return log_of(folder)
