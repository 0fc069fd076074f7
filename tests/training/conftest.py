"""A small corpus and a run on it, for everything that trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.faults.small_run import write_tokens

from trainyard.config.load import build_run, load_run
from trainyard.config.run import Run
from trainyard.training.run_folder import open_run, write_run_folder
from trainyard.training.stop import StopReason
from trainyard.training.worker import run_worker


@pytest.fixture(scope="session")
def token_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokens(tmp_path_factory.mktemp("tokens")))


@pytest.fixture
def tiny_run(token_prefix: str, tmp_path: Path) -> Run:
    return load_run(
        "tiny",
        [
            "name=test",
            f"data.blend.prefixes=['{token_prefix}']",
            f"data.cache_folder='{tmp_path / 'cache'}'",
            "data.split='80,10,10'",
            "train.length='12 steps'",
            "schedule.decay='12 steps'",
            "schedule.warmup='2 steps'",
            "model.dropout=0.1",
            "evaluate.batches=1",
            "log.interval=1",
            "log.tensorboard=false",
        ],
    ).run


def with_fields(run: Run, **sections: dict[str, object]) -> Run:
    """Changes fields of some sections of a run."""
    values = run.model_dump(mode="json", exclude_none=True)
    for name, fields in sections.items():
        values[name] |= fields
    return build_run(values)


def start(folder: Path, run: Run, resume: str = "auto") -> StopReason:
    write_run_folder(open_run(folder, run=run), resume)
    return run_worker(open_run(folder), resume)


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Reads the lines of a kind from the metrics of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]
