from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainyard.bench.job import BenchJob, Steps, prepare_run
from trainyard.bench.record import (
    build_record,
    compute_figures,
    recomputed_flops_per_token,
    render_table,
)
from trainyard.bench.rounds import BenchRun, Rounds, run_rounds
from trainyard.config.load import load_run
from trainyard.launch.environment import Process
from trainyard.layout.resolve import resolve
from trainyard.model.gpt import GPT, initialize

H200 = "NVIDIA H200"


def timed(name: str, *rounds: list[float], peak_memory_bytes: int = 2**30) -> BenchRun:
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
    return BenchRun(name, load_run("tiny", ["precision.kind=bf16"]).run, results=results)


def test_ratios_are_of_medians_round_by_round() -> None:
    first = timed("bf16", [2.0, 9.0, 2.0], [4.0])
    second = timed("fp8", [1.0, 1.0, 7.0], [5.0])
    assert second.speed_over(first) == [2.0, 0.8]
    assert second.step_seconds == [1.0, 1.0, 7.0, 5.0]


def test_a_record_and_its_table() -> None:
    runs = [timed("bf16", [0.2, 0.2], [0.4, 0.4]), timed("fp8", [0.1, 0.1], [0.1, 0.1])]
    record = build_record(runs, Rounds(BenchJob(Steps(3, 2)), 2, 1), "random tokens")
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


@pytest.mark.exhaustive
def test_candidates_take_turns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(1, 2)
    run = prepare_run(load_run("tiny").run, steps, tmp_path)
    candidates = [BenchRun("a", run), BenchRun("b", run)]
    with caplog.at_level("INFO", "trainyard"):
        run_rounds(candidates, Rounds(BenchJob(steps), 2, 1), Process(), tmp_path)
    assert caplog.messages == [f"round {n} of 2: {name}" for n in (1, 2) for name in "ab"]
    assert [len(outcome.results) for outcome in candidates] == [2, 2]
    # Taken apart once.
    assert [result["split"] is None for result in candidates[0].results] == [False, True]
    # The same weights and the same tokens each time.
    losses = {result["last_loss"] for each in candidates for result in each.results}
    assert len(losses) == 1


def test_throughput_is_the_batch_over_the_time() -> None:
    run = load_run("gpt3-350m", ["train.global_batch_size=64", "train.batch_ramp=none"]).run
    plan = resolve(run, 4)
    figures = compute_figures(run, plan, [1.0, 3.0], H200)
    assert figures["samples_per_second"] == 32.0
    assert figures["tokens_per_second_per_device"] == 32 * 2048 / 4
    per_second = 32 * 2048 / 4 * plan.model_flops_per_token
    assert figures["tflops_per_second_per_device"] == pytest.approx(per_second / 1e12)
    assert figures["model_flops_utilization"] == pytest.approx(per_second / 989e12)
    assert figures["hardware_flops_utilization"] == figures["model_flops_utilization"]
    spread = {"median": 2000.0, "p10": 1200.0, "p90": 2800.0, "mean": 2000.0}
    assert figures["milliseconds_per_step"] == pytest.approx(spread)


def test_the_peak_is_that_of_the_precision_and_none_where_it_is_unknown() -> None:
    seconds = [0.1, 0.1]
    shares = []
    for kind in ("bf16", "fp8"):
        run = load_run("gpt3-350m", ["train.batch_ramp=none", f"precision.kind={kind}"]).run
        figures = compute_figures(run, resolve(run, 1), seconds, H200)
        shares.append(figures["model_flops_utilization"])
    assert shares[0] / shares[1] == pytest.approx(1979 / 989)
    on_cpu = compute_figures(run, resolve(run, 1), seconds, "cpu")
    assert on_cpu["model_flops_utilization"] is None
    assert on_cpu["hardware_flops_utilization"] is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recomputed_products_are_those_that_torch_counts(
    recompute: Literal["attention", "block"], dropout: float
) -> None:
    run = load_run("tiny", [f"parallel.recompute={recompute}", f"model.dropout={dropout}"]).run
    tokens = torch.randint(run.model.vocabulary_size, (2, run.model.sequence_length))
    counted = []
    for kind in ("none", recompute):
        model = GPT(run.model, run.model.vocabulary_size, recompute=kind)  # type: ignore[arg-type]
        initialize(model, seed=1)
        keys = torch.tensor([3, 4]) if dropout else None
        with FlopCounterMode(display=False) as counter:
            model.summed_loss(model(tokens, keys), tokens).backward()  # type: ignore[no-untyped-call]
        products = counter.get_flop_counts()["Global"]
        counted.append(sum(n for op, n in products.items() if str(op) in ("aten.mm", "aten.addmm")))
    # Attention itself is told apart: its kernels count what no causal model needs.
    scores_and_values = 2.0 * run.model.n_layers * run.model.sequence_length * run.model.d_model
    expected = (recomputed_flops_per_token(run) - scores_and_values) * tokens.numel()
    assert counted[1] - counted[0] == expected
