from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainyard.errors import DataError
from trainyard.report.metrics import (
    LINE_LIMIT_BYTES,
    History,
    MetricsFile,
    RunMetrics,
    read_metrics,
)

from .conftest import run_lines


def start(step: int, time: float, resumed: bool = True) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "resumed": resumed, "device": "cpu"}


def trained(step: int, time: float, loss: float | None, **values: Any) -> dict[str, Any]:
    tokens = {"tokens": 100 * step, "loss": loss}
    return {"kind": "train", "time": time, "step": step, **tokens, **values}


def gather(*lines: dict[str, Any]) -> RunMetrics:
    history = History()
    for line in lines:
        history.add(line)
    return history.metrics()


def column(metrics: RunMetrics, key: str = "step") -> list[float]:
    return metrics.train[key].tolist()


def texts(metrics: RunMetrics) -> list[str]:
    return [f"{event.kind} {event.step}: {event.text}" for event in metrics.events]


def test_a_resumed_run_takes_back_what_it_does_again() -> None:
    metrics = gather(
        start(0, 0.0, resumed=False),
        trained(10, 9.0, 9.1, expert_load=np.array([[4, 2]])),
        trained(20, 18.0, 8.0),
        trained(30, 27.0, 7.5, expert_load=np.array([[6, 0]])),
        {"kind": "evaluate", "step": 30, "tokens": 3000, "loss": 7.6},
        {"kind": "sample", "step": 30, "prompt": "a", "text": "b"},
        {"kind": "end", "time": 28.0, "step": 30, "reason": "received SIGTERM"},
        start(10, 60.0),
        trained(20, 69.0, 7.9, expert_load=np.array([[3, 3]])),
    )
    assert column(metrics, "loss") == [9.1, 7.9]
    assert [load.tolist() for load in metrics.expert_loads.values()] == [[[4, 2]], [[3, 3]]]
    assert [way["loss"].tolist() for way in metrics.abandoned] == [[8.0, 7.5]]
    assert (metrics.evaluations, metrics.samples) == ([], [])
    assert metrics.tokens_at([10, 15]).tolist() == [1000, 1500]
    assert metrics.seconds == 28.0 + 9.0  # not the pause between
    assert metrics.reason == ""
    assert texts(metrics) == [
        "restart 10: resumed from step 10; repeats 20 steps, 32s after the last line",
        "stop 30: stopped: received SIGTERM",
    ]


def test_of_ways_done_again_twice_the_last_counts() -> None:
    metrics = gather(
        start(0, 0, resumed=False),
        *(trained(step, 0, 1.0) for step in (10, 20, 30, 40)),
        {"kind": "rollback", "step": 20, "from_step": 40, "skipped_sequences": 80},
        *(trained(step, 0, 2.0) for step in (30, 40, 50)),
        start(30, 0),
        trained(40, 0, 3.0),
        start(10, 0),
        trained(20, 0, 4.0),
    )
    assert column(metrics) == [10, 20]
    assert column(metrics, "loss") == [1.0, 4.0]
    assert [way["step"].tolist() for way in metrics.abandoned] == [[20, 30, 40], [30, 40, 50], [40]]
    assert texts(metrics)[1:] == [
        "rollback 20: rolled back to step 20 from step 40; the 80 sequences between are skipped",
        "restart 30: resumed from step 30; repeats 20 steps",
    ]
    assert (metrics.count("restart"), metrics.count("rollback")) == (2, 1)


@pytest.mark.parametrize("seed", range(20))
def test_telling_ways_apart_agrees_with_doing_it_line_by_line(seed: int) -> None:
    random = np.random.default_rng(seed)
    lines, expected, step = [start(0, 0, resumed=False)], {}, 0
    for number in range(200):
        if random.random() < 0.1:
            step = int(random.integers(0, step + 1))
            lines.append(start(step, 0))
            expected = {at: loss for at, loss in expected.items() if at <= step}
        step += 1
        lines.append(trained(step, 0, float(number)))
        expected[step] = float(number)
    metrics = gather(*lines)
    assert column(metrics) == sorted(expected)
    assert column(metrics, "loss") == [expected[at] for at in sorted(expected)]
    assert len(metrics.train) + sum(map(len, metrics.abandoned)) == 200


def test_values_that_are_no_number_leave_a_gap_and_the_later_line_of_a_step_wins() -> None:
    metrics = gather(*(trained(i, i, x) for i, x in enumerate([None, math.nan, math.inf, 1e200])))
    assert np.isnan(metrics.train["loss"]).all()
    assert metrics.train.last("loss") is None
    assert metrics.train.median("loss") is None
    assert metrics.train.last("tokens") == 300
    assert column(gather(trained(1, 0, 5.0), trained(1, 1, 4.0)), "loss") == [4.0]


def test_skipped_steps_are_found_where_their_count_grows() -> None:
    counts = enumerate([0, 2, 2, 3], start=1)
    lines = [trained(10 * i, 0, 1.0, skipped_steps=count) for i, count in counts]
    metrics = gather(start(0, 0, resumed=False), *lines)
    assert texts(metrics) == [
        "skipped 20: 2 of steps 11 to 20 skipped: a spike or non-finite gradients",
        "skipped 40: 1 of steps 31 to 40 skipped: a spike or non-finite gradients",
    ]
    assert metrics.count("skipped") == 3


def test_saves_and_failed_ones_are_kept() -> None:
    metrics = gather(
        {"kind": "save", "step": 10, "bytes": 5},
        {"kind": "save", "step": 20, "bytes": 6},
        {"kind": "save failed", "step": 31, "problem": "no room"},
    )
    assert [line["step"] for line in metrics.saves] == [10, 20]
    assert metrics.median_of_saves("bytes") == 5.5
    assert metrics.median_of_saves("seconds") is None
    assert texts(metrics) == ["save failed 31: a checkpoint was not saved: no room"]


def write(folder: Path, *lines: dict[str, Any] | str, tail: str = "") -> Path:
    path = folder / "metrics.jsonl"
    dumped = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{line}\n" for line in dumped) + tail)
    return path


def test_every_kind_is_sorted_out(tmp_path: Path) -> None:
    metrics = read_metrics(write(tmp_path, *run_lines(), {"kind": "later-version", "step": 3}))
    assert column(metrics) == list(range(1, 21))
    assert [line["loss"] for line in metrics.evaluations] == [4.5]
    assert [line["prompt"] for line in metrics.samples] == ["The"]
    assert (metrics.seconds, metrics.device) == (21.0, "a <b>GPU</b>")
    assert [event.kind for event in metrics.events] == ["skipped"]
    assert metrics.damage == ""


def test_a_run_started_afresh_forgets_the_one_before(tmp_path: Path) -> None:
    first = [start(0, 0.0, resumed=False), trained(10, 10, 1.0)]
    path = write(tmp_path, *first, start(0, 60.0, resumed=False), trained(65, 65, 1.0))
    metrics = read_metrics(path)
    assert (column(metrics), metrics.seconds) == ([65], 5.0)
    assert texts(metrics) == ["restart 0: started over; 10 earlier steps are not shown"]


@pytest.mark.parametrize("tail", ['{"kind": "tra', "{", '{"kind": "train"}', "\u00e9"])
def test_a_last_line_cut_short_is_not_there_yet(tmp_path: Path, tail: str) -> None:
    metrics = read_metrics(write(tmp_path, trained(1, 1, 1.0), tail=tail))
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
    metrics = read_metrics(write(tmp_path, trained(1, 1, 1.0), line, trained(2, 2, 1.0)))
    assert column(metrics) == [1, 2]
    said = "1 line of metrics.jsonl cannot be read and is skipped; line 2: "
    assert metrics.damage.startswith(said + problem)


def test_bytes_that_are_no_text_are_shown_as_such(tmp_path: Path) -> None:
    path = write(tmp_path, trained(1, 1, 1.0))
    path.write_bytes(b'{"kind": "sample", "step": 1, "text": "\xe6\xbc"}\n' + path.read_bytes())
    assert read_metrics(path).samples[0]["text"] == "\ufffd"


def test_a_file_without_a_readable_line_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no readable line; line 1: Expecting value"):
        read_metrics(write(tmp_path, "nothing", "of it"))
    with pytest.raises(DataError, match=r"cannot read .*none.jsonl: No such file"):
        read_metrics(tmp_path / "none.jsonl")
    metrics = read_metrics(write(tmp_path))  # a run that has not begun
    assert (len(metrics.train), metrics.abandoned, metrics.seconds) == (0, [], 0.0)


def test_a_line_without_end_is_damage(tmp_path: Path) -> None:
    path = write(tmp_path, trained(1, 1, 1.0))
    with path.open("ab") as file:
        file.truncate(2 * LINE_LIMIT_BYTES)
    assert "is skipped; line 2" in read_metrics(path).damage


def test_a_file_that_grows_is_read_on(tmp_path: Path) -> None:
    file = MetricsFile(write(tmp_path, trained(1, 1, 1.0), tail='{"kind": "train", '))
    assert [line["step"] for line in file.new_lines()] == [1]
    assert list(file.new_lines()) == []
    with (tmp_path / "metrics.jsonl").open("a") as growing:
        growing.write('"step": 2}\n')
    assert [line["step"] for line in file.new_lines()] == [2]
    assert column(file.metrics()) == [1, 2]


@pytest.mark.parametrize("steps", [[7], [3, 4, 5, 6, 7, 8]], ids=["shorter", "longer"])
def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path, steps: list[int]) -> None:
    file = MetricsFile(write(tmp_path, trained(1, 1, 1.0), trained(2, 2, 1.0)))
    assert len(list(file.new_lines())) == 2
    write(tmp_path, *(trained(step, step, 1.0) for step in steps))
    assert [line["step"] for line in file.new_lines()] == steps
    assert column(file.metrics()) == steps
