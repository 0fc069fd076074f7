from __future__ import annotations

import io
import math
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from trainyard.config.load import load_run
from trainyard.report.metrics import History
from trainyard.report.run_view import UNKNOWN
from trainyard.report.status import describe_line, draw_curve, render_screen, render_status

from .conftest import make_view, run_lines, train_line


def show(lines: list[dict[str, Any]], width: int = 80, height: int = 40, **values: Any) -> str:
    history = History()
    for line in lines:
        history.add(line)
    texts = [describe_line(line, 50) for line in lines][-10:]
    view = make_view(history.metrics(values.pop("damage", "")))
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(render_screen(view, texts, width, height, **values))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_experts_and_what_a_token_uses() -> None:
    run = load_run("tiny", ["model.n_experts=8", "model.mlp=swiglu", "model.bias=false"]).run
    history = History()
    history.add(train_line(5, 4.0, expert_imbalance=1.8))
    dead = {"kind": "dead experts", "time": 9.0, "step": 5, "problem": "no token chose expert 3"}
    history.add(dead)
    view = make_view(history.metrics(), run=run)
    view.plan["n_parameters"] = 1_000_000
    n_idle = 2 * 6 * 3 * 64 * 256
    text = (
        f"1M parameters, {(1_000_000 - n_idle) / 1000:.0f}k active; SwiGLU, 8 experts of 256, 2 a"
    )
    assert f"model       {text}ctive, no biases" in render_status(view)
    assert "step 5: no token chose expert 3" in render_status(view)
    assert describe_line(dead, 50) == "step 5: no token chose expert 3"
    console = Console(file=io.StringIO(), width=120, height=40)
    console.print(render_screen(view, [], 120, 40))
    assert isinstance(console.file, io.StringIO)
    assert "imbalance 1.80" in console.file.getvalue()


def test_everything_about_the_run_is_there() -> None:
    failed = {"kind": "save failed", "step": 20, "problem": "no room"}
    text = " ".join(show([*run_lines(), failed], damage="1 line cannot be read").split())
    for part in (
        "tiny training: process 7 1 line cannot be read ━━━",
        "step 20 of 50 (40%), ",
        "loss 4.0000; held out 4.5000 at step 20, best 4.5000 at step 20",
        "speed 2.05k tokens/s, 0.02 TFLOP/s per device ETA 0.0s",  # it has long passed
        "gradient norm 0.500, learning rate 1.000e-03",
        "memory 3.0 GiB consumed 10.2k tokens in 21s",
        "restarts 0; 2 skipped steps, 0 rollbacks, 1 failed saves",
        "loss over steps",
        "step 20: a checkpoint was not saved: no room",
    ):
        assert part in text, part
    by_formula = [line | {"formula_tflops_per_second_per_device": 72.021} for line in run_lines()]
    text = " ".join(show(by_formula).split())
    assert "0.02 TFLOP/s per device (72.02 by log.flop_formula)" in text


@pytest.mark.parametrize("height", [16, 24, 40, 100])
@pytest.mark.parametrize("width", [40, 80, 120])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    lines = show(run_lines(), width, height).splitlines()
    assert max(map(len, lines)) <= width
    if height >= 24 and width >= 80:
        assert len(lines) < height


def test_a_run_that_has_hardly_begun_can_be_shown() -> None:
    assert "step        not known yet" in show(run_lines()[:1])
    assert "step        1 of 50" in show(run_lines()[:2])


def test_a_curve_falls_from_the_upper_left_to_the_lower_right() -> None:
    x = np.arange(100.0)
    *rows, axis = draw_curve(x, 9 - x / 11, 30, 5, in_unicode=False)
    assert [row[:9].strip() for row in rows] == ["8.818", "", "", "", "0.1818"]
    assert [row[10:].index("*") for row in rows] == [0, 3, 8, 12, 17]
    assert axis.split() == ["0", "99"]
    (first, *_, last, _) = draw_curve(x, 9 - x / 11, 30, 5)
    assert (first[10], last[-1]) == ("⠉", "⣀")


@pytest.mark.parametrize(
    ("kind", "values", "text"),
    [
        ("start", {"resumed": True, "device": "cpu"}, "resumed on cpu"),
        ("evaluate", {"loss": 4.25}, "held-out loss 4.2500"),
        ("evaluate", {"loss": None}, f"held-out loss {UNKNOWN}"),
        ("sample", {"prompt": "a\x1b[31m", "text": "b\nc"}, r"sample of 'a\x1b[31m': b\nc"),
        ("save", {"bytes": 2048, "seconds": 1.5}, "saved 2.0 KiB in 1.5s"),
        ("rollback", {"from_step": 9, "skipped_sequences": 5}, "rolled back here from step 9"),
        ("end", {"reason": "done"}, "ended: done"),
    ],
)
def test_each_kind_of_line_has_its_text(kind: str, values: dict[str, Any], text: str) -> None:
    line = {"kind": kind, "step": 1200, **values}
    assert describe_line(line, None).startswith(f"step 1,200: {text}")


def test_a_line_of_steps_and_an_unknown_one() -> None:
    line = train_line(3, math.nan, memory_bytes="much")
    assert describe_line(line, 50) == (
        f"step 3/50 | loss {UNKNOWN} | lr 1.00e-03 | grad norm 0.500 | 512 tokens/s/device | "
        f"memory {UNKNOWN} | skipped 0 | ETA 47s"
    )
    assert describe_line({"kind": "later-version", "step": 1}, 50) == ""
