"""Evaluation on ranks: the loss of one device, in any layout; and its refusals."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.command import Fork, trainyard
from tests.evaluation.test_trained import save_untrained

from trainyard.config.load import load_run
from trainyard.data.indexed import IndexedWriter
from trainyard.errors import ConfigError
from trainyard.evaluation.likelihood import score_windows
from trainyard.evaluation.loss import evaluate_documents, window
from trainyard.evaluation.trained import evaluated_run, open_predictor, read_trained_run
from trainyard.launch.environment import Process

MANY = pytest.mark.exhaustive
BOUND = {torch.float64: 1e-9, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model of four blocks, on token files of random ids."""
    parent = tmp_path_factory.mktemp("ranks")
    random = np.random.default_rng(3)
    with IndexedWriter(parent / "corpus", np.dtype(np.uint16)) as writer:
        for _ in range(120):
            writer.add_document(random.integers(0, 280, 90).astype(np.uint16))
    data = f"data.blend.prefixes=['{parent}/corpus']"
    save_untrained(parent / "runs" / "four", data, "model.n_layers=4", "model.init_std=0.2")
    return parent


def evaluate(
    folder: Path, overrides: list[str], dtype: torch.dtype, process: Process
) -> dict[str, Any]:
    """Predicts 13 windows, which no batch divides, and scores pairs of many lengths."""
    trained = read_trained_run(folder / "runs" / "four")
    length = trained.run.model.sequence_length
    ids = np.random.default_rng(5).integers(0, 280, 12 * length + 9)
    with open_predictor(trained, process, overrides, "ids", dtype) as predictor:
        found = evaluate_documents(predictor, [ids], None)
        windows = [window(ids[:n], max(1, n - 3)) for n in range(2, length + 2, 3)]
        windows += [window(np.array([7, number]), 1) for number in range(280)]
        scores = score_windows(predictor, windows, lambda _done, _total: None)
    return {**found.as_dict(), "scores": scores.tolist()}


@pytest.mark.parametrize(
    ("n_ranks", "layout"),
    [
        (4, "tensor=2 pipeline=2"),
        (3, ""),
        pytest.param(2, "zero_stage=3", marks=MANY),
        pytest.param(2, "context=2", marks=MANY),
        pytest.param(2, "tensor=2 sequence=true", marks=MANY),
        pytest.param(2, "pipeline=2 chunks=2 schedule=interleaved", marks=MANY),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=MANY)])
def test_ranks_find_the_loss_of_one_device(
    folder: Path, tmp_path: Path, n_ranks: int, layout: str, dtype: torch.dtype
) -> None:
    overrides = [f"parallel.{field}" for field in layout.split()]
    alone = evaluate(folder, [], dtype, Process())

    def be_rank(rank: int) -> None:
        torch.set_num_threads(1)
        place = Process(rank, n_ranks, rank, n_ranks, store_file=tmp_path / "store")
        sys.stdout.write(json.dumps(evaluate(folder, overrides, dtype, place)))

    ranks = [fork.wait() for fork in [Fork(partial(be_rank, rank)) for rank in range(n_ranks)]]
    assert [rank.returncode for rank in ranks] == [0] * n_ranks, ranks[0].stderr
    found = [json.loads(rank.stdout) for rank in ranks]
    assert all(each == found[0] for each in found)
    assert found[0]["n_tokens"] == alone["n_tokens"]
    assert found[0]["loss"] == pytest.approx(alone["loss"], rel=BOUND[dtype])
    scores, expected = np.array(found[0]["scores"]), np.array(alone["scores"])
    assert scores == pytest.approx(expected, rel=BOUND[dtype])
    assert sum(expected[-280:, 1] == 0) == 1  # one token is the likeliest


@pytest.mark.exhaustive
def test_the_verb_starts_ranks_and_prints_once(folder: Path) -> None:
    run = str(folder / "runs" / "four")
    alone = trainyard("evaluate", run, "--json", folder=folder)
    ranks = trainyard("evaluate", run, "parallel.tensor=2", "--ranks=2", "--json", folder=folder)
    assert (alone.returncode, ranks.returncode) == (0, 0), ranks.stderr
    expected, found = json.loads(alone.stdout), json.loads(ranks.stdout)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["n_tokens"] == expected["n_tokens"] > 0
    assert found["unigram_loss"] == expected["unigram_loss"]
    assert json.loads((Path(run) / "evaluation.json").read_text()) == found


def test_only_the_layout_may_change(folder: Path) -> None:
    run = read_trained_run(folder / "runs" / "four").run
    with pytest.raises(
        ConfigError, match=r"'model\.n_layers=2': evaluate can change only the layout"
    ):
        evaluated_run(run, ["model.n_layers=2"], 2, "fp32")
    with pytest.raises(ConfigError, match=r"3 ranks cannot be divided by parallel\.tensor=2"):
        evaluated_run(run, ["parallel.tensor=2"], 3, "fp32")


def test_ranks_are_not_started_twice(folder: Path) -> None:
    environment = {
        **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},
    }
    ended = trainyard("evaluate", "runs/four", "--ranks=2", folder=folder, **environment)
    assert ended.returncode == 2
    assert "error: --ranks: a launcher has already started 2 ranks\nhint: " in ended.stderr


def test_what_was_trained_in_fp8_with_zero_is_evaluated_without(folder: Path) -> None:
    precision = ["precision.kind=fp8_lowbit", "precision.fp8.all_gather=true"]
    run = load_run("gpt3-13b", [*precision, "parallel.zero_stage=2"]).run
    found = evaluated_run(run, ["parallel.tensor=8", "parallel.pipeline=2"], 32, "bf16")
    assert (found.precision.kind, found.parallel.zero_stage) == ("bf16", 0)
    assert found.train.global_batch_size == 2 * 8 * run.train.micro_batch_size
    assert found.train.batch_ramp is None
