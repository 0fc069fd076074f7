"""The schema of run files, by the validator of another project."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from tests.command import trainyard

from trainyard.config.load import _presets
from trainyard.config.schema import render_schema, run_schema

ROOT = Path(__file__).parents[2]
RECIPES = sorted(ROOT.glob("recipes/*/*.toml"))


@pytest.fixture(scope="module")
def validator() -> Draft202012Validator:
    Draft202012Validator.check_schema(run_schema())
    return Draft202012Validator(run_schema())


def problems(validator: Draft202012Validator, tables: dict[str, Any]) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tables)]


def test_all_recipes_and_presets_are_valid(validator: Draft202012Validator) -> None:
    tables = {str(path): tomllib.loads(path.read_text()) for path in RECIPES} | _presets()
    found = {name: problems(validator, each) for name, each in tables.items()}
    assert len(found) > 90
    assert not {name: wrong for name, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[train]\nmicro_batch = 8", "$.train"),
        ("[train]\nmicro_batch_size = 0", "$.train.micro_batch_size"),
        ("[train]\nmicro_batch_size = '8'", "$.train.micro_batch_size"),
        ("[train]\nlength = 2000", "$.train.length"),
        ("[train]\nlength = '2000 epochs'", "$.train.length"),
        ("[precision]\nkind = 'fp7'", "$.precision.kind"),
        ("[model]\nn_layers = 1.5", "$.model.n_layers"),
        ("[data.blend]\nprefixes = 'web'", "$.data.blend.prefixes"),
        ("extends = 3", "$.extends"),
        ("size_in_all = 3", "$"),
    ],
)
def test_wrong_files_are_rejected(validator: Draft202012Validator, text: str, place: str) -> None:
    assert [line.partition(": ")[0] for line in problems(validator, tomllib.loads(text))] == [place]


def test_what_a_run_file_may_say(validator: Draft202012Validator) -> None:
    train = {"length": "1_000 steps", "batch_ramp": "none", "stop_after_minutes": math.inf}
    tables = {"extends": "gpt3-13b", "data": {"split": 1}, "train": train}
    assert problems(validator, tables) == []


def test_it_is_printed(tmp_path: Path) -> None:
    assert json.loads(trainyard("show", "--schema", folder=tmp_path).stdout) == run_schema()


def test_the_file_for_editors_is_current() -> None:
    shipped = ROOT / "docs" / "run.schema.json"
    assert shipped.read_text() == render_schema(), "trainyard show --schema > docs/run.schema.json"
    for path in ROOT.glob("recipes/*/*.toml"):
        first = path.read_text().partition("\n")[0].removeprefix("#:schema ")
        assert (path.parent / first).resolve() == shipped
