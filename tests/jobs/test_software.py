"""Nodes without Python, Trainyard or torch: one message, exit code 93, and no second start."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.scripts import RUN_LAST, SSH, build_job, run_job, write_program
from tests.launch.test_installed import SOURCES, write_package

HINT = (
    "hint: install Trainyard and torch for Python 3.11 or newer (docs/installing.md), or set "
    "python or the image in the cluster file; then launch again\n"
)
WAYS: dict[str, dict[str, Any]] = {
    "local": {},
    "slurm": {},
    "ssh": {"hosts": ("n1",)},
    "mpi": {"hosts": ("localhost",), "options": ("-launcher fork",)},
}


def run(
    folder: Path, scheduler: str, python: str, is_stage: bool = False, srun: str = RUN_LAST,
    **launch: Any,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs a job of two ranks, or a stage, by its script."""
    fields = {"scheduler": scheduler, "python": python, **launch, **WAYS[scheduler]}
    job = build_job(folder, fields, n_ranks_per_node=1 if is_stage else 2, is_stage=is_stage)
    programs = {"ssh": SSH, "srun": srun, "scontrol": 'echo "scontrol $*"'}
    for name, text in programs.items():
        write_program(folder / "bin" / name, text)
    path = f"{folder}/bin:{os.environ['PATH']}"
    given = {**os.environ, "PATH": path}
    done: subprocess.CompletedProcess[str] = run_job(job, programs=folder / "bin", **given)
    return done


def assert_held(done: subprocess.CompletedProcess[str], problem: str) -> None:
    assert done.returncode == 93, done.stderr
    said = done.stdout + done.stderr
    assert said.count("error: ") == said.count("hint: ") == 1, said
    assert f"error: {socket.gethostname()}: {problem}" in said
    assert HINT in said
    assert "Traceback" not in said


def test_a_rank_that_a_launcher_starts_late_is_held_too(tmp_path: Path) -> None:
    late = 'RANK_HERE=0 bash -c "${@: -1}"\nexec bash -c "${@: -1}"'
    python = (
        '[ "$RANK_HERE" != 0 ] || exec /opt/nothing/python\n'
        f'case "$*" in *launch.installed*) ;; *) touch "{tmp_path}/trains" ;; esac'
    )
    done = run(tmp_path, "slurm", write_program(tmp_path / "python", python), srun=late)
    assert_held(done, f"{tmp_path}/python: ")
    assert not (tmp_path / "trains").exists()


@pytest.mark.parametrize("is_stage", [False, True])
@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_no_python(scheduler: str, is_stage: bool, tmp_path: Path) -> None:
    done = run(tmp_path, scheduler, "/opt/nothing/python", is_stage)
    assert_held(done, "/opt/nothing/python: ")
    assert "/opt/nothing/python: No such file or directory" in done.stderr


@pytest.mark.parametrize("scheduler", ["slurm", "ssh", "mpi"])
def test_no_trainyard(scheduler: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if scheduler == "mpi":
        request.getfixturevalue("mpiexec")
    python = write_program(
        tmp_path / "python", f'unset PYTHONPATH\nexec {sys.executable} -S "$@"\n'
    )
    done = run(tmp_path, scheduler, python)
    assert_held(done, f"{python}: ")
    assert "No module named 'trainyard'" in done.stdout + done.stderr
    starts = (tmp_path / "runs/run/starts.log").read_text()
    assert re.findall(r" end \S+ (.*)", starts) == ["93 stay"]
    assert not list((tmp_path / "runs/run/logs").glob("refused-*")), "another start may speak again"


def test_a_python_that_is_too_old(tmp_path: Path) -> None:
    """What Python 3.10 says of -P, which came with 3.11."""
    says = "unknown option -P\nusage: python3 [option] ... [-c cmd | -m mod | file | -] [arg] ..."
    python = write_program(tmp_path / "python", f"echo '{says}' >&2\nexit 2\n")
    assert_held(run(tmp_path, "slurm", python), f"{python}: unknown option -P usage: python3 ")


def test_an_old_torch(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    write_package(tmp_path / "site", "torch", "2.7.0")
    python = write_program(
        tmp_path / "python",
        f'PYTHONPATH={tmp_path}/site:{SOURCES} exec {sys.executable} "$@"\n',
    )
    done = run(tmp_path, "slurm", python)
    problem = "torch 2.7.0 is installed, but Trainyard needs torch<2.15,>=2.11"
    assert_held(done, f"{python}: {problem}\n")


@pytest.mark.skipif(bool(shutil.which("singularity")), reason="singularity is installed")
def test_no_container_runtime(tmp_path: Path) -> None:
    container = {"runtime": "singularity", "image": "/images/some.sif"}
    done = run(tmp_path, "slurm", "python3", container=container)
    assert_held(done, "python3 in /images/some.sif: ")
    assert "singularity: command not found" in done.stderr


def run_failing(folder: Path, code: int, says: str) -> subprocess.CompletedProcess[str]:
    """Runs a job whose Apptainer ends so, for the check and for the ranks."""
    write_program(folder / "first/apptainer", f"echo '{says}' >&2\nexit {code}\n")
    container = {"runtime": "apptainer", "image": "/images/some.sif"}
    python, setup = "/opt/some/python", (f"PATH={folder}/first:$PATH",)
    return run(folder, "slurm", python, container=container, setup=setup)


@pytest.mark.parametrize(
    "says",
    [  # Apptainer 1.4.5
        "FATAL:   stat /opt/some/python: no such file or directory",
        'FATAL:   "python3": executable file not found in $PATH',
    ],
)
def test_an_image_without_python(says: str, tmp_path: Path) -> None:
    assert_held(run_failing(tmp_path, 255, says), f"/opt/some/python in /images/some.sif: {says}")


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (255, "FATAL:   container creation failed: mount /scratch: mount source does not exist"),
        (255, "FATAL:   could not open image /images/some.sif: stale file handle"),
        (1, "OSError: [Errno 116] Stale file handle"),
        (120, "OSError: [Errno 28] No space left on device"),
    ],
)
def test_a_failure_that_may_pass(code: int, says: str, tmp_path: Path) -> None:
    """The ranks fail themselves: the job is requeued, and their host blamed."""
    done = run_failing(tmp_path, code, says)
    folder = tmp_path / "runs/run"
    assert done.returncode == code, done.stderr
    assert HINT not in done.stderr
    assert "scontrol requeue 1\n" in done.stdout
    assert (folder / "starts.log").read_text().endswith(f" end 1 {code} requeue\n")
    host = socket.gethostname().partition(".")[0]
    assert (folder / "bad_nodes").read_text() == f"{host} 1\n"


def test_a_run_folder_that_the_node_cannot_write(tmp_path: Path) -> None:
    """Then all ranks speak."""
    srun = 'rm -rf runs/run/logs; touch runs/run/logs; exec bash -c "${@: -1}"'
    done = run(tmp_path, "slurm", "/opt/nothing/python", srun=srun)
    assert done.returncode == 93
    assert f"error: {socket.gethostname()}: /opt/nothing/python: " in done.stderr
