"""A set of runs as a job array on a real Slurm: one task is killed, another runs out of time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command import trainyard as here
from tests.faults.small_run import small_overrides, write_tokens

from trainyard.jobs.status import read_starts, read_submission
from trainyard.sweeps.sets import RunSet, read_set

from .conftest import need_slurm
from .launching import read_losses, trainyard, write_cluster
from .machines import Machines, why_not
from .slurm import Slurm

pytestmark = pytest.mark.exhaustive

N_RUNS, N_TASKS, N_STEPS = 12, 3, 800


def starts(folder: Path) -> list[bool]:
    """Whether each start of a run resumed it."""
    path = folder / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [line["resumed"] for line in lines if line["kind"] == "start"]


def train_on(slurm: Slurm, run_set: RunSet, n_started: int) -> None:
    """Waits until so many runs have a checkpoint."""

    def have_checkpoints() -> bool:
        folders = [one.folder / "checkpoints" for one in run_set.members]
        found = [folder for folder in folders if any(folder.glob("step-*/manifest.json"))]
        return len(found) >= n_started

    slurm.wait_until(f"{n_started} runs have a checkpoint", have_checkpoints)


def test_an_array_trains_a_set(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    need_slurm()
    if reason := why_not():
        pytest.skip(reason)
    tokens = write_tokens(tmp_path)
    cluster = write_cluster(tmp_path / "basement.toml", "slurm", options=["--exclusive"])
    words = ["tiny", "name=web", *small_overrides(tokens, N_STEPS), "checkpoint.interval=50"]
    words += ["optimizer.learning_rate=1e-3,2e-3,3e-3,4e-3", "--seeds", "3", "--at-once", "1"]
    words += ["--cluster", str(cluster), "--nodes", str(N_TASKS)]
    # The path of a socket is 107 characters at most.
    with Machines(tmp_path_factory.mktemp("m"), N_TASKS) as machines:
        slurm = Slurm(machines)
        slurm.start()
        said = trainyard(machines, tmp_path, "sweep", *words)
        assert said.returncode == 0, said.stderr
        assert "touch " in said.stdout and "job-*.log" in said.stdout
        run_set = read_set(tmp_path / "runs" / "web-sweep")
        submission = read_submission(run_set.folder)
        assert submission is not None
        job = submission.job
        train_on(slurm, run_set, N_TASKS)
        # Of the first task the step, which is all that runs on its node but the script.
        slurm.run(["scancel", "--signal=KILL", f"{job}_0.0"])
        slurm.run(["scontrol", "update", f"JobId={job}_2", "TimeLimit=3"])
        second = trainyard(machines, tmp_path, "sweep", *words)
        assert second.returncode == 2
        assert f"already has job {job}" in second.stderr
        status = trainyard(machines, tmp_path, "status", "web-sweep").stdout
        assert status.startswith("web-sweep: 12 runs: ")
        assert status.endswith(f"job {job} on {cluster}: RUNNING\n")

        def is_requeued() -> bool:
            return any(start.then for start in read_starts(run_set.folder / "task-2"))

        slurm.wait_until("the time limit has ended a task", is_requeued)
        slurm.run(["scontrol", "update", f"JobId={job}_2", "TimeLimit=UNLIMITED"])
        ended = slurm.wait(int(job))
        log = "\n".join(path.read_text() for path in sorted(run_set.folder.glob("job-*.log")))
        assert ended == dict.fromkeys(range(N_TASKS), ("COMPLETED", 0)), log
        status = trainyard(machines, tmp_path, "status", "web-sweep").stdout
        assert status.startswith("web-sweep: 12 runs: 12 done\n")
    tasks = [read_starts(run_set.folder / f"task-{task}") for task in range(N_TASKS)]
    ends = [[(start.exit_code, start.then) for start in task] for task in tasks]
    assert [task[-1] for task in ends] == [(0, "finish")] * N_TASKS, log
    assert ends[0][:-1] == [(137, "requeue")], log
    assert ends[1][:-1] == [], log
    # Until its limit is lifted, once or more.
    assert set(ends[2][:-1]) == {(75, "requeue")}, log
    # Each end disturbs one run; no other was begun twice, or trained again when done.
    counts = {one.name: len(starts(one.folder)) for one in run_set.members}
    assert min(counts.values()) == 1
    assert sum(counts.values()) <= N_RUNS + sum(len(task) - 1 for task in ends)
    assert not any(starts(one.folder)[0] for one in run_set.members)
    alone = tmp_path / "alone"
    alone.mkdir()
    for member in sorted(run_set.members, key=lambda one: -counts[one.name])[:4]:
        done = here("train", str(run_set.run_file(member)), folder=alone)
        assert done.returncode == 0, done.stderr
        assert read_losses(member.folder) == read_losses(alone / "runs" / member.name)
