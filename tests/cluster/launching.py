"""What tests that launch share: a cluster file for the machines, and `trainyard` typed on login."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import tomli_w

from .machines import Machines

TRAINYARD = [sys.executable, "-P", "-m", "trainyard.cli"]
SOURCES = Path(__file__).parents[2] / "src"


def write_cluster(path: Path, scheduler: str, devices_per_node: int = 1, **launch: Any) -> Path:
    """Writes a cluster file for machines of `machines.py`: CPUs, scratch in /run."""
    environment = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    table = {
        "scheduler": scheduler,
        "python": sys.executable,
        "scratch": "/run",
        **launch,
        "environment": environment | launch.get("environment", {}),
    }
    if scheduler in ("mpi", "ssh"):
        table.setdefault("hosts", ["n1", "n2"])
    content = {
        "description": "Machines in namespaces",
        "gpu": "cpu",
        "devices_per_node": devices_per_node,
        "launch": table,
    }
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    return path


def trainyard(
    machines: Machines,
    folder: Path,
    *arguments: str,
    path: str = "",
) -> CompletedProcess[str]:
    """Runs `trainyard` on the login machine, in a folder."""
    environment = {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"}
    if path:
        environment["PATH"] = path
    return machines.run(
        [*TRAINYARD, *arguments],
        folder=folder,
        environment=environment,
    )


def write_commands(folder: Path) -> dict[str, str]:
    """Writes `trainyard` into a folder of programs, for lines of bash that call it by name.

    Returns:
        The variables that those lines need.
    """
    programs = folder / "bin"
    programs.mkdir()
    (programs / "trainyard").write_text(f'#!/bin/sh\nexec {shlex.join(TRAINYARD)} "$@"\n')
    (programs / "trainyard").chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return {"PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1", "PATH": path}


def read_losses(folder: Path) -> dict[tuple[str, int], float]:
    """Losses of a run by kind and step, as they were said last, to the last bit."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    said = map(json.loads, lines)
    return {(e["kind"], e["step"]): e["loss"] for e in said if e["kind"] in ("train", "evaluate")}
