"""The learning rate, against the guides' printed values and the definition of each shape."""

from __future__ import annotations

import pytest

from trainyard.config.load import load_run
from trainyard.errors import ConfigError
from trainyard.layout.resolve import learning_rate, resolve


def rate(overrides: list[str], consumed: int) -> float:
    run = load_run("tiny", overrides).run
    return learning_rate(run, resolve(run), consumed)


@pytest.mark.parametrize(
    ("warmup", "decay", "consumed", "expected"),
    [
        ("13558 sequences", "9400526 sequences", 1_864_624, "5.498e-05"),  # the 64-GPU guide
        # Its ten-step run; warmup is a thousandth of the decay there: 12.288 sequences, said here
        # in tokens of 64.
        ("786 tokens", "12288 sequences", 5 * 1536, "2.270e-05"),
    ],
)
def test_golden_cosines(warmup: str, decay: str, consumed: int, expected: str) -> None:
    guide = ["optimizer.learning_rate=6e-5", "schedule.minimum_learning_rate=6e-6"]
    lengths = [f"schedule.warmup='{warmup}'", f"schedule.decay='{decay}'"]
    assert f"{rate([*guide, *lengths], consumed):.3e}" == expected


SHAPE = ["optimizer.learning_rate=1.0", "schedule.minimum_learning_rate=0.2"]
SHAPE += ["schedule.warmup='10 sequences'", "schedule.decay='110 sequences'"]
SHAPE += ["schedule.cooldown='20 sequences'"]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("cosine", {5: 0.5, 10: 1.0, 60: 0.6, 110: 0.2, 500: 0.2}),
        ("linear", {5: 0.5, 10: 1.0, 60: 0.6, 110: 0.2, 500: 0.2}),
        ("constant", {5: 0.5, 10: 1.0, 60: 1.0, 500: 1.0}),
        ("warmup_stable_decay", {5: 0.5, 60: 1.0, 90: 1.0, 100: 0.6, 110: 0.2, 500: 0.2}),
    ],
)
def test_shapes(kind: str, expected: dict[int, float]) -> None:
    got = {n: rate([*SHAPE, f"schedule.kind={kind}"], n) for n in expected}
    assert got == pytest.approx(expected)


POINTS = "0: 0, 10 sequences: 1, 3840 tokens: 0.5, 60 sequences: 0.1, 110 sequences: 0.2"


def test_points() -> None:
    points = ["schedule.kind=points", f"schedule.points='{POINTS}'"]
    # 3,840 tokens are 60 sequences: a jump.
    expected = {5: 0.5, 10: 1.0, 35: 0.75, 60: 0.5, 61: 0.102, 85: 0.15, 110: 0.2, 500: 0.2}
    got = {n: rate([*SHAPE, *points], n) for n in expected}
    assert got == pytest.approx(expected)
    late = ["schedule.kind=points", "schedule.points='10 sequences: 1, 20 sequences: 0'"]
    assert [rate(late, n) for n in (1, 10, 15)] == [1, 1, 0.5]


def test_points_out_of_order_in_other_units() -> None:
    points = "0: 0, 20 sequences: 1e-3, 64 tokens: 1e-4"
    with pytest.raises(ConfigError, match="64 tokens is sequence 1, before 20") as caught:
        rate(["schedule.kind=points", f"schedule.points='{points}'"], 1)
    assert caught.value.hint == "list points in the order of training"


def test_without_warmup_the_first_step_has_the_peak() -> None:
    assert rate([*SHAPE, "schedule.warmup='0 sequences'", "schedule.kind=constant"], 8) == 1.0
