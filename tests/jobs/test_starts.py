"""What a job script does with the end of its ranks, under a real mpiexec; ranks are stand-ins."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.jobs.scripts import SSH, build_job, run_job, write_program
from tests.waiting import WATCHDOG_SECONDS, wait_until

from trainyard.jobs.job import Job
from trainyard.jobs.script import render
from trainyard.jobs.status import Submission, read_current, write_submission

pytestmark = pytest.mark.exhaustive

# The nth start of a rank ends as the nth word says: CODE, CODE:STEP with a checkpoint before it,
# CODE!HOST with a rank that died there by itself, CODE=SAID with another code in outcome.json, or
# CODE?REFUSED with that of another rank, which will not start.
RANK = """\
[ "$3" != trainyard.launch.installed ] || exit 0
n=$(cat starts 2> /dev/null || echo 0)
echo $((n + 1)) > starts
words=($(cat plan))
word=${words[n]}
code=${word%%[:!=?]*}
case $word in
  *:*) mkdir -p "runs/run/checkpoints/step-0000000${word#*:}"
       touch "runs/run/checkpoints/step-0000000${word#*:}/manifest.json" ;;
  *!*) mkdir -p runs/run/logs/attempt-0
       echo "{\\"host\\": \\"${word#*!}\\", \\"has_failed\\": true}" \\
         > runs/run/logs/attempt-0/rank-00000.failed.json ;;
  *\\?*) echo "${word#*\\?}" > "runs/run/logs/refused-$TRAINYARD_JOB" ;;
  *=*) echo "{\\"exit_code\\": ${word#*=}}" > runs/run/outcome.json ;;
esac
exit "$code"
"""


@pytest.fixture
def folder(tmp_path: Path, mpiexec: list[str]) -> Path:
    write_program(tmp_path / "rank", RANK)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    return tmp_path


def job_of(folder: Path, scheduler: str = "mpi", needs: tuple[str, ...] = (), **launch: Any) -> Job:
    hosts = {"mpi": {"options": ("-launcher fork",)}, "ssh": {}, "pbs": {}}[scheduler]
    if scheduler != "pbs":
        hosts |= {"hosts": ("localhost",)}
    given = {"scheduler": scheduler, "python": str(folder / "rank"), **hosts, **launch}
    return build_job(folder, given, needs=needs)


def run(folder: Path, plan: str, hosts: tuple[str, ...] = ("localhost",)) -> tuple[int, str]:
    """Runs the script; gives its exit code, and the codes of all ends."""
    (folder / "plan").write_text(plan)
    done = run_job(job_of(folder, hosts=hosts), programs=folder, **os.environ)
    log = (folder / "runs" / "run" / "starts.log").read_text()
    return done.returncode, " ".join(re.findall(r" end \S+ (\d+)", log))


@pytest.mark.parametrize(
    ("plan", "code", "ends"),
    [
        ("0", 0, "0"),
        ("2", 2, "2"),
        ("93", 93, "93"),
        ("75 0", 0, "75 0"),
        ("1 0", 0, "1 0"),
        ("1 1 1 1 0", 93, "1 1 1 93"),  # three more starts
        ("1 1 75:1 1 1 0", 0, "1 1 75 1 1 0"),  # a checkpoint begins the count again
        ("0=75 0", 0, "75 0"),  # a launcher that turns a stop into 0
        ("1=93", 93, "93"),
        ("143?2 0", 2, "2"),  # ended because another rank refused
        ("75 143 0", 0, "75 143 0"),
    ],
)
def test_ends(folder: Path, plan: str, code: int, ends: str) -> None:
    assert run(folder, plan) == (code, ends)
    assert not list((folder / "scratch").iterdir()), "compiled kernels are cleaned up"


def test_starts_are_told(folder: Path) -> None:
    run(folder, "75 0")
    lines = (folder / "runs" / "run" / "starts.log").read_text().splitlines()
    words = [line.split() for line in lines]
    assert [each[1] for each in words] == ["start", "end", "start", "end"]
    assert [each[3] for each in words] == ["0", "75", "1", "0"]
    assert [each[4] for each in words] == ["localhost", "requeue", "localhost", "finish"]
    assert all(re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ", each[0]) for each in words)


def test_a_host_that_fails_twice_is_left_out(folder: Path) -> None:
    code, ends = run(folder, "1!localhost 75!localhost 0", ("localhost", "127.0.0.1"))
    assert (code, ends) == (0, "1 75 0")
    assert (folder / "runs" / "run" / "bad_nodes").read_text() == "localhost 2\n"
    starts = (folder / "runs" / "run" / "starts.log").read_text()
    assert re.findall(r" start \S+ \d (\S+)", starts) == ["localhost", "localhost", "127.0.0.1"]


def test_without_a_spare_it_stays_down(folder: Path) -> None:
    assert run(folder, "1!localhost 1!localhost 0")[0] == 93


def test_an_old_witness_blames_nobody(folder: Path) -> None:
    old = folder / "runs" / "run" / "logs" / "attempt-0" / "rank-00000.failed.json"
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps({"host": "localhost", "has_failed": True}))
    os.utime(old, (1, 1))
    run(folder, "1 0")
    assert not (folder / "runs" / "run" / "bad_nodes").exists()


@pytest.mark.parametrize(
    ("number", "scheduler"),
    [(signal.SIGTERM, "mpi"), (signal.SIGINT, "mpi"), (signal.SIGUSR1, "mpi"),
     (signal.SIGTERM, "ssh"), (signal.SIGINT, "ssh")],
)  # fmt: skip
def test_a_person_stops_it(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    scheduler: str,
) -> None:
    """The ranks are asked to save, and are not started again."""
    write_program(folder / "ssh", SSH.replace("n1", "localhost"))
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    rank = "[ $3 != trainyard.launch.installed ] || exit 0\n"
    rank += "trap 'echo saved > saved; exit 75' USR1\necho > ready\nwhile true; do sleep 0.1; done"
    write_program(folder / "rank", rank)
    job = job_of(folder, scheduler)
    job.script_path.write_text(render(job))
    script = job.script_path
    with subprocess.Popen(["bash", str(script)], start_new_session=True) as running:
        wait_until((folder / "ready").exists)
        os.killpg(running.pid, number)
        assert running.wait(WATCHDOG_SECONDS) == 75
    assert (folder / "saved").exists()
    assert (folder / "runs" / "run" / "starts.log").read_text().endswith(" 75 cancelled\n")


def test_a_folder_that_cannot_be_written(folder: Path) -> None:
    job = job_of(folder)
    (job.folder / "logs").write_text("in the way")
    job.script_path.write_text(render(job))
    done = subprocess.run(
        ["bash", job.script_path], capture_output=True, text=True, timeout=WATCHDOG_SECONDS
    )
    assert done.returncode == 2
    assert f"cannot write to {folder}/runs/run" in done.stderr
    assert not (folder / "starts").exists()


def run_as_pbs_does(folder: Path, plan: str, nodes: str = "localhost\n") -> tuple[int, str]:
    """Runs a job of one node; gives its exit code, and what qsub was told."""
    job = job_of(folder, "pbs", ("data/corpus.json",), time="01:00:00")
    (folder / "plan").write_text(plan)
    (folder / "nodes").write_text(nodes)
    write_program(folder / "qsub", 'echo "$@" > told; echo hello; echo 4712.server')
    given = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "HYDRA_LAUNCHER": "fork"}
    given |= {"PBS_JOBID": "4711[].server", "PBS_NODEFILE": str(folder / "nodes")}
    done = run_job(job, programs=folder, **given)
    told = folder / "told"
    return done.returncode, told.read_text() if told.exists() else ""


def test_pbs_brings_a_job_back(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "corpus.json").touch()
    # Two lines are two ranks of one node.
    twice = "localhost\nlocalhost\n"
    path = folder.parent / folder.name / "runs" / "run" / "job.sh"
    run_folder = folder / "runs" / "run"
    submission = Submission(cluster="pbs", scheduler="pbs", n_nodes=1, job="4711[].server")
    write_submission(run_folder, submission)
    assert run_as_pbs_does(folder, "75 0", twice) == (75, f"{path}\n")
    current = read_current(run_folder)
    assert current is not None
    assert current.job == "4712.server", "status asks about the job that goes on"
    assert run_as_pbs_does(folder, "75 0", twice)[0] == 0
    log = (folder / "runs" / "run" / "starts.log").read_text()
    assert re.findall(r" start (\S+ \d) ", log) == ["4711[].server 0", "4711[].server 1"]


def test_pbs_gives_too_many_nodes(folder: Path) -> None:
    (folder / "data").mkdir()
    (folder / "data" / "corpus.json").touch()
    assert run_as_pbs_does(folder, "0", "n1\nn2\n") == (2, "")


def test_pbs_starts_what_waits_for_a_failed_array(folder: Path) -> None:
    assert run_as_pbs_does(folder, "0") == (2, "")
    assert not (folder / "starts").exists()
