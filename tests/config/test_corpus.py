"""Tests of the schema of data files: what it accepts, and every text it refuses with."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.config import corpus as kinds_of
from trainyard.config.corpus import Corpus, Keep, NearDeduplicate, load_corpus
from trainyard.config.section import describe_fields
from trainyard.errors import ConfigError

HEAD = 'inputs = ["a.jsonl"]\noutput = "out"\ntokenizer = "gpt2"\n'
FULL = f"""{HEAD}
count_by = "meta.set"
files_per_output = 800
steps = [
    {{kind = "keep", field = "meta.set", values = ["web", "books"]}},
    {{kind = "keep", field = "language", values = ["en"]}},
    {{kind = "length", min_characters = 200}},
    {{kind = "near_deduplicate"}},
    {{kind = "deduplicate"}},
]
"""


def load(folder: Path, text: str) -> Corpus:
    path = folder / "data.toml"
    path.write_text(text)
    return load_corpus(path, {})


def step(text: str) -> str:
    return f"{HEAD}[[steps]]\n{text}\n"


def test_a_data_file_becomes_a_corpus(tmp_path: Path) -> None:
    corpus = load(tmp_path, FULL)
    assert corpus.inputs == ("a.jsonl",)
    assert corpus.files_per_output == 800
    assert corpus.document_steps == (
        Keep(kind="keep", field="meta.set", values=("web", "books")),
        Keep(kind="keep", field="language", values=("en",)),
        kinds_of.LengthLimits(kind="length", min_characters=200),
    )
    assert corpus.comparing_steps == (
        NearDeduplicate(kind="near_deduplicate"),
        kinds_of.Deduplicate(kind="deduplicate"),
    )
    assert corpus.metadata_fields == ("meta.set", "language")


def kinds(*names: str) -> str:
    return HEAD + "".join(f'[[steps]]\nkind = "{name}"\n' for name in names)


COMPARE_LAST = "deduplication must come last"
PROBLEMS = [
    (HEAD + 'append_eod = "yes"', "append_eod: must be a valid boolean (got 'yes')"),
    (HEAD + 'special_tokens = "drop"', "special_tokens: must be 'text' or 'parse' (got"),
    (step('kind = "keep"\nfield = "a"'), "steps.0.keep.values: required field is missing"),
    (step('kind = "keep"\nfield = "a"\nvalues = []'), "steps.0.keep.values: needs at least one"),
    (step('kind = "normalize"\nform = "NFD"'), "steps.0.normalize.form: must be 'NFC'"),
    (step('kind = "length"\nmin_characters = -5'), "steps.0.length.min_characters: must"),
    (step('kind = "near_deduplicate"\nbands = 0'), "steps.0.near_deduplicate.bands: must"),
    (step('kind = "deduplicate"\nseed = 3'), "steps.0.deduplicate.seed: unknown field"),
    (step('kind = "quality"\nmin_word = 3'), "unknown field; did you mean 'min_words'?"),
    (step('kind = "near_dedup"'), "steps.0: unknown kind; known: "),
    (step('field = "a"'), "steps.0: its kind is missing"),
    (kinds("deduplicate", "quality"), f"steps: quality comes after deduplicate; {COMPARE_LAST}"),
    (
        kinds("normalize", "near_deduplicate", "deduplicate", "length", "quality"),
        f"steps: length comes after deduplicate; {COMPARE_LAST}",
    ),
    (kinds("deduplicate", "deduplicate"), "steps: deduplicate is listed more than once"),
]


@pytest.mark.parametrize(("text", "problem"), PROBLEMS)
def test_a_wrong_value_is_named(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    assert f"1 problem in the corpus {tmp_path}/data.toml:\n  " in caught.value.problem
    assert problem in caught.value.problem
    assert "[" + str(tmp_path / "data.toml") + "]" in caught.value.problem


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = "json_kye = 1\n" + step('kind = "quality"\nmin_words = -1')
    with pytest.raises(ConfigError, match="2 problems in the corpus"):
        load(tmp_path, text)


def test_what_was_given_on_the_command_line_is_named_so() -> None:
    with pytest.raises(ConfigError, match=r"files_per_output: .*\[command line\]"):
        load_corpus(None, {"files_per_output": -1})


@pytest.mark.parametrize(
    "names",
    [["quality", "quality"], ["normalize", "near_deduplicate", "deduplicate"], ["length"], []],
)
def test_orders_that_make_sense_are_accepted(tmp_path: Path, names: list[str]) -> None:
    assert [step.kind for step in load(tmp_path, kinds(*names)).steps] == names


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin.toml").write_bytes(b'output = "\xe9"')
    with pytest.raises(ConfigError, match=r"cannot read the data file .*latin.toml: "):
        load_corpus(tmp_path / "latin.toml", {})
    with pytest.raises(ConfigError, match=r"data.toml is not valid TOML: "):
        load(tmp_path, "output = data/web")


def test_the_bend_of_the_defaults_is_where_the_manual_says() -> None:
    near = NearDeduplicate(kind="near_deduplicate")
    assert round((1 / near.bands) ** (1 / near.rows), 2) == 0.72
    assert "0.72" in describe_fields(NearDeduplicate)["rows"]
