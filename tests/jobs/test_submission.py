"""Handing scripts to a real Slurm, to nobody, and to bash; and the record of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cluster.machines import Machines
from tests.cluster.slurm import Slurm
from tests.waiting import WATCHDOG_SECONDS

from trainyard.api.launching import run_here, run_stage
from trainyard.errors import LaunchError, MachineError
from trainyard.jobs.schedulers import SCHEDULERS, BatchScheduler
from trainyard.jobs.status import (
    Submission,
    describe_submission,
    read_submission,
    write_submission,
)

SUBMIT = """
import sys
from pathlib import Path
from trainyard.errors import UserError
from trainyard.jobs import schedulers
schedulers.SUBMIT_SECONDS = float(sys.argv[1])
try:
    print(schedulers.SCHEDULERS["slurm"].submit(Path(sys.argv[2]), sys.argv[3:]))
except UserError as error:
    print(error)
"""


def submit(path: Path, name: str) -> str:
    scheduler = SCHEDULERS[name]
    assert isinstance(scheduler, BatchScheduler)
    return scheduler.submit(path)


LOOP = "while kill -0 $PPID; do sleep 0.05; done"
"""Of a script that waits for a signal, or for the end of its parent."""


def script(folder: Path, text: str, *options: str) -> Path:
    path = folder / "job.sh"
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in options), text]
    path.write_text("\n".join(lines) + "\n")
    return path


def submit_there(
    machines: Machines, path: Path, *after: str, seconds: float = WATCHDOG_SECONDS
) -> str:
    """As a user of the login machine does."""
    words = [str(seconds), str(path), *after]
    done = machines.run([sys.executable, "-c", SUBMIT, *words], folder=path.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.exhaustive
def test_a_job_runs_after_another(slurm: Slurm, machines: Machines, tmp_path: Path) -> None:
    first = submit_there(machines, script(tmp_path, f"sleep 0.3; echo 1 >>{tmp_path}/order"))
    second = submit_there(machines, script(tmp_path, f"echo 2 >>{tmp_path}/order"), first)
    assert slurm.wait(int(second)) == {0: ("COMPLETED", 0)}
    assert (tmp_path / "order").read_text() == "1\n2\n"


@pytest.mark.exhaustive
def test_a_job_never_runs_after_one_that_failed(
    slurm: Slurm, machines: Machines, tmp_path: Path
) -> None:
    first = submit_there(machines, script(tmp_path, "exit 3", "--array=0-1"))
    second = submit_there(machines, script(tmp_path, f"touch {tmp_path}/ran"), first)
    assert slurm.wait(int(second))[0][0] == "CANCELLED"
    assert not (tmp_path / "ran").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--partition=nowhere", "invalid partition specified: nowhere"),
        ("--gpus-per-node=8", "Requested node configuration is not available"),
        ("--time=tomorrow", "Invalid --time specification"),
    ],
)
def test_what_slurm_refuses(
    slurm: Slurm, machines: Machines, tmp_path: Path, option: str, said: str
) -> None:
    path = script(tmp_path, "true", option)
    answer = submit_there(machines, path)
    assert answer.startswith(f"sbatch rejected {path}: sbatch: error: "), answer
    assert said in answer
    assert "hint: its options are at the top of that script" in answer


@pytest.mark.exhaustive
def test_a_controller_that_is_not_there(
    slurm: Slurm, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (slurm.folder / "slurm.conf").read_text()
    (tmp_path / "slurm.conf").write_text(text.replace("(10.77.0.1)", "(10.77.0.99)"))
    monkeypatch.setitem(machines.environment, "SLURM_CONF", str(tmp_path / "slurm.conf"))
    answer = submit_there(machines, script(tmp_path, "true"), seconds=5)
    assert answer.startswith("sbatch has not answered within 5 s\nhint: the scheduler may be down")


@pytest.mark.parametrize(("scheduler", "program"), [("slurm", "sbatch"), ("pbs", "qsub")])
def test_no_scheduler_here(
    scheduler: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=f"there is no {program} on this machine") as caught:
        submit(tmp_path / "job.sh", scheduler)
    assert "or with --dry-run" in caught.value.hint


def test_an_answer_that_is_no_job_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    sbatch.write_text('#!/bin/sh\necho "welcome to $(date)"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        LaunchError, match=r"sbatch .*job\.sh returned 'welcome .*', which is not a job"
    ):
        submit(tmp_path / "job.sh", "slurm")
    sbatch.write_text('#!/bin/sh\necho "a line of a site"\necho "4711;lumi"\n')
    assert submit(tmp_path / "job.sh", "slurm") == "4711"
    with pytest.raises(LaunchError, match="sbatch cannot be started"):
        sbatch.write_text("")
        sbatch.chmod(0o644)
        monkeypatch.setenv("PATH", str(tmp_path))
        submit(tmp_path / "job.sh", "slurm")


def test_a_script_takes_over(tmp_path: Path) -> None:
    path = script(tmp_path, "trap 'exit 75' USR1; echo $$; while true; do sleep 0.05; done")
    program = "from pathlib import Path; from trainyard.api.launching import run_here; "
    program += f"run_here(Path({str(path)!r}))"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert int(running.stdout.readline()) == running.pid
        running.send_signal(signal.SIGUSR1)
    assert running.returncode == 75


STAGE = """
import signal
import sys
from pathlib import Path
from trainyard.errors import LaunchError
from trainyard.api.launching import run_stage
# Not as inherited: these tests may run under nohup themselves.
hangup = signal.SIG_IGN if sys.argv[2:] == ["nohup"] else signal.SIG_DFL
signal.signal(signal.SIGHUP, hangup)
try:
    run_stage("prepare", Path(sys.argv[1]))
except LaunchError as error:
    print(error.problem, flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("code", [0, 7])
def test_a_stage_is_stopped(tmp_path: Path, number: signal.Signals, code: int) -> None:
    name = number.name.removeprefix("SIG")
    text = f"trap 'echo stopped; exit {code}' {name}; echo ready; {LOOP}"
    argv = [sys.executable, "-c", STAGE, str(script(tmp_path, text))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(number)
        said = communicate(running)
    assert said == (f"stopped\nprepare ended with exit code {code}: later stages are not started\n")


def test_a_stage_outlives_its_terminal_under_nohup(tmp_path: Path) -> None:
    text = "echo ready; until [ -e go ]; do sleep 0.05; done; echo done"
    argv = [sys.executable, "-c", STAGE, str(script(tmp_path, text)), "nohup"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        running.send_signal(signal.SIGHUP)
        (tmp_path / "go").touch()
        assert communicate(running) == "done\n"


def communicate(running: subprocess.Popen[str]) -> str:
    try:
        return running.communicate(timeout=WATCHDOG_SECONDS)[0]
    except subprocess.TimeoutExpired:
        running.kill()  # else leaving its `with` would wait for it
        raise


def test_a_stage_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="prepare ended with SIGKILL: later stages are not"):
        run_stage("prepare", script(tmp_path, "kill -KILL $$"))


def test_no_bash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    says = f"bash {tmp_path}/job.sh cannot be started: No such file or directory"
    for start in (lambda path: run_stage("prepare", path), run_here):
        with pytest.raises(LaunchError, match=says):
            start(tmp_path / "job.sh")


def test_the_record_is_read_as_written(tmp_path: Path) -> None:
    assert read_submission(tmp_path) is None
    given = Submission(
        cluster="lumi", scheduler="slurm", n_nodes=16, job="4711", waits_for={"prepare": "4710"}
    )
    write_submission(tmp_path / "new", given)
    found = read_submission(tmp_path / "new")
    assert found is not None
    assert found.submitted.endswith("Z")
    assert found.model_copy(update={"submitted": ""}) == given
    assert describe_submission("run", found, Path("runs/run/job.log")) == (
        "job 4711 is submitted to lumi, 16 nodes\n"
        "    after prepare: job 4710\n"
        "    trainyard status run       show its status\n"
        "    tail -F runs/run/job.log   follow its log\n"
        "    touch runs/run/STOP        save, stop, and do not requeue\n"
        "    scancel 4711               end it"
    )


@pytest.mark.parametrize("text", ["x", "cluster = 1", "[[[", "a = 1", "\udcff"])
def test_a_damaged_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "job.toml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(LaunchError, match=r"job\.toml cannot be read: ") as caught:
        read_submission(tmp_path)
    assert caught.value.hint == "launch again, or remove it"


def test_a_record_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"job\.toml cannot be written: "):
        write_submission(
            tmp_path / "file", Submission(cluster="local", scheduler="local", n_nodes=1)
        )
