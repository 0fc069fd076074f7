from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from trainyard.bench.job import BenchJob, Steps
from trainyard.bench.measure import OurTraining, Timeline, measure
from trainyard.config.load import load_run
from trainyard.layout.flops import flops_per_token
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import HostClock, build_mesh
from trainyard.training.metrics import Metrics
from trainyard.training.state import State, TrainContext
from trainyard.training.step import train_step


class StepClock(HostClock):
    """A clock on which every mark is a quarter of a second after the one before."""

    def __init__(self) -> None:
        self._now = 0.0

    def mark(self) -> float:
        self._now += 0.25
        return self._now


class Counter:
    models: tuple[nn.Module, ...] = ()

    def __init__(self) -> None:
        self.n_steps = 0

    def step(self) -> Tensor:
        self.n_steps += 1
        return torch.zeros(())


def time_steps(
    folder: Path, seconds: float, clock: StepClock | None = None
) -> tuple[int, list[float]]:
    counter = Counter()
    mesh = build_mesh(resolve(load_run("tiny").run, 1).topology, 0, torch.device("cpu"))
    job = BenchJob(Steps(5, 10), has_breakdown=False, seconds=seconds)
    found = measure(counter, job, Timeline(cast(Any, clock or StepClock())), mesh, folder)
    return counter.n_steps, found["step_seconds"]


def test_steps_are_timed_for_as_long_as_asked(tmp_path: Path) -> None:
    assert time_steps(tmp_path, 0.0) == (15, [0.25] * 10)
    assert time_steps(tmp_path, 4.0) == (21, [0.25] * 16)
    assert time_steps(tmp_path, 0.5) == (15, [0.25] * 10)


def test_no_step_has_the_time_of_a_full_collection(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock = StepClock()
    monkeypatch.setattr(gc, "collect", clock.mark)
    assert time_steps(tmp_path, 0.0, clock) == (15, [0.25] * 10)


@pytest.mark.parametrize("kind", ["fp32", "fp8_lowbit"])
def test_a_measured_training_leaves_no_memory(
    kind: str, build: Callable[..., tuple[TrainContext, Timeline]], tmp_path: Path
) -> None:
    fp8 = "precision.fp8.emulate=true", "precision.fp8.precise_blocks=0"
    context, timeline = build(f"precision.kind={kind}", *fp8)
    mesh, training = context.model.mesh, OurTraining(context)
    left = ref(context.model)
    job = BenchJob(Steps(3, 1), has_breakdown=False)
    measure(training, job, timeline, mesh, tmp_path)
    del context, training
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert left() is None


def test_a_run_shorter_than_its_benchmark_begins_again(build: Any) -> None:
    parts, _ = build("train.length='2 steps'")
    training = OurTraining(parts)
    n_steps = parts.plan.n_steps
    for _ in range(n_steps + 2):
        training.step()
    assert training.state.step == 2


def test_training_logs_the_formula_that_is_asked_for(
    build: Callable[..., tuple[TrainContext, Timeline]], tmp_path: Path
) -> None:
    """Of a run that recomputes: 4 passes of 3, and 3/4 of the head; no peak is known of a CPU."""
    context, _ = build("log.flop_formula=megatron_deepspeed", "parallel.recompute=block")
    state, metrics = State.at_start(context), Metrics(context)
    with metrics.timing():
        result = train_step(context, state)
    metrics.add(result, context.run.train.global_batch_size)
    line = metrics.write_steps(state, result)
    metrics.close()
    written = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert written["flop_formula"] == "megatron_deepspeed"
    assert written["formula_share_of_peak"] is None
    flops = flops_per_token(
        context.run.model, context.plan.padded_vocabulary_size, "megatron_deepspeed", "block"
    )
    ratio = flops / context.plan.model_flops_per_token
    assert ratio > 1.1
    tflops = written["tflops_per_second_per_device"]
    assert written["formula_tflops_per_second_per_device"] == pytest.approx(ratio * tflops)
    assert "flop_formula" not in line  # the short line has MFU alone
