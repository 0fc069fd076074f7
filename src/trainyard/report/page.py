"""The report: one HTML file on one or more runs, without scripts or network access."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from html import escape
from pathlib import Path

from trainyard.errors import MachineError
from trainyard.files import publish_text
from trainyard.report.history import Line
from trainyard.report.pictures import render_svg, save_png
from trainyard.report.planned import compare_with_plan
from trainyard.report.plots import (
    LOSS,
    MARKS_LIMIT,
    POINTS_IN_A_CURVE,
    POINTS_IN_ALL,
    RunCurves,
    build_plot,
    build_plots,
)
from trainyard.report.style import STYLE
from trainyard.report.summary import UNKNOWN, ReportedRun, load_reported_run, summarize
from trainyard.report.tables import as_text, render_events, render_settings, render_table

SAMPLES_SHOWN = 8  # of each prompt, from the first to the last
PROMPTS_SHOWN = 12
SAMPLE_CHARACTERS = 1200
PROMPT_CHARACTERS = 300
# Even a text that got past the escaping could neither run nor fetch anything.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_folders: list[Path], output: Path, png_folder: Path | None = None) -> None:
    """Writes the report of one or more runs.

    Args:
        run_folders: of the runs, in the order in which they are shown.
        output: the file to write.
        png_folder: where each curve is written as a PNG too.

    Raises:
        DataError: a folder is no run folder, or a file in it is malformed.
        ConfigError: a run.toml is not valid.
        MachineError: a file cannot be written.
    """
    runs = _distinguish([load_reported_run(folder) for folder in run_folders])
    if png_folder is not None:
        _save_plots(png_folder, [build_curves(reported) for reported in runs])
    publish_text(output, render_page(runs))


def render_page(runs: list[ReportedRun]) -> str:
    """Renders the whole page."""
    alone = len(runs) == 1
    names = [reported.name for reported in runs]
    title = f"Training report: {', '.join(names) if len(runs) <= 3 else f'{len(runs)} runs'}"
    versions = [{k: as_text(v) for k, v in reported.versions.items()} for reported in runs]
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{escape(CONTENT_POLICY)}">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
{"".join(_render_heading(reported, alone=alone) for reported in runs)}
</header>
<main>
<h2>Summary</h2>
{_render_tiles(runs[0]) if alone else _render_comparison(runs)}
<h2>Curves</h2>
{_render_curves(runs)}
<h2>Restarts, skipped steps and failed saves</h2>
{render_events(runs)}
<h2>Plan against measured</h2>
{"".join(_render_planned(reported, alone=alone) for reported in runs)}
{"".join(_render_samples(reported, alone=alone) for reported in runs)}
<h2>Settings</h2>
{render_settings(runs)}
<h2>Environment</h2>
{render_table(versions, [] if alone else names)}
</main>
</body>
</html>
"""


def _distinguish(runs: list[ReportedRun]) -> list[ReportedRun]:
    """Appends the folder to names shared by several runs."""
    names = [reported.name for reported in runs]
    return [
        replace(reported, name=f"{reported.name} ({reported.folder})")
        if names.count(reported.name) > 1
        else reported
        for reported in runs
    ]


def build_curves(reported: ReportedRun) -> RunCurves:
    """Selects the curves of a run to draw."""
    return RunCurves(reported.name, reported.metrics, reported.evaluation.get("unigram_loss"))


def _save_plots(folder: Path, runs: list[RunCurves]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for plot in build_plots(runs):
            save_png(plot, folder)
    except OSError as error:
        raise MachineError(
            f"cannot write plots to {folder}: {error.strerror}",
            "pass a writable folder to --png",
        ) from None


def _render_heading(reported: ReportedRun, *, alone: bool) -> str:
    model, metrics = reported.run.model, reported.metrics
    parts = [
        f"{model.n_layers} blocks of width {model.d_model}, {model.n_heads} heads",
        f"sequences of {model.sequence_length} tokens",
        f"precision {reported.run.precision.kind}",
        *([f"on {metrics.device}"] if metrics.device else []),
        f"ended: {reported.reason}"
        if reported.reason
        else "still running, or ended for an unknown reason",
    ]
    facts = escape("; ".join(parts))
    damage = f'<p class="alert">{escape(metrics.damage)}.</p>\n' if metrics.damage else ""
    if not alone:
        return f'<p class="muted"><b>{escape(reported.name)}</b>: {facts}.</p>\n{damage}'
    return f'<p class="muted">{facts}.</p>\n<p>{escape(reported.run.description)}</p>\n{damage}'


def _render_tiles(reported: ReportedRun) -> str:
    tiles = "\n".join(
        f'<div class="card tile"><dt>{escape(figure.label)}</dt>'
        f'<dd class="value">{escape(figure.value)}</dd>'
        f"<dd><small>{escape(figure.meaning)}</small></dd></div>"
        for figure in summarize(reported)
        if figure.value != UNKNOWN
    )
    return f'<dl class="tiles">\n{tiles}\n</dl>'


def _render_comparison(runs: list[ReportedRun]) -> str:
    columns = [{figure.label: figure.value for figure in summarize(run)} for run in runs]
    known = {key for column in columns for key, value in column.items() if value != UNKNOWN}
    columns = [{key: column[key] for key in column if key in known} for column in columns]
    return render_table(columns, [reported.name for reported in runs])


def _render_curves(runs: list[ReportedRun]) -> str:
    """Draws the loss twice: large for a screen, and small for a phone."""
    curves = [build_curves(reported) for reported in runs]
    large = render_svg(build_plot(LOSS, curves, scale=2), "large-")
    loss, *others = (render_svg(plot) for plot in build_plots(curves))
    figures = [
        f'<figure class="card large">{large}</figure>',
        f'<figure class="card small">{loss}</figure>',
        *(f'<figure class="card">{svg}</figure>' for svg in others),
    ]
    n_points = min(POINTS_IN_A_CURVE, POINTS_IN_ALL // len(runs))
    notes = []
    if any(len(run.metrics.train) > n_points for run in curves):
        notes.append(
            f"Curves of more than {n_points} points are divided into {n_points} intervals: the "
            "line is the mean of each, the band spans its minimum to maximum."
        )
    if any(n > MARKS_LIMIT for run in curves for n in _count_by_kind(run)):
        notes.append(f"At most {MARKS_LIMIT} marks of each kind are drawn.")
    if any(run.metrics.abandoned for run in curves):
        notes.append(
            "Faint lines are steps that were repeated after a restart or rollback; only the last "
            "repetition counts."
        )
    note = f'\n<p class="muted">{" ".join(notes)}</p>' if notes else ""
    return f'<div class="plots">\n{chr(10).join(figures)}\n</div>{note}'


def _count_by_kind(run: RunCurves) -> Iterable[int]:
    return Counter(event.kind for event in run.metrics.events).values()


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
    return (
        f'<div class="card sample"><small>step {line["step"]:,}</small>'
        f"<blockquote><b>{escape(prompt[:PROMPT_CHARACTERS])}</b>{escape(text)}</blockquote></div>\n"
    )
