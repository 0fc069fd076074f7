"""The report: one HTML file on one or more runs, drawn without a server or network access."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path

from trainyard import errors
from trainyard.architecture import describe_parts
from trainyard.errors import explain_failure
from trainyard.files import publish_text
from trainyard.report.charts import (
    MARKS_LIMIT,
    POINTS_IN_A_CURVE,
    POINTS_IN_ALL,
    UNIGRAM,
    Chart,
    RunCurves,
    build_charts,
)
from trainyard.report.history import Line
from trainyard.report.next_steps import next_steps
from trainyard.report.planned import compare_with_plan
from trainyard.report.scores import list_scores
from trainyard.report.style import STYLE
from trainyard.report.summary import (
    UNKNOWN,
    Figure,
    ReportedRun,
    find_best,
    have_comparable_losses,
    have_equal_lengths,
    load_reported_run,
    summarize,
)
from trainyard.report.tables import (
    as_text,
    describe_lineage,
    render_differences,
    render_events,
    render_settings,
    render_table,
)
from trainyard.units import format_number

SAMPLES_SHOWN = 8  # of each prompt, from the first to the last
PROMPTS_SHOWN = 12
SAMPLE_CHARACTERS = 1200
PROMPT_CHARACTERS = 300
N_TILES = 6
NOT_MARKED = "No best value is marked: the runs have trained on different numbers of tokens."


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
    runs = _distinguish([load_reported_run(folder) for folder in run_folders])
    charts = build_charts([build_curves(reported, baselines or {}) for reported in runs])
    if png_folder is not None:
        _save_charts(png_folder, charts)
    publish_text(output, errors.escape(render_page(runs, charts)))


def render_page(runs: list[ReportedRun], charts: list[Chart]) -> str:
    """Renders the whole page."""
    alone = len(runs) == 1
    names = [reported.name for reported in runs]
    title = f"Training report: {', '.join(names) if len(runs) <= 3 else f'{len(runs)} runs'}"
    versions = [{k: as_text(v) for k, v in reported.versions.items()} for reported in runs]
    script = _script()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Even a text that got past the escaping could neither run nor fetch anything.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">
<title>{escape(title)}</title>
<style>{_asset("uplot/uPlot.min.css")}{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{"".join(_render_heading(reported, alone=alone) for reported in runs)}
</header>
<main>
{"" if alone else _render_comparison(runs)}
<section class="curves">
{_render_charts(charts[:1], runs)}
</section>
{_render_tiles(runs[0]) if alone else ""}
{_render_scores(runs)}
{_render_next(runs)}
{"".join(_render_samples(reported, alone=alone) for reported in runs)}
<h2>Other curves</h2>
{_render_charts(charts[1:], [])}
<h2>Settings</h2>
{render_settings(runs)}
<h2>Restarts, skipped steps and failed saves</h2>
{render_events(runs)}
<h2>Plan against measured</h2>
{"".join(_render_planned(reported, alone=alone) for reported in runs)}
<h2>Environment</h2>
{render_table(versions, [] if alone else names)}
</main>
<script type="application/json" id="charts">{_embed([chart.as_json() for chart in charts])}</script>
<script>{script}</script>
</body>
</html>
"""


@cache
def _asset(name: str) -> str:
    return files("trainyard.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _script() -> str:
    licence = f"/*\n{_asset('uplot/LICENSE')}*/\n"
    return f"{licence}{_asset('uplot/uPlot.iife.min.js')}\n{_asset('charts.js')}"


def _embed(value: object) -> str:
    """Renders JSON that no HTML parser takes for markup."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _distinguish(runs: list[ReportedRun]) -> list[ReportedRun]:
    """Appends the folder to names shared by several runs; takes losses of the same kind."""
    if len(runs) > 1:  # evaluation.json may be of any text
        newest = [(one.metrics.held_out_losses or [{}])[-1] for one in runs]
        pairs = zip(runs, newest, strict=True)
        runs = [replace(one, evaluation=one.evaluation | found) for one, found in pairs]
    names = [reported.name for reported in runs]
    return [
        replace(reported, name=f"{reported.name} ({reported.folder})")
        if names.count(reported.name) > 1
        else reported
        for reported in runs
    ]


def build_curves(reported: ReportedRun, baselines: Mapping[str, float]) -> RunCurves:
    """Selects the curves of a run to draw."""
    unigram = reported.evaluation.get("unigram_loss")
    known = {} if unigram is None else {UNIGRAM: unigram}
    return RunCurves(reported.name, reported.metrics, {**known, **baselines})


def _save_charts(folder: Path, charts: list[Chart]) -> None:
    from trainyard.report.pictures import save_png  # the page needs no matplotlib

    with explain_failure(f"cannot write plots to {folder}", "pass a writable folder to --png"):
        folder.mkdir(parents=True, exist_ok=True)
        for chart in charts:
            save_png(chart, folder)


def _render_heading(reported: ReportedRun, *, alone: bool) -> str:
    model, metrics = reported.run.model, reported.metrics
    parts = [
        f"{format_number(model.n_layers, 'block')} of width {model.d_model}, "
        f"{format_number(model.n_heads, 'head')}",
        f"sequences of {model.sequence_length} tokens",
        *describe_parts(model),
        f"precision {reported.run.precision.kind}",
        *([f"on {metrics.device}"] if metrics.device else []),
        f"ended: {reported.reason}"
        if reported.reason
        else "still running, or ended for an unknown reason",
    ]
    facts = escape("; ".join(parts))
    lineage = "".join(f"<p>{escape(text)}.</p>\n" for text in describe_lineage(reported))
    damage = lineage + f'<p class="alert">{escape(metrics.damage)}.</p>\n' * bool(metrics.damage)
    if not alone:
        return f'<p class="muted"><b>{escape(reported.name)}</b>: {facts}.</p>\n{damage}'
    return f'<p class="muted">{facts}.</p>\n<p>{escape(reported.run.description)}</p>\n{damage}'


def _render_tiles(reported: ReportedRun) -> str:
    known = [figure for figure in summarize(reported) if figure.value != UNKNOWN]
    tiles = "\n".join(
        f'<div class="card tile"><dt>{escape(figure.label)}</dt>'
        f'<dd class="value">{escape(figure.value)}</dd>'
        f"<dd><small>{escape(figure.meaning)}</small></dd></div>"
        for figure in known[:N_TILES]
    )
    others = {one.label: f"{one.value} {one.meaning}".strip() for one in known[N_TILES:]}
    return (
        f'<h2>Summary</h2>\n<dl class="tiles">\n{tiles}\n</dl>\n'
        f"<details><summary>{len(others)} more figures</summary>"
        f"{render_table([others], [])}</details>"
    )


def _render_comparison(runs: list[ReportedRun]) -> str:
    """Renders the settings that differ, then the figures, the best value of each marked."""
    summaries = [{one.label: one for one in summarize(run)} for run in runs]
    rows: list[list[Figure]] = [
        list(row) for row in zip(*(one.values() for one in summaries), strict=True)
    ]
    rows = [row for row in rows if any(one.value != UNKNOWN for one in row)]
    columns = [{row[i].label: row[i].value for row in rows} for i in range(len(runs))]
    comparable, marked = have_comparable_losses(runs), rows if have_equal_lengths(runs) else []
    best = {(i, row[0].label) for row in marked for i in find_best(row, comparable=comparable)}
    note = "" if comparable else " Losses per token are not compared: tokenizer or data differ."
    note = f"Marked: the best value.{note}" if marked else NOT_MARKED
    return (
        f"<h2>Settings that differ</h2>\n{render_differences(runs)}\n<h2>Summary</h2>\n"
        f'<p class="muted">{note}</p>\n'
        f"{render_table(columns, [reported.name for reported in runs], best)}"
    )


def _render_scores(runs: list[ReportedRun]) -> str:
    """Renders the scores of tasks, of several runs the best of each marked; empty without any."""
    found = [{one.label: one for one in list_scores(run.evaluation)} for run in runs]
    labels = list(dict.fromkeys(label for scores in found for label in scores))
    if not labels:
        return ""
    missing = Figure("", UNKNOWN)
    rows = {label: [scores.get(label, missing) for scores in found] for label in labels}
    columns: list[dict[str, str]] = [
        {
            label: f"{row[i].value} ({row[i].meaning})" if row[i].meaning else UNKNOWN
            for label, row in rows.items()
        }
        for i in range(len(runs))
    ]
    marked = rows if have_equal_lengths(runs) else {}
    best = {(i, label) for label, row in marked.items() for i in find_best(row, comparable=True)}
    names = [] if len(runs) == 1 else [run.name for run in runs]
    note = "" if len(runs) == 1 else " Marked: the best value." if marked else f" {NOT_MARKED}"
    return (
        f'<h2>Tasks</h2>\n<p class="muted">Zero-shot, by the rules of lm-eval, ± one standard '
        f"error.{note}</p>\n{render_table(columns, names, best)}\n"
    )


def _render_next(runs: list[ReportedRun]) -> str:
    rows = "\n".join(
        f"<p>{escape(what)}</p>\n<pre>{escape(command)}</pre>" for what, command in next_steps(runs)
    )
    return f'<h2>What to do next</h2>\n<div class="card next">{rows}</div>\n'


def _render_charts(charts: list[Chart], runs: list[ReportedRun]) -> str:
    """Renders the places of charts, which the script fills, and notes on what they show."""
    size = "large" if runs else "small"
    figures = "\n".join(
        f'<figure class="card"><figcaption>{escape(chart.title)}</figcaption>'
        f'<div class="{size}" id="chart-{chart.name}" role="img" '
        f'aria-label="{escape(chart.title)}. {escape(chart.description)}">'
        f"{'' if chart.series else 'nothing logged'}</div></figure>"
        for chart in charts
    )
    page = f'<div class="plots {size}">\n{figures}\n</div>'
    return f'{page}\n<p class="muted">{" ".join(_notes(runs))}</p>' if runs else page


def _notes(runs: list[ReportedRun]) -> Iterable[str]:
    yield "Over the tokens consumed. Drag to zoom, double-click to see all again."
    yield "<noscript>Drawing needs JavaScript; the page loads nothing.</noscript>"
    n_points = min(POINTS_IN_A_CURVE, POINTS_IN_ALL // len(runs))
    if any(len(run.metrics.train) > n_points for run in runs):
        yield (
            f"Curves of more than {n_points} points are divided into {n_points} intervals: the "
            "line is the mean of each, the band spans its minimum to maximum."
        )
    if any(len(run.metrics.events) > MARKS_LIMIT for run in runs):
        yield f"At most {MARKS_LIMIT} marks of each kind are drawn."
    if any(run.metrics.abandoned for run in runs):
        yield (
            "Faint lines are steps that were repeated after a restart or rollback; only the last "
            "repetition counts."
        )


def _render_planned(reported: ReportedRun, *, alone: bool) -> str:
    rows = compare_with_plan(reported)
    columns = [{key: pair[side] for key, pair in rows.items()} for side in (0, 1)]
    title = "" if alone else f"<h3>{escape(reported.name)}</h3>\n"
    return title + render_table(columns, ["planned", "measured"])


def _render_samples(reported: ReportedRun, *, alone: bool) -> str:
    prompts = list(dict.fromkeys(str(line.get("prompt", "")) for line in reported.metrics.samples))
    if not prompts:
        return ""
    title = "Samples" if alone else f"Samples of {reported.name}"
    parts = [f"<h2>{escape(title)}</h2>\n"]
    for prompt in prompts[:PROMPTS_SHOWN]:
        lines = [line for line in reported.metrics.samples if str(line.get("prompt", "")) == prompt]
        newest, *earlier = reversed(_spread(lines))
        parts.append(_render_sample(newest, prompt))
        if earlier:
            texts = "\n".join(_render_sample(line, prompt) for line in earlier)
            parts.append(f"<details><summary>Earlier in training</summary>\n{texts}</details>\n")
    if len(prompts) > PROMPTS_SHOWN:
        n_left_out = len(prompts) - PROMPTS_SHOWN
        parts.append(f'<p class="muted">{n_left_out:,} more prompts are not shown.</p>\n')
    return "".join(parts)


def _spread(lines: list[Line]) -> list[Line]:
    """Picks evenly spaced lines, including the first and the last."""
    n_shown = min(SAMPLES_SHOWN, len(lines))
    return [lines[round(i * (len(lines) - 1) / max(1, n_shown - 1))] for i in range(n_shown)]


def _render_sample(line: Line, prompt: str) -> str:
    text = str(line.get("text", "")).removeprefix(prompt)[:SAMPLE_CHARACTERS]
    text = re.sub(r"\n\s*\n\s*\n", "\n\n", text.rstrip()) or " (nothing but white space)"
    return (
        f'<div class="card sample"><small>step {line["step"]:,}</small>'
        f"<blockquote><b>{escape(prompt[:PROMPT_CHARACTERS])}</b>{escape(text)}</blockquote></div>\n"
    )
