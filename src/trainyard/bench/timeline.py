"""The parts of a training step: their times on the device's clock, and torch's profile of them.

A step reports its phases through `Heartbeat`; a `Timeline` is one that also records times, and uses
hooks to detect the end of forward passes. A step of two micro batches:

    source       heartbeat      hook      hook       hook      hook       heartbeat       the caller
    part         data wait  forward   backward   forward   backward   optimizer   (end)
    at, ms       0.0        0.1       5.1        15.2      20.2       30.3        34.0

    so  data wait 0.1    forward 5.0 + 5.0    backward 10.1 + 10.1    optimizer 3.7

On a GPU a mark is an event in the kernel stream: it does not synchronize, and measures the device's
time. "data wait" is then the time the device idles while the host waits for, or sends, data.

Under the profiler a step shows its top operators, and where the device waits for the host, which
reads a number back, or for exposed communication:

    forward      |------------------|
    computing     #######    #######       7 + 7
    communicating      ........            8, 4 of it exposed

Communication that overlaps with computing costs nothing. The rest is exposed, reported as a share
of each part of the step: 4 / 20 of forward here. On a GPU both are kernels; on a CPU they are
torch's operators and gloo's operations, of all threads.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from trainyard.bench.job import OPERATORS, PROFILED_STEPS, TRACE
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

COMMUNICATING: Final = re.compile(r"gloo:|nccl|rccl")
# Calls that make the host wait for the device; a copy without "Async" does too.
WAITING: Final = re.compile(r"(cuda|hip)((Stream|Device|Event)Synchronize|Memcpy)")
READ: Final = "aten::_local_scalar_dense"
# Python code, and events that only frame operators.
NO_OPERATOR: Final = re.compile(
    rf"\.py[:(]|^<|^nn\.Module: |^{ANNOTATION}|^Optimizer\.|^ProfilerStep|^PythonSubclass$"
)
N_OPERATORS, N_ROWS = 15, 40
REHEARSALS = 1
STEPS_UNDER_PROFILER = REHEARSALS + PROFILED_STEPS


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

    def part_seconds(self, marks: Iterable[Mark]) -> dict[str, float]:
        """Returns the seconds of each part between marks that have passed."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, start), (_, end) in pairwise(marks):
            if part != END:
                seconds[part] += self.clock.seconds(start, end)
        return seconds

    def _watch(self, model: nn.Module) -> Iterator[RemovableHandle]:
        yield model.register_forward_pre_hook(lambda *_: self.begin(FORWARD))
        # The stage with the loss has not finished its forward pass before that.
        last = getattr(model, "cross_entropy", None) or model
        yield last.register_forward_hook(lambda *_: self.begin(BACKWARD))


def profile_steps(
    step: Callable[[], object],
    timeline: Timeline,
    models: Sequence[nn.Module],
    device: torch.device,
    *,
    with_callers: bool,
) -> Any:
    """Runs `STEPS_UNDER_PROFILER` steps, and traces the last `PROFILED_STEPS`.

    Args:
        step: runs one step.
        timeline: names the parts of the step in the trace.
        models: as for `Timeline.recording`.
        device: for computation.
        with_callers: record the Python caller of each operator, which takes time.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The rehearsal imports what is imported late, without places: PyTorch names the frame of
    # a module's first run after its code is freed, so by garbage that fails to decode.
    for n_steps, has_callers in ((REHEARSALS, False), (PROFILED_STEPS, with_callers)):
        # Without "verbose", operators lack their callers.
        config = _ExperimentalConfig(verbose=True) if has_callers else None
        with (
            profile(
                activities=activities,
                with_stack=has_callers,
                experimental_config=config,
                acc_events=True,  # of one cycle; torch 2.11 warns without it
            ) as profiler,
            timeline.recording(models, annotates=True),
        ):
            for _ in range(n_steps):
                step()
            timeline.clock.wait()
    return profiler


def exposed_shares(profiler: Any) -> dict[str, float]:
    """Returns the share of each part in which this rank communicates without computing."""
    events = list(profiler.events())
    on_device = [event for event in events if _is_on_gpu(event)]
    annotations = [event for event in events if event.name.startswith(ANNOTATION)]
    # Device events, if there are any: kernels run later than their launch.
    annotations = [event for event in annotations if _is_on_gpu(event)] or annotations
    # What runs at each time: parts of the step, "communication" and "computation".
    running: list[tuple[str, Any]] = [
        (event.name.removeprefix(ANNOTATION), event) for event in annotations
    ]
    for event in [event for event in on_device if not _is_frame(event)] or events:
        if COMMUNICATING.match(event.name):
            running.append(("communication", event))
        elif on_device or event.name.startswith("aten::"):
            running.append(("computation", event))
    edges = [(event.time_range.start, 1, kind) for kind, event in running]
    edges += [(event.time_range.end, -1, kind) for kind, event in running]
    edges.sort()
    seconds, exposed = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    n_running: Counter[str] = Counter()
    for (time, change, kind), (next_time, _, _) in pairwise([*edges, (0.0, 0, "")]):
        n_running[kind] += change
        is_exposed = n_running["communication"] and not n_running["computation"]
        for part in PARTS:
            if n_running[part]:
                seconds[part] += next_time - time
                exposed[part] += next_time - time if is_exposed else 0.0
    return {part: exposed[part] / seconds[part] if seconds[part] else 0.0 for part in PARTS}


def describe_profile(profiler: Any, device: torch.device, folder: Path) -> dict[str, Any]:
    """Writes trace and operators to a folder; returns their entry for the record.

    Args:
        profiler: of steps with places.
        device: of the computation.
        folder: for `TRACE` and `OPERATORS`.
    """
    profiler.export_chrome_trace(str(folder / TRACE))
    operators = _list_operators(profiler, on_gpu=device.type == "cuda")
    (folder / OPERATORS).write_text(_render_operators(operators[:N_ROWS]), encoding="utf-8")
    events = profiler.events()
    return {
        "steps": PROFILED_STEPS,
        "operators": operators[:N_OPERATORS],
        "host_waits_per_step": _per_step(e.name for e in events if WAITING.fullmatch(e.name)),
        "host_reads_per_step": _per_step(filter(None, map(_reader, events))),
    }


def _list_operators(profiler: Any, *, on_gpu: bool) -> list[dict[str, Any]]:
    """Lists kernels of a GPU, or operators of a CPU, the most expensive first."""
    by = f"self_{'device' if on_gpu else 'cpu'}_time_total"
    rows = [
        row
        for row in profiler.key_averages()
        if _is_on_gpu(row) == on_gpu
        and not (on_gpu and _is_frame(row))
        and not NO_OPERATOR.search(row.key)
    ]
    rows.sort(key=lambda row: -getattr(row, by))
    whole = sum(getattr(row, by) for row in rows) or 1.0
    return [
        {
            "name": row.key,
            "calls_per_step": row.count / PROFILED_STEPS,
            "milliseconds_per_step": getattr(row, by) / 1000 / PROFILED_STEPS,
            "share": getattr(row, by) / whole,
        }
        for row in rows
    ]


def _render_operators(operators: Iterable[Mapping[str, Any]]) -> str:
    lines = [f"{'share':>7}{'ms/step':>11}{'calls/step':>12}  operator"]
    for operator in operators:
        lines.append(
            f"{operator['share']:>7.1%}{operator['milliseconds_per_step']:>11.3f}"
            f"{operator['calls_per_step']:>12g}  {operator['name']}"
        )
    return "\n".join(lines) + "\n"


def _reader(event: Any) -> str:
    """Names the code that read a number from a tensor; empty for reads by an operator."""
    if event.name != READ:
        return ""
    caller = event.cpu_parent
    while caller is not None and caller.name == "aten::item":
        caller = caller.cpu_parent
    if caller is not None and caller.name.startswith("aten::"):
        return ""
    parents = []
    while caller is not None:
        parents.append(caller.name)
        caller = caller.cpu_parent
    # In torch 2.11 Python code is no parent, and of a backward pass the stack is the forward one's.
    return next((str(name) for name in (*parents, *event.stack) if ".py(" in name), "unknown")


def _per_step(names: Iterable[str]) -> dict[str, float]:
    return {name: count / PROFILED_STEPS for name, count in Counter(names).items()}


def _is_on_gpu(event: Any) -> bool:
    return bool(event.device_type.name == "CUDA")


def _is_frame(event: Any) -> bool:
    """Returns whether an event of a device only frames kernels, as the names of parts do."""
    return event.name.startswith(ANNOTATION) or getattr(event, "is_user_annotation", False)
