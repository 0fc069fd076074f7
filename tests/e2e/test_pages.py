"""Generated pages are what `python -m benchmarks.pages` would write today."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.guides import PARTS, Job, examine, list_jobs, list_missing
from benchmarks.pages import (
    COMMANDS,
    FLAGS,
    PLANNED,
    RECORD,
    ROOT,
    ROW,
    TABLE,
    TABLES,
    TEXTS,
    commands_page,
    flags_page,
    planned_page,
    write_anew,
)

AGAIN = "if so: python -m benchmarks.pages"


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_tables_are_those_of_today(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = path.read_text(encoding="utf-8")
    assert ROW.search(text) or TABLE.search(text)
    assert text == write_anew(text), AGAIN


def test_every_table_is_on_a_page() -> None:
    texts = [path.read_text(encoding="utf-8") for path in TEXTS]
    assert {found[2] for text in texts for found in TABLE.finditer(text)} == set(TABLES)
    assert sum(text.count("written by python -m benchmarks.pages -->") for text in texts) == sum(
        len(TABLE.findall(text)) for text in texts
    )


def test_a_stale_figure_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text = (ROOT / "recipes" / "laptop" / "README.md").read_text(encoding="utf-8")
    row = ROW.search(text)
    assert row
    stale = text.replace(row[0], row[0].replace(" s |", "1 s |"))
    assert stale != text == write_anew(stale)


def test_the_page_of_commands_is_the_help_of_today() -> None:
    page = commands_page()
    for verb in ("trainyard", "trainyard prepare", "trainyard check layout", "trainyard demo"):
        assert f"\n## {verb}\n" in page
    again = "if so: python -m benchmarks.pages --commands"
    assert COMMANDS.read_text(encoding="utf-8") == page, again


def test_the_page_of_flags_is_that_of_the_table() -> None:
    assert FLAGS.read_text(encoding="utf-8") == flags_page(), AGAIN


def test_the_page_of_all_jobs_is_that_of_its_record() -> None:
    assert PLANNED.read_text(encoding="utf-8") == planned_page(), AGAIN
    rows = {row["recipe"]: row for row in json.loads(RECORD.read_text(encoding="utf-8"))["jobs"]}
    assert list_missing(list_jobs(), rows) == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("job", list_jobs(), ids=lambda job: job.name)
def test_recorded_plans_are_those_of_today(job: Job) -> None:
    rows = json.loads(RECORD.read_text(encoding="utf-8"))["jobs"]
    (recorded,) = (row[PARTS[0]] for row in rows if row["recipe"] == job.name)
    assert examine(job, PARTS[0], 300) | {"wall_seconds": 0} == recorded | {"wall_seconds": 0}, (
        AGAIN
    )
