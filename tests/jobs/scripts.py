"""Runs job scripts with stand-ins for the programs that schedulers install."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.waiting import WATCHDOG_SECONDS

from trainyard.config.cluster import Cluster, Launch
from trainyard.jobs.job import Job
from trainyard.jobs.script import render

RUN_LAST = 'case $* in *bash\\ -c*) exec bash -c "${@: -1}";; esac'
"""A launcher that runs the command of a rank as it comes to it."""
SSH = 'while [ "$1" != n1 ]; do shift; done; shift; exec bash -c "$*"'
"""The program ssh, for a host n1 that is this machine."""


def write_program(path: Path, body: str) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)
    return str(path)


def build_job(project: Path, launch: Mapping[str, Any], gpu: str = "cpu", **changes: Any) -> Job:
    """Builds a job of one rank with the `project`, unless fields of it are changed."""
    usual = {"scheduler": "slurm", "python": "python3", "scratch": f"{project}/scratch"}
    fields: dict[str, Any] = {
        "name": "run", "n_nodes": 1, "n_ranks_per_node": 1, "arguments": ("train",),
        "folder": project / "runs/run", "made_by": "test",
    }  # fmt: skip
    cluster = Cluster(gpu=gpu, launch=Launch.model_validate(usual | launch))
    return Job(**fields | {"cluster": cluster} | changes)


def run_job(job: Job, *words: str, programs: Path, **environment: str) -> Any:
    """Runs the script of a job, of Slurm in an allocation; returns the completed process."""
    for folder in (job.script_path.parent, job.folder / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    job.script_path.write_text(render(job))
    usual = {"PATH": f"{programs}:{os.environ['PATH']}"}
    if job.launch.scheduler == "slurm":
        usual["SLURM_JOB_ID"] = "1"
    return subprocess.run(
        ["bash", str(job.script_path), *words],
        env=usual | environment,
        capture_output=True,
        text=True,
        timeout=WATCHDOG_SECONDS,
    )
