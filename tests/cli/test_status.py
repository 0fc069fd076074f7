"""`trainyard status`: what it reads, and what it says where files are missing or odd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import machines, slurm
from tests.cluster.machines import Machines
from tests.cluster.slurm import Slurm
from tests.command import on_terminal
from tests.report.conftest import dump, run_lines, train_line, write_run_folder
from tests.waiting import WATCHDOG_SECONDS

from trainyard.cli.main import main
from trainyard.config.edit import set_fields
from trainyard.jobs.status import Submission, ask_scheduler, write_submission
from trainyard.launch.lock import hold
from trainyard.report.run_view import YOUNG_SECONDS, find_state
from trainyard.training.stop import INTERRUPTED

__all__ = ["machines", "slurm"]
Capture = pytest.CaptureFixture[str]
COMMAND = [sys.executable, "-c", "from trainyard.cli.main import main; main()", "status"]


def end(folder: Path, reason: str, exit_code: int) -> None:
    facts = {"reason": reason, "exit_code": exit_code, "step": 4}
    (folder / "outcome.json").write_text(json.dumps(facts))


def add(folder: Path, *lines: dict[str, Any]) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(dump([*lines]))


def run(capsys: Capture, *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["status", *map(str, words)])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out + captured.err


def status(folder: Path, capsys: Capture) -> str:
    code, said = run(capsys, folder)
    assert code == 0, said
    return said


def status_json(folder: Path, capsys: Capture) -> Any:
    return json.loads(run(capsys, folder, "--json")[1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = write_run_folder(tmp_path / "tiny", run_lines())
    (made / "plan.json").write_text(json.dumps({"n_steps": 50, "n_ranks": 4}))
    return made


@pytest.fixture
def young(tmp_path: Path) -> Path:
    return write_run_folder(tmp_path / "tiny", run_lines(3)[:-3])


def test_a_run_that_trains(folder: Path, capsys: Capture) -> None:
    lines = [
        *run_lines(8)[:-1],
        {"kind": "end", "time": 1009.0, "step": 8, "reason": "received SIGUSR1"},
        {"kind": "start", "time": 1020.0, "step": 8, "resumed": True, "device": "GPU"},
        train_line(9, 5.1, time=time.time() - 1, seconds_left=7255.0),
    ]
    (folder / "metrics.jsonl").write_text(dump(lines))
    checkpoint = folder / "checkpoints" / "step-00000008"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint / "model-00000-of-00001.safetensors").write_bytes(bytes(2046))
    os.utime(checkpoint / "manifest.json", 2 * (time.time() - 3600,))
    tasks = {f"arc/{n}": {"n_items": 9, "step": 8, "accuracy": 0.25} for n in range(12)}
    (folder / "evaluation.json").write_text(json.dumps({"tasks": tasks}))
    with hold(folder):
        end(folder, "of an earlier start", 75)
        said = status(folder, capsys).splitlines()
    assert said[0].startswith(f"tiny: training: process {os.getpid()} on ")
    assert said[1:] == [
        "step        9 of 50 (18%)",
        "loss        5.1000; held out 4.5000 at step 8",
        "tasks       " + "; ".join(f"arc/{n} accuracy 25.00%" for n in range(10)) + "; 2 more",
        "speed       2.05k tokens/s",
        "ETA         2h 0m",
        "checkpoint  step 8, 1h 0m ago, 2.0 KiB",
        "restarts    1",
        "    step 5: 2 of step 5 skipped: a spike or non-finite gradients",
        "    step 8: stopped: received SIGUSR1",
        "    step 8: resumed from step 8, 11s after the last line",
    ]


def test_without_locks_the_age_of_the_metrics_has_to_do(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to("lock")  # which nobody can open
    metrics = tmp_path / "metrics.jsonl"
    metrics.touch()
    assert find_state(tmp_path)[0] == "training"
    os.utime(metrics, (0, metrics.stat().st_mtime - 2 * YOUNG_SECONDS))
    assert find_state(tmp_path)[0] == "lost"


def test_a_loss_of_long_ago_is_not_shown_beside_the_newest_step(
    folder: Path, capsys: Capture
) -> None:
    add(folder, *(train_line(step, None) for step in (21, 22)))
    said = status(folder, capsys)
    assert "step        22 of 50" in said
    assert "loss        none: the newest steps were skipped; held out" in said
    assert status_json(folder, capsys)["loss"] is None


def test_starts_ends_and_nodes_that_failed(folder: Path, capsys: Capture) -> None:
    (folder / "starts.log").write_text(
        "2026-11-22T02:30:00Z start 4711 0 n[1-2]\n"
        "2026-11-22T04:29:00Z end 4711 75 requeue\n"
        "2026-11-22T04:31:00Z start 4711 1 n[1-2]\n"
        "2026-11-22T04:49:00Z end 4711 many\n"
        "2026-11-22T04:50:00Z lost 4711 n1\n"
        "2026-11-22T04:50:00Z start 4711 2 n[2-3]\n"
        "2026-11-22T04"
    )
    (folder / "bad_nodes").write_text("n1 2\nn3 1\nnonsense\n")
    record = {"cluster": "basement", "scheduler": "ssh", "n_nodes": 2}
    write_submission(folder, Submission(**record, submitted="2026-11-22T02:29:00Z"))
    with hold(folder):
        said = status(folder, capsys)
    assert "job         2 nodes of basement, since 2026-11-22T02:29:00Z\n" in said
    assert (
        "restarts    2\n"
        "    2026-11-22T02:30:00Z job 4711 on n[1-2]: ended 2026-11-22T04:29:00Z with 75: "
        "started again\n"
        "    2026-11-22T04:31:00Z job 4711 on n[1-2]: was lost with n1\n"
        "    2026-11-22T04:50:00Z job 4711 on n[2-3]: runs\n"
    ) in said
    assert "    node n1 failed 2 times, and is excluded\n    node n3 failed once" in said


AGAIN = "; the same command continues"


@pytest.mark.parametrize(
    ("reason", "code", "state", "text"),
    [
        ("why\nat", 0, "done", "ended: why"),
        ("why\nat", 75, "stopped", f"ended: why{AGAIN}"),
        ("why\nat", 93, "held", "ended: why; needs attention before it is started again"),
        ("why\nat", 2, "stopped", "ended: why"),
        ("why\nat", "x", "stopped", "ended: why"),
        (INTERRUPTED.reason, INTERRUPTED.exit_code, "stopped", f"ended: stopped by Ctrl-C{AGAIN}"),
        ("", None, "lost", "not running, reason unknown: killed, or its machine failed"),
    ],
)
def test_a_run_that_does_not_train(
    folder: Path, capsys: Capture, reason: str, code: Any, state: str, text: str
) -> None:
    if code is not None:
        end(folder, reason, code)
    found = status_json(folder, capsys)
    assert (found["state"], found["text"]) == (state, text)
    assert (found["step"], found["n_steps"], found["checkpoint"]) == (20, 50, None)
    assert (found["seconds_left"], found["tokens_per_second"]) == (None, 4 * 512)


def test_a_run_that_was_never_started(tmp_path: Path, capsys: Capture) -> None:
    folder = write_run_folder(tmp_path / "tiny", [])
    for name in ("plan.json", "metrics.jsonl"):
        (folder / name).unlink()
    said = status(folder, capsys)
    assert said.startswith("tiny: not started yet\nstep        not known yet\n")
    assert status_json(folder, capsys)["state"] == "new"


@pytest.mark.parametrize(
    ("stall", "seconds", "interval", "text"),
    [
        # sqrt(2 x 60 s x 86400 s / (128 x 0.003789)) = 4624 s.
        (60.0, 60.0, 1000, "462 steps (1h 17m) lose least, set is 1,000: 96.9% and 96.1% of the "
         "time are useful, if training stalls for 60 s per save as measured and 128 nodes of 8 "
         "ranks fail 0.0038 times per day each"),
        (60.0, 60.0, "5 minutes", "462 steps (1h 17m) lose least, set is 5 minutes: 96.9% and "),
        (60.0, 60.0, "70 minutes", None),
        (0.01, 400.0, 1000, "40 steps (6m 40s) lose least"),  # no faster than they are written
        (60.0, 60.0, 350, None),  # nothing to be won
        (-1, 1.0, 1000, None),
        (None, 1.0, 1000, None),
    ],
)  # fmt: skip
def test_how_often_to_save(
    folder: Path,
    capsys: Capture,
    stall: float | None,
    seconds: float,
    interval: int | str,
    text: str | None,
) -> None:
    (folder / "plan.json").write_text(json.dumps({"n_steps": 9000, "n_ranks": 1024}))
    text_of_run = (folder / "run.toml").read_text()
    changed = set_fields(text_of_run, {"checkpoint.interval": interval}, "run.toml")
    (folder / "run.toml").write_text(changed)
    add(folder, train_line(21, 5.0, milliseconds_per_step=10_000.0))
    add(folder, {"kind": "save", "step": 21, "stall_seconds": stall, "seconds": seconds})
    said = status(folder, capsys)
    assert f"save every  {text}" in said if text else "save every" not in said


def test_a_scheduler_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for scheduler, program in (("slurm", "squeue"), ("pbs", "qstat")):
        asked = ask_scheduler(Submission(cluster="c", scheduler=scheduler, n_nodes=1, job="1"))
        assert (asked.phase, asked.text) == ("unknown", f"there is no {program} on this machine")


@pytest.mark.parametrize(
    ("states", "phase", "text"),
    [
        ("COMPLETED RUNNING PENDING", "running", "RUNNING"),
        ("COMPLETED PENDING FAILED", "waiting", "PENDING"),
        ("COMPLETED FAILED", "ended", "COMPLETED"),
        ("", "ended", "the scheduler no longer knows it"),
    ],
)
def test_an_array_runs_while_one_of_its_tasks_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: str, phase: str, text: str
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\nfor state in {states}; do printf '%-32s\\n' $state; done\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    asked = ask_scheduler(Submission(cluster="c", scheduler="slurm", n_nodes=3, job="1"))
    assert (asked.phase, asked.text) == (phase, text)


@pytest.mark.parametrize(
    ("answer", "phase", "text", "nodes"),
    [
        ({"job_state": "R", "exec_host": "n1/0*4+n2/0*4"}, "running", "R", "n1,n2"),
        ({"job_state": "Q", "comment": "Full:  wait"}, "waiting", "Q Full: wait", ""),
        ({"job_state": "F", "Exit_status": 0}, "ended", "F", ""),
    ],
)
def test_what_qstat_answers_of_the_job_that_goes_on(
    folder: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    answer: dict[str, object],
    phase: str,
    text: str,
    nodes: str,
) -> None:
    """In the form that OpenPBS 23.06 gave it."""
    qstat = tmp_path / "qstat"
    said = json.dumps({"timestamp": 1, "pbs_version": "23.06.06", "Jobs": {"0.n3": answer}})
    qstat.write_text(f"#!/bin/sh\n[ \"$*\" = '-x -f -F json 0.n3' ] && echo '{said}'\n")
    qstat.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    write_submission(folder, Submission(cluster="c", scheduler="pbs", n_nodes=2, job="8.n3"))
    (folder / "starts.log").write_text("T1 resubmitted 8.n3 9.n3\nT2 resubmitted 9.n3 0.n3\n")
    found = status_json(folder, capsys)
    assert found["submission"]["job"] == "0.n3"
    assert found["job"] == {"phase": phase, "text": text, "nodes": nodes}


def test_followed_off_a_terminal_it_prints_lines_until_the_run_has_ended(young: Path) -> None:
    with hold(young):
        watching = subprocess.Popen(
            [*COMMAND, str(young), "--follow"], stdout=subprocess.PIPE, text=True
        )
        assert watching.stdout is not None
        first = [watching.stdout.readline() for _ in range(4)]
        assert first[0] == "step 0: started on a <b>GPU</b>\n"
        assert first[3].startswith("step 3/50 | loss 5.7000 | lr 1.00e-03 | grad norm 0.500 | 512 ")
        add(young, train_line(4, 5.5))
        assert watching.stdout.readline().startswith("step 4/50 | loss 5.5000")
        end(young, "done", 0)
        add(young, {"kind": "end", "step": 4, "reason": "done"})
    rest, _ = watching.communicate(timeout=WATCHDOG_SECONDS)
    assert (rest, watching.returncode) == ("step 4: ended: done\nended: done\n", 0)


def test_followed_on_a_terminal_it_shows_the_run_until_ctrl_c(young: Path) -> None:
    with hold(young):
        pressed = [("3 of 50 (6%)", "\x03")]
        sized = {"COLUMNS": "100", "LINES": "40", "TERM": "xterm"}
        words = ("status", str(young), "--follow")
        code, seen = on_terminal(*words, folder=young, typed=pressed, **sized)
    assert f"training: process {os.getpid()} on " in seen
    assert (code, "Traceback" in seen) == (0, False)


@pytest.mark.exhaustive
def test_jobs_of_a_real_slurm(slurm: Slurm, machines: Machines, folder: Path) -> None:
    def state(job: int) -> tuple[str, str]:
        record = Submission(cluster="c", scheduler="slurm", n_nodes=2, job=str(job))
        write_submission(folder, record)
        done = machines.run([*COMMAND, str(folder), "--json"])
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        return found["state"], found["job"]["text"] + found["job"]["nodes"]

    job = slurm.submit("#!/bin/sh\nsleep 600\n", "--nodes=2")
    slurm.wait_until("it runs", lambda: slurm.tasks(job)[0][0] == "RUNNING")
    assert state(job) == ("starting", "RUNNINGn[1-2]")
    waits = slurm.submit("#!/bin/sh\ntrue\n", f"--dependency=afterok:{job}")
    assert state(waits) == ("waiting", "PENDING (Dependency)")
    slurm.run(["scontrol", "hold", str(waits)])
    assert state(waits) == ("held", "PENDING (JobHeldAdmin)")
    slurm.run(["scancel", str(job), str(waits)])
    slurm.wait(job)
    assert state(job) == ("lost", "CANCELLEDn[1-2]")
    assert state(999_999) == ("lost", "the scheduler no longer knows it")


def test_without_a_run_it_lists_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.chdir(tmp_path)
    none = "error: no run in runs/\nhint: trainyard train RUN_FILE starts one\n"
    assert run(capsys) == (2, none)
    (tmp_path / "runs").mkdir()
    end(write_run_folder(tmp_path / "runs" / "one", run_lines()), "done", 0)
    write_run_folder(tmp_path / "runs" / "two", [])
    write_run_folder(tmp_path / "runs" / "three", run_lines())
    (tmp_path / "runs" / "three" / "plan.json").write_text("[")
    code, printed = run(capsys)
    rows = [line.split() for line in printed.splitlines()]
    assert (code, rows[0]) == (0, ["run", "state", "step", "loss", "last", "step"])
    assert rows[1][:7] == ["one", "done", "20", "of", "50", "(40%)", "4.0000"]
    assert rows[1][-1] == "ago"
    assert rows[2][:3] == ["three", "not", "readable"]
    assert rows[-1][:6] == ["two", "lost", "not", "known", "yet", "not"]
    code, printed = run(capsys, "--json")
    assert [one["name"] for one in json.loads(printed)] == ["one", "two"]
    for words, text in (
        (("--follow",), "--follow needs a run, and prints no JSON"),
        (("one", "--json", "--follow"), "--follow needs a run, and prints no JSON"),
        (("absent",), "error: no folder "),
        (("runs",), "is not a run folder: it has no run.toml"),
    ):
        code, printed = run(capsys, *words)
        assert code == 2 and text in printed
