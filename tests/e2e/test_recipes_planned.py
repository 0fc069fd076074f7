"""The recipes' plan tables are what `trainyard plan` says today, and their launch lines render.

python -m tests.e2e.test_recipes_planned      writes the tables anew; look at the difference
"""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import typer
from tests.command import call
from typer.testing import CliRunner

from trainyard.cli.launch import launch
from trainyard.cli.plan import plan
from trainyard.cli.plan_table import describe_step
from trainyard.config.load import all_fields, load_run, preset_names
from trainyard.errors import MachineError
from trainyard.plan.resolve import resolve
from trainyard.units import format_seconds

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "recipes").glob("*/README.md"))
RECIPES = sorted((ROOT / "recipes").glob("*/*.toml"))
ROW = re.compile(r"^\| `(\S+\.toml [^`]*)` \|.*\|$", re.MULTILINE)
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


def planned_row(arguments: str) -> str:
    """The row of a table: what `trainyard plan` is given, and what it says."""
    app = typer.Typer()
    app.command()(plan)
    result = CliRunner().invoke(app, [*shlex.split(arguments), "--json"])
    does_not_fit = isinstance(result.exception, MachineError)
    if result.exception is not None and not does_not_fit:
        raise result.exception
    found: dict[str, Any] = json.loads(result.stdout)
    assert found["fits"] is not does_not_fit
    memory = f"{max(rank['peak_bytes'] for rank in found['memory']) / 2**30:.1f}"
    if found["usable_bytes"]:
        memory += f" of {found['usable_bytes'] / 2**30:.1f}"
    if does_not_fit:
        memory = f"**{memory}: does not fit**"
    step, cost = found["step"], found["cost"]
    speed = f"{step['tokens_per_second_per_device']:,.0f}"
    cells = [f"`{arguments}`", memory, describe_step(step["seconds"]), speed]
    return f"| {' | '.join([*cells, format_seconds(cost['seconds'])])} |"


def plan_again(text: str) -> str:
    """A page with its plans of today."""
    return ROW.sub(lambda row: planned_row(row[1]), text)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.parent.name)
def test_plan_tables_are_those_of_today(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert ROW.search(text)
    assert text == plan_again(text), "if so: python -m tests.e2e.test_recipes_planned"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_recipe_has_a_row_and_fits_as_it_is(path: Path) -> None:
    text = (path.parent / "README.md").read_text(encoding="utf-8")
    name = str(path.relative_to(ROOT))
    rows = {shlex.split(row[1])[0]: row[0] for row in ROW.finditer(text) if "=" not in row[1]}
    assert "does not fit" not in rows[name]


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
    written = [words[2:] for words in commands(text) if words[1] == "launch"]
    assert written
    for words in written:
        script = call(launch, *words, "--dry-run")
        assert script.startswith("#!/bin/bash")
        if "--stages" in words:
            assert " prepare recipes/" in script


def test_any_key_of_polaris_by_override() -> None:
    """The README's line for one key, with every other."""
    text = (ROOT / "recipes" / "polaris" / "README.md").read_text(encoding="utf-8")
    (words,) = [words for words in commands(text) if words[2].startswith("polaris-")]
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


def test_what_the_polaris_guide_does_is_overrides_away() -> None:
    text = (ROOT / "recipes" / "polaris" / "README.md").read_text(encoding="utf-8")
    table = text.partition("| there, as overrides |\n")[2].partition("\n\n")[0]
    values = [word for word in overrides_in(table) if word != "train.seed=N"]
    run = load_run("recipes/polaris/gpt25b.toml", values).run
    plan = resolve(run, 64)
    assert (plan.topology.tensor, plan.n_steps, plan.n_sequences) == (64, 10, 10)
    assert run.optimizer.clip_norm == float("inf")


def main() -> None:
    os.chdir(ROOT)
    for path in GUIDES:
        path.write_text(plan_again(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
