from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from trainyard.config.load import load_run
from trainyard.layout.resolve import resolve
from trainyard.training import session
from trainyard.training.metrics import render_full_line, render_short_line

PLAN = resolve(load_run("tiny", ["train.length='3_310 steps'"]).run)
VALUES: dict[str, Any] = {
    "step": 240,
    "sequences": 1920,
    "tokens": 123_000,
    "learning_rate": 1e-3,
    "loss": 2.51349,
    "gradient_norm": 0.5,
    "loss_scale": 1.0,
    "milliseconds_per_step": 33.0,
    "sequences_per_second": 240.0,
    "tokens_per_second_per_device": 61_234.0,
    "tflops_per_second_per_device": 0.1,
    "model_flops_utilization": None,
    "memory_bytes": 2**30,
    "skipped_steps": 0,
    "seconds_left": 112.0,
}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "step   240 of 3,310 | loss 2.513 | 61,234 tokens/s | 1m 52s left"),
        (
            {"model_flops_utilization": 0.412, "skipped_steps": 3, "step": 3310, "seconds_left": 0},
            "step 3,310 of 3,310 | loss 2.513 | 61,234 tokens/s | MFU 41.2% | 3 skipped "
            "| 0.0s left",
        ),
        (
            {"loss": math.nan, "loss_scale": 2.0**31, "skipped_steps": 1},
            "step   240 of 3,310 | skipped: gradients overflowed, loss scale now 2.14748e+09 "
            "| 61,234 tokens/s | 1 skipped | 1m 52s left",
        ),
        (
            {"loss": math.nan, "skipped_steps": 1},
            "step   240 of 3,310 | skipped: loss or gradients not finite | 61,234 tokens/s "
            "| 1 skipped | 1m 52s left",
        ),
    ],
)
def test_a_short_line_has_what_a_person_watches(changes: dict[str, Any], line: str) -> None:
    assert render_short_line(VALUES | changes, PLAN) == line


def test_a_full_line_has_every_metric() -> None:
    line = render_full_line(VALUES, PLAN)
    for text in (
        "lr 1.000e-03",
        "grad norm  0.500",
        "loss scale 1",
        "33.0 ms/step",
        "memory 1.0 GiB",
    ):
        assert text in line
    assert " by " not in line
    figures = {"formula_tflops_per_second_per_device": 72.02, "formula_share_of_peak": 0.3761}
    line = render_full_line(VALUES | {"flop_formula": "megatron", **figures}, PLAN)
    assert " | 72.02 TFLOP/s per device by megatron, 37.61% of the peak | " in line


def test_the_bar_moves_with_every_step_and_logs_nothing_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves: list[tuple[float, str]] = []
    lines: list[str] = []

    @contextmanager
    def show_progress(_title: str, *, plain_lines: bool) -> Iterator[Any]:
        yield lambda done, _total, detail: moves.append((done, detail))

    monkeypatch.setattr(session, "show_progress", show_progress)
    monkeypatch.setattr(session.logger, "info", lambda form, text: lines.append(form % text))
    parts: Any = SimpleNamespace(is_first_rank=True, plan=PLAN)
    with session.show_training(parts, 7) as show:
        show(8, "")
        show(9, "a line")
    assert moves == [(step, f"step {step} of 3,310") for step in (7, 8, 9)]
    assert lines == ["a line"]
