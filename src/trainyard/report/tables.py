"""Tables of the report, as HTML: one row for each field, one column for each run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from itertools import pairwise
from typing import Any

from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Run
from trainyard.report.summary import UNKNOWN, ReportedRun, unused_settings
from trainyard.training.run_folder import HISTORY_FOLDER
from trainyard.training.start import describe_ancestry

EVENTS_SHOWN = 200
# What every run has of its own says nothing about which preset it is near to.
OWN_FIELDS = ("name", "description")
OWN_SECTIONS = ("data.", "tokenizer.", "evaluate.sample_", "log.")

Fields = dict[str, str]


def render_table(
    columns: list[Fields],
    headings: list[str],
    marked: set[tuple[int, str]] | None = None,
    css: str = "",
) -> str:
    """Renders one row for each field.

    Args:
        columns: values by field.
        headings: of the columns; without any, the table has none.
        marked: cells to stand out, by number of the column and field.
        css: class of the table.
    """
    keys = list(dict.fromkeys(key for column in columns for key in column))
    if not keys:
        return '<p class="muted">Nothing recorded.</p>'
    head = ""
    if headings:
        names = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
        head = f"<thead><tr><td></td>{names}</tr></thead>\n"
    rows = "\n".join(
        f'<tr><th scope="row">{_breakable(key)}</th>'
        + "".join(
            _cell(column.get(key, UNKNOWN), (number, key) in (marked or ()))
            for number, column in enumerate(columns)
        )
        + "</tr>"
        for key in keys
    )
    return in_a_box(f'<table class="{css}">\n{head}<tbody>\n{rows}\n</tbody></table>')


def in_a_box(table: str) -> str:
    """Wraps a table in its own scroll area, for touch and keyboard."""
    return f'<div class="card scroll" tabindex="0">{table}</div>'


def render_events(runs: list[ReportedRun]) -> str:
    """Lists the events of a run; if there are very many, only the first and the last."""
    found = [(run.name, event) for run in runs for event in run.metrics.events]
    if not found:
        return '<p class="muted">No restart, rollback, skipped step, failed save or stop.</p>\n'
    n_left_out = len(found) - EVENTS_SHOWN
    half = EVENTS_SHOWN // 2
    shown = found if n_left_out <= 0 else [*found[:half], *found[-half:]]
    name_head = '<th scope="col">run</th>' if len(runs) > 1 else ""
    rows = "\n".join(
        f'<tr><th scope="row">{event.step:,}</th>'
        + (f'<td class="run">{escape(name)}</td>' if name_head else "")
        + f"<td>{escape(event.text[:500])}</td></tr>"
        for name, event in shown
    )
    head = f'<th scope="col">step</th>{name_head}<th scope="col">what</th>'
    note = (
        "" if n_left_out <= 0 else f'<p class="muted">{n_left_out:,} between are not shown.</p>\n'
    )
    return (
        in_a_box(
            f'<table class="events">\n<thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{rows}\n</tbody></table>"
        )
        + note
    )


def render_differences(runs: list[ReportedRun]) -> str:
    """Shows the settings that differ between runs."""
    columns = [_flatten(reported.run) for reported in runs]
    differing = [key for key in _keys(columns) if _differs(key, columns)]
    if not differing:
        return '<p class="muted">None: the runs have the same settings.</p>'
    chosen = [{key: fields.get(key, UNKNOWN) for key in differing} for fields in columns]
    return render_table(chosen, [reported.name for reported in runs], css="fields")


def render_settings(runs: list[ReportedRun]) -> str:
    """Shows differences from the nearest preset first, then from the defaults; folds the rest."""
    defaults = _flatten(Run())
    columns, headings = [_flatten(reported.run) for reported in runs], [run.name for run in runs]
    first: list[str] = []
    parts = []
    if len(runs) == 1:
        preset, compared = find_nearest_preset(columns[0])
        first = [key for key in _keys(columns) if _differs(key, [*columns, compared])]
        chosen = [
            {key: fields.get(key, UNKNOWN) for key in first} for fields in (*columns, compared)
        ]
        table = render_table(chosen, ["this run", f"preset {preset}"], css="fields")
        parts.append(
            f'<p class="muted">Different from the nearest preset, {escape(preset)}:</p>\n{table}'
        )
        headings = ["this run"]
    changed = [key for key in _keys(columns) if _differs(key, [*columns, defaults])]
    rest = [key for key in changed if key not in first]
    chosen = [{key: fields.get(key, UNKNOWN) for key in rest} for fields in (*columns, defaults)]
    same = {key: defaults.get(key, UNKNOWN) for key in _keys(columns) if key not in changed}
    parts += [
        f"<details><summary>{len(rest)} {'more ' if first else ''}settings that are not the "
        "default</summary>\n"
        f"{render_table(chosen, [*headings, 'default'], css='fields')}</details>",
        f"<details><summary>{len(same)} settings at their defaults</summary>\n"
        f"{render_table([same], [], css='fields')}</details>",
    ]
    return "\n".join(parts)


def find_nearest_preset(fields: Fields) -> tuple[str, Fields]:
    """Finds the shipped preset that differs least from a run, and its values."""
    presets = {name: _flatten(load_run(name).run) for name in preset_names()}

    def distance(name: str) -> int:
        preset = presets[name]
        return sum(
            preset.get(key) != fields.get(key)
            for key in preset.keys() | fields.keys()
            if key not in OWN_FIELDS and not key.startswith(OWN_SECTIONS)
        )

    nearest = min(sorted(presets), key=distance)
    return nearest, presets[nearest]


def describe_lineage(reported: ReportedRun) -> Iterator[str]:
    """Describes the checkpoints that a run started from, and each change since, with its step."""
    if reported.ancestors:
        yield f"Started from {describe_ancestry(reported.ancestors)}"
    paths = sorted((reported.folder / HISTORY_FOLDER).glob("until-*.toml"))
    files = [_flatten(run) for run in (*(load_run(str(path)).run for path in paths), reported.run)]
    for path, (before, now) in zip(paths, pairwise(files), strict=True):
        changes = (
            f"{key} {before.get(key, UNKNOWN)} became {now.get(key, UNKNOWN)}"
            for key in _keys([before, now])
            if _differs(key, [before, now])
        )
        yield f"From step {int(path.stem.removeprefix('until-')):,}: {'; '.join(changes)}"


def as_text(value: Any) -> str:
    """Formats a value for the page."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _keys(columns: list[Fields]) -> list[str]:
    keys = dict.fromkeys(key for fields in columns for key in fields)
    return [key for key in keys if key not in OWN_FIELDS]


def _differs(key: str, columns: list[Fields]) -> bool:
    return len({fields.get(key) for fields in columns}) > 1


def _cell(value: str, is_marked: bool) -> str:
    text = escape(value)
    return f"<td><mark>{text}</mark></td>" if is_marked else f"<td>{text}</td>"


def _breakable(key: str) -> str:
    """Lets a narrow screen break a field name between its words."""
    return escape(key).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _flatten(run: Run) -> Fields:
    """Maps dotted field names to values, as on the command line."""
    fields: Fields = {}

    def add(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{key}.")
            else:
                fields[prefix + key] = as_text(value)

    add(run.model_dump(mode="json", exclude=unused_settings(run)), "")
    return fields
