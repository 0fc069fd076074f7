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
from contextlib import suppress
from dataclasses import dataclass

from trainyard.errors import UserError
from trainyard.layout.resolve import resolve
from trainyard.report.run_view import read_run
from trainyard.sweeps.sets import RunSet

FIRST_SHARE = 0.25
"""Share of its steps that a member is given."""
LEAST_OTHERS = 3


@dataclass(frozen=True)
class HeldOutCurve:
    """Held-out losses of a member by step, and the steps of the whole run."""

    losses: Mapping[int, float]
    n_steps: int

    def best_until(self, step: int) -> float | None:
        """Returns the lowest loss up to a step; None for a member that has not come as far."""
        if max(self.losses, default=0) < step:
            return None
        return min((loss for at, loss in self.losses.items() if at <= step), default=None)


def read_curves(run_set: RunSet) -> dict[str, HeldOutCurve]:
    """Reads the curves of the members that have begun, by name."""
    curves = {}
    for member in run_set.members:
        with suppress(UserError):  # no run yet, or damaged: nothing is known of it
            view = read_run(member.folder)
            losses = {int(one["step"]): one["loss"] for one in view.metrics.held_out_losses}
            curves[member.name] = HeldOutCurve(losses, view.n_steps or resolve(view.run).n_steps)
    return curves


def explain_hopeless(name: str, curves: Mapping[str, HeldOutCurve]) -> str:
    """Says why a member is hopeless; empty if it is not, or if it is too early to tell."""
    own = curves.get(name)
    step = max(own.losses, default=0) if own else 0
    if own is None or step < FIRST_SHARE * own.n_steps or step >= own.n_steps:
        return ""
    others = [one for other, one in curves.items() if other != name]
    same = [one for one in others if one.n_steps == own.n_steps]
    best = [loss for one in same if (loss := one.best_until(step)) is not None]
    mine = own.best_until(step)
    if mine is None or len(best) < LEAST_OTHERS or mine <= statistics.median(best):
        return ""
    return (
        f"held-out loss {mine:.4f} at step {step:,} is above the median of "
        f"{len(best)} others, {statistics.median(best):.4f}"
    )
