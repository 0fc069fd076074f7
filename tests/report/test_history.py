from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from trainyard.report.metrics import History, RunMetrics


def start(step: int, time: float, resumed: bool = True) -> dict[str, Any]:
    return {"kind": "start", "time": time, "step": step, "resumed": resumed, "device": "cpu"}


def trained(step: int, time: float, loss: float | None, **values: Any) -> dict[str, Any]:
    tokens = {"tokens": 100 * step, "loss": loss}
    return {"kind": "train", "time": time, "step": step, **tokens, **values}


def gather(*lines: dict[str, Any]) -> RunMetrics:
    history = History()
    for line in lines:
        history.add(line)
    return history.metrics("")


def losses(metrics: RunMetrics) -> list[float]:
    return metrics.train["loss"].tolist()


def texts(metrics: RunMetrics) -> list[str]:
    return [f"{event.kind} {event.step}: {event.text}" for event in metrics.events]


def test_a_resumed_run_takes_back_what_it_does_again() -> None:
    metrics = gather(
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
    assert losses(metrics) == [9.1, 7.9]
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
    assert metrics.train["step"].tolist() == [10, 20]
    assert losses(metrics) == [1.0, 4.0]
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
    assert metrics.train["step"].tolist() == sorted(expected)
    assert losses(metrics) == [expected[at] for at in sorted(expected)]
    assert len(metrics.train) + sum(map(len, metrics.abandoned)) == 200


def test_the_later_line_of_a_step_wins() -> None:
    assert losses(gather(trained(1, 0, 5.0), trained(1, 1, 4.0))) == [4.0]


def test_values_that_are_no_number_leave_a_gap() -> None:
    metrics = gather(*(trained(i, i, x) for i, x in enumerate([None, math.nan, math.inf, 1e200])))
    assert np.isnan(metrics.train["loss"]).all()
    assert metrics.train.last("loss") is None
    assert metrics.train.median("loss") is None
    assert metrics.train.last("tokens") == 300


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
