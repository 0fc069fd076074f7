"""The Slurm and the mpiexec that other tests build on do what those tests rely on."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

from .machines import Machines
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


def test_each_machine_has_its_own_name_address_and_processes(machines: Machines) -> None:
    for name in ("login", "n1", "n2"):
        said = machines.run(["sh", "-c", "hostname; ip -brief addr; ps ax"], host=name).stdout
        assert said.splitlines()[0] == name
        assert f" {machines.address(name)}/24" in said
        assert "sshd" in said
        assert "pytest" not in said
    there = machines.run(["ssh", "n2", "hostname; echo $SSH_CONNECTION"], host="n1").stdout
    assert re.fullmatch(r"n2\n10\.77\.0\.11 \d+ 10\.77\.0\.12 22\n", there)


def test_a_node_that_is_cut_off_answers_no_more(machines: Machines) -> None:
    ask = ["ssh", "-o", "ConnectTimeout=1", "n2", "hostname"]
    machines.cut("n2")
    try:
        assert "timed out" in machines.run(ask).stderr
    finally:
        machines.join("n2")
    machines.wait_until("n2 answers", lambda: machines.run(ask).stdout == "n2\n")


def test_a_second_slurm_loses_a_node_and_leaves_nothing(slurm: Slurm, tmp_path: Path) -> None:
    """Its job is run again on the other node."""
    mark = tmp_path / "process"
    script = f"#!/bin/sh\nhostname >>{tmp_path}/hosts\nsleep 600 & echo $! >{mark}\nwait\n"
    links = Path("/proc/self/net/dev").read_text().count("\n")
    with tempfile.TemporaryDirectory(prefix="machines-") as folder:
        with Machines(Path(folder)) as machines:
            second = Slurm(machines)
            second.start()
            job = second.submit(script, "--requeue", "--open-mode=append")
            second.wait_until("the job runs", mark.exists)
            machines.kill("n1")
            assert machines.run(["ssh", "-o", "ConnectTimeout=2", "n1", "true"]).returncode != 0
            hosts = tmp_path / "hosts"
            second.wait_until("it runs again", lambda: "n2" in hosts.read_text())
            assert hosts.read_text() == "n1\nn2\n"
            second.boot("n1")
            assert second.show(job)["Restarts"] == "1"
            asked = ["pgrep", "-f", "slurmctld|slurmd|munged|sleep 600"]
            assert machines.run(asked, host="n2").stdout
        left = subprocess.run(["pgrep", "-af", folder], capture_output=True, text=True).stdout
    assert left == ""
    assert Path("/proc/self/net/dev").read_text().count("\n") == links
    assert slurm.run(["sinfo", "--noheader", "-pmain", "--format=%D"]).strip() == "2"


def test_mpiexec_runs_its_ranks(mpiexec: list[str]) -> None:
    argv = [*mpiexec, "3", "sh", "-c", "echo $PMI_RANK of $PMI_SIZE"]
    # Forwarding its input to ranks that have ended is what mpiexec can die of.
    answer = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert sorted(answer.stdout.splitlines()) == ["0 of 3", "1 of 3", "2 of 3"]
