"""The recipes' launch lines render, and their overrides are fields; test_pages.py: their tables."""

from __future__ import annotations

import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from benchmarks.pages import ROW
from tests.command import call

from trainyard.cli.launch import launch
from trainyard.cli.main import app
from trainyard.cli.plan import plan
from trainyard.config.load import all_fields, load_run, preset_names
from trainyard.corpus.fetching.catalogue import find_corpus
from trainyard.errors import ConfigError, MachineError
from trainyard.layout.resolve import resolve

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "recipes").glob("*/README.md"))
OF_GUIDES = [path for path in GUIDES if path.parent.name != "laptop"]
RECIPES = sorted((ROOT / "recipes").glob("*/*.toml"))
# What a cluster wants besides: a project that pays, an image.
OWN = {
    "lumi": ["--account", "project_465000001", "--image", "trainyard.sif"],
    "azure-ndv5": ["--image", "trainyard.sqsh"],
    "polaris": ["--account", "MyProject"],
}


def commands(text: str) -> list[list[str]]:
    """The commands of a page: its lines of code, continued ones joined."""
    lines = re.sub(r" \\\n\s*", " ", text).splitlines()
    return [shlex.split(line) for line in lines if re.match(r"(    )?trainyard ", line)]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_every_recipe_has_a_row_and_fits_as_it_is() -> None:
    for path in RECIPES:
        text = (path.parent / "README.md").read_text(encoding="utf-8")
        rows = {shlex.split(row[1])[0]: row[0] for row in ROW.finditer(text) if "=" not in row[1]}
        assert "does not fit" not in rows[str(path.relative_to(ROOT))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.parent.name)
def test_what_is_planned_can_be_launched(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # PBS takes no blank in the path
    Path("recipes").symlink_to(ROOT / "recipes")
    text = path.read_text(encoding="utf-8")
    for row in ROW.finditer(text):
        words = shlex.split(row[1])
        cluster = words[words.index("--cluster") + 1] if "--cluster" in words else ""
        if "--nodes" in words:
            with pytest.raises(MachineError) if "does not fit" in row[0] else nullcontext():
                assert call(launch, *words, *OWN[cluster], "--dry-run").startswith("#!/bin/bash")
    for line in re.findall(r"^    (printf '.*' .*> mine\.toml)$", text, re.MULTILINE):
        subprocess.run(["bash", "-c", line], check=True)
    written = [words[2:] for words in commands(text) if words[1] == "launch"]
    assert written
    hosts = [f"n{number}" for number in range(4)]  # an allocation, for --here
    Path("hosts").write_text("\n".join(hosts))
    allocation = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4", "PBS_NODEFILE": "hosts"}
    for words in written:
        with monkeypatch.context() as patch:
            for name, value in allocation.items() if "--here" in words else ():
                patch.setenv(name, value)
            script = call(launch, *words, "--dry-run")
        assert script.startswith("#!/bin/bash")
        if "--stages" in words:
            assert " prepare recipes/" in script


@pytest.mark.parametrize("path", OF_GUIDES, ids=lambda path: path.parent.name)
def test_five_commands_lead_to_the_first_step(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    section = text.partition("\n## From an account to the first step\n")[2].partition("\n## ")[0]
    block = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)[0]
    lines = [line.strip() for line in block.splitlines()]
    assert len(lines) <= 5
    assert lines[0].startswith("git clone REPOSITORY trainyard && cd trainyard && ")
    assert shlex.split(lines[-1])[:2] in (["trainyard", "train"], ["trainyard", "launch"])
    assert "--dry-run" not in lines[-1]


@pytest.mark.parametrize("path", OF_GUIDES, ids=lambda path: path.parent.name)
def test_commands_are_those_of_the_program(path: Path) -> None:
    """They parse; what needs no cluster, and fetches nothing, runs."""
    verbs: Any = typer.main.get_command(app)
    written = commands(path.read_text(encoding="utf-8"))
    assert {"plan", "launch", "status", "evaluate", "export"} <= {words[1] for words in written}
    for _, verb, *words in written:
        verbs.get_command(None, verb).make_context(verb, list(words))
        if "--fetch" in words:
            find_corpus(words[words.index("--fetch") + 1])
        if verb == "plan" and "mine.toml" not in words:
            assert ": fits, " in call(plan, *words)


def test_any_key_of_polaris_by_override() -> None:
    """The README's line for one key, with every other."""
    text = (ROOT / "recipes" / "polaris" / "README.md").read_text(encoding="utf-8")
    launched = [words for words in commands(text) if words[1] == "launch"]
    (words,) = [words for words in launched if words[2].startswith("polaris-")]
    fields = [word for word in words if re.match(r"[a-z_.]+=", word)]
    keys = [name for name in preset_names() if name.startswith("polaris-")]
    assert len(keys) == 40
    for key in keys:
        run = load_run(key, [*fields, "parallel.pipeline=1"]).run
        assert resolve(run, 64).topology.tensor == 4
        assert run.precision.kind == "fp16"


def overrides_in(text: str) -> list[str]:
    """The overrides among the words of a page's code."""
    words = [word for span in re.findall(r"`([^`\n]+)`", text) for word in shlex.split(span)]
    return [word for word in words if re.match(r"[a-z0-9_]+\.[a-z0-9_.]+=", word)]


def test_overrides_that_pages_name_are_fields() -> None:
    for path in GUIDES:
        fields = {word.partition("=")[0] for word in overrides_in(path.read_text(encoding="utf-8"))}
        assert fields <= set(all_fields())


def differences(path: Path) -> list[tuple[str, str]]:
    """The first and the last cell of each row of a guide's table of differences: ours, theirs."""
    table = path.read_text(encoding="utf-8").partition("| here | there | why | theirs |\n")[2]
    lines = table.partition("\n\n")[0].splitlines()[1:]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines]
    assert {len(row) for row in rows} == {4}
    return [(row[0], row[-1]) for row in rows]


def is_set(recipe: str, override: str) -> bool:
    """Whether a recipe has this value already."""
    try:
        return load_run(recipe, [override]).run == load_run(recipe).run
    except ConfigError:
        return False


@pytest.mark.parametrize("path", OF_GUIDES, ids=lambda path: path.parent.name)
def test_what_a_guide_does_is_overrides_away(path: Path) -> None:
    recipes = [str(each) for each in sorted(path.parent.glob("*.toml"))]
    n_checked = 0
    for ours, theirs in differences(path):
        others = [word for word in overrides_in(theirs) if word != "train.seed=N"]
        for word in overrides_in(ours):
            assert any(is_set(recipe, word) for recipe in recipes), f"no recipe has {word}"
        for word in others:
            assert not all(is_set(recipe, word) for recipe in recipes), f"{word} changes nothing"
        n_checked += len(overrides_in(ours)) + len(others)
    assert n_checked >= 6


def test_polaris_as_its_guide_runs_it() -> None:
    rows = differences(ROOT / "recipes" / "polaris" / "README.md")
    values = [word for _, theirs in rows for word in overrides_in(theirs) if word != "train.seed=N"]
    run = load_run("recipes/polaris/gpt25b.toml", values).run
    plan = resolve(run, 64)
    assert (plan.topology.tensor, plan.n_steps, plan.n_sequences) == (64, 10, 10)
    assert run.optimizer.clip_norm == float("inf")
