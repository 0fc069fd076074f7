"""When to stop a member early: the median rule (Vizier, Golovin et al. 2017, section 3.2.3).

A member is hopeless at a step if its best held-out loss so far is higher than the median of the
others' best losses up to that step. It is asked once a member has done a quarter of its steps, and
only about members that have come as far, at least three of them. Only runs of one length can be
compared so.

    step        250     500     750        at step 500, the median of the others is 3.31
    a           3.60    3.31    3.10
    b           3.90    3.70    ..         3.70 > 3.31: b is stopped
    c           3.55    3.29    3.08
    d           3.70    3.40    3.20
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from trainyard.sweeps.results import read_results
from trainyard.sweeps.sets import RunSet

FIRST_SHARE = 0.25
"""Share of its steps that a member is given."""
LEAST_OTHERS = 3


@dataclass(frozen=True)
class HeldOutCurve:
    """Held-out losses of a member by step, one or more, and the steps of the whole run."""

    losses: Mapping[int, float]
    n_steps: int


def read_curves(run_set: RunSet) -> dict[str, HeldOutCurve]:
    """Reads the curves of the members that have a held-out loss, by name."""
    curves = {}
    for one in read_results(run_set).members:
        if one.view and one.view.n_steps and (lines := one.view.metrics.held_out_losses):
            losses = {int(line["step"]): line["loss"] for line in lines}
            curves[one.member.name] = HeldOutCurve(losses, one.view.n_steps)
    return curves


def explain_hopeless(name: str, curves: Mapping[str, HeldOutCurve]) -> str:
    """Says why a member is hopeless; empty if it is not, or if it is too early to tell."""
    if (own := curves.get(name)) is None:
        return ""
    step = max(own.losses)
    others = [
        min([loss for at, loss in one.losses.items() if at <= step], default=float("inf"))
        for other, one in curves.items()
        if other != name and one.n_steps == own.n_steps and max(one.losses) >= step
    ]
    if len(others) < LEAST_OTHERS or not FIRST_SHARE <= step / own.n_steps < 1:
        return ""
    mine, median = min(own.losses.values()), statistics.median(others)
    if mine <= median:
        return ""
    above = f"is above the median of {len(others)} others, {median:.4f}"
    return f"held-out loss {mine:.4f} at step {step:,} {above}"
