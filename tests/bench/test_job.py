from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from trainyard.bench.job import Steps, describe_data, parse_steps, prepare_run
from trainyard.config.load import load_run
from trainyard.data.indexed import IndexedDataset
from trainyard.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "warm_up", "expected"),
    [
        ("10", None, Steps(3, 10)),
        ("10", 0, Steps(0, 10)),
        ("5-10", None, Steps(4, 6)),
        ("1-1", None, Steps(0, 1)),
    ],
)
def test_steps(text: str, warm_up: int | None, expected: Steps) -> None:
    assert parse_steps(text, warm_up) == expected


@pytest.mark.parametrize(
    ("text", "warm_up", "problem"),
    [
        *(
            (text, None, f"--steps '{text}' is not a number of steps or a range")
            for text in ("ten", "-3", "5-", "9999999999", "0", "10-5", "0-5")
        ),
        ("5-10", 2, "--steps 5-10 begins after a warm-up of 4, but --warm-up is 2"),
    ],
)
def test_steps_that_cannot_be(text: str, warm_up: int | None, problem: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_steps(text, warm_up)
    assert error.value.problem.startswith(problem)
    assert "--steps" in error.value.hint


def test_a_run_without_data_reads_the_same_random_tokens_everywhere(tmp_path: Path) -> None:
    run = load_run("tiny", ["tokenizer.path='nowhere'"]).run
    tokens = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        prepared = prepare_run(run, Steps(1, 2), tmp_path / name)
        dataset = IndexedDataset(prepared.data.train.prefixes[0])
        tokens.append(np.array(dataset.stream))
        assert prepared.tokenizer.path == ""
        assert prepared.data.cache_folder.startswith(str(tmp_path / name))
    assert np.array_equal(*tokens)
    assert len(np.unique(tokens[0])) == run.model.vocabulary_size
    assert len(tokens[0]) >= 3 * run.train.global_batch_size * run.model.sequence_length
    assert describe_data(run) == "random tokens"


def test_a_run_with_data_keeps_it_and_batches_are_full_from_the_start(tmp_path: Path) -> None:
    ramp = ["train.batch_ramp.start=4", "train.batch_ramp.increment=4"]
    ramp.append("train.batch_ramp.length='100 sequences'")
    run = load_run("tiny", ["data.blend.prefixes=['corpus']", *ramp]).run
    prepared = prepare_run(run, Steps(1, 2), tmp_path)
    assert prepared.data == run.data
    assert prepared.tokenizer.path == ""
    assert prepared.train.batch_ramp is None
    assert list(tmp_path.iterdir()) == []
    assert describe_data(run) == "the run's token files"
