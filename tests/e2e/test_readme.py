"""The commands of the README, run as they are written, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.command import trainyard

from trainyard.data.indexed import IndexedWriter

ROOT = Path(__file__).parents[2]
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Training as written takes minutes; the test trains the same model for a few steps.
SHORTENED = ["train.length=2 steps", "evaluate.batches=1", "log.tensorboard=false"]


def section(title: str) -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition(f"## {title}\n")[2].partition("\n## ")[0]


def fenced(text: str, kind: str = "") -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for of_kind, block in blocks if of_kind == kind]


def fenced_commands(text: str) -> list[list[str]]:
    lines = [line for block in fenced(text) for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("trainyard ")]


def python_source(n_bytes: int) -> str:
    """Text that every machine has."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(STANDARD_LIBRARY.glob("*.py"))]
    return "".join(texts)[:n_bytes]


def write_texts(folder: Path, n_files: int, n_bytes: int) -> None:
    folder.mkdir(exist_ok=True)
    text = python_source(n_bytes)
    size = -(-len(text) // n_files)
    for number in range(n_files):
        part = text[number * size : (number + 1) * size]
        (folder / f"part{number}.txt").write_text(part, encoding="utf-8")


def one_file(folder: Path) -> list[str]:
    (folder / "book.txt").write_text(python_source(200_000), encoding="utf-8")
    return ["book.txt"]


def two_files(folder: Path) -> list[str]:
    write_texts(folder, 2, 200_000)
    return ["part0.txt", "part1.txt"]


def twenty_files(folder: Path) -> list[str]:
    write_texts(folder / "corpus", 20, 200_000)
    return ["corpus/"]


def folder_with_other_files(folder: Path) -> list[str]:
    write_texts(folder / "corpus", 3, 60_000)
    for name in ("a.md", "b.md", "c.pdf", "cover.PNG", ".DS_Store"):
        (folder / "corpus" / name).write_bytes(b"\x89\0")
    return ["corpus"]


def one_line_of_json(folder: Path) -> list[str]:
    line = json.dumps({"text": python_source(200_000)})
    (folder / "one.jsonl").write_text(line + "\n", encoding="utf-8")
    return ["one.jsonl"]


INPUTS = [one_file, two_files, twenty_files, folder_with_other_files, one_line_of_json]


@pytest.mark.parametrize("write", INPUTS, ids=lambda write: write.__name__)
def test_commands_for_your_own_text(tmp_path: Path, write: Callable[[Path], list[str]]) -> None:
    """As the README has them, with each kind of input; the first goes all the way."""
    prepare, *others = fenced_commands(section("Your own text"))
    assert prepare == ["trainyard", "prepare", "corpus/", "-o", "web"]
    assert [command[1] for command in others] == ["train", "report", "generate", "export"]
    prepared = trainyard("prepare", *write(tmp_path), "-o", "web", folder=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    skipped = "skipped 2 .md, 1 .pdf, 1 .png, 1 hidden; "
    assert prepared.stderr.startswith(skipped if write is folder_with_other_files else "")
    written = shlex.split(prepared.stdout.splitlines()[-1].removeprefix("train with: "))
    assert written[:-1] == others[0][:-1]
    shortened = [*written[1:-2], *SHORTENED]  # without --minutes
    trained = trainyard(*shortened, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "web_text_document is split by tokens" in trained.stderr
    losses = re.findall(r"held-out loss ([\d.]+)", trained.stderr)
    assert 4 < float(losses[-1]) < 8
    evaluated = trainyard("evaluate", "runs/web", "--json", folder=tmp_path)
    assert json.loads(evaluated.stdout)["n_tokens"] >= 64
    if write is one_file:
        for command in others[1:]:
            result = trainyard(*command[1:], folder=tmp_path)
            assert result.returncode == 0, f"{command}: {result.stderr}"
        assert (tmp_path / "runs" / "web" / "report.html").stat().st_size > 10_000
        assert (tmp_path / "web-gpt" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_commands_before_the_queue(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    commands = fenced_commands(section("Before the queue"))
    assert [command[1] for command in commands] == ["plan", "plan", "plan"]
    for command, answer in zip(
        commands, (": fits, ", "fastest layouts", "arguments for the largest: "), strict=True
    ):
        result = trainyard(*command[1:], folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        assert answer in result.stdout


# Stands where Slurm would: it takes the script, and answers with a number.
SBATCH = """#!/bin/bash
cp "${@: -1}" submitted.sh && echo 4711
"""


@pytest.mark.exhaustive
def test_commands_on_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but Slurm, which tests/cluster has."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data" / "gpt2").mkdir(parents=True)
    (tmp_path / "trainyard.sif").touch()
    with IndexedWriter(tmp_path / "data/my-gpt2_text_document", np.dtype(np.uint16)) as writer:
        for _ in range(50):
            writer.add_document(np.arange(3000, dtype=np.uint16))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    text = section("On a cluster")
    (own,) = fenced(text, "toml")
    assert 15 <= len(own.splitlines()) <= 20
    (tmp_path / "basement.toml").write_text(own)
    said = []
    for command in fenced_commands(text):
        short = ["--seconds", "0.02", "--gigabytes", "0.01"] if command[1] == "doctor" else []
        result = trainyard(*command[1:], *short, folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        said.append(result.stdout)
    cluster, dry, launched, status, planned, ours, doctor = said
    assert 'partition = "standard-g"' in cluster
    # What is submitted is what a dry run prints, but for the word.
    assert (tmp_path / "submitted.sh").read_text() == dry.replace(" --dry-run", "")
    assert launched.startswith("job 4711 is submitted to lumi, 2 nodes")
    assert "trainyard status lumi-13b" in launched
    assert "4711 on lumi, 2 nodes" in status
    assert "A100 80GB" in planned
    assert "fits" in planned
    assert "#SBATCH --partition=main\n" in ours
    assert "\nmodule load cuda\n" in ours
    assert "\nverdict: " in doctor


def test_verbs_of_the_readme_are_those_of_the_program() -> None:
    from trainyard.cli.help import VERBS

    table = re.findall(r"^\| (`.*?`) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    written = {verb for cell in table for verb in re.findall(r"`(\w+)`", cell)}
    assert written == {*VERBS}


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
    # Recipes in commands, and in the help of the program.
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md"), ROOT / "README.md"]
    for page in [*pages, *(ROOT / "src").rglob("*.py")]:
        for name in re.findall(r"\brecipes/\w+/[\w./-]+\.toml", page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_index_of_the_docs_has_every_page() -> None:
    folder = ROOT / "docs"
    links = re.findall(r"\]\(([\w./-]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    for link in links:
        assert (folder / link).exists(), link
    assert {path.name for path in folder.glob("*.md")} <= {*links, "README.md"}
