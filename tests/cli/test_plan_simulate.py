"""What `trainyard plan --simulate` prints of a rank."""

from __future__ import annotations

import json

import pytest

from trainyard.cli.plan_simulate import print_simulation
from trainyard.config.load import load_run
from trainyard.errors import ConfigError

OVERRIDES = [
    *("parallel.pipeline=2", "parallel.zero_stage=0", "train.global_batch_size=4"),
    *("train.micro_batch_size=1", "train.compile=never"),
]
RUN = load_run("tiny", OVERRIDES).run


def test_every_stage_is_told_with_its_peak(capsys: pytest.CaptureFixture[str]) -> None:
    print_simulation(RUN, 2, None, as_json=False)
    text = capsys.readouterr().out
    for part in (
        *("rank 0 of 2: 4 of 4 micro batches run in", "rank 1 of 2", "peak ", "formulas", "(+"),
        *(" in the backward of block 0", "weights: embedding.weight", "pipeline send, 4 calls"),
        "FLOP per step",
    ):
        assert part in text


def test_json_has_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    print_simulation(RUN, 2, 1, as_json=True)
    report = json.loads(capsys.readouterr().out)
    (rank,) = report["ranks"]
    assert (report["n_ranks"], rank["rank"]) == (2, 1)
    assert 0 < rank["held_bytes"] < rank["peak_bytes"] <= rank["planned_bytes"]
    assert {message["axis"] for message in rank["messages"]} == {"pipeline"}


def test_there_must_be_such_a_rank() -> None:
    with pytest.raises(ConfigError, match="--rank 2 of 2 ranks, counted from 0") as error:
        print_simulation(RUN, 2, 2, as_json=False)
    assert error.value.hint.startswith("--rank 1 is the last")


def test_fp8_is_simulated_without_a_device_that_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    fp8 = ["precision.kind=fp8_lowbit", "train.global_batch_size=8", "model.n_layers=4"]
    print_simulation(load_run("tiny", fp8).run, 2, 1, as_json=False)
    text = capsys.readouterr().out
    for part in ("_scaled_mm", "shard all-to-all", "workspace of fp8 matmuls is not counted"):
        assert part in text
