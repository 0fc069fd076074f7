"""Patterns in a blend: the files they match, their weights, and what stays as it was."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.data.patterns import find_token_files, is_pattern
from trainyard.errors import DataError

ALL, TWICE = "data/part_*_text_document", "'data/part_12_text_document' is listed more than once"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the token files part_1 to part_12, of 100 bytes x their number."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    for number in range(1, 13):
        (tmp_path / f"data/part_{number}_text_document.bin").write_bytes(bytes(100 * number))
    return tmp_path


def run_of(**blends: dict[str, Any]) -> Run:
    return Run.model_validate({"name": "x", "data": blends})


def parts(*numbers: int) -> tuple[str, ...]:
    return tuple(f"data/part_{number}_text_document" for number in numbers)


@pytest.mark.usefixtures("folder")
def test_slices_take_files_in_order_of_number() -> None:
    slices = {"train": "[:-4]", "valid": "[-2:]", "test": "[-4:-2]"}
    run = run_of(**{name: {"prefixes": [f"{ALL}{part}"]} for name, part in slices.items()})
    data = find_token_files(run).data
    assert data.train.prefixes == parts(*range(1, 9))
    assert data.test.prefixes == parts(9, 10)
    assert data.valid.prefixes == parts(11, 12)
    assert data.valid.patterns == (f"{ALL}[-2:]",)
    whole = find_token_files(run_of(blend={"prefixes": [ALL]})).data.blend
    assert whole.prefixes == parts(*range(1, 13))
    assert whole.weights == ()


def test_a_weight_is_shared_by_size(folder: Path) -> None:
    (folder / "wiki.bin").touch()
    blend = {"prefixes": ["wiki", "data/part_[1-3]_text_document"], "weights": [0.4, 0.6]}
    found = find_token_files(run_of(blend=blend)).data.blend
    assert found.prefixes == ("wiki", *parts(1, 2, 3))
    assert found.weights == pytest.approx((0.4, 0.1, 0.2, 0.3), abs=1e-15)


def test_names_without_patterns_stay(folder: Path) -> None:
    run = run_of(blend={"prefixes": ["data/missing", "data/part_1_text_document"]})
    assert find_token_files(run) is run
    # A file of that very name is meant.
    odd = "data/odd[1:2]"
    assert is_pattern(odd)
    (folder / f"{odd}.bin").touch()
    assert not is_pattern(odd)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("prefixes", "valid", "problem"),
    [
        (["data/none_*[:-1]"], (), "data.train.prefixes: 'data/none_*' matches no token files"),
        ([f"{ALL}[:-30]"], (), f"data.train.prefixes: [:-30] is empty: '{ALL}' matches 12 token"),
        ([f"{ALL}[:-1]"], parts(11), f"{parts(11)[0]} is in data.train and in data.valid"),
        ([f"{ALL}[:-1]"], (f"./x/../{parts(11)[0]}",), "is in data.train and in data.valid"),
        (["data/part_1*_text_document", *parts(12)], (), f"data.train.prefixes: {TWICE}"),
        (["./data/part_1*_text_document", *parts(12)], (), TWICE),
        (["data/part_*[-:]"], (), "'data/part_*[-:]' matches no token"),
        (["data/part_*[:-]"], (), "'data/part_*[:-]' matches no token"),
    ],
)
def test_mistakes(prefixes: list[str], valid: tuple[str, ...], problem: str) -> None:
    with pytest.raises(DataError) as error:
        find_token_files(run_of(train={"prefixes": prefixes}, valid={"prefixes": valid}))
    assert problem in error.value.problem
    assert error.value.hint


def test_files_in_preparation_are_refused(folder: Path) -> None:
    run = run_of(blend={"prefixes": ["data/part_*_text_document"]})
    (folder / "data/part.work").mkdir()
    with pytest.raises(DataError, match=r"data/part is still being prepared \(data/part.work"):
        find_token_files(run)
    (folder / "data/part.work").rename(folder / "data/par.work")
    assert len(find_token_files(run).data.blend.prefixes) == 12


@pytest.mark.usefixtures("folder")
def test_a_plan_does_without_the_files() -> None:
    run = run_of(train={"prefixes": ["data/none_*[:-1]"]}, valid={"prefixes": ["data/part_*[-1:]"]})
    found = find_token_files(run, missing_ok=True).data
    assert found.train == run.data.train
    assert found.valid.prefixes == parts(12)


def test_a_run_that_has_trained_keeps_its_files(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_of(blend={"prefixes": ["data/part_*_text_document[:-1]"]})
    first = find_token_files(run)
    # As the run folder keeps it: named files, found no second time.
    (folder / "run.toml").write_text(render_run(first))
    begun = load_run("run.toml").run
    assert begun.data == first.data
    (folder / "data/part_13_text_document.bin").write_bytes(bytes(100))
    assert find_token_files(begun) == begun
    with caplog.at_level(logging.INFO):
        assert find_token_files(run, begun).data == first.data
    assert "the patterns match 12 files now; the run keeps the 11 it started with" in caplog.text
    assert len(find_token_files(run).data.blend.prefixes) == 12
    # Another pattern is another choice.
    other = run_of(blend={"prefixes": ["data/part_*_text_document[:-2]"]})
    assert find_token_files(other, begun).data.blend.patterns == other.data.blend.prefixes
    # Not one file is left to match; the run still knows their names.
    for path in (folder / "data").iterdir():
        path.unlink()
    assert find_token_files(run, begun).data == first.data


def test_the_command_line_takes_a_pattern() -> None:
    run = load_run("tiny", ["data.blend.prefixes=['data/web_*_text_document[:-2]']"]).run
    assert run.data.blend.prefixes == ("data/web_*_text_document[:-2]",)


def test_an_empty_file_has_no_weight(folder: Path) -> None:
    run = run_of(blend={"prefixes": ["data/part_[12]_text_document"], "weights": [1.0]})
    for number in (1, 2):
        (folder / f"data/part_{number}_text_document.bin").write_bytes(b"")
        with pytest.raises(DataError, match=r"prefixes: data/part_1_text_document.bin is empty"):
            find_token_files(run)


@pytest.mark.usefixtures("folder")
def test_more_files_than_a_blend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainyard.config.run.MOST_PREFIXES", 11)
    with pytest.raises(DataError, match=r"data\.blend\.prefixes: 12 prefixes; a blend takes 11"):
        find_token_files(run_of(blend={"prefixes": [ALL]}))


def test_changed_weights_are_another_choice(folder: Path) -> None:
    def blend(*weights: float) -> Run:
        prefixes = ["data/part_[12]_text_document", "data/part_[3-5]_text_document", *parts(7)]
        return run_of(blend={"prefixes": prefixes, "weights": weights})

    # A share of 7e-11 counts, and sums of rounded weights are what was asked for.
    (folder / "data/part_2_text_document.bin").write_bytes(b"")
    os.truncate(folder / "data/part_2_text_document.bin", 10**12)
    asked = blend(0.7, 0.2, 0.1)
    (folder / "run.toml").write_text(render_run(find_token_files(asked)))
    begun = load_run("run.toml").run
    assert find_token_files(asked, begun) == begun
    for path in (folder / "data").iterdir():
        path.rename(path.with_name(f"{path.name}.gone"))
    assert find_token_files(asked, begun) == begun
    for path in (folder / "data").iterdir():
        path.rename(path.with_suffix(""))
    first, *_ = begun.data.blend.weights
    # The second begins with a sum of the first files; `check_resumable` rejects both.
    for weights in ((0.5, 0.4, 0.1), (first, 0.9 - first, 0.1), (7.0, 2.0, 1.0)):
        found = find_token_files(blend(*weights), begun).data.blend
        assert found.prefixes == begun.data.blend.prefixes
        assert found.weights != begun.data.blend.weights
        assert found.weights[-1] == weights[-1]
    without = run_of(blend={"prefixes": begun.data.blend.patterns})
    assert find_token_files(without, begun).data.blend.weights == ()
