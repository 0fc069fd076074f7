"""A running Slurm and a working mpiexec, or a skip that says which package is missing."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from .slurm import Slurm

SLURM_PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
}


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes, `n1` and `n2`, of four CPUs each; shared by the tests of a session."""
    missing = [package for program, package in SLURM_PACKAGES.items() if not shutil.which(program)]
    if missing:
        pytest.skip(f"needs Slurm; not installed here: {' '.join(missing)}")
    if os.getuid() != 0:
        pytest.skip("needs root, to start Slurm's daemons")
    # Not below pytest's own folder: the path of a socket is 107 characters at most.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Slurm(Path(folder)) as running:
        yield running


@pytest.fixture(scope="session")
def mpiexec() -> list[str]:
    """The command, up to the number of ranks, that starts local ranks with a real MPI launcher.

    MPICH's: it tells each rank its number and their count in PMI_RANK and PMI_SIZE.
    """
    if not shutil.which("mpiexec.hydra"):
        pytest.skip("needs MPICH's mpiexec; not installed here: mpich")
    return ["mpiexec.hydra", "-launcher", "fork", "-n"]
