from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import DataError
from trainyard.report.metrics import curve, read_metrics


def start(step: int, time: float, resumed: bool = True) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "resumed": resumed, "device": "cpu"}


def trained(step: int, time: float, loss: float | None) -> dict[str, Any]:
    return {"kind": "train", "time": time, "step": step, "tokens": 100 * step, "loss": loss}


def write(folder: Path, *lines: dict[str, Any], tail: str = "") -> Path:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    return path


def test_every_kind_is_sorted_out(tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    metrics = read_metrics(write(tmp_path, *lines, {"kind": "later-version", "step": 3}))
    assert [line["step"] for line in metrics.train] == list(range(1, 21))
    assert [line["loss"] for line in metrics.evaluations] == [4.5]
    assert [line["prompt"] for line in metrics.samples] == ["The"]
    assert (metrics.seconds, metrics.device, metrics.reason) == (21.0, "a <b>GPU</b>", "done")
    assert metrics.restarts == []


def test_a_resumed_run_takes_back_what_it_does_again(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        start(0, 0.0, resumed=False),
        trained(10, 9.0, 9.1),
        trained(20, 18.0, 8.0),
        trained(30, 27.0, 7.5),
        {"kind": "evaluate", "step": 30, "tokens": 3000, "loss": 7.6},
        {"kind": "sample", "step": 30, "prompt": "a", "text": "b"},
        {"kind": "end", "time": 28.0, "step": 30, "reason": "received SIGTERM"},
        start(10, 60.0),
        trained(20, 69.0, 7.9),
    )
    metrics = read_metrics(path)
    assert curve(metrics.train, "loss")[1].tolist() == [9.1, 7.9]
    assert (metrics.evaluations, metrics.samples) == ([], [])
    assert metrics.restarts == [10]
    assert metrics.tokens_at([10, 15]).tolist() == [1000, 1500]
    assert metrics.seconds == 28.0 + 9.0  # not the pause between
    assert metrics.reason == ""


def test_a_run_started_afresh_forgets_the_one_before(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        start(0, 0.0, resumed=False),
        trained(10, 9.0, 9.1),
        start(10, 10.0),
        start(0, 60.0, resumed=False),
        trained(5, 61.0, 8.0),
    )
    metrics = read_metrics(path)
    assert [line["step"] for line in metrics.train] == [5]
    assert (metrics.restarts, metrics.seconds) == ([], 1.0)


def test_the_later_line_of_a_step_wins(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, trained(1, 0, 5.0), trained(1, 1, 4.0)))
    assert curve(metrics.train, "loss")[1].tolist() == [4.0]


@pytest.mark.parametrize("tail", ['{"kind": "tra', "{", '{"kind": "train"}', "\u00e9"])
def test_a_last_line_cut_short_is_tolerated(tmp_path: Path, tail: str) -> None:
    metrics = read_metrics(write(tmp_path, trained(1, 0, 5.0), tail=tail))
    assert len(metrics.train) == 1


def test_a_last_line_cut_within_a_character_is_tolerated(tmp_path: Path) -> None:
    path = write(tmp_path, trained(1, 0, 5.0))
    path.write_bytes(path.read_bytes() + b'{"kind": "sample", "text": "\xe6\xbc')
    assert len(read_metrics(path).train) == 1


def test_a_last_line_that_lacks_only_its_end_counts(tmp_path: Path) -> None:
    tail = json.dumps(trained(2, 1, 4.0))
    assert len(read_metrics(write(tmp_path, trained(1, 0, 5.0), tail=tail)).train) == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"kind": "tra', "line 2 is not JSON"),
        ("", "line 2 is not JSON"),
        ("[1]", "line 2 has no kind, such as train, evaluate, sample, start, end"),
        ('{"step": 3}', "line 2 has no kind"),
        ('{"kind": "train", "tokens": 1}', "line 2 has no step"),
        ('{"kind": "train", "step": "3"}', "line 2 has no step, or one that is not a number"),
        ('{"kind": "train", "step": 3, "loss": "low"}', "line 2: loss is 'low', not a number"),
        ('{"kind": "end", "step": 3, "time": "now"}', "line 2: time is 'now', not a number"),
    ],
)
def test_a_malformed_line_is_named(tmp_path: Path, line: str, problem: str) -> None:
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(trained(1, 0, 5.0))
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError) as caught:
        read_metrics(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert "hint: remove the line" in str(caught.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*metrics.jsonl: No such file"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_values_that_are_no_number_leave_a_gap(tmp_path: Path) -> None:
    path = write(
        tmp_path, trained(1, 0, None), trained(2, 1, float("nan")), trained(3, 2, float("inf"))
    )
    assert curve(read_metrics(path).train, "loss")[0].tolist() == []
    assert curve([{"step": 1, "loss": 2.0}, trained(4, 0, 2.0)], "loss")[0].tolist() == [400]


def test_an_empty_file_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path))
    assert (metrics.train, metrics.seconds) == ([], 0.0)
