"""The real Slurm and mpiexec of tests/cluster."""

from __future__ import annotations

from tests.cluster.conftest import mpiexec, slurm

__all__ = ["mpiexec", "slurm"]
