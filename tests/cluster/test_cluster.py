"""The Slurm and the mpiexec that other tests build on do what those tests rely on."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from .slurm import Slurm

pytestmark = pytest.mark.dist


def test_each_task_of_an_array_runs(slurm: Slurm, tmp_path: Path) -> None:
    script = f"#!/bin/sh\necho $SLURM_ARRAY_TASK_ID | tee {tmp_path}/$SLURM_ARRAY_TASK_ID\n"
    job = slurm.submit(script, "--array=0-4")
    assert slurm.wait(job) == {i: ("COMPLETED", 0) for i in range(5)}
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {
        f"{i}": f"{i}\n" for i in range(5)
    }
    assert slurm.output(job, 3) == "3\n"


def test_a_failing_task_shows_its_exit_code(slurm: Slurm) -> None:
    job = slurm.submit("#!/bin/sh\nexit $((SLURM_ARRAY_TASK_ID * 3))\n", "--array=0-1")
    assert slurm.wait(job) == {0: ("COMPLETED", 0), 1: ("FAILED", 3)}


def test_a_job_can_be_cancelled(slurm: Slurm, tmp_path: Path) -> None:
    mark = tmp_path / "started"
    job = slurm.submit(f"#!/bin/sh\ntouch {mark}\nsleep 600\n")
    slurm.wait_until("the job runs", mark.exists)
    slurm.run(["scancel", str(job)])
    assert slurm.wait(job)[0][0] == "CANCELLED"


def test_a_job_starts_after_the_one_it_depends_on(slurm: Slurm, tmp_path: Path) -> None:
    path = tmp_path / "order"
    first = slurm.submit(f"#!/bin/sh\nsleep 0.3\necho first >>{path}\n")
    second = slurm.submit(f"#!/bin/sh\necho second >>{path}\n", f"--dependency=afterok:{first}")
    assert slurm.wait(second) == {0: ("COMPLETED", 0)}
    assert path.read_text() == "first\nsecond\n"


def test_a_job_of_two_nodes_runs_tasks_on_both(slurm: Slurm) -> None:
    script = "#!/bin/sh\nsrun sh -c 'echo $SLURMD_NODENAME $SLURM_PROCID'\n"
    job = slurm.submit(script, "--nodes=2", "--ntasks-per-node=2")
    assert slurm.wait(job) == {0: ("COMPLETED", 0)}, slurm.output(job)
    assert sorted(slurm.output(job).splitlines()) == ["n1 0", "n1 1", "n2 2", "n2 3"]


def test_a_second_slurm_runs_beside_the_first_and_leaves_nothing(
    slurm: Slurm, tmp_path: Path
) -> None:
    mark = tmp_path / "process"
    script = f"#!/bin/sh\necho $$ >{mark}.new\nmv {mark}.new {mark}\nsleep 600 & wait\n"
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, Slurm(Path(folder), 1) as second:
        second.submit(script)
        second.wait_until("the job runs", mark.exists)
        process = Path("/proc") / mark.read_text().strip()
        assert b"slurm_script" in (process / "cmdline").read_bytes()
        ports = re.findall("Port=([0-9]+)", (second.folder / "slurm.conf").read_text())
    # Where nobody collects an ended process, it stays, without a command line.
    assert not process.exists() or (process / "cmdline").read_bytes() == b""
    assert len(ports) == 2
    for port in ports:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", int(port)))  # fails while anything listens there, at any address
    assert slurm.run(["sinfo", "--noheader", "--format=%D"]).strip() == "2"


def test_mpiexec_runs_its_ranks(mpiexec: list[str]) -> None:
    argv = [*mpiexec, "3", "sh", "-c", "echo $PMI_RANK of $PMI_SIZE"]
    # Forwarding its input to ranks that have ended is what mpiexec can die of.
    answer = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=True
    )
    assert sorted(answer.stdout.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]
