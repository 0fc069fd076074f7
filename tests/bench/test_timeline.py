from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainyard.bench.measure import (
    BACKWARD,
    DATA,
    END,
    FORWARD,
    OPTIMIZER,
    OurTraining,
    Timeline,
    describe_profile,
    exposed_shares,
    profile_steps,
)
from trainyard.parallel.mesh import HostClock
from trainyard.training.state import TrainContext

Build = Callable[..., tuple[TrainContext, Timeline]]
CPU = torch.device("cpu")


class Counter(HostClock):
    """A clock that goes on by a second at each look."""

    def __init__(self) -> None:
        self._ticks = count()

    def mark(self) -> float:
        return float(next(self._ticks))


def test_a_step_tells_its_parts_in_order(build: Build) -> None:
    context, timeline = build()
    ours = OurTraining(context)
    ours.step()
    with timeline.recording(ours.models) as marks:
        ours.step()
    # Two micro batches of 4; the first forward pass begins with bringing the batch over.
    names = [name for name, _ in marks]
    in_passes = [FORWARD, FORWARD, BACKWARD, FORWARD, BACKWARD]
    assert names == [DATA, *in_passes, OPTIMIZER, END]
    seconds = timeline.part_seconds(marks)
    assert sum(seconds.values()) == pytest.approx(marks[-1][1] - marks[0][1])
    assert all(value > 0 for value in seconds.values())


def test_time_between_steps_belongs_to_no_part() -> None:
    timeline = Timeline(Counter())
    with timeline.recording([]) as marks:
        for _ in range(2):
            for name in (DATA, FORWARD, BACKWARD, OPTIMIZER, END):
                timeline.begin(name)
    assert timeline.part_seconds(marks) == {DATA: 2.0, FORWARD: 2.0, BACKWARD: 2.0, OPTIMIZER: 2.0}


def test_nothing_is_noted_and_no_hook_is_left_outside_of_a_recording(build: Build) -> None:
    context, timeline = build()
    ours = OurTraining(context)
    with timeline.recording(ours.models) as marks:
        pass
    ours.step()
    assert [name for name, _ in marks] == [END]
    (model,) = ours.models
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())


def event(name: str, start: float, end: float, device: str = "CPU") -> Any:
    return SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=end),
        device_type=SimpleNamespace(name=device),
    )


def exposed(*events: Any) -> dict[str, float]:
    shares = exposed_shares(SimpleNamespace(events=lambda: events))
    return {part: share for part, share in shares.items() if share}


def test_communication_is_exposed_where_nothing_is_computed() -> None:
    # The drawing at the top of bench/measure.py.
    events = [
        event("trainyard: forward", 0, 20),
        event("aten::mm", 1, 8),
        event("aten::mm", 12, 19),
        event("gloo:all_reduce", 6, 14),
        event("trainyard: optimizer", 20, 30),
    ]
    assert exposed(*events) == pytest.approx({"forward": 0.2})


def test_what_overlaps_counts_once() -> None:
    forward, backward = event("trainyard: forward", 0, 10), event("trainyard: backward", 10, 20)
    again = event("trainyard: forward", 20, 30)
    nested = [event("aten::linear", 2, 6), event("aten::mm", 3, 5)]
    crossing = [event("gloo:all_reduce", 4, 12), event("gloo:all_gather", 8, 15)]
    assert exposed(forward, backward, again, *nested, *crossing) == pytest.approx(
        {"forward": 0.2, "backward": 0.5}
    )
    assert exposed(forward, *crossing, event("aten::mm", 0, 30)) == {}
    assert exposed(forward, *nested) == exposed(*crossing) == {}


def test_kernels_count_where_there_are_some() -> None:
    events = [
        event("trainyard: backward", 0, 1),
        event("trainyard: backward", 100, 200, "CUDA"),
        event("aten::mm", 100, 200),
        event("gemm_kernel", 100, 150, "CUDA"),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 140, 190, "CUDA"),
    ]
    assert exposed(*events) == {"backward": 0.4}


def profile_ours(build: Build, folder: Path, step: Callable[[OurTraining], object]) -> Any:
    context, timeline = build()
    ours = OurTraining(context)
    profiler = profile_steps(lambda: step(ours), timeline, ours.models, CPU, with_callers=True)
    return describe_profile(profiler, CPU, folder)


def test_a_step_reads_nothing_that_the_host_does_not_have(build: Build, tmp_path: Path) -> None:
    found = profile_ours(build, tmp_path, OurTraining.step)
    places = found["host_reads_per_step"]
    # On a CPU, the loss reads the gradient that it gets, and the labels of the batch; on a GPU
    # neither waits. torch 2.11 reads the gradient in the forward pass.
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
