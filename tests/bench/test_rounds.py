from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.bench.job import Steps, prepare_run
from trainyard.bench.record import build_record, find_commit, render_table
from trainyard.bench.rounds import BenchOptions, BenchResult, BenchRun, run_rounds
from trainyard.config.load import load_run
from trainyard.launch.environment import Process


def outcome(name: str, *rounds: list[float], peak_memory_bytes: int = 2**30) -> BenchResult:
    split = {
        "milliseconds": {"data wait": 1.0, "forward": 3.0, "communication": 0.0},
        "milliseconds_per_step": 4.0,
        "milliseconds_of_other_steps": 3.2,
    }
    results = [
        {
            "step_seconds": seconds,
            "device": "NVIDIA H200",
            "peak_memory_bytes": peak_memory_bytes + number,
            "startup_seconds": {"imports": 2.0 + number, "first step": 1.0},
            "split": split if number == 0 else None,
            "profile": None,
            "first_loss": 6.25,
            "last_loss": 6.0,
            "n_threads": 1,
        }
        for number, seconds in enumerate(rounds)
    ]
    return BenchResult(BenchRun(name, load_run("tiny", ["precision.kind=bf16"]).run), results)


def test_ratios_are_of_medians_round_by_round() -> None:
    first = outcome("bf16", [2.0, 9.0, 2.0], [4.0])
    second = outcome("fp8", [1.0, 1.0, 7.0], [5.0])
    assert second.speed_over(first) == [2.0, 0.8]
    assert second.step_seconds == [1.0, 1.0, 7.0, 5.0]


def test_a_record_and_its_table() -> None:
    outcomes = [outcome("bf16", [0.2, 0.2], [0.4, 0.4]), outcome("fp8", [0.1, 0.1], [0.1, 0.1])]
    order = BenchOptions(Steps(3, 2), 2, 1, profiles=False)
    record = build_record(outcomes, order, "random tokens")
    assert record["machine"]["device"] == "NVIDIA H200"
    assert record["machine"]["peak_flops_per_second"]["bf16"] == 989e12
    first, second = record["candidates"]
    assert second["speed_over_first"] == {"median": 3.0, "lowest": 2.0, "highest": 4.0}
    assert first["peak_memory_bytes"] == 2**30 + 1
    assert first["startup_seconds"] == {"imports": 2.5, "first step": 1.0, "total": 3.5}
    assert first["split"]["overhead"] == pytest.approx(0.25)
    assert first["model_flops_utilization"] > 0
    rows = {line[:30].strip(): line[30:].split() for line in render_table(record).splitlines()}
    assert rows["times as fast as the first"] == ["1.000", "3.000"]
    assert rows["lowest - highest round"] == ["1.000", "-", "1.000", "2.000", "-", "4.000"]
    assert rows["ms/step, median"] == ["300.00", "100.00"]
    assert rows["10 % - 90 %"] == ["200.00", "-", "400.00", "100.00", "-", "100.00"]
    assert rows["forward"] == ["3.00", "ms", "75.0%"] * 2
    assert rows["overhead of the breakdown"] == ["+25.0%", "+25.0%"]
    assert rows["peak memory"] == ["1.0", "GiB"] * 2
    assert rows["start in all"] == ["3.50", "s"] * 2


def test_a_commit_is_named_in_a_checkout_alone() -> None:
    is_checkout = any((folder / ".git").exists() for folder in Path(__file__).parents)
    assert bool(find_commit()) == is_checkout


@pytest.mark.exhaustive
def test_candidates_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(1, 2)
    run = prepare_run(load_run("tiny").run, steps, tmp_path)
    candidates = [BenchRun("a", run), BenchRun("b", run)]
    with caplog.at_level("INFO", "trainyard"):
        outcomes = run_rounds(
            candidates, BenchOptions(steps, 2, 1, profiles=False), Process(), tmp_path
        )
    assert caplog.messages == [f"round {n} of 2: {name}" for n in (1, 2) for name in "ab"]
    assert [len(outcome.results) for outcome in outcomes] == [2, 2]
    # Taken apart once.
    assert [result["split"] is None for result in outcomes[0].results] == [False, True]
    # The same weights and the same tokens each time.
    losses = {result["last_loss"] for each in outcomes for result in each.results}
    assert len(losses) == 1
