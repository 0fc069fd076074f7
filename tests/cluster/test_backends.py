"""The same run file by every way of starting ranks: the same losses, to the last bit.

Two ranks each time, on one machine or on two; PBS is not packaged for Debian, so its script runs
here with what PBS gives to a job: PBS_NODEFILE and a few more variables, on the first node of it.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import small_overrides, write_tokens
from tests.waiting import wait_until

from .conftest import need_slurm
from .launching import read_losses, trainyard, write_cluster
from .machines import Machines

pytestmark = pytest.mark.exhaustive

N_STEPS = 3


@dataclass(frozen=True)
class Way:
    """How ranks are started."""

    scheduler: str
    launch: dict[str, Any] = field(default_factory=dict)
    needs: str = "bash"
    """A program; of the package that the next one names."""
    package: str = ""

    @property
    def n_nodes(self) -> int:
        return 1 if self.scheduler == "local" else 2


WAYS = {
    "local": Way("local"),
    "slurm, a task for each rank": Way("slurm"),
    "slurm, torchrun on each node": Way("slurm", {"start": "torchrun"}),
    "pbs, mpiexec of MPICH": Way("pbs", {"mpiexec": "mpich"}, "mpiexec.hydra", "mpich"),
    "mpiexec of MPICH": Way("mpi", {"mpiexec": "mpich"}, "mpiexec.hydra", "mpich"),
    "mpiexec of Open MPI": Way(
        "mpi",
        {"mpiexec": "openmpi", "options": ["--allow-run-as-root"]},
        "mpiexec.openmpi",
        "openmpi-bin",
    ),
    "ssh": Way("ssh"),
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
    way = WAYS[name]
    if not shutil.which(way.needs):
        pytest.skip(f"not installed here: {way.package}")
    run = "-".join(name.replace(",", "").split())
    devices = 2 // way.n_nodes
    cluster = write_cluster(project / f"{run}.toml", way.scheduler, devices, **way.launch)
    launch = ["launch", *settings(project, run), "--cluster", str(cluster)]
    launch += ["--nodes", str(way.n_nodes), "--ranks-per-node", str(devices)]
    if way.scheduler == "slurm":
        need_slurm()
        slurm = request.getfixturevalue("slurm")
        said = trainyard(machines, project, *launch)
        assert said.returncode == 0, said.stderr
        ended = slurm.wait(job_of(project / "runs" / run))
        assert ended == {0: ("COMPLETED", 0)}, whole_log_of(project / "runs" / run)
    elif way.scheduler == "pbs":
        run_as_pbs_does(machines, project, run, launch)
    else:
        done = trainyard(machines, project, *launch)
        assert done.returncode == 0, done.stderr
    assert read_losses(project / "runs" / run) == expected
    assert trainyard(machines, project, "status", run).stdout.startswith(f"{run}: ended: done\n")


def run_as_pbs_does(machines: Machines, project: Path, run: str, launch: list[str]) -> None:
    # Takes the script and gives a number, no more: what PBS does with it is done below.
    qsub = project / "bin" / "qsub"
    qsub.parent.mkdir()
    qsub.write_text("#!/bin/sh\necho 0.login\n")
    qsub.chmod(0o755)
    path = f"{qsub.parent}:{machines.environment['PATH']}"
    said = trainyard(machines, project, *launch, path=path)
    assert said.returncode == 0, said.stderr
    nodes = project / "nodes"
    nodes.write_text("n1\nn2\n")
    given = {
        "PBS_NODEFILE": str(nodes),
        "PBS_JOBID": "0.login",
        "PBS_JOBNAME": run,
        "PBS_O_WORKDIR": str(project),
        "PBS_WALLTIME": "3600",
    }
    done = machines.run(
        ["bash", str(project / "runs" / run / "job.sh")],
        host="n1",
        folder=Path("/root"),
        environment=given,
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
