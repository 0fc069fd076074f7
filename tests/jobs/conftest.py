"""The real Slurm and mpiexec of tests/cluster."""

from __future__ import annotations

from tests.cluster.conftest import machines, mpiexec, slurm

__all__ = ["machines", "mpiexec", "slurm"]
