"""`import trainyard`, as its users call it."""

from __future__ import annotations

import ast
import importlib
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import trainyard
from trainyard.api.plan_table import plan_as_json, render_plan
from trainyard.config.run import Run

ROOT = Path(__file__).parents[2]
TINY = ["train.length=2 steps"]


def test_the_import_is_light() -> None:
    code = """
import sys, trainyard
assert not {"torch", "numpy", "pydantic"} & set(sys.modules), "import trainyard is slow"
print(trainyard.plan("tiny").plan.n_steps, trainyard.load_run("tiny").name)
assert "torch" not in sys.modules, "a plan imports torch"
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True)
    assert done.stdout.split() == [b"50", b"tiny"], done.stderr.decode()


def test_type_checkers_see_the_names() -> None:
    tree = ast.parse((ROOT / "src/trainyard/__init__.pyi").read_text())
    typed = {
        alias.asname: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed.keys() | {"__version__"} == set(trainyard.__all__)
    for name, module in typed.items():
        there = getattr(importlib.import_module(module or ""), name)
        assert there.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pretrain'"):
        _ = trainyard.pretrain  # type: ignore[attr-defined]


def test_a_plan_is_the_one_of_the_command() -> None:
    report = trainyard.plan("gpt3-1.3b", gpu="h100", gpus=8)
    assert report.plan.n_ranks == 8 and report.fits and report.time is not None
    assert str(report) == render_plan(report).plain
    assert plan_as_json(report)["fits"] is True
    assert not trainyard.plan(trainyard.load_run("gpt3-175b"), gpu="h100", gpus=1).fits
    with pytest.raises(trainyard.TrainyardError, match="no layout fits on 1 device"):
        trainyard.plan("gpt3-175b", gpu="h100", gpus=1)
    with pytest.raises(trainyard.TrainyardError, match="0 devices"):
        trainyard.plan("gpt3-1.3b", gpu="h100", gpus=0)


def test_a_run_is_loaded_from_a_name_or_a_run() -> None:
    run = trainyard.load_run("tiny", TINY)
    assert isinstance(run, Run) and trainyard.load_run(run) is run
    assert trainyard.load_run(run, ["train.seed=7"]).train.seed == 7
    with pytest.raises(trainyard.TrainyardError, match="no preset named 'tini'"):
        trainyard.load_run("tini")


def test_missing_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(trainyard.TrainyardError, match=r"metrics\.jsonl"):
        trainyard.read_metrics("nothing/metrics.jsonl")
    with pytest.raises(trainyard.TrainyardError, match="no folder nothing"):
        trainyard.Checkpoint("nothing")


def test_training_refuses_as_the_command_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainyard.load_run("tiny", ["data.blend.prefixes=['absent']"])
    with pytest.raises(trainyard.TrainyardError, match="absent") as refused:
        trainyard.train(run)
    assert refused.value.hint and refused.value.problem in capfd.readouterr().out
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(trainyard.TrainyardError, match=r"absent\.txt does not exist"):
        trainyard.prepare("absent.txt", "web")
    with pytest.raises(trainyard.TrainyardError, match="no output given"):
        trainyard.prepare("absent.txt", "")


@pytest.mark.exhaustive
def test_training_that_is_interrupted_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/*.md")))
    (tmp_path / "book.txt").write_text("".join(pages), encoding="utf-8")
    program = """
import trainyard
file = trainyard.prepare("book.txt", "web", vocabulary_size=512).run_file
try:
    trainyard.train(file, ["train.length=100000 steps", "log.interval=1"])
except KeyboardInterrupt:
    print("interrupted at", trainyard.Checkpoint("runs/web").path.name)
"""
    command = [sys.executable, "-u", "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if re.search(r"step +[3-9]\b", line):
                child.send_signal(signal.SIGINT)
                break
        else:
            pytest.fail("no step was logged")
        told = child.stdout.read()
    assert "saving after this step; Ctrl-C again: leave now" in told
    assert "received SIGINT: saved step" in told and "interrupted at step-" in told


@pytest.mark.exhaustive
def test_the_examples_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    for number, page in enumerate(sorted(ROOT.glob("docs/*.md"))[:12]):
        (tmp_path / "corpus" / f"{number}.txt").write_text(page.read_text(encoding="utf-8"))
    text = (ROOT / "docs/python.md").read_text(encoding="utf-8")
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, "docs/python.md", "exec"), names)
    shown = capsys.readouterr()
    assert "step-00000040 " in shown.out and "unknown field" in shown.out
