"""The test split: evaluated once, at the end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.training.conftest import lines_of, start, with_fields

from trainyard.config.run import Run
from trainyard.data.indexed import IndexedWriter
from trainyard.report.figures import summarize
from trainyard.report.metrics import read_metrics
from trainyard.report.run_view import read_run
from trainyard.report.status import render_status


def write_corpus(prefix: Path, n_documents: int) -> str:
    random = np.random.default_rng(n_documents)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(n_documents):
            writer.add_document(random.integers(0, 512, 200).astype(np.uint16))
    return str(prefix)


def evaluated(folder: Path) -> list[tuple[int, str]]:
    return [(line["step"], line["split"]) for line in lines_of(folder, "evaluate")]


def test_the_test_split_is_evaluated_once_at_the_end(
    tiny_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = with_fields(tiny_run, train={"length": "4 steps"}, evaluate={"interval": 2})
    with caplog.at_level("INFO", "trainyard"):
        start(tmp_path, run)
    start(tmp_path, run)  # there is nothing left to do
    assert evaluated(tmp_path) == [(2, "valid"), (4, "valid"), (4, "test")]
    held_out, test = (lines_of(tmp_path, "evaluate")[n]["loss"] for n in (1, 2))
    assert held_out != test
    assert f"step 4: test loss {test:.4f} | perplexity " in caplog.text
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics.test["loss"] == test
    assert [line["loss"] for line in metrics.held_out_losses][-1] == held_out
    figures = {figure.label: figure.value for figure in summarize(read_run(tmp_path))}
    assert figures["Test loss"] == f"{test:.4f}"
    assert figures["Held-out loss"] == f"{held_out:.4f}"
    assert f"; test {test:.4f} at step 4" in render_status(read_run(tmp_path))
    notes = {figure.label: figure.meaning for figure in summarize(read_run(tmp_path))}
    assert notes["Test loss"] == "nats per token, at step 4"


def test_a_blend_for_the_test_is_read(tiny_run: Run, tmp_path: Path) -> None:
    names = ("train", "valid", "test")
    blends = {name: {"prefixes": [write_corpus(tmp_path / name, 120)]} for name in names}
    data = {"blend": {"prefixes": []}, **blends}
    run = with_fields(tiny_run, train={"length": "2 steps"}, data=data)
    start(tmp_path / "run", run)
    assert evaluated(tmp_path / "run") == [(2, "valid"), (2, "test")]
    start(tmp_path / "none", with_fields(run, evaluate={"batches": 0}))
    assert evaluated(tmp_path / "none") == []


def test_a_split_too_small_for_a_test_is_no_error(
    tiny_run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = write_corpus(tmp_path / "corpus", 200)
    data = {"blend": {"prefixes": [prefix]}, "split": "949,50,1"}
    with caplog.at_level("INFO", "trainyard"):
        start(tmp_path / "run", with_fields(tiny_run, train={"length": "2 steps"}, data=data))
    assert evaluated(tmp_path / "run") == [(2, "valid")]
    assert (
        f"no final evaluation: {prefix}: the test split gets none of its 200 documents"
        in caplog.text
    )


def test_held_out_files_may_be_shorter_than_an_evaluation(tiny_run: Run, tmp_path: Path) -> None:
    """Several files without weights are read once at most; 15 sequences, no multiple of a batch."""
    short = [write_corpus(tmp_path / f"{n}", n) for n in (2, 3)]
    data = {
        "blend": {"prefixes": []},
        "train": {"prefixes": [write_corpus(tmp_path / "train", 120)]},
        "valid": {"prefixes": short},
    }
    run = with_fields(tiny_run, train={"length": "2 steps"}, data=data, evaluate={"batches": 9})
    start(tmp_path / "run", run)
    (line,) = lines_of(tmp_path / "run", "evaluate")
    length, n_sequences = run.model.sequence_length, sum((200 * n - 1) // 64 for n in (2, 3))
    assert length == 64 and n_sequences % run.train.global_batch_size
    assert line["n_tokens"] == length * n_sequences
