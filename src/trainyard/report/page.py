"""The report: one HTML file that shows how runs went, without scripts and without a network."""

from __future__ import annotations

import json
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from trainyard.config.run import Run
from trainyard.data.publish import publish_text
from trainyard.errors import MachineError
from trainyard.report.metrics import Line
from trainyard.report.plots import Plot, RunCurves, build_plots, render_svg, save_png
from trainyard.report.style import STYLE
from trainyard.report.summary import (
    UNKNOWN,
    ReportedRun,
    load_reported_run,
    summarise,
)

SAMPLES_SHOWN = 8  # of each prompt, from the first to the last
SAMPLE_CHARACTERS = 2000
# Even a text that got past the escaping could neither run nor fetch anything.
CONTENT_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Fields = dict[str, str]


def write_report(run_folders: list[Path], output: Path) -> None:
    """Writes the report of one or several runs, and each run's curves as PNG into its plots/.

    Raises:
        DataError: a folder is no run folder, or a file in it is malformed.
        ConfigError: a run.toml is not valid.
        MachineError: a file cannot be written.
    """
    runs = _distinguish([load_reported_run(folder) for folder in run_folders])
    for reported in runs:
        _save_plots(reported.folder / "plots", build_plots([build_curves(reported)]))
    together = build_plots([build_curves(reported) for reported in runs])
    publish_text(output, render_page(runs, together))


def render_page(runs: list[ReportedRun], plots: list[Plot]) -> str:
    """Renders the whole page."""
    title = f"Training report: {', '.join(reported.name for reported in runs)}"
    figures = "\n".join(f'<figure class="card">{render_svg(plot)}</figure>' for plot in plots)
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
{"".join(_render_heading(reported, alone=len(runs) == 1) for reported in runs)}
</header>
<main>
<h2>Summary</h2>
{_render_tiles(runs[0]) if len(runs) == 1 else _render_comparison(runs)}
<h2>Curves</h2>
<div class="plots">
{figures}
</div>
{"".join(_render_samples(reported, alone=len(runs) == 1) for reported in runs)}
<h2>Settings</h2>
{_render_settings(runs)}
<h2>Environment</h2>
{_render_table([{k: _text(v) for k, v in reported.versions.items()} for reported in runs], runs)}
</main>
</body>
</html>
"""


def _distinguish(runs: list[ReportedRun]) -> list[ReportedRun]:
    """Adds the folder to names that several runs share."""
    names = [reported.name for reported in runs]
    return [
        replace(reported, name=f"{reported.name} ({reported.folder})")
        if names.count(reported.name) > 1
        else reported
        for reported in runs
    ]


def build_curves(reported: ReportedRun) -> RunCurves:
    """Picks what is drawn of a run."""
    unigram_loss = reported.evaluation.get("unigram_loss")
    return RunCurves(
        reported.name, reported.metrics, reported.run.model.sequence_length, unigram_loss
    )


def _save_plots(folder: Path, plots: list[Plot]) -> None:
    try:
        folder.mkdir(exist_ok=True)
        for plot in plots:
            save_png(plot, folder)
    except OSError as error:
        raise MachineError(
            f"cannot write plots into {folder}: {error.strerror}",
            "make the run folder writable, or copy it to where you may write",
        ) from None


def _render_heading(reported: ReportedRun, *, alone: bool) -> str:
    model, metrics = reported.run.model, reported.metrics
    parts = [
        f"{model.n_layers} blocks of width {model.d_model}, {model.n_heads} heads",
        f"sequences of {model.sequence_length} tokens",
        f"precision {reported.run.precision.kind}",
        *([f"on {metrics.device}"] if metrics.device else []),
        f"ended: {metrics.reason}" if metrics.reason else "not ended, or ended without saying why",
    ]
    facts = escape("; ".join(parts))
    if not alone:
        return f'<p class="muted"><b>{escape(reported.name)}</b>: {facts}.</p>\n'
    return f'<p class="muted">{facts}.</p>\n<p>{escape(reported.run.description)}</p>\n'


def _render_tiles(reported: ReportedRun) -> str:
    tiles = "\n".join(
        f'<div class="card tile"><dt>{escape(figure.label)}</dt>'
        f'<dd class="value">{escape(figure.value)}</dd>'
        f"<dd><small>{escape(figure.meaning)}</small></dd></div>"
        for figure in summarise(reported)
        if figure.value != UNKNOWN
    )
    return f'<dl class="tiles">\n{tiles}\n</dl>'


def _render_comparison(runs: list[ReportedRun]) -> str:
    columns = [{figure.label: figure.value for figure in summarise(run)} for run in runs]
    return _render_table(columns, runs, css="summary")


def _render_samples(reported: ReportedRun, *, alone: bool) -> str:
    prompts = dict.fromkeys(str(line.get("prompt", "")) for line in reported.metrics.samples)
    if not prompts:
        return ""
    title = "Samples" if alone else f"Samples of {reported.name}"
    parts = [f"<h2>{escape(title)}</h2>\n"]
    for prompt in prompts:
        lines = [line for line in reported.metrics.samples if str(line.get("prompt", "")) == prompt]
        newest, *earlier = reversed(_spread(lines))
        parts.append(_render_sample(newest, prompt))
        if earlier:
            texts = "\n".join(_render_sample(line, prompt) for line in earlier)
            parts.append(f"<details><summary>Earlier in training</summary>\n{texts}</details>\n")
    return "".join(parts)


def _spread(lines: list[Line]) -> list[Line]:
    """Picks lines at equal distances, the first and the last among them."""
    n_shown = min(SAMPLES_SHOWN, len(lines))
    return [lines[round(i * (len(lines) - 1) / max(1, n_shown - 1))] for i in range(n_shown)]


def _render_sample(line: Line, prompt: str) -> str:
    text = str(line.get("text", "")).removeprefix(prompt)[:SAMPLE_CHARACTERS]
    return (
        f'<div class="card sample"><small>step {line["step"]:,}</small>'
        f"<blockquote><b>{escape(prompt)}</b>{escape(text)}</blockquote></div>\n"
    )


def _render_settings(runs: list[ReportedRun]) -> str:
    """Shows what differs from the defaults; the rest can be unfolded."""
    defaults = _flatten(Run().model_dump(mode="json"))
    columns = [_flatten(reported.run.model_dump(mode="json")) for reported in runs]
    for fields in columns:
        del fields["name"], fields["description"]
    keys = list(dict.fromkeys(key for fields in columns for key in fields))
    changed = {key for key in keys if any(f.get(key) != defaults.get(key) for f in columns)}
    chosen = [{key: f.get(key, UNKNOWN) for key in keys if key in changed} for f in columns]
    others = {key: defaults[key] for key in keys if key not in changed}
    note = "Values that are not the default are <mark>marked</mark>." if len(runs) > 1 else ""
    return (
        f'<p class="muted">{len(changed)} settings differ from their defaults. {note}</p>\n'
        f"{_render_table(chosen, runs, defaults)}\n"
        f"<details><summary>{len(others)} settings at their defaults</summary>\n"
        f"{_render_table([others], runs[:1])}</details>"
    )


def _render_table(
    columns: list[Fields], runs: list[ReportedRun], defaults: Fields | None = None, css: str = ""
) -> str:
    """Renders one row for each field and one column for each run."""
    keys = list(dict.fromkeys(key for column in columns for key in column))
    if not keys:
        return '<p class="muted">Nothing recorded.</p>'
    head = ""
    if len(columns) > 1:
        names = "".join(f'<th scope="col">{escape(reported.name)}</th>' for reported in runs)
        head = f"<thead><tr><td></td>{names}</tr></thead>\n"
    rows = "\n".join(
        f'<tr><th scope="row">{_breakable(key)}</th>'
        + "".join(_render_cell(column.get(key, UNKNOWN), key, defaults) for column in columns)
        + "</tr>"
        for key in keys
    )
    table = f'<table class="{css}">\n{head}<tbody>\n{rows}\n</tbody></table>'
    return f'<div class="card scroll" tabindex="0">{table}</div>'


def _render_cell(value: str, key: str, defaults: Fields | None) -> str:
    text = escape(value)
    is_changed = defaults is not None and value != defaults.get(key)
    return f"<td><mark>{text}</mark></td>" if is_changed else f"<td>{text}</td>"


def _breakable(key: str) -> str:
    """Lets a narrow screen break a field's name where its words end."""
    return escape(key).replace(".", ".<wbr>").replace("_", "_<wbr>")


def _flatten(values: dict[str, Any], prefix: str = "") -> Fields:
    """Names nested values by their dotted fields, as a run file on the command line does."""
    fields: Fields = {}
    for key, value in values.items():
        if isinstance(value, dict):
            fields |= _flatten(value, f"{prefix}{key}.")
        else:
            fields[prefix + key] = _text(value)
    return fields


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
