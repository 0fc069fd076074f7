from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.command import call

from trainyard.cli.bench import bench
from trainyard.errors import UserError

PARTS = ["data wait", "forward", "backward", "optimizer", "communication"]
STARTS = ["process", "imports", "config", "ranks", "data", "model", "first step", "total"]


def run_bench(*arguments: str) -> str:
    return call(bench, *arguments)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_candidate(record: dict[str, Any], candidate: dict[str, Any]) -> None:
    """What holds between the figures, whatever the machine does."""
    run, spread = record["run"], candidate["milliseconds_per_step"]
    assert 0 < spread["p10"] <= spread["median"] <= spread["p90"]
    steps = [ms for each in candidate["rounds"] for ms in each["step_milliseconds"]]
    assert len(steps) == record["steps"]["rounds"] * record["steps"]["timed"]
    seconds = sum(steps) / 1000
    samples = run["global_batch_size"] * len(steps)
    assert candidate["samples_per_second"] == pytest.approx(samples / seconds)
    tokens = samples * run["model"]["sequence_length"] / record["n_ranks"]
    assert candidate["tokens_per_second_per_device"] == pytest.approx(tokens / seconds)
    tflops = tokens / seconds * run["model_flops_per_token"] / 1e12
    assert candidate["tflops_per_second_per_device"] == pytest.approx(tflops)
    assert candidate["model_flops_utilization"] is None
    assert candidate["hardware_flops_utilization"] is None
    assert candidate["peak_memory_bytes"] > 50 * 2**20
    split = candidate["split"]
    assert list(split["milliseconds"]) == PARTS
    assert all(value >= 0 for value in split["milliseconds"].values())
    assert sum(split["milliseconds"].values()) == pytest.approx(split["milliseconds_per_step"])
    assert split["milliseconds"]["forward"] > 0
    assert list(candidate["startup_seconds"]) == STARTS
    starts = list(candidate["startup_seconds"].values())
    assert sum(starts[:-1]) == pytest.approx(starts[-1])
    assert 5.5 < candidate["first_loss"] < 7  # the logarithm of a vocabulary of 512 is 6.24


def test_a_run_on_one_rank_leaves_a_record_with_everything(folder: Path) -> None:
    record = json.loads(
        run_bench("tiny", "--ranks", "1", "--steps", "4", "--warm-up", "1", "--json")
    )
    assert list(record) == [
        *("benchmark", "date", "command", "commit", "machine", "packages", "run", "n_ranks"),
        *("layout", "data", "steps", "formulas", "candidates"),
    ]
    assert record["data"] == "random tokens"
    assert record["steps"] == {"warm_up": 1, "timed": 4, "rounds": 1}
    assert record["machine"]["device"] == "cpu"
    assert record["packages"]["torch"]
    (candidate,) = record["candidates"]
    assert list(candidate) == [
        *("name", "precision", "milliseconds_per_step", "samples_per_second"),
        *("tokens_per_second_per_device", "tflops_per_second_per_device"),
        *("model_flops_utilization", "hardware_flops_utilization", "exchanged_weight_bytes"),
        *(
            "peak_memory_bytes",
            "split",
            "startup_seconds",
            "speed_over_first",
            "first_loss",
            "last_loss",
            "n_threads",
        ),
        *("profile", "rounds"),
    ]
    check_candidate(record, candidate)
    assert candidate["name"] == candidate["precision"] == "fp32"
    assert candidate["split"]["milliseconds"]["communication"] == 0
    assert candidate["profile"] is None
    (written,) = (folder / "runs" / "bench").iterdir()
    assert json.loads(written.read_text()) == record
    assert [path.name for path in folder.iterdir()] == ["runs"]


@pytest.mark.exhaustive
def test_precisions_in_turn_on_two_ranks(folder: Path) -> None:
    arguments = ["--ranks", "2", "--steps", "3-5", "--compare", "fp32,bf16", "--rounds", "1"]
    table = run_bench("tiny", *arguments, "--output", "out/record.json", "--profile")
    record = json.loads((folder / "out" / "record.json").read_text())
    assert record["steps"] == {"warm_up": 2, "timed": 3, "rounds": 1}
    assert record["n_ranks"] == record["layout"]["shard"] == 2
    first, second = record["candidates"]
    assert [each["precision"] for each in (first, second)] == ["fp32", "bf16"]
    for candidate in (first, second):
        check_candidate(record, candidate)
        assert candidate["split"]["milliseconds"]["communication"] > 0
        assert candidate["profile"]["host_waits_per_step"] == {}
    assert first["speed_over_first"] == {"median": 1.0, "lowest": 1.0, "highest": 1.0}
    medians = [each["milliseconds_per_step"]["median"] for each in (first, second)]
    assert second["speed_over_first"]["median"] == pytest.approx(medians[0] / medians[1])
    # The same weights and tokens.
    assert first["first_loss"] == pytest.approx(second["first_loss"], rel=1e-3)
    names = [
        f"record-{kind}-{what}"
        for kind in ("bf16", "fp32")
        for what in ("operators.txt", "trace.json")
    ]
    assert sorted(path.name for path in (folder / "out").iterdir()) == [*names, "record.json"]
    lines = table.splitlines()
    assert lines[0].startswith("tiny: 136,960 parameters, 8 sequences of 64 tokens a step")
    assert lines[1].startswith("2 ranks on cpu; ")
    assert lines[2] == "3 steps after 2 of warm-up"
    titles = [line[:30].strip() for line in lines if line]
    for title in ("ms/step, median", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "HFU", "peak memory"):
        assert title in titles
    assert any(line.split() == ["fp32", "bf16"] for line in lines)


@pytest.mark.parametrize(
    ("arguments", "problem", "hint"),
    [
        (["--steps", "10-5"], "--steps 10-5 is not a range of steps", "--steps 5-10 times"),
        (["--compare", "fp32,fp31"], "'fp31' is not a precision", "fp32, fp16, bf16"),
        (["--compare", "fp32,fp32"], "'fp32' is listed twice", "each at most once"),
        (["--ranks", "3"], "cannot be divided", "nearest that works"),
        (["parallel.tensor=3"], "must be divisible by parallel.tensor=3", "parallel.tensor="),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    folder: Path, arguments: list[str], problem: str, hint: str
) -> None:
    ranks = [] if "--ranks" in arguments else ["--ranks", "1"]
    with pytest.raises(UserError) as error:
        run_bench("tiny", *ranks, *arguments)
    assert problem in str(error.value)
    assert hint in str(error.value)
    assert error.value.exit_code == 2
    assert list(folder.iterdir()) == []
