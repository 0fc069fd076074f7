"""Start times of the parts of a training step, on the device's clock.

A step reports its phases through `Heartbeat`; a `Timeline` is one that also records times, and uses
hooks to detect the end of forward passes. A step of two micro batches:

    source       heartbeat      hook      hook       hook      hook       heartbeat       the caller
    part         data wait  forward   backward   forward   backward   optimizer   (end)
    at, ms       0.0        0.1       5.1        15.2      20.2       30.3        34.0

    so  data wait 0.1    forward 5.0 + 5.0    backward 10.1 + 10.1    optimizer 3.7

On a GPU a mark is an event in the kernel stream: it does not synchronize, and measures the device's
time. "data wait" is then the time the device idles while the host waits for, or sends, data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

from torch import nn
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.parallel.mesh import Clock
from trainyard.parallel.mesh import DeviceClock as DeviceClock
from trainyard.parallel.mesh import HostClock as HostClock
from trainyard.parallel.mesh import build_clock as build_clock

DATA, FORWARD, BACKWARD, OPTIMIZER, END = "data wait", "forward", "backward", "optimizer", ""
PARTS: Final = (DATA, FORWARD, BACKWARD, OPTIMIZER)
PART_OF_PHASE: Final = {"data": DATA, "forward and backward": FORWARD, "update": OPTIMIZER}
ANNOTATION: Final = "trainyard: "
Mark = tuple[str, Any]
"""A part and its start."""


class Timeline(Heartbeat):
    """Records when parts of a step start, while enabled.

    Args:
        clock: of the device.
    """

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self._marks: list[Mark] | None = None
        self._annotates = False
        self._annotation: record_function | None = None

    def enter(self, phase: Phase, step: int) -> None:
        """Receives the phase from the training step."""
        super().enter(phase, step)
        if phase in PART_OF_PHASE:
            self.begin(PART_OF_PHASE[phase])

    def begin(self, part: str) -> None:
        """Ends the previous part, and starts this one; `END` starts none."""
        if self._marks is None:
            return
        self._marks.append((part, self.clock.mark()))
        if self._annotation is not None:
            self._annotation.__exit__(None, None, None)
            self._annotation = None
        if self._annotates and part != END:
            self._annotation = record_function(ANNOTATION + part)
            self._annotation.__enter__()  # type: ignore[no-untyped-call]

    @contextmanager
    def recording(
        self, models: Iterable[nn.Module], *, annotates: bool = False
    ) -> Iterator[list[Mark]]:
        """Records times inside its block, in the list that it yields.

        Args:
            models: the stages of a model, to separate forward from backward passes.
            annotates: also name the parts in a profiler trace.
        """
        marks: list[Mark] = []
        self._marks, self._annotates = marks, annotates
        handles = [handle for model in models for handle in self._watch(model)]
        try:
            yield marks
        finally:
            self.begin(END)
            self._marks = None
            for handle in handles:
                handle.remove()

    def add_up(self, marks: Iterable[Mark]) -> dict[str, float]:
        """Returns the seconds of each part between marks that have passed."""
        found = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(marks):
            if part != END:
                found[part] += self.clock.seconds(start, end)
        return found

    def _watch(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield model.register_forward_pre_hook(lambda *_: self.begin(FORWARD))
        # The stage with the loss has not finished its forward pass before that.
        last = getattr(model, "cross_entropy", None) or model
        yield last.register_forward_hook(lambda *_: self.begin(BACKWARD))
