"""Exit codes, messages and start-up of the command line, as a user meets them.

Mistakes are made in forks of this process, what goes well in processes of its own.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.command import trainyard

from trainyard import __version__
from trainyard.config.load import load_run
from trainyard.data.indexed import IndexedWriter
from trainyard.data.loader import build_orders
from trainyard.layout.resolve import resolve

RUN_FILE = """
name = "small"
extends = "tiny"

[data]
split = "90,10,0"
cache_folder = "cache"

[data.blend]
prefixes = ["corpus"]
"""


def start_trainyard(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from trainyard.cli.main import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    random = np.random.default_rng(3)
    with IndexedWriter(tmp_path / "corpus", np.dtype(np.uint16)) as writer:
        for _ in range(20):
            writer.add_document(random.integers(0, 512, 200).astype(np.uint16))
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "gtp3-13b"], "'gtp3-13b'\nhint: did you mean the preset gpt3-13b?"),
        (["show", "nowhere.toml"], "error: no run file nowhere.toml"),
        (["train", "run.toml", "model.n_head=3"], "model.n_head: unknown field; did you mean"),
        (["train", "run.toml", "--resume", "maybe"], "'maybe' is not one of 'auto', 'must'"),
        (["train", "run.toml", "model.n_heads=5"], "d_model=64 must be divisible by n_heads=5"),
        (["evaluate", "runs/none"], "runs/none"),
        (["show", "order", "run.toml", "--split", "holdout"], "--split 'holdout' is not one of"),
        (["show", "order", "run.toml", "--start", "900"], "sequences 900 to 903 requested"),
        (["import", "a" * 300, "--output", "x"], "File name too long"),
        (["show", "a" * 300], "File name too long"),
        (["import", ".", "--output", "a" * 300], "File name too long"),
        (["prepare", "a" * 300, "--output", "x"], "File name too long"),
        (["prepare", "nothing.txt", "--output", "x", "--train-tokenizer", "300"], "nothing.txt"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_and_exit_code_2(
    folder: Path, arguments: list[str], message: str
) -> None:
    before = sorted(folder.rglob("*"))
    result = trainyard(*arguments, folder=folder)
    assert result.returncode == 2, result.stderr
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert [path for path in sorted(folder.rglob("*")) if "cache" not in path.parts] == before


def test_debug_shows_the_traceback_too(folder: Path) -> None:
    result = trainyard("--debug", "show", "nope.toml", folder=folder)
    assert result.returncode == 2
    assert "Traceback" in result.stderr


def test_version_and_presets(folder: Path) -> None:
    shown = start_trainyard("--version", folder=folder).stdout
    assert shown.strip() == f"trainyard {__version__}"
    assert "gpt3-175b" in trainyard("show", folder=folder).stdout


def test_show_order_writes_exactly_what_training_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--split", "train", "--start", "5", "--count", "20", "--output", "order.npz"]
    result = trainyard("show", "order", "run.toml", *arguments, folder=folder)
    assert result.returncode == 0, result.stderr
    monkeypatch.chdir(folder)
    with np.load("order.npz", allow_pickle=False) as found:
        sequences = found["sequences"]
    assert sequences.shape == (20, 65)
    run = load_run("run.toml").run
    order = build_orders(run, resolve(run))["train"]
    assert order is not None
    np.testing.assert_array_equal(sequences, order.sequences(5, 20))


def test_train_and_show(folder: Path) -> None:
    short = ["train.length='4 steps'", "evaluate.batches=1"]
    trained = start_trainyard("train", "run.toml", *short, folder=folder)
    assert trained.returncode == 0, trained.stderr
    assert "step 4 of 4 | loss" in trained.stderr
    shown = trainyard("show", "runs/small", folder=folder)
    assert "both moments of every weight" in shown.stdout
    tokens = trainyard("show", "corpus", folder=folder)
    assert "4,000 of uint16" in tokens.stdout
