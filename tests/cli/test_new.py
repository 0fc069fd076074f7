"""`trainyard new`: run files that load, fit their data, machine and time, and train."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.command import trainyard

from trainyard.config.load import load_run
from trainyard.errors import MachineError
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import LocalMachine
from trainyard.planning.ladder import Estimator, shape_run
from trainyard.planning.new_run import choose_local_run, choose_run

DAY = 86_400.0
H100 = Estimator(find_machine(None, "h100-80g"), (1e9,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the token files and the tokenizer of a small text."""
    path = tmp_path_factory.mktemp("new")
    (path / "text.txt").write_text("\n".join(f"{i} squared is {i * i}" for i in range(4000)))
    trainyard("prepare", "text.txt", "-o", "web", folder=path).check_returncode()
    return path


def test_a_file_for_this_machine_is_commented_and_trains(folder: Path) -> None:
    shown = trainyard("new", "web_text_document", "-o", "mine.toml", folder=folder)
    assert shown.returncode == 0, shown.stderr
    assert "trainyard train mine.toml" in shown.stdout.splitlines()
    lines = (folder / "mine.toml").read_text().splitlines()
    fields = [i for i, line in enumerate(lines) if " = " in line and not line.startswith("#")]
    assert len(fields) > 20
    assert all(lines[i - 1].startswith("# ") for i in fields[1:]), "all but the name"
    short = ("train.length=2 steps", "schedule.warmup=1 steps", "schedule.decay=2 steps")
    ended = trainyard("train", "mine.toml", *short, folder=folder)
    assert ended.returncode == 0, ended.stderr
    assert (folder / "runs/mine/tokenizer").is_dir()


def test_more_time_is_a_larger_model() -> None:
    machine = LocalMachine("2 CPU cores", 1, False, 60e9, "fp32")
    short, long = (choose_local_run(10**8, 1024, machine, s) for s in (600, DAY))
    assert long.parameters > 4 * short.parameters
    assert short.seconds <= 606
    assert 60_000 < long.seconds <= 1.01 * DAY


def test_a_file_for_other_devices_fits_them(folder: Path) -> None:
    devices = ("--gpu", "h100-80g", "--gpus", "8")
    shown = trainyard("new", "web_text_*", "-o", "big.toml", *devices, folder=folder)
    assert shown.returncode == 0, shown.stderr
    command = shown.stdout.splitlines()[-2].split()
    assert command == ["trainyard", "plan", "big.toml", *devices]
    planned = trainyard(*command[1:], folder=folder)
    assert planned.returncode == 0, planned.stderr
    assert 'extends = "gpt3-125m"' in (folder / "big.toml").read_text(), "the text is short"


@pytest.mark.parametrize(("gpus", "days", "preset"), [(8, 1, "gpt3-1.3b"), (64, 6, "gpt3-6.7b")])
def test_the_largest_model_in_time(gpus: int, days: int, preset: str) -> None:
    chosen = choose_run(400_000_000_000, 50257, H100, gpus, days * DAY)
    assert chosen.preset == preset
    assert chosen.seconds <= days * DAY
    run = load_run(preset).run
    assert chosen.values["optimizer.learning_rate"] == run.optimizer.learning_rate
    sizes = {"gpt3-1.3b": (32, 2560), "gpt3-6.7b": (40, 5120)}  # the next of SHAPES
    next_size = shape_run(run, sizes[preset], keeps_length=False)
    assert H100.estimate(next_size, gpus).seconds > days * DAY


def test_a_short_text_has_a_smaller_model() -> None:
    chosen = choose_run(3_000_000_000, 50257, H100, 64, 7 * DAY)
    assert chosen.parameters < 1e9
    assert 1 < chosen.passes <= 4
    with pytest.raises(MachineError, match="the smallest, of 125M parameters, takes"):
        choose_run(3_000_000_000, 50257, H100, 1, 60)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("web_text_document -o web.toml", "web.toml already exists"),
        ("web_text_document -o web", "--output web is not a run file\nhint: -o web.toml"),
        ("nothing -o a.toml", "no token files nothing.bin and .idx"),
        ("web_text_document -o a.toml --time soon", "--time 'soon' is not a duration"),
        ("web_text_document -o a.toml --gpus 2", "hint: --gpu h100 --gpus 2"),
        ("web_text_document -o a.toml --nodes 2", "--nodes 2 needs a cluster"),
        ("web_text_document -o a.toml --tokenizer gpt2", "made with the tokenizer"),
    ],
)
def test_refusals(words: str, message: str, folder: Path) -> None:
    shown = trainyard("new", *words.split(), folder=folder)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert message in shown.stderr
    assert not (folder / "a.toml").exists()
