"""A set of runs: which settings it tries, and its folder.

    trainyard sweep web.toml optimizer.learning_rate=1e-3,2e-3 model.dropout=0,0.1 --seeds 2

is a set of eight runs. Its folder has the members, so that the set can be continued, extended and
moved to another machine; each member is a run like any other:

    runs/web-sweep/set.toml              the name and the values of each member
    runs/web-sweep/members/..-03.toml    the run file of a member, with every field
    runs/web-sweep/stopped/..-03         why it was stopped early
    runs/web-ladder/conclusion.txt       what a ladder has found, with a picture, law.svg
    runs/web-sweep-03/                   its run folder
"""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tomli_w

from trainyard.checkpoint.resume import run_changes
from trainyard.config.load import load_run, parse_toml, render_run
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.errors import ConfigError
from trainyard.files import publish_text, read_file
from trainyard.launch.lock import hold
from trainyard.planning.shorten import follow_length
from trainyard.report.figures import have_comparable_losses
from trainyard.training.run_folder import RUNS

RECORD, MEMBERS, STOPPED = "set.toml", "members", "stopped"
CONCLUSION, LAW_PICTURE = "conclusion.txt", "law.svg"
SEED = "train.seed"
MOST_MEMBERS = 1000
_RANGE = re.compile(r"([0-9.eE+-]+)\.\.([0-9.eE+-]+)")
_TOKEN = re.compile(r""""(?:\\.|[^"\\])*"|'[^']*'|.""", re.DOTALL)
"""A text in quotes, or a character."""


@dataclass(frozen=True)
class Member:
    """A run of a set."""

    folder: Path
    """Its run folder, beside that of the set."""
    values: Mapping[str, str]
    """What sets it apart, by field, the seed included; as typed."""

    @property
    def name(self) -> str:
        """The name of its run."""
        return self.folder.name


@dataclass(frozen=True)
class RunSet:
    """Runs that are trained and compared together."""

    folder: Path
    members: Sequence[Member]

    @property
    def name(self) -> str:
        """The name of its folder."""
        return self.folder.name

    @property
    def fields(self) -> list[str]:
        """The fields in which settings differ: the members of one differ by their seeds only."""
        return [field for field in self.members[0].values if field != SEED]

    def run_file(self, member: Member) -> Path:
        """Returns the run file of a member."""
        return self.folder / MEMBERS / f"{member.name}.toml"

    def load_members(self) -> dict[str, Run]:
        """Loads the runs of all members, by name.

        Raises:
            ConfigError: a run file is not valid.
        """
        return {one.name: load_run(str(self.run_file(one))).run for one in self.members}

    @property
    def conclusion(self) -> str:
        """What was found, where that is not the best setting: by a ladder; else empty."""
        path = self.folder / CONCLUSION
        return read_file(path).decode(errors="replace").strip() if path.exists() else ""

    def why_stopped(self, member: Member) -> str:
        """Returns why a member was stopped early; empty if it was not."""
        path = self.folder / STOPPED / member.name
        return read_file(path).decode(errors="replace").strip() if path.exists() else ""


def is_set(name: str | Path) -> bool:
    """Returns whether a name in `runs`, or a folder, is that of a set."""
    return any((folder / RECORD).is_file() for folder in (RUNS / name, Path(name)))


def read_set(name: str | Path) -> RunSet:
    """Reads a set by its name in `runs` or by its folder.

    Raises:
        ConfigError: its record is damaged.
    """
    folder = next(f for f in (RUNS / name, Path(name)) if (f / RECORD).is_file())
    path = folder / RECORD
    table = parse_toml(read_file(path).decode(errors="replace"), str(path))
    try:
        members = [
            Member(folder.with_name(one["name"]), {**one["values"]}) for one in table["member"]
        ]
    except (KeyError, TypeError, ValueError):
        members = []
    texts = [text for one in members for text in one.values.values()]
    fields = {frozenset(one.values) for one in members}
    if len(fields) != 1 or not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{path} does not describe a set of runs", "remove it, or restore it")
    return RunSet(folder, members)


def split_axes(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Separates overrides such as "optimizer.learning_rate=1e-3,2e-3" from those of one value.

    Returns:
        the overrides that all members share, and by field the values or ranges to try.

    Raises:
        ConfigError: one is not of this form, or its field is there twice.
    """
    given: dict[str, str] = {}
    axes: dict[str, list[str]] = {}
    for text in overrides:
        field, equals, value = text.partition("=")
        field, values = field.strip(), split_values(value)
        if not equals:
            raise ConfigError(f"{text!r} is not of the form section.field=value,value")
        if field in given:
            raise ConfigError(f"{field} is given twice", f"{field}=value,value")
        given[field] = text
        if len(values) > 1 or _RANGE.fullmatch(values[0]):
            axes[field] = values
    if "name" in axes:
        raise ConfigError("name names one run", "--name NAME names the set, and so its runs")
    return [text for field, text in given.items() if field not in axes], axes


def split_values(text: str) -> list[str]:
    """Splits "a,b" at commas outside of brackets and quotes."""
    values, depth = [""], 0
    for token in _TOKEN.findall(text):
        depth += (token in ("[", "{")) - (token in ("]", "}"))
        if token == "," and not depth:
            values.append("")
        else:
            values[-1] += token
    return [value.strip() for value in values]


def expand(
    axes: Mapping[str, list[str]], n_seeds: int = 1, n_drawn: int = 0, first_seed: int = 0
) -> list[dict[str, str]]:
    """Lists the values of each member by field, the seed included.

    Args:
        axes: as `split_axes` returns them; a range, `1e-4..1e-2`, is for drawing.
        n_seeds: seeds of each setting.
        n_drawn: draw so many settings at random instead of the whole grid; numbers of a range are
            spread evenly by their logarithm. The first of more draws are the same.
        first_seed: of the seeds, and that of drawing.

    Raises:
        ConfigError: a range without drawing, nothing to vary, or too many members.
    """
    ranges = [field for field, each in axes.items() if any(map(_RANGE.fullmatch, each))]
    if ranges and not n_drawn:
        raise ConfigError(
            f"{ranges[0]}={','.join(axes[ranges[0]])} has a range, which a grid cannot have",
            "--draw N draws N settings; or list values: 1e-3,2e-3,4e-3",
        )
    if not axes and n_seeds == 1:
        raise ConfigError(
            "a set needs a field with several values, or several seeds",
            "for example optimizer.learning_rate=1e-3,2e-3,4e-3, or --seeds 3",
        )
    if SEED in axes and n_seeds > 1:
        raise ConfigError(f"--seeds {n_seeds} and {SEED} both set the seeds", "omit one of them")
    n_members = (n_drawn or math.prod(map(len, axes.values()))) * n_seeds
    if n_members > MOST_MEMBERS:
        raise ConfigError(f"{n_members:,} runs in a set", f"at most {MOST_MEMBERS:,}: --draw N")
    grid = (dict(zip(axes, each, strict=True)) for each in itertools.product(*axes.values()))
    settings = _draw(axes, n_drawn, random.Random(first_seed)) if n_drawn else grid
    seeds = [{SEED: str(first_seed + n)} for n in range(n_seeds)] if SEED not in axes else [{}]
    return [setting | seed for setting in settings for seed in seeds]


def _draw(
    axes: Mapping[str, list[str]], n_settings: int, source: random.Random
) -> list[dict[str, str]]:
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for _ in range(100 * n_settings):
        setting = {f: _draw_value(source.choice(each), source) for f, each in axes.items()}
        found.setdefault((*setting.values(),), setting)
        if len(found) == n_settings:
            return [*found.values()]
    raise ConfigError(
        f"--draw {n_settings}, but these values have only {len(found)} combinations",
        "omit --draw, or give ranges, such as optimizer.learning_rate=1e-4..1e-2",
    )


def _draw_value(value: str, source: random.Random) -> str:
    if not (match := _RANGE.fullmatch(value)):
        return value
    try:
        low, high = map(float, match.groups())
    except ValueError:
        low = high = 0.0
    if not 0 < low < high < math.inf:
        raise ConfigError(f"{value} is not a range of positive numbers", "such as 1e-4..1e-2")
    drawn = math.exp(source.uniform(math.log(low), math.log(high)))
    is_whole = all(re.fullmatch("[0-9]+", end) for end in match.groups())
    return str(round(drawn)) if is_whole else f"{drawn:.4g}"


def as_number(value: str) -> float | str:
    """Returns the number that a value is, or the value."""
    try:
        return float(value)
    except ValueError:
        return value


def build_set(
    run_file: str, overrides: Sequence[str], name: str = "", n_seeds: int = 1, n_drawn: int = 0
) -> tuple[RunSet, dict[str, Run]]:
    """Builds a set of runs, or adds to the one of its name; checked but not written.

    Args:
        run_file: as for `load_run`.
        overrides: of all members, or with several values each, as for `split_axes`.
        name: of the set; empty: that of the run, and "-sweep".
        n_seeds: as for `expand`.
        n_drawn: as for `expand`.

    Returns:
        the set, and the runs of the members that were asked for, by name.

    Raises:
        ConfigError: a member is not valid, or they cannot be compared.
    """
    shared, axes = split_axes(overrides)
    named = [f"name={json.dumps(name)}"] if name else []
    base = load_run(run_file, [*shared, *named]).run
    settings = expand(axes, n_seeds, n_drawn, base.train.seed)
    folder = RUNS / (name or f"{base.name}-sweep")
    known = read_set(folder) if is_set(folder) else RunSet(folder, [])
    if known.members and known.members[0].values.keys() != settings[0].keys():
        raise ConfigError(
            f"{folder} varies {', '.join(known.fields) or 'the seed'} alone",
            "--name NAME makes another set",
        )
    members = {_identify(member.values): member for member in known.members}
    runs: dict[str, Run] = {}
    for values in settings:
        own = [*shared, *(f"{field}={value}" for field, value in values.items())]
        run = follow_length(load_run(run_file, own).run, run_file, own, None)
        new = Member(folder.with_name(f"{folder.name}-{len(members) + 1:02}"), values)
        member = members.setdefault(_identify(values), new)
        if member.name in runs:
            raise ConfigError("the same values twice: " + " ".join(own[len(shared) :]))
        runs[member.name] = change(run, {"name": member.name})
    if any(run.evaluate.batches == 0 for run in runs.values()):
        problem = "evaluate.batches=0: a set compares held-out losses"
        raise ConfigError(problem, "evaluate.batches=10")
    if not have_comparable_losses([*runs.values()]):
        raise ConfigError(
            "losses of different tokenizers or held-out texts cannot be compared",
            "give all runs one tokenizer, and one data.valid",
        )
    return RunSet(folder, [*members.values()]), runs


def _identify(values: Mapping[str, str]) -> frozenset[tuple[str, float | str]]:
    """Returns what is equal for 1e-3 and 0.001."""
    return frozenset((field, as_number(value)) for field, value in values.items())


def write_set(run_set: RunSet, runs: Mapping[str, Run]) -> None:
    """Writes a set into its folder, or adds to the one that is there.

    Args:
        run_set: as built.
        runs: of its members, by name; others are in the folder already.

    Raises:
        ConfigError: a member that has begun has other settings, or a run has the name of the set or
            of a new member.
        MachineError: the folder cannot be written.
    """
    has_begun = any(member.folder.exists() for member in run_set.members)
    taken = [run_set.folder] if (run_set.folder / "run.toml").exists() else []
    with hold(run_set.folder):
        for member in run_set.members:
            file, run = run_set.run_file(member), runs.get(member.name)
            if not file.exists():
                taken += [member.folder] if member.folder.exists() else []
            elif has_begun and run and (changes := run_changes(load_run(str(file)).run, run)):
                raise ConfigError(
                    f"{run_set.folder} was begun with another "
                    + ", ".join(one.field for one in changes),
                    "--name NAME makes another set; or remove that folder and those of its runs",
                )
        if taken:
            problem = f"{taken[0]} is a run that is not in the set {run_set.name}"
            raise ConfigError(problem, "--name NAME gives the set another name")
        (run_set.folder / MEMBERS).mkdir(exist_ok=True)
        for member in run_set.members:
            if member.name in runs:
                publish_text(run_set.run_file(member), render_run(runs[member.name]))
        record = [{"name": one.name, "values": dict(one.values)} for one in run_set.members]
        publish_text(run_set.folder / RECORD, tomli_w.dumps({"member": record}))
