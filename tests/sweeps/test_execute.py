"""Real sets of runs of seconds: what a kill, a signal or a second program leaves of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
from tests.command import Fork, trainyard
from tests.faults.small_run import differences, read_outcome, small_overrides, write_tokens
from tests.waiting import wait_until

from trainyard.cli.main import main
from trainyard.config.load import load_run
from trainyard.errors import LaunchError
from trainyard.launch.lock import find_holder
from trainyard.sweeps import execute
from trainyard.sweeps.execute import Slot, divide_machine, most_ranks

from .conftest import MakeSet

RATE = "optimizer.learning_rate"
N_STEPS = 60


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def words(tokens: Path, *more: str, n_steps: int = N_STEPS) -> list[str]:
    """Words of a sweep of small runs, which save every 20 steps."""
    return ["tiny", "name=web", *small_overrides(tokens, n_steps), "checkpoint.interval=20", *more]


class Sweep(Fork):
    """A `trainyard sweep` in a folder, in a fork of this process."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.runs = folder / "runs"

        def run() -> None:
            os.chdir(folder)
            main(["sweep", *arguments])

        super().__init__(run)

    def wait_for_checkpoint(self, *names: str) -> None:
        """Waits until these runs have one, from which they are far from done."""
        for name in names:
            found = self.runs / name / "checkpoints"
            wait_until(lambda found=found: any(found.glob("step-*/manifest.json")), name)

    def kill_run(self, name: str) -> None:
        holder = find_holder(self.runs / name)
        match = re.match(r"process (\d+) on ", holder or "")
        assert match, holder
        os.kill(int(match[1]), signal.SIGKILL)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """What a run has logged so far; the last line may be half written."""
    path = folder / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.rpartition("\n")[0].splitlines()]


def kinds_of(folder: Path) -> list[str]:
    return [line["kind"] for line in read_lines(folder)]


def starts(folder: Path) -> list[bool]:
    """Whether each start of a run resumed it."""
    return [line["resumed"] for line in read_lines(folder) if line["kind"] == "start"]


def states(folder: Path) -> list[str]:
    found = json.loads(trainyard("status", "web-sweep", "--json", folder=folder).stdout)
    return [one["state"] for one in found["members"]]


def assert_done(done: CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, done.stderr
    return done.stderr


def test_a_killed_run_is_taken_up_again_bit_for_bit(tmp_path: Path, tokens: Path) -> None:
    """Four runs, two at a time; one has a folder that training refuses."""
    refused = tmp_path / "runs" / "web-sweep-04" / "checkpoints"
    options = ["--seeds", "2", "--at-once", "2"]
    sweep = words(tokens, f"{RATE}=1e-3,3e-3", "train.stop_after_minutes=600", *options)
    shown = trainyard("sweep", *sweep, "--dry-run", folder=tmp_path).stdout
    assert shown.splitlines()[3] == f"web-sweep-04  {RATE}=3e-3 train.seed=1235"
    assert not (tmp_path / "runs").exists()
    running = Sweep(tmp_path, *sweep)
    running.wait_for_checkpoint("web-sweep-02")
    running.kill_run("web-sweep-02")
    refused.parent.mkdir()
    refused.touch()
    done = running.wait()
    said = assert_done(done, 93)
    assert "web-sweep-02 ended with SIGKILL; the end of runs/web-sweep/logs/" in said
    assert f"web-sweep-02 continues: {RATE}=1e-3, train.seed=1235 (try 2)\n" in said
    assert "web-sweep-04 ended with exit code 2; the end of" in said
    assert "web-sweep-04/checkpoints is not a folder" in said
    assert said.count("web-sweep-04 continues") == 1  # not again at once
    assert "failed: web-sweep-04; the same command tries them again" in said
    assert "best: " in done.stdout
    assert starts(tmp_path / "runs" / "web-sweep-02") == [False, True]

    refused.unlink()
    again = trainyard("sweep", "web-sweep", "--json", folder=tmp_path)
    assert "web-sweep-04 is done: 4 of 4" in assert_done(again)
    found = json.loads(again.stdout)
    assert [one["state"] for one in found["members"]] == ["done"] * 4
    assert starts(tmp_path / "runs" / "web-sweep-01") == [False]
    assert trainyard("sweep", *sweep, folder=tmp_path).stderr == ""  # nothing is left

    alone = tmp_path / "alone"
    shutil.copytree(tmp_path / "runs" / "web-sweep" / "members", alone)
    name = "web-sweep-02"
    assert_done(trainyard("train", f"{name}.toml", folder=alone))
    expected, outcome = (read_outcome(folder / "runs" / name) for folder in (alone, tmp_path))
    assert differences(expected, outcome) == []
    lines = read_lines(alone / "runs" / name)
    (held_out,) = (line["loss"] for line in lines if line.get("split") == "valid")
    assert found["members"][1]["held_out_loss"] == held_out


def test_a_hopeless_run_is_stopped_early(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that aborts for losses that are not finite."""
    monkeypatch.setattr(execute, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(execute, "LOOK_SHARE", 1.0)
    more = [f"{RATE}=1e-3,2e-3,3e-3,3", "evaluate.interval=10", "--at-once", "3"]
    sweep = words(tokens, *more, "--stop-hopeless", n_steps=200)
    done = trainyard("sweep", *sweep, folder=tmp_path)
    said = assert_done(done)
    assert re.search("web-sweep-04 is stopped early: held-out loss .* above the median of 3", said)
    assert re.search("\nweb-sweep-04: stopped early at .* is above the median of 3", done.stdout)
    assert states(tmp_path) == ["done", "done", "done", "stopped early"]
    assert len(starts(tmp_path / "runs" / "web-sweep-04")) == 1
    assert "web-sweep-04" not in assert_done(trainyard("sweep", *sweep, folder=tmp_path))


@pytest.mark.exhaustive
def test_whatever_ends_a_sweep_the_same_command_continues(tmp_path: Path, tokens: Path) -> None:
    sweep = words(tokens, f"{RATE}=1e-3,3e-3", "--at-once", "2", n_steps=3000)
    names = ["web-sweep-01", "web-sweep-02"]
    folders = [tmp_path / "runs" / name for name in names]

    def has_saved(n_starts: int) -> bool:
        """Whether both runs have begun so often, and saved since then."""
        kinds = [kinds_of(folder) for folder in folders]
        counts = [each.count("start") for each in kinds]
        return counts == [n_starts] * 2 and all(
            "save" in each[-each[::-1].index("start") :] for each in kinds
        )

    signals = ((signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGKILL, -9))
    for n_starts, (number, code) in enumerate(signals, 1):
        running = Sweep(tmp_path, *sweep)
        wait_until(lambda n=n_starts: has_saved(n), "both runs have saved")
        os.kill(running.pid, number)
        said = assert_done(running.wait(), code)
        wait_until(lambda: not any(map(find_holder, folders)), "the runs end with the sweep")
        if code > 0:
            assert "stopped: the same command continues; 2 are left" in said
        assert states(tmp_path) == ["stopped" if code > 0 else "lost"] * 2
    stop = tmp_path / "runs" / "web-sweep" / "STOP"
    stop.touch()
    assert "there is a file" in assert_done(trainyard("sweep", *sweep, folder=tmp_path), 93)
    stop.unlink()
    running = Sweep(tmp_path, *sweep)
    wait_until(lambda: has_saved(4), "both runs have saved")
    stop.touch()
    assert "there is a file" in assert_done(running.wait(), 93)
    assert [starts(folder) for folder in folders] == [[False, True, True, True]] * 2


@pytest.mark.exhaustive
def test_two_sweeps_share_the_runs(tmp_path: Path, tokens: Path) -> None:
    sweep = words(tokens, f"{RATE}=1e-3,2e-3,3e-3,4e-3", "--at-once", "1")
    first = Sweep(tmp_path, *sweep)
    first.wait_for_checkpoint("web-sweep-01")
    second = Sweep(tmp_path, *sweep)
    said = [assert_done(one.wait()) for one in (first, second)]
    taken = [set(re.findall("(web-sweep-0.) starts", text)) for text in said]
    assert all(taken)
    assert not taken[0] & taken[1]
    assert states(tmp_path) == ["done"] * 4
    for folder in (tmp_path / "runs").glob("web-sweep-*"):
        assert starts(folder) == [False]


@pytest.mark.exhaustive
def test_a_time_limit_of_a_run_ends_the_sweep(tmp_path: Path, tokens: Path) -> None:
    """One that stops by itself is not started again at once: the limit is that of the others."""
    limit = "train.stop_after_minutes=0.001"
    sweep = words(tokens, f"{RATE}=1e-3,3e-3", limit, "--at-once", "1", n_steps=3000)
    done = trainyard("sweep", *sweep, folder=tmp_path)
    said = assert_done(done, 75)
    assert "web-sweep-01 ended with exit code 75; the end" in said
    assert "web-sweep-02" not in said
    assert states(tmp_path) == ["stopped", "not started"]


def test_what_all_runs_lack_is_one_message(tmp_path: Path, tokens: Path) -> None:
    lacking = [word.replace(str(tokens), "nowhere") for word in words(tokens, f"{RATE}=1,2")]
    said = assert_done(trainyard("sweep", *lacking, folder=tmp_path), 2)
    assert said.startswith("error: ") and "nowhere" in said
    assert "web-sweep-01 starts" not in said
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = trainyard("sweep", str(tmp_path / "runs" / "web-sweep"), folder=elsewhere)
    assert "web-sweep is not in runs/ here" in assert_done(done, 2)
    done = trainyard("sweep", "web-sweep", "--seeds", "2", folder=tmp_path)
    assert "web-sweep is a set of runs, whose values are given" in assert_done(done, 2)
    done = trainyard("sweep", "web-sweep", "--nodes", "2", folder=tmp_path)
    assert "--nodes is for a job array" in assert_done(done, 2)


def test_a_folder_that_cannot_be_written(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "runs").touch()  # root may write to any folder
    said = assert_done(trainyard("sweep", *words(tokens, f"{RATE}=1,2"), folder=tmp_path), 2)
    assert said.startswith("error: runs/web-sweep/lock cannot be written: ")
    assert "hint: start in a writable folder" in said


@pytest.mark.parametrize(
    ("visible", "layout", "at_once", "expected"),
    [
        (None, "1", None, ["0", "1", "2", "3", "4"]),
        ("7,5,3", "1", None, ["7", "5", "3"]),
        (None, "1", 2, ["0 1 2 3", "4 5 6 7"]),
        (None, "2", None, ["0 1", "2 3", "4 5", "6 7"]),
        (None, "8", None, ["0 1 2 3 4 5 6 7"]),
        ("0,1", "4", None, "a run of web needs 4 GPUs, and here 2 can be used"),
        ("0,1", "2", 2, "a run of web needs 2 GPUs 2 times, and here 2 can be used"),
    ],
)
def test_gpus_are_divided(
    make_set: MakeSet,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    layout: str,
    at_once: int | None,
    expected: list[str] | str,
) -> None:
    monkeypatch.setattr(execute, "list_gpus", lambda: ["a GPU"] * 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    parallel = [
        f"parallel.tensor={min(2, int(layout))}",
        f"parallel.pipeline={-(-int(layout) // 2)}",
    ]
    run_set = make_set(
        [f"{RATE}=1,2,3,4,5", "model.n_layers=4", "train.global_batch_size=16", *parallel],
        [None] * 5,
    )
    if isinstance(expected, str):
        with pytest.raises(LaunchError, match=expected):
            divide_machine(run_set, at_once)
        return
    slots = divide_machine(run_set, at_once)
    assert [" ".join(slot.devices) for slot in slots] == expected


def test_cpus_are_divided(make_set: MakeSet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "list_gpus", lambda: ["a GPU"] * 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden: on the CPU
    monkeypatch.setattr(execute, "bound_to", lambda: set(range(12)))
    run_set = make_set([f"{RATE}=1,2,3,4,5"], [None] * 5)
    assert divide_machine(run_set) == [Slot((), 2)] * 5
    assert divide_machine(run_set, 3) == [Slot((), 4)] * 3
    monkeypatch.setattr(execute, "free_memory_bytes", lambda: 1)
    assert divide_machine(run_set) == [Slot((), 12)]
    assert divide_machine(run_set, 2) == [Slot((), 6)] * 2


def test_as_many_ranks_as_a_layout_allows() -> None:
    run = load_run("tiny", ["train.global_batch_size=8", "train.micro_batch_size=1"]).run
    assert [most_ranks(run, n) for n in (1, 2, 3, 7, 8, 9)] == [1, 2, 2, 4, 8, 8]
