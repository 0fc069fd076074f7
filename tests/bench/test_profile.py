from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainyard.bench.measure import OurTraining
from trainyard.bench.profile import (
    describe_profile,
    exposed_shares,
    intersect,
    join,
    profile_steps,
    subtract,
    total,
)
from trainyard.bench.timeline import Timeline
from trainyard.training.state import TrainContext

Build = Callable[..., tuple[TrainContext, Timeline]]
CPU = torch.device("cpu")


def test_intervals() -> None:
    assert join([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert intersect([(0, 4), (6, 9)], [(3, 7), (8, 20)]) == [(3, 4), (6, 7), (8, 9)]
    assert subtract([(0, 10)], [(2, 3), (5, 6), (9, 12)]) == [(0, 2), (3, 5), (6, 9)]
    assert subtract([(0, 1)], []) == [(0, 1)]
    assert total([(0, 2), (1, 3), (5, 6)]) == 4


def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
    )


def test_talking_is_exposed_where_nothing_is_computed() -> None:
    # The drawing at the top of bench/profile.py.
    events = [
        event("trainyard: forward", 0, 20),
        event("aten::mm", 1, 8),
        event("aten::mm", 12, 19),
        event("gloo:all_reduce", 6, 14),
        event("trainyard: optimizer", 20, 30),
    ]
    shares = exposed_shares(SimpleNamespace(events=lambda: events))
    expected = {"data wait": 0.0, "forward": 0.2, "backward": 0.0, "optimizer": 0.0}
    assert shares == pytest.approx(expected)


def test_kernels_count_where_there_are_some() -> None:
    events = [
        event("trainyard: backward", 0, 1),
        event("trainyard: backward", 100, 200, "CUDA"),
        event("aten::mm", 100, 200),
        event("gemm_kernel", 100, 150, "CUDA"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 140, 190, "CUDA"),
    ]
    assert exposed_shares(SimpleNamespace(events=lambda: events))["backward"] == 0.4


def profile_ours(build: Build, folder: Path, step: Callable[[OurTraining], object]) -> Any:
    context, timeline = build()
    ours = OurTraining(context)
    profiler = profile_steps(lambda: step(ours), timeline, ours.models, CPU, with_places=True)
    return describe_profile(profiler, CPU, folder)


def test_a_step_reads_nothing_that_the_host_does_not_have(build: Build, tmp_path: Path) -> None:
    found = profile_ours(build, tmp_path, OurTraining.step)
    places = found["host_reads_per_step"]
    # The gradient that the loss gets, only where it is on the CPU; the labels of the batch, which
    # is there too. On a GPU neither waits. torch 2.11 places the former in the forward pass.
    allowed = {
        "trainyard/model/loss.py": ("backward", "summed_cross_entropy"),
        "trainyard/training/step.py": ("compute_gradients",),
    }
    for place in places:
        assert place.endswith(allowed[place.partition("(")[0]])
    assert sum(places.values()) <= 3
    assert found["host_waits_per_step"] == {}


def test_a_read_is_found_with_its_place(build: Build, tmp_path: Path) -> None:
    found = profile_ours(build, tmp_path, lambda ours: ours.step().item())
    others = {"model/loss.py", "training/step.py"}
    new = [p for p in found["host_reads_per_step"] if not any(other in p for other in others)]
    assert len(new) == 1
    assert found["host_reads_per_step"][new[0]] == 1.0


@pytest.mark.exhaustive
def test_a_profile_names_operators_and_parts(build: Build, tmp_path: Path) -> None:
    found = profile_ours(build, tmp_path, OurTraining.step)
    shares = [each["share"] for each in found["operators"]]
    assert shares == sorted(shares, reverse=True)
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {entry["name"] for entry in trace["traceEvents"] if "name" in entry}
    # Which of them take longest depends on the machine and its load.
    assert {"aten::mm", "aten::addmm"} <= names
    assert {each["name"] for each in found["operators"]} <= names
    assert all(".py" not in each["name"] for each in found["operators"])
    assert {"trainyard: forward", "trainyard: backward", "trainyard: optimizer"} <= names
    table = (tmp_path / "operators.txt").read_text().splitlines()
    assert table[0].split() == ["share", "ms/step", "calls/step", "operator"]
    assert table[1].split()[-1] == found["operators"][0]["name"]
