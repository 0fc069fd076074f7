from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from trainyard.config.load import load_run
from trainyard.config.rules import change
from trainyard.errors import UserError
from trainyard.report.charts import build_charts
from trainyard.report.figures import next_steps
from trainyard.report.page import render_page, write_report
from trainyard.report.run_view import read_run
from trainyard.units import Length

from .conftest import EVIL, run_lines, train_line

MakeRunFolder = Callable[..., Path]
VOID = {"meta", "wbr", "br", "link", "img", "input", "hr"}
N_CHARTS = 5
LEAST_OF_TEXT, LEAST_OF_LINES = 4.5, 3.0
"""Ratios of luminance that WCAG 2.2 asks for (1.4.3 and 1.4.11)."""
MAY_LOAD = ("src", "href", "xlink:href", "action", "data", "poster", "srcset")


class Page(HTMLParser):
    """Checks that tags are balanced, and collects text and whatever could load or run."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.active: list[str] = []
        """Attributes that load something or run a script."""
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in MAY_LOAD and (value or "")[:1] != "#"):
                self.active.append(f"{tag} {name}={value}")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert tag in VOID or self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def report(*folders: Path) -> str:
    """Renders the page alone, without files."""
    runs = [read_run(folder) for folder in folders]
    return render_page(runs, build_charts(runs))


def charts_of(html: str) -> list[dict[str, Any]]:
    """Reads the data that the page's script draws."""
    data = html.split('id="charts">')[1].split("</script>")[0]
    assert not set("<>&") & set(data)
    charts: list[dict[str, Any]] = json.loads(data)
    return charts


@pytest.fixture(scope="module")
def html(make_run_folder: MakeRunFolder) -> str:
    return report(make_run_folder())


def test_the_report_is_one_well_formed_file_that_loads_nothing_and_runs_its_own_script(
    html: str,
) -> None:
    page = Page(html)
    assert page.active == []
    assert not {"img", "link", "iframe", "object"} & set(page.tags)
    assert page.tags.count("script") == 2  # the data, and what draws them
    script = html.split("<script>")[1].split("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f'script-src &#x27;sha256-{digest}&#x27;"' in html  # no other script can run
    assert "Permission is hereby granted" in script  # uPlot's licence travels with it
    assert "url(" not in html and "@import" not in html
    assert len(html) < 200_000
    assert html.count('role="img" aria-label="') == N_CHARTS
    # What a model or a user wrote is text: the description and a sample.
    assert page.text.count(EVIL) == 2 and "a <b>GPU</b>" in page.text


def test_the_numbers_of_the_run_are_there(html: str) -> None:
    text = " ".join(Page(html).text.split())
    for number in (
        "Held-out loss4.5000nats per token, latest",
        "Best held-out loss4.5000nats per token, at step 20",
        "Perplexity90.02 on",
        "Training loss4.0000",
        "Parameters137k",
        "Tokens10.2k consumed",
        "Steps20 of 50",
        "Time21swithout pauses",
        "Tokens/s512per device",
        "Peak memory3.0 GiB a",
        "Restarts0",
        "What to do next",
        " train.length='40 steps'",
        "Skipped steps2 no update",
        "52 of step 5 skipped",
        "Steps5020",
        "Tokens25,60010,240",
        "Model FLOP2.05e+108.19e+09",
        "Checkpoint1.6 MiB",
        "torch9.9.9",
        "ended: done",
        "train.seed7",
        "2 blocks of width 64, 4 heads",
    ):
        assert number in text, number
    assert "Bits per byte" not in text  # not known


def score(accuracy: float, **others: object) -> dict[str, object]:
    return {"n_items": 1000, "step": 20, "accuracy": accuracy, "accuracy_stderr": 0.01, **others}


def test_scores_of_tasks_are_listed_and_of_several_runs_the_best_marked(
    make_run_folder: MakeRunFolder,
) -> None:
    one, two = make_run_folder("one"), make_run_folder("two")
    assert "<h2>Tasks</h2>" not in report(one)
    final = {"loss": 4.25, "perplexity": 70.1, "bits_per_byte": 1.5, "unigram_loss": 5.75}
    tasks = {"lambada/test": score(0.5, perplexity=12.5), "blimp/a<b>": score(0.75)}
    (one / "evaluation.json").write_text(json.dumps({**final, "tasks": tasks}))
    others = {
        "lambada/test": score(0.25, perplexity=10.0),
        **{f"blimp/{name}": score(value) for name, value in (("a<b>", 0.8), ("b", 0.6))},
        **{"odd": 3, "piqa/odd": {"n_items": "x"}, "arc/none": score(math.nan)},
    }
    (two / "evaluation.json").write_text(json.dumps({"tasks": others}))
    # The final evaluation wins over those in training.
    for number in ("4.2500", "1.5000", "5.7500", "token frequencies alone: 5.75"):
        assert number in Page(report(one)).text
    alone = Page(report(two)).text
    assert "blimp, mean of 2 files, accuracy70.00% ± 0.71% (2,000 items, step 20)" in alone
    assert "lambada/test perplexity10.00 (1,000 items, step 20)" in alone
    assert "odd" not in alone
    html = report(one, two).replace(" (1,000 items, step 20)", "")
    for row in (
        "<td><mark>50.00% ± 1.00%</mark></td><td>25.00% ± 1.00%</td>",
        "<td>12.50</td><td><mark>10.00</mark></td>",
        "<td>75.00% ± 1.00%</td><td><mark>80.00% ± 1.00%</mark></td>",
        "a&lt;b&gt;",
    ):
        assert row in html


def test_settings_that_are_not_those_of_the_nearest_preset_come_first(html: str) -> None:
    row = '<th scope="row">train.<wbr>seed</th><td>7</td><td>1234</td>'
    assert html.index("Different from the nearest preset, tiny:") < html.index(row)
    assert html.index(row) < html.index("settings that are not the default")
    assert '<th scope="col">preset tiny</th>' in html
    assert '<th scope="row">model.<wbr>tied_<wbr>embeddings</th><td>true</td>' in html


def test_of_runs_compared_the_best_values_are_marked_and_their_differences_on_top(
    make_run_folder: MakeRunFolder,
) -> None:
    better = [line | ({"loss": 4.0} if line["kind"] == "evaluate" else {}) for line in run_lines()]
    one, two = make_run_folder("one"), make_run_folder("two", lines=better)
    settings = (two / "run.toml").read_text()
    (two / "run.toml").write_text(settings.replace("seed = 7", "seed = 8"))
    (one / "evaluation.json").write_text('{"loss": 1.0}')  # of another text
    write_report([one, two], one / "report.html")
    html = (one / "report.html").read_text(encoding="utf-8")
    row = '<th scope="row">train.<wbr>seed</th><td>7</td><td>8</td>'
    best = '<th scope="row">Held-out loss</th><td>4.5000</td><td><mark>4.0000</mark></td>'
    assert html.index(row) < html.index(best) < html.index('id="chart-loss"')
    assert len(charts_of(html)) == N_CHARTS
    assert "Training report: one, two" in html
    assert "Frequency loss" not in html  # known of neither
    # Losses per token of two tokenizers cannot be compared.
    (two / "run.toml").write_text(settings.replace('path = ""', 'path = "gpt2"'))
    html = report(one, two)
    assert "Losses per token are not compared: tokenizer or data differ." in html
    assert "<mark>4.0000</mark>" not in html
    (two / "run.toml").write_text(settings)
    assert "None: the runs have the same settings." in report(one, two)


def test_of_runs_of_different_lengths_no_value_is_marked(make_run_folder: MakeRunFolder) -> None:
    folders = make_run_folder("one"), make_run_folder("two", lines=run_lines(10))
    for folder, accuracy in zip(folders, (0.5, 0.6), strict=True):
        (folder / "evaluation.json").write_text(json.dumps({"tasks": {"arc": score(accuracy)}}))
    html = report(*folders)
    assert html.count("No best value is marked") == 2
    assert "<mark>" not in html


def test_a_setting_without_effect_does_not_differ(make_run_folder: MakeRunFolder) -> None:
    one, two = make_run_folder("one"), make_run_folder("two")
    settings = (two / "run.toml").read_text()
    for kind, is_listed in (("cosine", False), ("warmup_stable_decay", True)):
        changed = settings.replace('kind = "cosine"', f'kind = "{kind}"')
        (two / "run.toml").write_text(re.sub('cooldown = ".*"', 'cooldown = "7 steps"', changed))
        differing = report(one, two).partition("<h2>Summary</h2>")[0]
        assert ("cooldown" in differing) == is_listed


def test_names_and_prompts_cannot_leave_the_data_of_the_script(
    make_run_folder: MakeRunFolder,
) -> None:
    run = replace(read_run(make_run_folder()), name=EVIL)
    html = render_page([run], build_charts([run], {EVIL: 3.0}))
    assert Page(html).active == [] and Page(html).tags.count("script") == 2
    labels = [one["label"] for one in charts_of(html)[0]["series"]]
    assert labels[0] == EVIL and labels[-1] == f"{EVIL}: 3"


def test_a_run_that_stopped_is_continued_and_its_words_are_quoted(
    make_run_folder: MakeRunFolder,
) -> None:
    folder = make_run_folder(lines=run_lines()[:-1])
    folder = folder.rename(folder.with_name("a b"))
    run = read_run(folder)
    commands = dict(next_steps([run]))
    *command, named = shlex.split(commands["Continue where it stopped:"])
    assert command == ["trainyard", "train"]
    assert load_run(named).run == run.run  # not the preset of its name
    assert commands["Follow while it runs:"] == f"trainyard status '{folder}' --follow"
    assert "Train longer:" not in commands


def test_what_did_not_go_straight_on_is_marked_and_listed(make_run_folder: MakeRunFolder) -> None:
    lines = [
        {"kind": "start", "time": 0, "step": 0, "resumed": False, "device": "cpu"},
        *(train_line(step, 5.0) for step in range(1, 11)),
        {"kind": "rollback", "time": 11, "step": 5, "from_step": 10, "skipped_sequences": 40},
        {"kind": "save failed", "time": 12, "step": 5, "problem": "no <room>"},
        *(train_line(step, 4.0) for step in range(6, 9)),
        {"kind": "start", "time": 20, "step": 7, "resumed": True, "device": "cpu"},
        train_line(8, 3.0),
    ]
    folder = make_run_folder(lines=lines)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("<nonsense>\n")
    (folder / "outcome.json").write_text('{"reason": "10 steps in a row\\nat", "exit_code": 93}')
    html = report(folder)
    text = Page(html).text
    for part in (
        "rolled back to step 5 from step 10; the 40 sequences between are skipped",
        "a checkpoint was not saved: no <room>",
        "resumed from step 7; repeats 1 step",
        "Faint lines are steps that were repeated",
        "Restarts1 rollbacks: 1",
        "1 line of metrics.jsonl cannot be read and is skipped; line 19: ",
        "ended: 10 steps in a row.",
    ):
        assert part in text, part
    for chart in charts_of(html):
        marked = {mark["label"] for mark in chart["marks"]}
        assert marked == {"restart", "rollback", "save failed", "skipped steps"}
        assert "repeated later" in {one["label"] for one in chart["series"]}


def test_samples_over_time_are_shown_from_the_newest(make_run_folder: MakeRunFolder) -> None:
    texts = [
        *(f"Once text {step}." for step in range(100)),
        "Once\n\n \n",
        "Once a\n\n \n\n\nb\n\n",
    ]
    samples = [
        {"kind": "sample", "step": step, "prompt": "Once", "text": text}
        for step, text in enumerate(texts)
    ]
    html = report(make_run_folder(lines=[*run_lines(), *samples]))
    shown = re.findall(r"<b>Once</b>(.*?)</blockquote>", html, re.DOTALL)
    assert len(shown) == 8  # the prompt is shown once
    assert shown[0] == " a\n\nb" and shown[-1] == " text 0."  # empty lines take little room
    assert html.index("text 0.") > html.index("Earlier in training") > html.index(" a\n\nb<")
    only = report(make_run_folder(lines=[*run_lines(), samples[100]]))
    assert "<b>Once</b> (nothing but white space)</blockquote>" in only


def test_a_long_run_of_many_samples_and_events_stays_small(make_run_folder: MakeRunFolder) -> None:
    folder = make_run_folder()
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 20_001):
            loss = 3 + 1 / step + step % 7 / 50
            skipped = {"skipped_steps": step // 3, "gradient_norm": step % 97, "loss_scale": step}
            file.write(json.dumps(train_line(step, loss, **skipped)) + "\n")
            prompt = {
                "kind": "sample",
                "prompt": f"{step // 10 % 50}" + '"' * 5000,
                "text": "&" * 5000,
            }
            file.write(json.dumps({"step": step, **prompt}) + "\n" if step % 10 == 0 else "")
            if step % 100 == 0:
                file.write(json.dumps({"kind": "start", "step": step - 30, "resumed": True}) + "\n")
    html = report(folder)
    assert "Curves of more than 2000 points are divided into 2000 intervals" in html
    assert "At most 100 marks of each kind are drawn." in html
    assert "more prompts are not shown" in html
    assert len(html) < 2_000_000


def test_a_run_that_has_only_started_has_a_report(make_run_folder: MakeRunFolder) -> None:
    folder = make_run_folder(lines=run_lines()[:1])
    (folder / "plan.json").unlink()
    (folder / "versions.json").unlink()
    page = Page(report(folder))
    assert "nothing logged" in page.text
    assert "Nothing recorded." in page.text
    assert "still running, or ended for an unknown reason" in page.text


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("evaluation.json", "{", "evaluation.json cannot be read: "),
        ("evaluation.json", "[]", "evaluation.json is not a JSON object"),
        ("run.toml", "[model]\nn_layer = 3\n", "did you mean 'model.n_layers'"),
        ("ancestry.json", "{", r"ancestry\.json"),
        ("plots", "in the way", r"cannot write plots to .*plots: "),
    ],
)
def test_a_damaged_file_or_one_in_the_way_is_named(
    make_run_folder: MakeRunFolder, file: str, content: str, problem: str
) -> None:
    folder = make_run_folder()
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=problem):
        write_report([folder], folder / "report.html", folder / "plots")


def test_ancestry_and_changes_are_told_alone_and_compared(make_run_folder: MakeRunFolder) -> None:
    base, branch = make_run_folder("base"), make_run_folder("branch")
    parent = {"run": "<b>", "step": 300, "sha256": "0a1b2c" * 11, "path": "x", "taken": "weights"}
    (branch / "ancestry.json").write_text(json.dumps([parent]))
    (branch / "history").mkdir()
    settings = (branch / "run.toml").read_text()
    (branch / "history/until-00000012.toml").write_text(settings.replace("seed = 7", "seed = 6"))
    for html in (report(branch), report(base, branch)):
        assert Page(html).text.count("Started from <b>@300 (weights, 0a1b2c0a1b2c).") == 1
        assert Page(html).text.count("From step 12: train.seed 6 became 7.") == 1
    assert "Started from" not in report(base) and "From step" not in report(base)


@pytest.mark.parametrize(
    ("kind", "last_rate", "what", "expected"),
    [
        ("warmup_stable_decay", 1e-3, "", "train.length=40 steps"),
        (
            *("warmup_stable_decay", 0, ", from before the decay"),
            "name=base-longer schedule.warmup=0 steps schedule.decay=30 steps "
            "train.length=30 steps train.start_from=base/checkpoints/step-00000010 "
            "train.start_with=weights_and_optimizer data.from_step=0 data.skip=85 sequences",
        ),
        (
            *("cosine", 0, ", from these weights, with a new schedule"),
            "name=base-longer train.start_from=base train.start_with=weights data.from_step=0 "
            "data.skip=125 sequences",
        ),
    ],
)
def test_a_longer_run_depends_on_whether_the_rate_has_decayed(
    make_run_folder: MakeRunFolder, kind: str, last_rate: float, what: str, expected: str
) -> None:
    changed = {"learning_rate": last_rate}
    lines = [line | (changed if line.get("step", 0) > 12 else {}) for line in run_lines()]
    folder = make_run_folder("base", lines=lines)
    for step in (5, 10, 15):
        (folder / f"checkpoints/step-{step:08d}").mkdir(parents=True)
    loaded = read_run(folder)
    run = change(loaded.run, {"schedule.kind": kind, "data.skip": Length(5, "sequences")})
    command = dict(next_steps([replace(loaded, run=run)]))[f"Train longer{what}:"]
    words = [word.replace(str(folder), "base") for word in shlex.split(command)]
    assert " ".join(words) == f"trainyard train base {expected}"


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return sum(weight * p for weight, p in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_and_curves_stand_out_enough(scheme: int) -> None:
    style = files("trainyard.report").joinpath("style.css").read_text(encoding="utf-8")
    part = style.split("@media (prefers-color-scheme: dark)")[scheme].split("* {")[0]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", part))
    texts = [(name, at) for name in ("text", "muted", "accent", "alert") for at in ("page", "card")]
    lines = [(f"run-{number}", "card") for number in range(6)]
    for least, pairs in ((LEAST_OF_TEXT, [*texts, ("text", "mark")]), (LEAST_OF_LINES, lines)):
        for name, background in pairs:
            dark, light = sorted(luminance(colours[one]) for one in (name, background))
            assert (light + 0.05) / (dark + 0.05) >= least, (name, background)
