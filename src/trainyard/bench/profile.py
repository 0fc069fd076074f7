"""Steps under torch's profiler: a trace, its top operators, and waits of the device.

The device waits for the host, when that reads a number back, and for exposed communication:

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from trainyard.bench.job import OPERATORS, PROFILED_STEPS, TRACE
from trainyard.bench.timeline import ANNOTATION, PARTS, Timeline

Interval = tuple[float, float]
"""Start and end in a trace, microseconds."""

TALKING = re.compile(r"gloo:|nccl|rccl")
# Calls that make the host wait for the device; a copy without "Async" does too.
WAITING = re.compile(r"(cuda|hip)((Stream|Device|Event)Synchronize|Memcpy)")
READ = "aten::_local_scalar_dense"
# Python code, and events that only frame operators.
NO_OPERATOR = re.compile(
    rf"\.py[:(]|^<|^nn\.Module: |^{ANNOTATION}|^Optimizer\.|^ProfilerStep|^PythonSubclass$"
)
N_OPERATORS, N_ROWS = 15, 40
REHEARSALS = 1
STEPS_UNDER_PROFILER = REHEARSALS + PROFILED_STEPS


def profile_steps(
    step: Callable[[], object],
    timeline: Timeline,
    models: Sequence[nn.Module],
    device: torch.device,
    *,
    with_places: bool,
) -> Any:
    """Runs `STEPS_UNDER_PROFILER` steps, and traces the last `PROFILED_STEPS`.

    Args:
        step: runs one step.
        timeline: names the parts of the step in the trace.
        models: as for `Timeline.recording`.
        device: for computation.
        with_places: record the Python caller of each operator, which takes time.
    """
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # The rehearsal imports what is imported late, without places: PyTorch names the frame of
    # a module's first run after its code is freed, so by garbage that fails to decode.
    for n_steps, has_places in ((REHEARSALS, False), (PROFILED_STEPS, with_places)):
        # Without "verbose", operators lack their callers.
        config = _ExperimentalConfig(verbose=True) if has_places else None
        with (
            profile(
                activities=activities,
                with_stack=has_places,
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
    """Returns the share of each part of the step in which this rank only talked to others."""
    events = list(profiler.events())
    on_device = [event for event in events if _is_on_gpu(event)]
    annotations = [event for event in events if event.name.startswith(ANNOTATION)]
    # Device events, if there are any: kernels run later than their launch.
    annotations = [e for e in annotations if _is_on_gpu(e)] or annotations
    work = [e for e in on_device if not _is_frame(e)] or events
    talking = [_interval(event) for event in work if TALKING.match(event.name)]
    computing = [
        _interval(event)
        for event in work
        if (on_device or event.name.startswith("aten::")) and not TALKING.match(event.name)
    ]
    exposed = subtract(talking, computing)
    shares = {}
    for part in PARTS:
        inside = [_interval(event) for event in annotations if event.name == ANNOTATION + part]
        length = total(inside)
        shares[part] = total(intersect(exposed, inside)) / length if length else 0.0
    return shares


def describe_profile(profiler: Any, device: torch.device, folder: Path) -> dict[str, Any]:
    """Writes trace and operators to a folder; returns their entry for the record.

    Args:
        profiler: of steps with places.
        device: of the computation.
        folder: for `TRACE` and `OPERATORS`.
    """
    profiler.export_chrome_trace(str(folder / TRACE))
    operators = _list_operators(profiler, on_gpu=device.type == "cuda")
    (folder / OPERATORS).write_text(render_operators(operators[:N_ROWS]), encoding="utf-8")
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


def render_operators(operators: Iterable[Mapping[str, Any]]) -> str:
    """Formats operators as a table."""
    lines = [f"{'share':>7}{'ms/step':>11}{'calls/step':>12}  operator"]
    for each in operators:
        lines.append(
            f"{each['share']:>7.1%}{each['milliseconds_per_step']:>11.3f}"
            f"{each['calls_per_step']:>12g}  {each['name']}"
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


def _interval(event: Any) -> Interval:
    return event.time_range.start, event.time_range.end


def join(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the same time as intervals that are apart, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def intersect(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the time that is in both."""
    ours, others = join(a), join(b)
    found: list[Interval] = []
    while ours and others:
        start, end = max(ours[0][0], others[0][0]), min(ours[0][1], others[0][1])
        if start < end:
            found.append((start, end))
        (ours if ours[0][1] < others[0][1] else others).pop(0)
    return found


def subtract(a: Iterable[Interval], b: Iterable[Interval]) -> list[Interval]:
    """Returns the time that is in `a` alone."""
    others = join(b)
    edges = [-float("inf"), *(edge for interval in others for edge in interval), float("inf")]
    gaps = list(zip(edges[::2], edges[1::2], strict=True))
    return intersect(a, gaps)


def total(intervals: Iterable[Interval]) -> float:
    """Sums the time of intervals, counting overlaps once."""
    return sum(end - start for start, end in join(intervals))
