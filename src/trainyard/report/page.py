"""The report: one HTML file on one or more runs, drawn without a server or network access."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from trainyard import errors
from trainyard.architecture import describe_parts
from trainyard.checkpoint.resume import format_value
from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Run
from trainyard.errors import explain_failure
from trainyard.files import publish_text
from trainyard.report.charts import (
    MARKS_LIMIT,
    POINTS_IN_A_CURVE,
    POINTS_IN_ALL,
    Chart,
    build_charts,
)
from trainyard.report.figures import (
    Figure,
    compare_with_plan,
    find_best,
    have_comparable_losses,
    list_scores,
    next_steps,
    summarize,
)
from trainyard.report.metrics import Line
from trainyard.report.run_view import UNKNOWN, RunView, load_facts, read_run, unused_settings
from trainyard.training.run_folder import describe_ancestry, read_history
from trainyard.units import format_number

SAMPLES_SHOWN = 8  # of each prompt, from the first to the last
PROMPTS_SHOWN = 12
SAMPLE_CHARACTERS = 1200
PROMPT_CHARACTERS = 300
EVENTS_SHOWN = 200
N_TILES = 6
NOT_MARKED = "No best value is marked: the runs have trained on different numbers of tokens."
# What every run has of its own says nothing about which preset it is near to.
OWN_FIELDS = ("name", "description")
OWN_SECTIONS = ("data.", "tokenizer.", "evaluate.sample_", "log.")

Fields = dict[str, str]
T = TypeVar("T")


def write_report(
    run_folders: list[Path],
    output: Path,
    png_folder: Path | None = None,
    baselines: Mapping[str, float] | None = None,
) -> None:
    """Writes the report of one or more runs.

    Args:
        run_folders: of the runs, in the order in which they are shown.
        output: the file to write.
        png_folder: where each curve is written as a PNG too.
        baselines: held-out losses of other models to compare with, in nats per token, by name.

    Raises:
        DataError: a folder is no run folder, or a file in it is malformed.
        ConfigError: a run.toml is not valid.
        MachineError: a file cannot be written.
    """
    runs = _distinguish([read_run(folder) for folder in run_folders])
    charts = build_charts(runs, baselines)
    if png_folder is not None:
        from trainyard.report.pictures import save_png  # the page needs no matplotlib

        hint = "pass a writable folder to --png"
        with explain_failure(f"cannot write plots to {png_folder}", hint):
            png_folder.mkdir(parents=True, exist_ok=True)
            for chart in charts:
                save_png(chart, png_folder)
    publish_text(output, errors.escape(render_page(runs, charts)))


def _distinguish(runs: list[RunView]) -> list[RunView]:
    """Appends the folder to names shared by several runs; takes losses of the same kind."""
    names = [view.name for view in runs]
    if len(runs) > 1:  # evaluation.json may be of any text
        newest = [(view.metrics.held_out_losses or [{}])[-1] for view in runs]
        pairs = zip(runs, newest, strict=True)
        runs = [replace(view, evaluation=view.evaluation | line) for view, line in pairs]
    return [
        replace(view, name=f"{view.name} ({view.folder})") if names.count(view.name) > 1 else view
        for view in runs
    ]


def render_page(runs: list[RunView], charts: list[Chart]) -> str:
    """Renders the whole page."""
    alone = len(runs) == 1
    names = [view.name for view in runs]
    title = f"Training report: {', '.join(names) if len(runs) <= 3 else f'{len(runs)} runs'}"
    headings = "".join(_render_heading(view, alone=alone) for view in runs)
    main = _asset("runs.html").format(
        comparison="" if alone else _render_comparison(runs),
        loss=render_charts(charts[:1], "large"),
        notes=" ".join(_notes(runs)),
        tiles=_render_tiles(runs[0]) if alone else "",
        scores=_render_scores(runs),
        next_steps=_render_next(runs),
        samples="".join(_render_samples(view, alone=alone) for view in runs),
        charts=render_charts(charts[1:], "small"),
        settings=_render_settings(runs),
        events=_render_events(runs),
        planned="".join(_render_planned(view, alone=alone) for view in runs),
        environment=_render_environment(runs),
    )
    return render_document(title, headings, main, charts)


def render_document(title: str, headings: str, main: str, charts: Sequence[Chart]) -> str:
    """Renders a page.

    Args:
        title: text, of the page and its first heading.
        headings: HTML below the title.
        main: HTML, with the places of the charts.
        charts: what the script draws there.
    """
    script = f"/*\n{_asset('uplot/LICENSE')}*/\n{_asset('uplot/uPlot.iife.min.js')}\n"
    script += _asset("charts.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Even a text that got past the escaping could neither run nor fetch anything.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return _asset("page.html").format(
        policy=escape(policy),
        title=escape(title),
        plot_style=_asset("uplot/uPlot.min.css"),
        style=_asset("style.css"),
        headings=headings,
        main=main,
        data=_embed([chart.as_json() for chart in charts]),
        script=script,
    )


@cache
def _asset(name: str) -> str:
    return files("trainyard.report").joinpath(name).read_text(encoding="utf-8")


def _embed(value: object) -> str:
    """Renders JSON that no HTML parser takes for markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _render_heading(view: RunView, *, alone: bool) -> str:
    model, metrics = view.run.model, view.metrics
    parts = [
        f"{format_number(model.n_layers, 'block')} of width {model.d_model}, "
        f"{format_number(model.n_heads, 'head')}",
        f"sequences of {model.sequence_length} tokens",
        *describe_parts(model),
        f"precision {view.run.precision.kind}",
        *([f"on {metrics.device}"] if metrics.device else []),
        f"ended: {view.reason}" if view.reason else "still running, or ended for an unknown reason",
    ]
    name = "" if alone else f"<b>{escape(view.name)}</b>: "
    lines = [f'<p class="muted">{name}{escape("; ".join(parts))}.</p>']
    lines += [f"<p>{escape(view.run.description)}</p>"] if alone else []
    lines += [f"<p>{escape(text)}.</p>" for text in _describe_lineage(view)]
    lines += [f'<p class="alert">{escape(metrics.damage)}.</p>'] if metrics.damage else []
    return "".join(f"{line}\n" for line in lines)


def _describe_lineage(view: RunView) -> Iterator[str]:
    """Describes the checkpoints that a run started from, and each change since, with its step."""
    if view.ancestors:
        yield f"Started from {describe_ancestry(view.ancestors)}"
    for step, changes in read_history(view.folder):
        texts = (
            f"{one.field} {format_value(one.saved)} became {format_value(one.wanted)}"
            for one in changes
        )
        yield f"From step {step:,}: {'; '.join(texts)}"


def _render_tiles(view: RunView) -> str:
    known = [figure for figure in summarize(view) if figure.value != UNKNOWN]
    tiles = "\n".join(
        f'<div class="card tile"><dt>{escape(figure.label)}</dt>'
        f'<dd class="value">{escape(figure.value)}</dd>'
        f"<dd><small>{escape(figure.meaning)}</small></dd></div>"
        for figure in known[:N_TILES]
    )
    others = {one.label: [f"{one.value} {one.meaning}".strip()] for one in known[N_TILES:]}
    return (
        f'<h2>Summary</h2>\n<dl class="tiles">\n{tiles}\n</dl>\n'
        f"{_folded(f'{len(others)} more figures', render_table(others))}"
    )


def _render_comparison(runs: list[RunView]) -> str:
    """Renders the settings that differ, then the figures, the best value of each marked."""
    comparable = have_comparable_losses([view.run for view in runs])
    table, note = _render_figures(runs, [summarize(view) for view in runs], comparable=comparable)
    if note != NOT_MARKED and not comparable:
        note += " Losses per token are not compared: tokenizer or data differ."
    settings = [_flatten(view.run) for view in runs]
    differences = '<p class="muted">None: the runs have the same settings.</p>'
    if differing := _differing(settings):
        differences = _render_fields(differing, settings, [view.name for view in runs])
    return (
        f"<h2>Settings that differ</h2>\n{differences}\n"
        f'<h2>Summary</h2>\n<p class="muted">{note}</p>\n{table}'
    )


def _render_scores(runs: list[RunView]) -> str:
    """Renders the scores of tasks; empty without any."""
    scores = [
        [replace(one, value=f"{one.value} ({one.meaning})") for one in list_scores(view.evaluation)]
        for view in runs
    ]
    if not any(scores):
        return ""
    table, note = _render_figures(runs, scores, comparable=True)
    return (
        '<h2>Tasks</h2>\n<p class="muted">Zero-shot, by the rules of lm-eval, ± one standard '
        f"error.{note and ' '}{note}</p>\n{table}\n"
    )


def _render_figures(
    runs: list[RunView], figures: list[list[Figure]], *, comparable: bool
) -> tuple[str, str]:
    """Renders figures by run, the best of several marked, and a note on the marks.

    Args:
        runs: the runs.
        figures: of each run; what is unknown of all is left out.
        comparable: losses per token may be compared.
    """
    missing = Figure("", UNKNOWN)
    rows = _as_rows([{one.label: one for one in column} for column in figures], missing)
    rows = {label: row for label, row in rows.items() if any(x.value != UNKNOWN for x in row)}
    texts = {label: [one.value for one in row] for label, row in rows.items()}
    if len(runs) == 1:
        return render_table(texts), ""
    same_length = len({view.last("tokens") for view in runs}) == 1
    best = {
        (label, number)
        for label, row in (rows.items() if same_length else ())
        for number in find_best(row, comparable=comparable)
    }
    note = "Marked: the best value." if same_length else NOT_MARKED
    return render_table(texts, [view.name for view in runs], best), note


def _render_next(runs: list[RunView]) -> str:
    rows = "\n".join(
        f"<p>{escape(what)}</p>\n<pre>{escape(command)}</pre>" for what, command in next_steps(runs)
    )
    return f'<h2>What to do next</h2>\n<div class="card next">{rows}</div>\n'


def render_charts(charts: list[Chart], size: str) -> str:
    """Renders the places of charts, which the script fills."""
    figures = "\n".join(
        f'<figure class="card"><figcaption>{escape(chart.title)}</figcaption>'
        f'<div class="{size}" id="chart-{chart.name}" role="img" '
        f'aria-label="{escape(chart.title)}. {escape(chart.description)}">'
        f"{'' if chart.series else 'nothing logged'}</div>{_render_scale(chart)}</figure>"
        for chart in charts
    )
    return f'<div class="plots {size}">\n{figures}\n</div>'


def _render_scale(chart: Chart) -> str:
    """Renders what the colours of a load map mean."""
    if chart.load_map is None:
        return ""
    most = chart.load_map.most
    return (
        f'<div class="scale"><i class="none"></i>no token<span>1/{most:.2g}</span>'
        f'<i class="ramp">1</i><span>{most:.2g} times the mean load</span></div>'
    )


def _notes(runs: list[RunView]) -> Iterable[str]:
    yield "Over the tokens consumed. Drag to zoom, double-click to see all again."
    yield "<noscript>Drawing needs JavaScript; the page loads nothing.</noscript>"
    n_points = min(POINTS_IN_A_CURVE, POINTS_IN_ALL // len(runs))
    if any(len(view.metrics.train) > n_points for view in runs):
        yield (
            f"Curves of more than {n_points} points are divided into {n_points} intervals: the "
            "line is the mean of each, the band spans its minimum to maximum."
        )
    if any(len(view.metrics.events) > MARKS_LIMIT for view in runs):
        yield f"At most {MARKS_LIMIT} marks of each kind are drawn."
    if any(view.metrics.abandoned for view in runs):
        yield (
            "Faint lines are steps that were repeated after a restart or rollback; only the last "
            "repetition counts."
        )


def _render_environment(runs: list[RunView]) -> str:
    versions = [load_facts(view.folder / "versions.json") for view in runs]
    columns = [{key: _as_text(value) for key, value in facts.items()} for facts in versions]
    headings = [view.name for view in runs] if len(runs) > 1 else []
    return render_table(_as_rows(columns, UNKNOWN), headings)


def _render_planned(view: RunView, *, alone: bool) -> str:
    title = "" if alone else f"<h3>{escape(view.name)}</h3>\n"
    return title + render_table(compare_with_plan(view), ["planned", "measured"])


def _render_samples(view: RunView, *, alone: bool) -> str:
    by_prompt: dict[str, list[Line]] = {}
    for line in view.metrics.samples:
        by_prompt.setdefault(str(line.get("prompt", "")), []).append(line)
    if not by_prompt:
        return ""
    parts = [f"<h2>{escape('Samples' if alone else f'Samples of {view.name}')}</h2>\n"]
    for prompt, lines in list(by_prompt.items())[:PROMPTS_SHOWN]:
        # Evenly spaced ones, including the first and the last.
        n_shown = min(SAMPLES_SHOWN, len(lines))
        shown = [lines[round(i * (len(lines) - 1) / max(1, n_shown - 1))] for i in range(n_shown)]
        newest, *earlier = (_render_sample(line, prompt) for line in reversed(shown))
        parts.append(newest)
        if earlier:
            parts.append(_folded("Earlier in training", "\n" + "\n".join(earlier)) + "\n")
    if len(by_prompt) > PROMPTS_SHOWN:
        n_left_out = len(by_prompt) - PROMPTS_SHOWN
        parts.append(f'<p class="muted">{n_left_out:,} more prompts are not shown.</p>\n')
    return "".join(parts)


def _render_sample(line: Line, prompt: str) -> str:
    text = str(line.get("text", "")).removeprefix(prompt)[:SAMPLE_CHARACTERS]
    text = re.sub(r"\n\s*\n\s*\n", "\n\n", text.rstrip()) or " (nothing but white space)"
    return (
        f'<div class="card sample"><small>step {line["step"]:,}</small>'
        f"<blockquote><b>{escape(prompt[:PROMPT_CHARACTERS])}</b>{escape(text)}</blockquote></div>\n"
    )


def _render_events(runs: list[RunView]) -> str:
    """Lists the events of all runs; if there are very many, only the first and the last."""
    events = [(view.name, event) for view in runs for event in view.metrics.events]
    if not events:
        return '<p class="muted">No restart, skipped step, failed save, dead expert or stop.</p>\n'
    note = ""
    if len(events) > EVENTS_SHOWN:
        n_left_out, half = len(events) - EVENTS_SHOWN, EVENTS_SHOWN // 2
        events = [*events[:half], *events[-half:]]
        note = f'<p class="muted">{n_left_out:,} between are not shown.</p>\n'
    several = len(runs) > 1
    rows = "\n".join(
        f'<tr><th scope="row">{event.step:,}</th>'
        + (f'<td class="run">{escape(name)}</td>' if several else "")
        + f"<td>{escape(event.text[:500])}</td></tr>"
        for name, event in events
    )
    headings = ["step", *(["run"] if several else []), "what"]
    head = "".join(f'<th scope="col">{heading}</th>' for heading in headings)
    return _boxed_table("events", head, rows) + note


def _render_settings(runs: list[RunView]) -> str:
    """Shows differences from the nearest preset first, then from the defaults; folds the rest."""
    defaults = _flatten(Run())
    columns, headings = [_flatten(view.run) for view in runs], [view.name for view in runs]
    first: list[str] = []
    parts = []
    if len(runs) == 1:
        headings = ["this run"]
        preset, compared = _find_nearest_preset(columns[0])
        first = _differing([*columns, compared])
        table = _render_fields(first, [*columns, compared], [*headings, f"preset {preset}"])
        parts.append(
            f'<p class="muted">Different from the nearest preset, {escape(preset)}:</p>\n{table}'
        )
    changed = _differing([*columns, defaults])
    rest = [key for key in changed if key not in first]
    same = [key for key in _as_rows(columns, "") if key not in {*changed, *OWN_FIELDS}]
    more = f"{len(rest)} {'more ' if first else ''}settings that are not the default"
    table = _render_fields(rest, [*columns, defaults], [*headings, "default"])
    parts += [
        _folded(more, f"\n{table}"),
        _folded(f"{len(same)} settings at their defaults", f"\n{_render_fields(same, [defaults])}"),
    ]
    return "\n".join(parts)


def _find_nearest_preset(fields: Fields) -> tuple[str, Fields]:
    """Finds the shipped preset that differs least from a run, and its values."""
    presets = {name: _flatten(load_run(name).run) for name in preset_names()}

    def distance(name: str) -> int:
        differing = _differing([presets[name], fields])
        return sum(not key.startswith(OWN_SECTIONS) for key in differing)

    nearest = min(sorted(presets), key=distance)
    return nearest, presets[nearest]


def _flatten(run: Run) -> Fields:
    """Maps dotted field names to values, as on the command line."""
    fields: Fields = {}

    def add(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                add(value, f"{prefix}{key}.")
            else:
                fields[prefix + key] = _as_text(value)

    add(run.model_dump(mode="json", exclude=unused_settings(run)), "")
    return fields


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _as_rows(columns: Sequence[Mapping[str, T]], missing: T) -> dict[str, list[T]]:
    """Turns columns of a table into its rows, in the order in which their keys first occur."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, missing) for column in columns] for key in keys}


def _differing(columns: Sequence[Fields]) -> list[str]:
    """Lists the fields whose values differ between columns; all runs have names of their own."""
    rows = _as_rows(columns, None).items()
    return [key for key, row in rows if key not in OWN_FIELDS and len(set(row)) > 1]


def _render_fields(keys: list[str], columns: list[Fields], headings: Iterable[str] = ()) -> str:
    rows = {key: [fields.get(key, UNKNOWN) for fields in columns] for key in keys}
    return render_table(rows, headings, css="fields")


def render_table(
    rows: Mapping[str, Sequence[str]],
    headings: Iterable[str] = (),
    marked: Collection[tuple[str, int]] = (),
    css: str = "",
) -> str:
    """Renders one row for each field.

    Args:
        rows: values by field.
        headings: of the columns; without any, the table has none.
        marked: cells to stand out, by field and number of the column.
        css: class of the table.
    """
    if not rows:
        return '<p class="muted">Nothing recorded.</p>'

    def cell(key: str, number: int, text: str) -> str:
        mark, end = ("<mark>", "</mark>") if (key, number) in marked else ("", "")
        return f"<td>{mark}{escape(text)}{end}</td>"

    body = "\n".join(
        f'<tr><th scope="row">{_breakable(key)}</th>'
        f"{''.join(cell(key, number, text) for number, text in enumerate(row))}</tr>"
        for key, row in rows.items()
    )
    names = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in headings)
    return _boxed_table(css, f"<td></td>{names}" if names else "", body)


def _breakable(key: str) -> str:
    """Lets a narrow screen break a field name between its words."""
    return escape(key).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _boxed_table(css: str, head: str, rows: str) -> str:
    """Renders a table in its own scroll area, for touch and keyboard."""
    head = f"<thead><tr>{head}</tr></thead>\n" if head else ""
    table = f'<table class="{css}">\n{head}<tbody>\n{rows}\n</tbody></table>'
    return f'<div class="card scroll" tabindex="0">{table}</div>'


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>{content}</details>"
