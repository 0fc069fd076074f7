from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.command import call

from trainyard.cli.bench import bench
from trainyard.errors import UserError

PARTS = ["data wait", "forward", "backward", "optimizer", "communication"]
TRACES = ("operators.txt", "trace.json")
STARTS = ["process", "imports", "config", "ranks", "data", "model", "first step", "total"]


def run_bench(words: str) -> str:
    return call(bench, *words.split())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check_candidate(record: dict[str, Any], candidate: dict[str, Any]) -> None:
    """What holds between the figures, whatever the machine does."""
    steps = [ms for each in candidate["rounds"] for ms in each["step_milliseconds"]]
    assert len(steps) == record["steps"]["rounds"] * record["steps"]["timed"]
    assert candidate["model_flops_utilization"] is None
    assert candidate["peak_memory_bytes"] > 50 * 2**20
    split = candidate["split"]["milliseconds"]
    assert list(split) == PARTS
    assert min(split.values()) >= 0 and split["forward"] > 0
    assert sum(split.values()) == pytest.approx(candidate["split"]["milliseconds_per_step"])
    assert (split["communication"] > 0) == (record["n_ranks"] > 1)
    starts = candidate["startup_seconds"]
    assert list(starts) == STARTS
    assert sum(starts.values()) == pytest.approx(2 * starts["total"])
    assert 5.5 < candidate["first_loss"] < 7  # the logarithm of a vocabulary of 512 is 6.24


def test_a_run_on_one_rank_leaves_a_record_with_everything(folder: Path) -> None:
    record = json.loads(run_bench("tiny --ranks 1 --steps 4 --warm-up 1 --json"))
    keys = "benchmark date command commit machine packages run n_ranks layout data steps formulas"
    assert list(record) == [*keys.split(), "candidates"]
    assert record["data"] == "random tokens"
    assert record["steps"] == {"warm_up": 1, "timed": 4, "rounds": 1}
    assert record["machine"]["device"] == "cpu" and record["packages"]["torch"]
    (candidate,) = record["candidates"]
    check_candidate(record, candidate)
    assert candidate["name"] == candidate["precision"] == "fp32"
    assert candidate["profile"] is None
    (written,) = (folder / "runs" / "bench").iterdir()
    assert json.loads(written.read_text()) == record
    assert [path.name for path in folder.iterdir()] == ["runs"]


@pytest.mark.exhaustive
def test_precisions_in_turn_on_two_ranks(folder: Path) -> None:
    compared = "--compare fp32,bf16 --rounds 1 --output out/record.json --profile"
    table = run_bench(f"tiny --ranks 2 --steps 3-5 {compared}")
    record = json.loads((folder / "out" / "record.json").read_text())
    assert record["steps"] == {"warm_up": 2, "timed": 3, "rounds": 1}
    assert record["n_ranks"] == record["layout"]["shard"] == 2
    first, second = record["candidates"]
    assert [each["precision"] for each in (first, second)] == ["fp32", "bf16"]
    for candidate in (first, second):
        check_candidate(record, candidate)
        assert candidate["profile"]["host_waits_per_step"] == {}
    # The same weights and tokens.
    assert first["first_loss"] == pytest.approx(second["first_loss"], rel=1e-3)
    traces = [f"{kind}-{what}" for kind in ("bf16", "fp32") for what in TRACES]
    names = [*(f"record-{trace}" for trace in traces), "record.json"]
    assert sorted(path.name for path in (folder / "out").iterdir()) == names
    lines = table.splitlines()
    assert lines[0].startswith("tiny: 136,960 parameters, 8 sequences of 64 tokens a step")
    assert lines[1].startswith("2 ranks on cpu; ")
    assert lines[2] == "3 steps after 2 of warm-up"
    assert any(line.split() == ["fp32", "bf16"] for line in lines)


@pytest.mark.parametrize(
    ("words", "problem", "hint"),
    [
        ("--ranks 1 --steps 10-5", "'10-5' is not a number of steps or a range", "--steps"),
        ("--ranks 1 --compare fp32,fp31", "'fp31' is not a precision", "fp32, fp16, bf16"),
        ("--ranks 1 --compare fp32,fp32", "'fp32' is listed twice", "each at most once"),
        ("--ranks 3", "cannot be divided", "nearest that works"),
        ("--ranks 1 parallel.tensor=3", "nearest that works: parallel.tensor=2", "show --fields"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    folder: Path, words: str, problem: str, hint: str
) -> None:
    with pytest.raises(UserError) as error:
        run_bench(f"tiny {words}")
    assert problem in error.value.problem and hint in error.value.hint
    assert error.value.exit_code == 2
    assert list(folder.iterdir()) == []
