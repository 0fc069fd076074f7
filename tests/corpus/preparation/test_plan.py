"""The plan of a corpus: the same for every process, and told apart from any other."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trainyard.config.corpus import Corpus, output_prefixes
from trainyard.corpus.preparation.plan import Identity, PreparationPlan, plan_corpus
from trainyard.corpus.sources.files import choose_unit_bytes
from trainyard.data.sidecar import TokenizerRecord
from trainyard.errors import DataError

TOKENIZER = TokenizerRecord("gpt2", "f" * 64, 50257, 50256, "text")
LINE = b'{"text": "cat"}\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.jsonl", "b.jsonl", "c.txt"):
        (tmp_path / name).write_bytes(LINE * 4)
        os.utime(tmp_path / name, ns=(10**18, 10**18))
    return tmp_path


def plan(folder: Path, record: TokenizerRecord = TOKENIZER, **options: Any) -> PreparationPlan:
    unit_bytes = options.pop("unit_bytes", 40)
    given = {"inputs": (str(folder),), "output": "data/web", "tokenizer": "gpt2", **options}
    return plan_corpus(Corpus.model_validate(given), record, unit_bytes)


def test_every_process_makes_the_same_plan(folder: Path) -> None:
    one, two = plan(folder), plan(folder)
    assert (one.units, one.outputs, one.recipe) == (two.units, two.outputs, two.recipe)
    read = msgspec.json.decode(msgspec.json.encode(one.identity), type=Identity)
    assert read == one.identity
    one.identity.check_equal(read, "data/web.work was begun", "")


def test_units_make_one_output(folder: Path) -> None:
    made = plan(folder)
    assert [output.prefix for output in made.outputs] == ["data/web_text_document"]
    assert made.outputs[0].units == range(len(made.units)) == range(5)
    assert made.outputs[0].files == range(3)
    assert made.unit_bytes == [48, 16, 48, 16, 64]
    assert sum(made.unit_bytes) == 3 * 64


def test_every_band_is_a_piece_of_work(folder: Path) -> None:
    steps = [{"kind": "deduplicate"}, {"kind": "near_deduplicate", "bands": 7}]
    made = plan(folder, steps=steps)
    units, compares, joins = made.stages
    assert len(set(units)) == 5
    end = made.recipe[:8]
    assert compares == [f"compare-{number:03d}-{end}" for number in range(8)]
    assert joins == [f"join-00000-{end}"]
    assert made.label(units[3]) == "unit-000003"


def test_a_unit_keeps_its_name_as_long_as_its_input_does(folder: Path) -> None:
    before = plan(folder).stages
    (folder / "b.jsonl").write_bytes(LINE)
    units, _, joins = plan(folder).stages
    assert units[:2] == before[0][:2]
    assert units[-1] == before[0][-1]
    assert not set(units[2:-1]) & set(before[0])
    assert joins != before[2]


@pytest.mark.parametrize(
    ("files_per_output", "files", "units"),
    [
        (1, [range(1), range(1, 2), range(2, 3)], [range(2), range(2, 4), range(4, 5)]),
        (2, [range(2), range(2, 3)], [range(4), range(4, 5)]),
        (3, [range(3)], [range(5)]),
        (9, [range(3)], [range(5)]),
    ],
)
def test_files_are_dealt_to_outputs(
    folder: Path, files_per_output: int, files: list[range], units: list[range]
) -> None:
    made = plan(folder, files_per_output=files_per_output, json_key="body")
    assert [output.files for output in made.outputs] == files
    assert [output.units for output in made.outputs] == units
    prefixes = [f"data/web_{number:02d}_body_document" for number in range(len(files))]
    assert [output.prefix for output in made.outputs] == prefixes


def test_small_files_of_two_outputs_share_no_unit(folder: Path) -> None:
    made = plan(folder, unit_bytes=10_000, files_per_output=2)
    assert [len(unit) for unit in made.units] == [2, 1]
    assert len(plan(folder, unit_bytes=10_000).units) == 1


@pytest.mark.parametrize(("total", "unit"), [(0, 32), (1_000, 62.5), (10**6, 128)])
def test_units_of_small_corpora_are_smaller(total: int, unit: float) -> None:
    assert choose_unit_bytes(total * 2**20) == unit * 2**20


def test_names_are_those_of_megatron_and_sort_as_the_outputs_do() -> None:
    one = Corpus(output="data/web")
    assert output_prefixes(one, 1) == ["data/web_text_document"]
    several = Corpus(output="web", files_per_output=1)
    assert output_prefixes(several, 2) == ["web_00_text_document", "web_01_text_document"]
    many = output_prefixes(several, 1001)
    assert (many[0], many[-1]) == ("web_0000_text_document", "web_1000_text_document")
    assert many == sorted(many)


def test_names_and_places_decide_nothing(folder: Path) -> None:
    assert plan(folder).recipe == plan(folder, output="elsewhere", tokenizer="other").recipe
    renamed = msgspec.structs.replace(TOKENIZER, name="copy_of_gpt2")
    assert plan(folder).recipe == plan(folder, renamed).recipe
    glob = f"{folder}/*.*"
    assert plan(folder).recipe == plan(folder, inputs=(glob,)).recipe


BEGUN = "data/web.work was begun"
MINE = TokenizerRecord("mine", "e" * 64, 300, 299, "text")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"append_eod": False}, "with append_eod=True, not append_eod=False"),
        ({"json_key": "body"}, "with json_key='text', not json_key='body'"),
        ({"files_per_output": 2}, "with files_per_output=0, not files_per_output=2"),
        (
            {"steps": [{"kind": "deduplicate"}]},
            "with steps=[], not steps=[{'kind': 'deduplicate'}]",
        ),
        ({"record": MINE}, f"with another tokenizer, .* {'f' * 16}, not {'e' * 16}"),
        ({"special_tokens": "parse"}, "with special_tokens='text', not special_tokens='parse'"),
        ({"unit_bytes": 41}, "with unit_bytes 40, not 41"),
    ],
)
def test_other_work_is_told_apart(folder: Path, options: dict[str, Any], problem: str) -> None:
    begun, now = plan(folder), plan(folder, **options)
    assert now.recipe != begun.recipe
    with pytest.raises(DataError, match=rf"^{BEGUN} {problem.replace('[', '.')}") as caught:
        now.identity.check_equal(begun.identity, BEGUN, "the hint")
    assert caught.value.hint == "the hint"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            lambda a, b: a.write_bytes(LINE * 5),
            f"a.jsonl changed since {BEGUN}: 80 bytes now, 64 then",
        ),
        (
            lambda a, b: os.utime(b),
            "b.jsonl changed since .*: 64 bytes now, 64 then, or another time",
        ),
        (lambda a, b: b.unlink(), f"{BEGUN} with .*/b.jsonl, which is not an input now"),
        (lambda a, b: a.with_name("aa.jsonl").touch(), f"{BEGUN} without .*/aa.jsonl"),
    ],
)
def test_other_inputs_are_named(
    folder: Path, change: Callable[[Path, Path], object], problem: str
) -> None:
    begun = plan(folder)
    change(folder / "a.jsonl", folder / "b.jsonl")
    now = plan(folder)
    assert now.recipe != begun.recipe
    with pytest.raises(DataError, match=problem):
        now.identity.check_equal(begun.identity, BEGUN, "")


def test_other_orders_and_versions_are_named(folder: Path) -> None:
    names = [str(folder / name) for name in ("a.jsonl", "b.jsonl")]
    begun, now = plan(folder, inputs=names), plan(folder, inputs=names[::-1])
    assert begun.recipe != now.recipe
    older = msgspec.structs.replace(now.identity, version="0.0.1")
    for other, problem in (
        (begun.identity, "with the inputs in another order"),
        (older, r"with version 0.0.1, not trainyard \d"),
    ):
        with pytest.raises(DataError, match=f"{BEGUN} {problem}"):
            now.identity.check_equal(other, BEGUN, "")


def test_hard_links_of_one_file_are_refused(folder: Path) -> None:
    (folder / "d.jsonl").hardlink_to(folder / "a.jsonl")
    with pytest.raises(DataError, match=r"d\.jsonl and .*a\.jsonl are hard links of one file"):
        plan(folder)
    (folder / "d.jsonl").rename(folder.parent / f"{folder.name}-elsewhere")
    plan(folder)  # a link from elsewhere is no second input
