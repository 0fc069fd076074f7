"""The demo, whole but small: part of its corpus, and seconds of training."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from tests.command import trainyard

from trainyard.cli import demo
from trainyard.config.load import load_run
from trainyard.layout.resolve import resolve

FILES = 61


@pytest.fixture(autouse=True)
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = demo._standard_library_sources

    def some_sources() -> Iterator[str]:
        return islice(sources(), FILES)

    monkeypatch.setattr(demo, "_standard_library_sources", some_sources)
    monkeypatch.setattr(demo, "VOCABULARY_SIZE", 512)
    monkeypatch.setattr(demo, "MINUTES", 0.02)


def test_an_interrupted_demo_continues_and_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_held_out: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo, "_use", interrupt)
        interrupted = trainyard("demo", folder=tmp_path)
    assert interrupted.returncode != 0
    assert "the same command continues it" in interrupted.stderr
    run = load_run(str(tmp_path / "runs/demo/run.toml")).run
    asked = load_run("demo").run
    assert resolve(run).n_steps < resolve(asked).n_steps
    finished = trainyard("demo", folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "this one continues it" in finished.stdout
    assert "$ trainyard prepare" not in finished.stdout
    assert "demo is done at step" in finished.stderr
    assert "torch" not in finished.stderr, "warnings of libraries"
    folder = tmp_path / "runs/demo"
    assert load_run(str(folder / "run.toml")).run == run
    for stage in ("evaluate", "generate", "export", "report"):
        assert f"$ trainyard {stage}" in finished.stdout
    for name in ("report.html", "evaluation.json", "huggingface/model.safetensors"):
        assert (folder / name).stat().st_size > 0
    assert "xz -9e" in finished.stdout
    assert "Your own text" in finished.stdout


@pytest.mark.exhaustive
def test_a_machine_that_becomes_slower_loses_no_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MINUTES", 1e6)  # all steps, however slow this machine is
    monkeypatch.setattr(demo, "MOST_MINUTES", 1e-6)
    finished = trainyard("demo", folder=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "slowed down" in finished.stdout
    assert (tmp_path / "runs/demo/report.html").stat().st_size > 0


def test_the_folder_of_another_run_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "runs/demo/run.toml"
    other.parent.mkdir(parents=True)
    other.write_text("mine")
    refused = trainyard("demo", folder=tmp_path)
    assert refused.returncode == 2
    assert "hint: move it: mv runs/demo runs/mine" in refused.stderr
    assert other.read_text() == "mine"
