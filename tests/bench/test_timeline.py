from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from trainyard.bench.measure import OurTraining
from trainyard.bench.timeline import BACKWARD, DATA, END, FORWARD, OPTIMIZER, HostClock, Timeline
from trainyard.training.state import TrainContext

Build = Callable[..., tuple[TrainContext, Timeline]]


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
    seconds = timeline.add_up(marks)
    assert sum(seconds.values()) == pytest.approx(marks[-1][1] - marks[0][1])
    assert all(value > 0 for value in seconds.values())


def test_time_between_steps_belongs_to_no_part() -> None:
    timeline = Timeline(Counter())
    with timeline.recording([]) as marks:
        for _ in range(2):
            for name in (DATA, FORWARD, BACKWARD, OPTIMIZER, END):
                timeline.begin(name)
    assert timeline.add_up(marks) == {DATA: 2.0, FORWARD: 2.0, BACKWARD: 2.0, OPTIMIZER: 2.0}


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
