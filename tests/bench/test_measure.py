from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from trainyard.bench.job import BenchJob, Steps
from trainyard.bench.measure import OurTraining, measure
from trainyard.bench.timeline import HostClock, Timeline
from trainyard.config.load import load_run
from trainyard.parallel.mesh import build_mesh
from trainyard.plan.resolve import resolve


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


def time_steps(folder: Path, seconds: float) -> tuple[int, list[float]]:
    counter = Counter()
    mesh = build_mesh(resolve(load_run("tiny").run, 1).topology, 0, torch.device("cpu"))
    job = BenchJob(Steps(5, 10), "", takes_apart=False, profiles=False, seconds=seconds)
    found = measure(counter, job, Timeline(cast(Any, StepClock())), mesh, folder)
    return counter.n_steps, found["step_seconds"]


def test_steps_are_timed_for_as_long_as_asked(tmp_path: Path) -> None:
    assert time_steps(tmp_path, 0.0) == (15, [0.25] * 10)
    assert time_steps(tmp_path, 4.0) == (21, [0.25] * 16)
    assert time_steps(tmp_path, 0.5) == (15, [0.25] * 10)


def test_a_run_shorter_than_its_benchmark_begins_again(build: Any) -> None:
    parts, _ = build("train.length='2 steps'")
    training = OurTraining(parts)
    n_steps = parts.plan.n_steps
    for _ in range(n_steps + 2):
        training.step()
    assert training._state.step == 2
