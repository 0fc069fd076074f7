"""What a set of runs has found: a table of its settings, best first, and each field's effect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from trainyard.errors import UserError, printable
from trainyard.log import align
from trainyard.report.metrics import is_finite
from trainyard.report.run_view import UNKNOWN, RunView, read_run
from trainyard.sweeps.sets import Member, RunSet
from trainyard.units import format_number

STOPPED_EARLY, NOT_STARTED, DAMAGED = "stopped early", "not started", "not readable"
MOST_ROWS = 40


@dataclass(frozen=True)
class MemberResult:
    """What a member has reached."""

    member: Member
    state: str
    """As of `RunView`; or stopped early, not started, or not readable."""
    loss: float | None
    """Held-out loss of its newest evaluation, in nats per token."""
    share: float
    """Share of its steps that it has done."""
    view: RunView | None

    @property
    def final_loss(self) -> float | None:
        """Its loss once it has trained to its end, so that it can be compared."""
        return self.loss if self.state == "done" else None


@dataclass
class Setting:
    """The members of a set that differ by their seeds only."""

    values: Mapping[str, str]
    losses: list[float]
    """Final held-out losses of those that are done."""
    n_members: int = 0

    @property
    def mean(self) -> float:
        """Mean of the losses; infinite without any."""
        return statistics.fmean(self.losses) if self.losses else math.inf

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None for fewer than two."""
        return statistics.stdev(self.losses) if len(self.losses) > 1 else None

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None for fewer than two."""
        return None if self.spread is None else self.spread / math.sqrt(len(self.losses))


@dataclass(frozen=True)
class Effect:
    """The final losses of all settings with one value of a field."""

    field: str
    value: str
    mean: float
    best: float
    n_settings: int


@dataclass(frozen=True)
class SetResults:
    """Results of a set of runs."""

    run_set: RunSet
    members: Sequence[MemberResult]

    @property
    def state(self) -> str:
        """In one line: how many members are in which state."""
        states = [one.state for one in self.members]
        return ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))

    @cached_property
    def settings(self) -> list[Setting]:
        """The settings, that with the lowest mean loss first; those without a loss last."""
        found: dict[tuple[str, ...], Setting] = {}
        for one in self.members:
            values = {field: one.member.values[field] for field in self.run_set.fields}
            setting = found.setdefault((*values.values(),), Setting(values, []))
            setting.n_members += 1
            if one.final_loss is not None:
                setting.losses.append(one.final_loss)
        return sorted(found.values(), key=lambda one: one.mean)

    @property
    def ranked(self) -> list[Setting]:
        """The settings with a loss, that with the lowest mean first."""
        return [one for one in self.settings if one.losses]

    @property
    def effects(self) -> list[Effect]:
        """For each value of each field, the losses of the settings that have it."""
        effects = []
        # A ladder tries each field where it matters, and not with all values of the others.
        for field in () if self.run_set.conclusion else self.run_set.fields:
            values = dict.fromkeys(one.member.values[field] for one in self.members)
            for value in values if len(values) > 1 else ():
                means = [one.mean for one in self.ranked if one.values[field] == value]
                if means:
                    mean = statistics.fmean(means)
                    effects.append(Effect(field, value, mean, min(means), len(means)))
        return effects

    @property
    def verdict(self) -> str:
        """Says which setting is best, and whether seeds could explain the difference."""
        if self.run_set.conclusion:
            return self.run_set.conclusion
        if not self.ranked:
            return "no run is done yet"
        best, *others = self.ranked
        text = f"best: {describe_values(best.values) or 'the only setting'}, {best.mean:.4f}"
        if not others:
            return text
        gap = others[0].mean - best.mean
        text += f"; the second is {gap:.4f} higher"
        if best.error is None or others[0].error is None:
            return f"{text}; more --seeds show whether that is more than chance"
        error = math.hypot(best.error, others[0].error)  # of the difference of two means
        verdict = "less than" if gap < 2 * error else "more than"
        return f"{text}, {verdict} twice its standard error over seeds, {error:.4f}"

    def as_json(self) -> dict[str, Any]:
        """Returns the results for programs; unknown values are null."""
        return {
            "name": self.run_set.name,
            "state": self.state,
            "members": [
                {
                    "name": one.member.name,
                    "values": dict(one.member.values),
                    "state": one.state,
                    "held_out_loss": one.loss,
                    "share": one.share,
                }
                for one in self.members
            ],
            "settings": [
                asdict(one) | {"mean": one.mean if one.losses else None, "spread": one.spread}
                for one in self.settings
            ],
            "effects": [asdict(effect) for effect in self.effects],
            "verdict": self.verdict,
        }


def read_results(run_set: RunSet) -> SetResults:
    """Reads what the members of a set have reached."""
    return SetResults(run_set, [_read_member(run_set, member) for member in run_set.members])


def _read_member(run_set: RunSet, member: Member) -> MemberResult:
    if not (member.folder / "run.toml").exists():
        return MemberResult(member, NOT_STARTED, None, 0.0, None)
    try:
        view = read_run(member.folder)
    except UserError:
        return MemberResult(member, DAMAGED, None, 0.0, None)
    loss = view.metrics.evaluations[-1].get("loss") if view.metrics.evaluations else None
    is_stopped = view.state != "done" and run_set.why_stopped(member)
    state = STOPPED_EARLY if is_stopped else view.state
    share = (view.step or 0) / view.n_steps if view.n_steps else 0.0
    return MemberResult(member, state, loss if is_finite(loss) else None, share, view)


def describe_values(values: Mapping[str, str]) -> str:
    """Formats values as overrides."""
    return " ".join(f"{field}={value}" for field, value in values.items())


def tabulate_settings(results: SetResults) -> list[list[str]]:
    """Returns the rows of a table of the settings, best first, and before them its heading."""
    rows = [[*results.run_set.fields, "held out", "± seeds", "runs"]]
    for one in results.settings[:MOST_ROWS]:
        loss = f"{one.mean:.4f}" if one.losses else UNKNOWN
        spread = UNKNOWN if one.spread is None else f"{one.spread:.4f}"
        runs = f"{len(one.losses)} of {one.n_members}"
        rows.append([*one.values.values(), loss, spread, runs])
    return rows


def tabulate_effects(results: SetResults) -> list[list[str]]:
    """Returns the rows of a table of the effects of fields, and before them its heading.

    Of a field whose values each have one setting, the table of settings says as much.
    """
    several = {effect.field for effect in results.effects if effect.n_settings > 1}
    return [["field", "value", "mean", "best", "settings"]] + [
        [e.field, e.value, f"{e.mean:.4f}", f"{e.best:.4f}", str(e.n_settings)]
        for e in results.effects
        if e.field in several
    ]


def describe_others(results: SetResults) -> list[str]:
    """Returns a line for each member that neither is done nor waits to be started."""
    others = [one for one in results.members if one.state not in ("done", "new", NOT_STARTED)]
    return [_describe_other(results, one) for one in others[:MOST_ROWS]]


def describe_state(results: SetResults) -> str:
    """Returns the number of runs, and how many are in which state."""
    return f"{format_number(len(results.members), 'run')}: {results.state}"


def results_row(results: SetResults) -> tuple[str, ...]:
    """Returns state, step and loss, for a list of runs."""
    best = [f"{one.mean:.4f} held out" for one in results.ranked] or [""]
    return describe_state(results), "", best[0]


def render_results(results: SetResults) -> str:
    """Renders a table of the settings, best first, and the unfinished runs."""
    lines = [f"{results.run_set.name}: {describe_state(results)}", ""]
    settings = tabulate_settings(results)
    lines += align(settings, right=range(len(settings[0])))
    if len(results.settings) > MOST_ROWS:
        lines.append(f"... and {len(results.settings) - MOST_ROWS} more")
    if len(effects := tabulate_effects(results)) > 1:
        lines += ["", *align(effects, right=range(1, len(effects[0])))]
    if others := describe_others(results):
        lines += ["", *others]
    return "\n".join(map(printable, [*lines, "", *results.verdict.splitlines()]))


def _describe_other(results: SetResults, one: MemberResult) -> str:
    why = results.run_set.why_stopped(one.member)
    loss = "" if one.loss is None else f", held out {one.loss:.4f}"
    text = f"{one.member.name}: {one.state} at {one.share:.0%}{loss}"
    return text + (f": {why}" if why else "")
