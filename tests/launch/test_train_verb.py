"""`trainyard train` as one rank of many: what it refuses before torch is even imported."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.command import trainyard
from tests.faults.small_run import write_tokens
from tests.launch.test_environment import TORCHRUN
from tests.waiting import WATCHDOG_SECONDS

from trainyard.api.running import Training, train_run, wait_for_run_folder
from trainyard.cli.main import main
from trainyard.config.load import load_run, render_run
from trainyard.errors import ConfigError, LaunchError
from trainyard.launch.environment import Process

RANK_1 = Process(1, 2, 1, 2)
Refused = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refused:
    """Runs a command that ends with 2; returns its message."""

    def run(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([*words])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("option", "value"), [("--ranks", ["2"]), ("--minutes", ["2.5"]), ("--overwrite", [])]
)
def test_options_that_a_launcher_rules_out(
    option: str, value: list[str], monkeypatch: pytest.MonkeyPatch, refused: Refused
) -> None:
    for name, place in TORCHRUN.items():
        monkeypatch.setenv(name, place)
    assert refused("train", "tiny", option, *value) == (
        f"error: {option}: a launcher has already started 4 ranks\n"
        f"hint: omit {option}, or the launcher\n"
    )


@pytest.mark.parametrize("source", ["renamed", "runs/renamed", "runs/renamed/run.toml", "away/a"])
@pytest.mark.parametrize("verb", [["train"], ["launch", "--cluster", "slurm", "--dry-run"]])
def test_a_run_that_has_moved_is_not_started_anew(
    source: str,
    verb: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refused: Refused,
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/renamed", "away/a"):
        (tmp_path / folder / "checkpoints" / "step-00000004").mkdir(parents=True)
        (tmp_path / folder / "run.toml").write_text(render_run(load_run("tiny", ["name=a"]).run))
    error = refused(*verb, source)
    assert "is not where its run is trained: name='a', so runs/a\n" in error
    assert not (tmp_path / "runs" / "a").exists()


def test_ranks_that_do_not_fit_the_layout(refused: Refused) -> None:
    error = refused("train", "tiny", "parallel.tensor=2", "--ranks", "3")
    assert "3 ranks cannot be divided by parallel.tensor=2" in error
    assert "hint: nearest that works: 2 ranks" in error


def test_the_run_folder_is_waited_for(tmp_path: Path) -> None:
    run = load_run("tiny", []).run
    (tmp_path / "run.toml").write_text("# of an earlier run")
    writes = threading.Timer(0.3, (tmp_path / "run.toml").write_text, [render_run(run)])
    writes.start()
    wait_for_run_folder(tmp_path, run, RANK_1, timeout_seconds=WATCHDOG_SECONDS)
    writes.join()


@pytest.mark.parametrize("there", [True, False])
def test_the_run_folder_is_not_there(tmp_path: Path, there: bool) -> None:
    run = load_run("tiny", []).run
    if there:
        (tmp_path / "run.toml").write_text(render_run(load_run("tiny", ["train.seed=9"]).run))
    with pytest.raises(LaunchError) as caught:
        wait_for_run_folder(tmp_path, run, RANK_1, timeout_seconds=0.2)
    what = "holds a different run from this rank's" if there else "is missing"
    assert caught.value.problem == f"rank 1 of 2: {tmp_path}/run.toml {what}, 0.2 s after its start"


@pytest.mark.parametrize(
    ("n_gpus", "options", "problem"),
    [
        (
            1,
            ["--ranks", "2"],
            "2 ranks on this machine, where torch sees 1 GPU\nhint: --ranks 1; or",
        ),
        (3, ["parallel.tensor=4"], "4 ranks on this machine, where torch sees 3 GPUs\n"),
        (4, ["--ranks", "4", "train.micro_batch_size=1"], "data.blend.prefixes is empty"),
        (0, ["--ranks", "2", "train.micro_batch_size=1"], "data.blend.prefixes is empty"),
    ],
)
def test_more_ranks_than_gpus_do_not_start(
    n_gpus: int,
    options: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("trainyard.config.devices.list_gpus", lambda: ["NVIDIA H200"] * 4)
    monkeypatch.setattr("trainyard.api.running._count_gpus", lambda: n_gpus)
    if "prefixes" not in problem:
        options = [*options, f"data.blend.prefixes=['{write_tokens(tmp_path)}']"]
    done = trainyard("train", "tiny", *options, "--force", folder=tmp_path)
    assert done.returncode == 2
    assert problem in done.stderr


def test_two_lengths(refused: Refused) -> None:
    assert refused("train", "tiny", "train.length=20 steps", "--minutes", "1") == (
        "error: --minutes and train.length= both set the length of the run\n"
        "hint: omit one of them\n"
    )


@pytest.mark.parametrize(
    ("training", "problem"),
    [
        (Training("tiny", ranks=0), "ranks=0 is below 1"),
        (Training("tiny", minutes=-1), "minutes=-1 is below 0.01"),
    ],
)
def test_numbers_that_python_may_give(training: Training, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        train_run(training)
    assert caught.value.problem == problem
