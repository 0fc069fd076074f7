"""Any value in any file of a run folder: it is reported as missing, or refused in one message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainyard.errors import UserError
from trainyard.launch.restarts import Restarts
from trainyard.report.charts import build_charts
from trainyard.report.page import render_page
from trainyard.report.run_view import RunReader, read_run
from trainyard.report.status import (
    describe_line,
    render_screen,
    render_status,
    status_as_json,
    status_row,
)

from .conftest import PLAN, run_lines, train_line

VALUES = ["text", -1, 1e300, 10**400, True, None, [1], {"a": 1}]
TASK = {"n_items": 9, "step": 20, "accuracy": 0.5, "accuracy_stderr": 0.1, "perplexity": 3.0}
LAYOUT = {"data_parallel_size": 1, "stages": [[0, 2]], "padded_vocabulary_size": 512}
FILES: dict[str, Any] = {
    "plan.json": {**PLAN, **LAYOUT, "memory": {"rank": 3}},
    "versions.json": {"torch": "2.13", "python": "3.12"},
    "outcome.json": {"reason": "done", "exit_code": 0, "step": 20, "command": "train"},
    "evaluation.json": {
        **{"loss": 4.5, "perplexity": 90.0, "bits_per_byte": 2.0, "unigram_loss": 6.0, "step": 20},
        "tasks": {"arc": TASK, "blimp/a": TASK, "blimp/b": TASK},
    },
    "ancestry.json": [
        {"run": "a", "step": 3, "sha256": "0" * 64, "path": "runs/a", "taken": "weights"}
    ],
    "logs/restarts.json": {"newest": 40, "without_progress": 2, "exit_code": None},
}
LINES = [
    *run_lines(3),
    train_line(3, 5.7, expert_load=[[1, 3], [2, 2]], expert_imbalance=1.5),
    {"kind": "save", "time": 1020.0, "step": 3, "stall_seconds": 0.1, "seconds": 1.0, "bytes": 9},
    {"kind": "restart", "time": 1021.0, "step": 3, "reason": "killed"},
    {"kind": "start", "time": 1021.0, "step": 3, "resumed": True, "device": "cpu"},
    {"kind": "rollback", "time": 1022.0, "step": 3, "from_step": 3, "skipped_sequences": 4},
    {"kind": "skipped", "time": 1022.0, "step": 3, "loss": 1.0},
    {"kind": "save failed", "time": 1023.0, "step": 3, "problem": "disk full"},
    {"kind": "dead experts", "time": 1023.0, "step": 3, "experts": {"0": [1]}, "problem": "none"},
    {"kind": "test", "time": 1023.0, "step": 3, "loss": 4.0, "perplexity": 50.0},
    {"kind": "spike", "time": 1023.0, "step": 3, "loss": 4.0},
    {"kind": "end", "time": 1023.0, "step": 3, "reason": "done"},
]


def variants(value: Any) -> Iterator[Any]:
    """Yields a JSON value with each part replaced by each value, and each part left out."""
    yield from VALUES
    if isinstance(value, dict):
        for key, part in value.items():
            yield {name: each for name, each in value.items() if name != key}
            for each in variants(part):
                yield {**value, key: each}
    if isinstance(value, list):
        for i, part in enumerate(value):
            for each in variants(part):
                yield [*value[:i], each, *value[i + 1 :]]


def read_all(folder: Path) -> None:
    """Reads a run folder as status, status --follow, report and a restart do."""
    reader = RunReader(folder)
    view = reader.read()
    render_status(view)
    status_row(view)
    json.dumps(status_as_json(view))
    last = [describe_line(line, view.n_steps) for line in reader.new_lines]
    render_screen(view, last, 80, 40, in_unicode=True)
    view = read_run(folder)
    render_page([view, view], build_charts([view, view]))
    render_page([view], build_charts([view]))
    Restarts(folder).end(93)


@pytest.fixture(autouse=True)
def few_presets(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compare with all takes seconds."""
    monkeypatch.setattr("trainyard.report.page.preset_names", lambda: ["tiny"])


@pytest.mark.parametrize("name", FILES)
def test_any_value_of_a_file(make_run_folder: Callable[..., Path], name: str) -> None:
    folder = make_run_folder()
    (folder / "logs").mkdir()
    for each, content in FILES.items():
        (folder / each).write_text(json.dumps(content))
    read_all(folder)
    for content in variants(FILES[name]):
        (folder / name).write_text(json.dumps(content))
        check(folder, content)


def test_any_value_of_a_line(make_run_folder: Callable[..., Path]) -> None:
    folder = make_run_folder(lines=LINES)
    read_all(folder)
    numbers = {line["kind"]: number for number, line in enumerate(LINES)}
    for number in numbers.values():
        for line in variants(LINES[number]):
            lines = [*LINES[:number], line, *LINES[number + 1 :]]
            (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
            check(folder, line)


def check(folder: Path, content: Any) -> None:
    try:
        read_all(folder)
    except UserError:
        pass
    except Exception as error:
        raise AssertionError(f"{json.dumps(content)[:300]}: {error!r}") from error
