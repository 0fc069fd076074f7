"""The commands of the README, run as they are written, in order."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
from tests.command import trainyard

ROOT = Path(__file__).parents[2]
# Training as written takes minutes; the test trains the same model for a few steps.
SHORTENED = ["train.length='2 steps'", "train.global_batch_size=2", "train.micro_batch_size=1"]
SHORTENED += ["evaluate.batches=1"]


def fenced_commands(text: str) -> list[list[str]]:
    blocks = re.findall(r"^```\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("trainyard ")]


@pytest.mark.slow
def test_commands_for_your_own_text(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for path in sorted(Path(subprocess.__file__).parent.glob("*.py"))[:120]:
        text = path.read_text(encoding="utf-8")
        (tmp_path / "corpus" / f"{path.stem}.txt").write_text(text, encoding="utf-8")
    commands = fenced_commands((ROOT / "README.md").read_text(encoding="utf-8"))
    assert [command[1] for command in commands] == [
        *("prepare", "train", "report", "generate", "export")
    ]
    for command in commands:
        extra = SHORTENED if command[1] == "train" else []
        result = trainyard(*command[1:], *extra, folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
    assert (tmp_path / "runs" / "web" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "web-gpt" / "model.safetensors").exists()


def test_verbs_of_the_readme_are_those_of_the_program() -> None:
    from trainyard.cli.main import app

    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    written = {verb for cell in table for verb in re.findall(r"`(\w+)`", cell)}
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    names |= {group.name for group in app.registered_groups}
    assert written == names


def test_every_path_the_docs_name_exists() -> None:
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]:
        for name in re.findall(
            r"`((?:src|docs|tests|benchmarks|recipes)/[\w./-]+)`", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
