from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import DataError
from trainyard.report.metrics import LINE_LIMIT_BYTES, MetricsFile, RunMetrics, read_metrics

from .conftest import run_lines


def trained(step: int, loss: float | None = 1.0) -> dict[str, Any]:
    return {"kind": "train", "time": step, "step": step, "tokens": 100 * step, "loss": loss}


def write(folder: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def steps(metrics: RunMetrics) -> list[float]:
    return metrics.train["step"].tolist()


def test_every_kind_is_sorted_out(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, *run_lines(), {"kind": "later-version", "step": 3}))
    assert steps(metrics) == list(range(1, 21))
    assert [line["loss"] for line in metrics.evaluations] == [4.5]
    assert [line["prompt"] for line in metrics.samples] == ["The"]
    assert (metrics.seconds, metrics.device) == (21.0, "a <b>GPU</b>")
    assert [event.kind for event in metrics.events] == ["skipped"]
    assert metrics.damage == ""


def test_a_run_started_afresh_forgets_the_one_before(tmp_path: Path) -> None:
    start = {"kind": "start", "step": 0, "resumed": False}
    later = [{"kind": "start", "time": 60.0, **start}, trained(65)]
    path = write(tmp_path, {"kind": "start", "time": 0.0, **start}, trained(10), *later)
    metrics = read_metrics(path)
    assert steps(metrics) == [65]
    assert metrics.seconds == 5.0
    assert [event.text for event in metrics.events] == [
        "started over; 10 earlier steps are not shown"
    ]


@pytest.mark.parametrize("tail", ['{"kind": "tra', "{", '{"kind": "train"}', "\u00e9"])
def test_a_last_line_cut_short_is_not_there_yet(tmp_path: Path, tail: str) -> None:
    metrics = read_metrics(write(tmp_path, trained(1), tail=tail))
    assert (len(metrics.train), metrics.damage) == (1, "")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"kind": "tra', "Unterminated string"),
        ("", "Expecting value"),
        ("\0\0\0\0", "Expecting value"),
        ("[" * 100_000, "it nests too deeply"),
        ("[1]", "it has no kind, such as train or evaluate"),
        ('{"step": 3}', "it has no kind"),
        ('{"kind": "train", "tokens": 1}', "step is 'None', not a whole number"),
        ('{"kind": "train", "step": "3"}', "step is '3', not a whole number"),
        ('{"kind": "train", "step": NaN}', "step is 'nan', not a whole number"),
        ('{"kind": "train", "step": 1e999}', "step is 'inf', not a whole number"),
        ('{"kind": "train", "step": -1}', "step is '-1', not a whole number"),
        ('{"kind": "train", "step": 3, "loss": "low"}', "loss is 'low', not a number"),
        ('{"kind": "train", "step": 3, "loss": true}', "loss is 'True', not a number"),
        ('{"kind": "end", "step": 3, "time": "now"}', "time is 'now', not a number"),
    ],
)
def test_a_damaged_line_is_left_out_and_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{json.dumps(trained(1))}\n{line}\n{json.dumps(trained(2))}\n")
    metrics = read_metrics(path)
    assert steps(metrics) == [1, 2]
    said = "1 line of metrics.jsonl cannot be read and is skipped; line 2: "
    assert metrics.damage.startswith(said + problem)


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    path = write(tmp_path, trained(1))
    path.write_bytes(b'{"kind": "sample", "step": 1, "text": "\xe6\xbc"}\n' + path.read_bytes())
    assert read_metrics(path).samples[0]["text"] == "\ufffd"


def test_a_file_without_a_readable_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("nothing\nof it\n")
    with pytest.raises(DataError, match=r"has no readable line; line 1: Expecting value"):
        read_metrics(path)
    with pytest.raises(DataError, match=r"cannot read .*none.jsonl: No such file"):
        read_metrics(tmp_path / "none.jsonl")
    path.write_text("")  # a run that has not begun
    metrics = read_metrics(path)
    assert (len(metrics.train), metrics.abandoned, metrics.seconds) == (0, [], 0.0)


def test_a_line_without_end_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, trained(1))
    with path.open("ab") as file:
        file.truncate(2 * LINE_LIMIT_BYTES)
    assert "is skipped; line 2" in read_metrics(path).damage


def test_a_file_that_grows_is_read_on(tmp_path: Path) -> None:
    file = MetricsFile(write(tmp_path, trained(1), tail='{"kind": "train", '))
    assert [line["step"] for line in file.new_lines()] == [1]
    assert list(file.new_lines()) == []
    with (tmp_path / "metrics.jsonl").open("a") as growing:
        growing.write('"step": 2}\n')
    assert [line["step"] for line in file.new_lines()] == [2]
    assert steps(file.metrics()) == [1, 2]


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    file = MetricsFile(write(tmp_path, trained(1), trained(2)))
    assert len(list(file.new_lines())) == 2
    write(tmp_path, trained(7))
    assert [line["step"] for line in file.new_lines()] == [7]
    assert steps(file.metrics()) == [7]


def test_a_file_that_was_replaced_by_a_longer_one_is_read_anew(tmp_path: Path) -> None:
    file = MetricsFile(write(tmp_path, trained(1), trained(2)))
    assert len(list(file.new_lines())) == 2
    write(tmp_path, *(trained(step) for step in range(3, 9)))
    assert [line["step"] for line in file.new_lines()] == [3, 4, 5, 6, 7, 8]
    assert steps(file.metrics()) == [3, 4, 5, 6, 7, 8]
