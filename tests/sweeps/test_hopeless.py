"""The median rule, by the table of its docstring."""

from __future__ import annotations

import re

import pytest

from trainyard.sweeps import hopeless
from trainyard.sweeps.hopeless import HeldOutCurve, explain_hopeless, read_curves

from .conftest import MakeSet

N_STEPS = 1000


def table() -> dict[str, HeldOutCurve]:
    """Reads the curves in the docstring: those of `b` end at step 500."""
    lines = [line.split() for line in (hopeless.__doc__ or "").splitlines()]
    steps = next(line for line in lines if line[:1] == ["step"] and line[-1].endswith("3.31"))
    numbers = [int(text) for text in steps[1:] if text.isdigit()]
    curves = {}
    for name, *texts in filter(None, lines):
        losses = [float(text) for text in texts if re.fullmatch(r"\d\.\d\d", text)]
        if re.fullmatch("[a-d]", name) and losses:
            curves[name] = HeldOutCurve(dict(zip(numbers, losses[:3], strict=False)), N_STEPS)
    return curves


def up_to(step: int, curve: HeldOutCurve) -> HeldOutCurve:
    return HeldOutCurve({at: loss for at, loss in curve.losses.items() if at <= step}, N_STEPS)


def test_the_table_of_the_docstring() -> None:
    curves = table()
    curves["b"] = up_to(500, curves["b"])
    assert [len(one.losses) for one in curves.values()] == [3, 2, 3, 3]
    assert explain_hopeless("b", curves) == (
        "held-out loss 3.7000 at step 500 is above the median of 3 others, 3.3100"
    )
    assert [name for name in curves if explain_hopeless(name, curves)] == ["b"]
    # Of the others only two are at step 750.
    assert "step 750" in explain_hopeless("d", table() | {"e": curves["a"], "f": curves["a"]})


def test_others_count_only_if_they_have_come_as_far_and_are_as_long() -> None:
    curves = table() | {"b": up_to(500, table()["b"])}
    assert explain_hopeless("b", curves | {"c": up_to(250, curves["c"])}) == ""
    longer = HeldOutCurve(curves["c"].losses, 2 * N_STEPS)
    assert explain_hopeless("b", curves | {"c": longer}) == ""
    assert explain_hopeless("b", {name: curves[name] for name in "abc"}) == ""


@pytest.mark.parametrize(
    ("losses", "is_stopped"),
    [
        ({249: 9.0}, False),  # too early
        ({250: 9.0}, True),
        ({250: 3.0, 500: 9.0}, False),  # its best counts
        ({250: 3.6}, False),  # equal to the median
        ({1000: 9.0}, False),  # done
    ],
)
def test_the_best_loss_after_a_quarter_decides(losses: dict[int, float], is_stopped: bool) -> None:
    others = {name: HeldOutCurve({200: 4.0, 250: 3.6, 1000: 3.5}, N_STEPS) for name in "abc"}
    curves = others | {"own": HeldOutCurve(losses, N_STEPS)}
    assert bool(explain_hopeless("own", curves)) is is_stopped
    assert explain_hopeless("unknown", curves) == ""


def test_curves_of_members_that_have_begun(make_set: MakeSet) -> None:
    run_set = make_set(["optimizer.learning_rate=1,2,3"], [3.0, None, float("nan")])
    (run_set.folder.with_name("web-03") / "plan.json").write_text("no JSON")
    curves = read_curves(run_set)
    assert curves == {"web-01": HeldOutCurve({20: 5.5, 40: 3.0}, 40)}
