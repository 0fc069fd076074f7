"""Machines with sshd, a running Slurm, real mpiexecs, or a skip that says what is missing."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .machines import Machines, why_not
from .slurm import PACKAGES, Slurm


@pytest.fixture(scope="session")
def machines() -> Iterator[Machines]:
    """`login` and the nodes `n1` and `n2`, shared by the tests of a session."""
    if reason := why_not():
        pytest.skip(reason)
    # Not below pytest's own folder: the path of a socket is 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="machines-") as folder, Machines(Path(folder)) as all_:
        yield all_


@pytest.fixture(scope="session")
def slurm(machines: Machines) -> Slurm:
    """A Slurm on those nodes, of four CPUs each."""
    need_slurm()
    running = Slurm(machines)
    running.start()
    return running


def need_slurm() -> None:
    """Skips the test where Slurm is not installed."""
    missing = [package for program, package in PACKAGES.items() if not shutil.which(program)]
    if missing:
        pytest.skip(f"needs Slurm; not installed here: {' '.join(missing)}")


@pytest.fixture(scope="session")
def mpiexec() -> list[str]:
    """The command, up to the number of ranks, that starts local ranks with a real MPI launcher.

    MPICH's: it tells each rank its number and their count in PMI_RANK and PMI_SIZE.
    """
    if not shutil.which("mpiexec.hydra"):
        pytest.skip("needs MPICH's mpiexec; not installed here: mpich")
    return ["mpiexec.hydra", "-launcher", "fork", "-n"]
