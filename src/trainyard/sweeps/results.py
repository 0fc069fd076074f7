"""What a set of runs has found: a table of its settings, best first, and each field's effect."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from trainyard.errors import UserError, printable
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
    def is_done(self) -> bool:
        """Whether it has trained to its end, so that its loss can be compared."""
        return self.state == "done" and self.loss is not None


@dataclass(frozen=True)
class Setting:
    """The members of a set that differ by their seeds only."""

    values: Mapping[str, str]
    losses: Sequence[float]
    """Final held-out losses of those that are done."""
    n_members: int

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

    @property
    def best(self) -> Setting | None:
        """The setting with the lowest mean loss; None before a run is done."""
        return self.settings[0] if self.settings[0].losses else None

    @cached_property
    def settings(self) -> list[Setting]:
        """The settings, that with the lowest mean loss first; those without a loss last."""
        by_setting: dict[tuple[str, ...], list[MemberResult]] = {}
        fields = self.run_set.fields
        for one in self.members:
            setting = tuple(one.member.values[field] for field in fields)
            by_setting.setdefault(setting, []).append(one)
        found = [
            Setting(
                dict(zip(fields, setting, strict=True)),
                [one.loss for one in ones if one.is_done and one.loss is not None],
                len(ones),
            )
            for setting, ones in by_setting.items()
        ]
        return sorted(found, key=lambda one: one.mean)

    @property
    def effects(self) -> list[Effect]:
        """For each value of each field, the losses of the settings that have it."""
        effects = []
        # A ladder tries each field where it matters, and not with all values of the others.
        for field in () if self.run_set.conclusion else self.run_set.fields:
            values = dict.fromkeys(one.member.values[field] for one in self.members)
            for value in values if len(values) > 1 else ():
                means = [one.mean for one in self.settings if one.values[field] == value]
                means = [mean for mean in means if mean < math.inf]
                if means:
                    mean = statistics.fmean(means)
                    effects.append(Effect(field, value, mean, min(means), len(means)))
        return effects

    @property
    def verdict(self) -> str:
        """Says which setting is best, and whether seeds could explain the difference."""
        if self.run_set.conclusion:
            return self.run_set.conclusion
        ranked = [one for one in self.settings if one.losses]
        if (best := self.best) is None:
            return "no run is done yet"
        text = f"best: {describe_values(best.values) or 'the only setting'}, {best.mean:.4f}"
        if len(ranked) == 1:
            return text
        gap = ranked[1].mean - best.mean
        text += f"; the second is {gap:.4f} higher"
        errors = [one.error for one in ranked[:2] if one.error is not None]
        if len(errors) < 2:
            return f"{text}; more --seeds show whether that is more than chance"
        error = math.hypot(*errors)  # of the difference of two means
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
    best = f"{results.best.mean:.4f} held out" if results.best else ""
    return describe_state(results), "", best


def render_results(results: SetResults) -> str:
    """Renders a table of the settings, best first, and the unfinished runs."""
    lines = [f"{results.run_set.name}: {describe_state(results)}", ""]
    lines += align(tabulate_settings(results))
    if len(results.settings) > MOST_ROWS:
        lines.append(f"... and {len(results.settings) - MOST_ROWS} more")
    if len(effects := tabulate_effects(results)) > 1:
        lines += ["", *align(effects)]
    if others := describe_others(results):
        lines += ["", *others]
    return "\n".join(map(printable, [*lines, "", *results.verdict.splitlines()]))


def _describe_other(results: SetResults, one: MemberResult) -> str:
    why = results.run_set.why_stopped(one.member)
    loss = "" if one.loss is None else f", held out {one.loss:.4f}"
    text = f"{one.member.name}: {one.state} at {one.share:.0%}{loss}"
    return text + (f": {why}" if why else "")


def align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligns columns; those of numbers at the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [
        all(cell[:1].isdigit() or cell == UNKNOWN for cell in column[1:])
        for column in zip(*rows, strict=True)
    ]
    pairs = (zip(row, widths, is_number, strict=True) for row in rows)
    return [
        "  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in row).rstrip()
        for row in pairs
    ]
