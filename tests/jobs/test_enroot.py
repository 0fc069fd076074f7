"""Stages on nodes without GPUs, in an image for GPUs: the environment that enroot's hooks read.

pyxis passes the environment of the step to enroot, which runs its hooks before the container
starts. The hooks are enroot's own, where it is installed; elsewhere set ENROOT_SYSCONF_PATH and
ENROOT_LIBRARY_PATH, enroot's variables, to the folders of its hooks.d and its common.sh
(github.com/NVIDIA/enroot, conf/hooks and src).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from tests.jobs.scripts import run_job, write_program

from trainyard.config.cluster import read_cluster
from trainyard.jobs.job import Job

HOOKS = Path(os.environ.get("ENROOT_SYSCONF_PATH", "/etc/enroot")) / "hooks.d"
LIBRARY = os.environ.get("ENROOT_LIBRARY_PATH", "/usr/lib/enroot")
HIDDEN = "NVIDIA_VISIBLE_DEVICES=void MELLANOX_VISIBLE_DEVICES=void"
# Of NVIDIA's images.
IMAGE = "NVIDIA_VISIBLE_DEVICES=all\nNVIDIA_DRIVER_CAPABILITIES=compute,utility\n"
SHOW = "echo NVIDIA_VISIBLE_DEVICES=$NVIDIA_VISIBLE_DEVICES "
SHOW += "MELLANOX_VISIBLE_DEVICES=$MELLANOX_VISIBLE_DEVICES"


def run(folder: Path, is_stage: bool, step: str) -> subprocess.CompletedProcess[str]:
    """Runs a script for azure-ndv5; `step` is what its srun does instead of starting a task."""
    image = {"container": {"image": "/images/trainyard.sqsh"}}
    cluster = read_cluster("azure-ndv5", image)
    job = Job("run", cluster, 1, 1, ("prepare",), folder / "runs/run", "test", is_stage)
    write_program(folder / "srun", step)
    done: subprocess.CompletedProcess[str] = run_job(job, programs=folder)
    return done


def test_the_step_of_a_stage_hides_devices(tmp_path: Path) -> None:
    done = run(tmp_path, True, SHOW)
    assert (done.returncode, done.stdout) == (0, f"{HIDDEN}\n"), done.stderr


def test_the_step_of_training_does_not(tmp_path: Path) -> None:
    done = run(tmp_path, False, SHOW)
    assert "NVIDIA_VISIBLE_DEVICES= MELLANOX_VISIBLE_DEVICES=\n" in done.stdout


@pytest.mark.skipif(not (HOOKS / "98-nvidia.sh").exists(), reason="enroot is not installed")
@pytest.mark.parametrize("hook", ["98-nvidia.sh", "99-mellanox.sh"])
def test_a_stage_needs_no_driver(hook: str, tmp_path: Path) -> None:
    (tmp_path / "image").write_text(f"{IMAGE}MELLANOX_VISIBLE_DEVICES=all\n")
    done = run(tmp_path, True, step_of(hook, tmp_path))
    assert (done.returncode, done.stdout, done.stderr) == (0, "hook ended with 0\n", "")


@pytest.mark.skipif(not (HOOKS / "98-nvidia.sh").exists(), reason="enroot is not installed")
def test_training_needs_one(tmp_path: Path) -> None:
    """Here there is none: the hook, and with it the start of the container, fails."""
    (tmp_path / "image").write_text(IMAGE)
    done = run(tmp_path, False, step_of("98-nvidia.sh", tmp_path))
    assert "hook ended with 1\n" in done.stdout
    assert "Command not found: nvidia-container-cli" in done.stderr


def step_of(hook: str, folder: Path) -> str:
    """What enroot does between the start of the step and of its task."""
    given = f"ENROOT_ENVIRON={folder}/image ENROOT_ROOTFS={folder} ENROOT_LIBRARY_PATH={LIBRARY}"
    return f"{given} bash {HOOKS}/{hook}; echo hook ended with $?"
