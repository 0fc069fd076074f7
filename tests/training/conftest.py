"""A small corpus and a run on it, for everything that trains."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.faults.small_run import write_tokens

from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.config.load import build_run, load_run
from trainyard.config.run import Run
from trainyard.training.run_folder import open_run, write_run_folder
from trainyard.training.stop import Stop, StopReason
from trainyard.training.worker import run_worker


@pytest.fixture(scope="session")
def token_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tokens(tmp_path_factory.mktemp("tokens")))


@pytest.fixture(scope="session")
def tiny_run(token_prefix: str) -> Run:
    return load_run(
        "tiny",
        [
            "name=test",
            f"data.blend.prefixes=['{token_prefix}']",
            f"data.cache_folder='{Path(token_prefix).parent / 'cache'}'",
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


@pytest.fixture(scope="session")
def finished(tiny_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with checkpoints of steps 6 and 12, to be copied."""
    folder: Path = tmp_path_factory.mktemp("finished")
    start(folder, with_fields(tiny_run, checkpoint={"interval": 6}))
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def with_fields(run: Run, **sections: dict[str, object]) -> Run:
    """Changes fields of some sections of a run."""
    values = run.model_dump(mode="json", exclude_none=True)
    for name, fields in sections.items():
        values[name] |= fields
    return build_run(values)


def start(folder: Path, run: Run, resume: str = "auto") -> StopReason:
    write_run_folder(open_run(folder, run=run), resume)
    return run_worker(open_run(folder), resume)


def stop_at(patch: pytest.MonkeyPatch, n_steps: int, request: str = "75 told to") -> None:
    """Lets the n-th look for requests find one."""
    found = iter([None] * (n_steps - 1) + [request])
    patch.setattr(Stop, "stop_request", lambda _: next(found, None))


def newest(folder: Path) -> Path:
    """Gives the newest checkpoint of a run, which must have one."""
    checkpoint = newest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    return checkpoint


def require_same(one: Path, other: Path) -> None:
    """Weights and moments of two runs are equal to the last bit."""
    expected, found = (load_tensors(newest(folder), "") for folder in (one, other))
    assert expected.keys() == found.keys() and len(found) > 20
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def losses_of(folder: Path, kind: str = "train") -> list[float]:
    return [line["loss"] for line in lines_of(folder, kind)]


def lines_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Reads the lines of a kind from the metrics of a run."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == kind]
