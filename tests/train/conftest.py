"""A small corpus and a run on it, for everything that trains."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.indexed import IndexedWriter

VOCABULARY_SIZE = 512


@pytest.fixture(scope="session")
def token_prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Token files whose next token mostly follows from the last: there is something to learn."""
    prefix = tmp_path_factory.mktemp("tokens") / "corpus_text_document"
    random = np.random.default_rng(7)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(60):
            steps = random.choice([1, 1, 1, 2, 7], size=random.integers(50, 400))
            writer.add_document((np.cumsum(steps) % VOCABULARY_SIZE).astype(np.uint16))
    return str(prefix)


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


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
