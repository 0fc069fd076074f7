"""A resume reads each file of its run once."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import small_overrides

from trainyard.api.running import Training, train_run
from trainyard.checkpoint.format import load_manifest
from trainyard.cli.show_data import show_order
from trainyard.config.load import load_run
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer
from trainyard.data.loader import describe_data
from trainyard.data.vocabulary import load_vocabulary
from trainyard.layout.resolve import resolve
from trainyard.training import loop
from trainyard.training.worker import run_worker

COUNTED: dict[Callable[..., Any], Callable[..., str]] = {
    load_run: lambda source, *_: str(source),
    resolve: lambda run, *_: str(run.train.length),
    load_manifest: lambda path: path.name,
    load_vocabulary: lambda _source: "",
    describe_data: lambda _run: "",
}
"""The functions to count, and what of their arguments tells calls apart."""


def count_calls(patch: pytest.MonkeyPatch) -> Counter[tuple[str, str]]:
    """Counts the calls of every module that has imported one of the functions."""
    assert run_worker, "all that training imports is there"
    counts: Counter[tuple[str, str]] = Counter()

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            counts[function.__name__, COUNTED[function](*arguments)] += 1
            return function(*arguments, **options)

        return call

    for module in [m for name, m in sys.modules.items() if name.startswith("trainyard.")]:
        for name, value in vars(module).copy().items():
            if callable(value) and value in COUNTED:
                patch.setattr(module, name, count(value))
    return counts


def test_a_resume_reads_each_file_once(
    token_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    train_tokenizer([text] * 3, 512, Path("tok"))
    own = ("name=once", "checkpoint.interval=2", "tokenizer.path=tok")

    def train(n_steps: int) -> int:
        return train_run(Training("tiny", [*small_overrides(Path(token_prefix), n_steps), *own]))

    assert train(4) == 0
    shutil.rmtree("runs/once/checkpoints/step-00000004")
    counts = count_calls(monkeypatch)
    at_first_step: dict[tuple[str, str], int] = {}

    train_steps = loop.train

    def note(*arguments: Any) -> Any:
        at_first_step.update(counts)
        return train_steps(*arguments)

    monkeypatch.setattr("trainyard.training.loop.train", note)
    assert train(4) == 0
    assert at_first_step == {
        ("load_run", "tiny"): 1,
        ("load_run", "runs/once/run.toml"): 1,  # as it was begun
        ("resolve", "4 steps"): 1,
        ("load_manifest", "step-00000002"): 1,
        ("load_vocabulary", ""): 1,
        ("describe_data", ""): 1,
    }


def test_a_start_builds_no_order_that_show_order_has_built(
    token_prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one CPU can build the order of a large run before its job is in the queue."""
    monkeypatch.chdir(tmp_path)
    fields = [*small_overrides(Path(token_prefix), 4), "data.cache_folder=cache"]
    show_order(["tiny", *fields], "train", 0, 1, tmp_path / "order.npz")

    def list_cache() -> dict[str, tuple[int, int]]:
        files = {path.name: path.stat() for path in Path("cache").iterdir()}
        return {name: (found.st_ino, found.st_mtime_ns) for name, found in files.items()}

    before = list_cache()
    assert sum(name.endswith("shuffle_index.npy") for name in before) >= 2  # train and valid
    assert train_run(Training("tiny", fields)) == 0
    assert list_cache() == before
