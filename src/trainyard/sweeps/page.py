"""The page of a set of runs: its verdict, its settings, what each field does, and the curves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from html import escape
from pathlib import Path

from trainyard.errors import escape as escape_controls
from trainyard.files import publish_text, read_file
from trainyard.report.charts import build_charts
from trainyard.report.page import render_charts, render_document, render_table
from trainyard.report.run_view import RunView
from trainyard.sweeps.results import (
    STOPPED_EARLY,
    SetResults,
    describe_others,
    describe_state,
    tabulate_effects,
    tabulate_settings,
)
from trainyard.sweeps.sets import LAW_PICTURE, SEED

MOST_CURVES = 12


def write_set_report(results: SetResults, output: Path) -> None:
    """Writes the page of a set.

    Raises:
        MachineError: the file cannot be written.
    """
    views = [*_label_best(results)]
    charts = build_charts(views) if views else []
    verdict = results.verdict[:1].upper() + results.verdict[1:]
    first, *rest = (f"{line}." for line in verdict.replace(":\n", ": ").splitlines())
    heading = f"<p><b>{escape(first)}</b></p>\n"
    heading += "".join(f"<p>{escape(line)}</p>\n" for line in rest)
    heading += f'<p class="muted">{escape(describe_state(results))}.</p>'
    picture = results.run_set.folder / LAW_PICTURE
    if picture.exists():
        svg = read_file(picture).decode(errors="replace")
        label = "Loss over compute: runs, the law fitted to them, and the prediction"
        heading += f'\n<figure class="card">{_fit_page(svg, label, "60rem")}</figure>'
    n_fields = len(results.run_set.fields)
    heads, *settings = (row[n_fields:] for row in tabulate_settings(results))
    rows = dict(zip((_shorten(one.values) for one in results.settings), settings, strict=False))
    best = {(next(iter(rows)), 0)} if results.ranked else ()
    main = f"<h2>Settings, best first</h2>\n{render_table(rows, heads, best, 'values')}"
    main += "".join(f'\n<p class="muted">{escape(text)}.</p>' for text in describe_others(results))
    main += "\n" + "\n".join(_render_effects(results))
    some = f" of the {len(views)} best runs" if len(views) < len(results.members) else ""
    main += f"\n<h2>Curves{some}</h2>\n" + render_charts(charts[:1], "large")
    main += "\n<br>\n" + render_charts(charts[1:], "small")
    title = f"Set of runs: {results.run_set.name}"
    publish_text(output, escape_controls(render_document(title, heading, main, charts)))


def _shorten(values: Mapping[str, str]) -> str:
    """Formats values without the sections of their fields, unless two would be alike."""
    names = [field.rpartition(".")[2] for field in values]
    is_unique = len({*names}) == len(names)
    pairs = zip(names if is_unique else values, values.values(), strict=True)
    return ", ".join(f"{name}={value}" for name, value in pairs) or "all"


def _label_best(results: SetResults) -> Iterator[RunView]:
    """Names the runs with the lowest losses by their values; not those stopped early."""
    has_seeds = len({one.member.values[SEED] for one in results.members}) > 1
    known = [one for one in results.members if one.loss is not None and one.state != STOPPED_EARLY]
    for one in sorted(known, key=lambda one: one.loss or 0.0)[:MOST_CURVES]:
        values = {f: v for f, v in one.member.values.items() if f != SEED or has_seeds}
        assert one.view is not None
        yield replace(one.view, name=_shorten(values))


def _render_effects(results: SetResults) -> Iterator[str]:
    fields = dict.fromkeys(effect.field for effect in results.effects)
    if not fields:
        return
    yield "<h2>What each field does</h2>"
    with suppress(ModuleNotFoundError):  # the page needs no matplotlib
        from trainyard.sweeps.picture import draw_effect

        yield (
            '<p class="muted">A point for the last held-out loss of each run that is done; '
            'the line joins their means.</p>\n<div class="plots">'
        )
        for field in fields:
            svg = _fit_page(draw_effect(results, field), field, "26rem")
            yield f'<figure class="card"><figcaption>{escape(field)}</figcaption>{svg}</figure>'
        yield "</div>"
    heads, *effects = tabulate_effects(results)
    if effects:
        rows = {_shorten({field: value}): row for field, value, *row in effects}
        yield "<br>\n" + render_table(rows, heads[2:], css="values")


def _fit_page(svg: str, label: str, most: str) -> str:
    """Returns a picture that shrinks with the page."""
    style = f"width: 100%; height: auto; max-width: {most}"
    size = f'role="img" aria-label="{escape(label)}" style="{style}"'
    attributes = svg.partition("<svg ")[2].replace(' height="', ' data-height="', 1)
    return f"<svg {size} {attributes}"
