"""The commands of the README, run as they are written, in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import sysconfig
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tests.command import trainyard

from trainyard import __version__
from trainyard.data.indexed import IndexedWriter

ROOT = Path(__file__).parents[2]
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
# Training as written takes minutes; the test trains the same model for a few steps.
SHORTENED = ["train.length=2 steps", "evaluate.batches=1", "log.tensorboard=false"]


def section(title: str, page: str = "README.md") -> str:
    text = (ROOT / page).read_text(encoding="utf-8")
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


def test_commands_for_your_own_text(tmp_path: Path) -> None:
    """As the README has them, on a folder with files of other kinds too."""
    prepare, *others = fenced_commands(section("Your own text"))
    assert prepare == ["trainyard", "prepare", "corpus/", "-o", "web"]
    assert [command[1] for command in others] == ["train", "report", "generate", "export"]
    write_texts(tmp_path / "corpus", 3, 100_000)
    for name in ("a.md", "b.md", "c.pdf", "cover.PNG", ".DS_Store"):
        (tmp_path / "corpus" / name).write_bytes(b"\x89\0")
    prepared = trainyard(*prepare[1:], folder=tmp_path)
    assert prepared.returncode == 0, prepared.stderr
    assert prepared.stderr.startswith("skipped 2 .md, 1 .pdf, 1 .png, 1 hidden; ")
    written = shlex.split(prepared.stdout.splitlines()[-1].removeprefix("train with: "))
    assert written[:-1] == others[0][:-1]
    shortened = [*written[1:-2], *SHORTENED]  # without --minutes
    trained = trainyard(*shortened, folder=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "web_text_document is split by tokens" in trained.stderr
    losses = re.findall(r"held-out loss ([\d.]+)", trained.stderr)
    assert 4 < float(losses[-1]) < 8
    for command in [*others[1:], ["trainyard", "evaluate", "runs/web", "--json"]]:
        result = trainyard(*command[1:], folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
    assert json.loads(result.stdout)["n_tokens"] >= 64
    assert (tmp_path / "runs" / "web" / "report.html").stat().st_size > 10_000
    assert (tmp_path / "web-gpt" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_commands_for_one_gpu(tmp_path: Path) -> None:
    """Without a GPU; `train`, which would take long, has the model and the steps of a test."""
    write_texts(tmp_path / "corpus", 20, 200_000)
    small = ["model.n_layers=1", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"]
    small += ["train.global_batch_size=2", "train.micro_batch_size=1", "precision.kind=fp32"]
    small += ["evaluate.sample_interval=0"]
    shortened = {
        "doctor": ["--seconds", "0.02", "--gigabytes", "0.01"],
        "train": [*small, "model.sequence_length=64", *SHORTENED],
    }
    said = []
    for command in fenced_commands(section("One GPU")):
        result = trainyard(*command[1:], *shortened.get(command[1], []), folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        said.append(result.stdout)
    doctor, _, new, plan, _ = said
    assert "\nverdict: " in doctor
    assert "\ntrainyard plan big.toml" in new
    assert plan.startswith("big on 1 device")
    assert (tmp_path / "runs" / "big" / "metrics.jsonl").exists()


@pytest.mark.exhaustive
def test_commands_of_a_plan(tmp_path: Path) -> None:
    commands = fenced_commands(section("Plan"))
    answers = (": fits, ", "fastest layouts", "arguments for the largest: ")
    for command, answer in zip(commands, answers, strict=True):
        result = trainyard(*command[1:], folder=tmp_path)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        assert answer in result.stdout


# Stands where Slurm would: it takes the script, and answers with a number.
SBATCH = """#!/bin/bash
cp "${@: -1}" submitted.sh && echo 4711
"""


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with recipes, token files and an image, and an sbatch in the PATH."""
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
    return tmp_path


def run_on_login_node(folder: Path, text: str) -> list[str]:
    """Runs the commands of a text, all but Slurm, which tests/cluster has; returns the output."""
    said = []
    for command in fenced_commands(text):
        result = trainyard(*command[1:], folder=folder)
        assert result.returncode == 0, f"{command}: {result.stderr}"
        said.append(result.stdout)
    return said


@pytest.mark.exhaustive
def test_commands_on_a_cluster(login_node: Path) -> None:
    text = section("A cluster")
    (own,) = fenced(text, "toml")
    (login_node / "mine.toml").write_text(own)
    write_texts(login_node / "corpus", 20, 200_000)
    prepare = fenced_commands(section("One GPU"))[1]
    assert trainyard(*prepare[1:], folder=login_node).returncode == 0
    new, plan, dry, launched, status = run_on_login_node(login_node, text)
    assert "16 devices (H100)" in new
    assert ": fits, " in plan
    assert "#SBATCH --partition=gpu\n" in dry and "#SBATCH --account=my-project\n" in dry
    assert "\nmodule load cuda\n" in dry
    # What is submitted is what a dry run prints, but for the word.
    assert (login_node / "submitted.sh").read_text() == dry.replace(" --dry-run", "")
    assert launched.startswith("job 4711 is submitted to mine.toml, 2 nodes")
    assert "4711 on mine.toml, 2 nodes" in status


@pytest.mark.exhaustive
def test_commands_of_the_cluster_tutorial(login_node: Path) -> None:
    page = "docs/tutorial-cluster.md"
    cluster, planned = (
        run_on_login_node(login_node, section(title, page))
        for title in ("2. Choose a cluster file", "3. Plan")
    )
    assert 'partition = "standard-g"' in cluster[0]
    assert ": fits, " in planned[0] and "fastest layouts" in planned[1]
    dry, launched, status = run_on_login_node(login_node, section("6. Launch", page))
    assert (login_node / "submitted.sh").read_text() == dry.replace(" --dry-run", "")
    assert launched.startswith("job 4711 is submitted to lumi, 2 nodes")
    assert "trainyard status lumi-13b" in launched
    assert "4711 on lumi, 2 nodes" in status


@pytest.mark.exhaustive
def test_a_cluster_file_of_twenty_lines(login_node: Path) -> None:
    title = "A cluster file of your own, in twenty lines"
    own, _ = fenced(section(title, "docs/launching.md"), "toml")
    assert 15 <= len(own.splitlines()) <= 20
    (login_node / "basement.toml").write_text(own)
    run = [
        "laptop",
        "train.micro_batch_size=4",
        'data.blend.prefixes=["data/my-gpt2_text_document"]',
        "tokenizer.path=gpt2",
    ]
    launch = ["launch", *run, "--cluster", "basement.toml", "--nodes", "2", "--dry-run"]
    result = trainyard(*launch, folder=login_node)
    assert result.returncode == 0, result.stderr
    assert "#SBATCH --partition=main\n" in result.stdout
    assert "\nulimit -c 0 " in result.stdout or "\nulimit -c 0\n" in result.stdout


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160


def test_pages_name_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == __version__
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\d\S+) - \d{4}-\d\d-\d\d$", changes, re.MULTILINE)[0] == __version__
    assert f"Trainyard {__version__} " in (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_path_the_docs_name_exists() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    recipes = [*(ROOT / "recipes").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    for page in [*pages, *recipes]:
        pattern = r"\brecipes/\w+/[\w./-]+\.toml"
        if page in pages and page.name != "log.md":  # which tells of files of its day
            pattern += r"|(?<=`)(?:src|docs|tests|benchmarks|recipes)/[\w./-]+(?=`)"
        for name in re.findall(pattern, page.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_the_index_of_the_docs_has_every_page() -> None:
    folder = ROOT / "docs"
    links = re.findall(r"\]\(([\w./-]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
    for link in links:
        assert (folder / link).exists(), link
    assert {path.name for path in folder.glob("*.md")} <= {*links, "README.md"}
