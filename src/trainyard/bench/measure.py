"""One rank of a candidate: builds it like training, warms up, times steps and parts of steps.

Timed steps run undisturbed: the breakdown and traces use extra steps, whose time is reported too,
to show the overhead.

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

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile
from torch.utils.hooks import RemovableHandle

from trainyard.bench.job import OPERATORS, PROFILED_STEPS, RESULT, RUN, TRACE, BenchJob
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Data, Run
from trainyard.data.loader import build_orders, data_fingerprint
from trainyard.launch.environment import Process
from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.layout.resolve import Plan, resolve
from trainyard.parallel.mesh import (
    Clock,
    Mesh,
    build_clock,
    build_mesh,
    choose_device,
    device_name,
    explain_device_errors,
)
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.precision.float8 import refuse_device
from trainyard.training.context import build_context
from trainyard.training.metrics import peak_memory_bytes
from trainyard.training.run_folder import OpenRun, RunFiles
from trainyard.training.state import State, TrainContext
from trainyard.training.step import COMPILE_STEPS, freeze_collector, train_step, unfreeze_collector

COMMUNICATION = "communication"
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


class TimedTraining(Protocol):
    """A training loop, step by step."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models for `Timeline.recording`."""

    def step(self) -> Tensor:
        """Runs the next step; returns its loss, on the device."""


Builder = Callable[[Path, Run, Plan, Mesh, Timeline], TimedTraining]
"""Builds the training of a run, with a folder for its files, that reports to a timeline."""


class OurTraining:
    """The step of `trainyard train`.

    Attributes:
        context: of the run.
        state: its progress.
    """

    def __init__(self, context: TrainContext) -> None:
        self.context = context
        self.state = State.at_start(context)

    @property
    def models(self) -> Sequence[nn.Module]:
        """The stages of this rank."""
        return list(self.context.model.stages.values())

    def step(self) -> Tensor:
        """Runs the next step; returns its loss, on the device."""
        loss = train_step(self.context, self.state).loss
        # Start over if the run is shorter than the benchmark.
        self.state.step = (self.state.step + 1) % self.context.plan.n_steps
        return loss


def build_ours(folder: Path, run: Run, plan: Plan, mesh: Mesh, timeline: Timeline) -> OurTraining:
    """Builds the training of `trainyard train`."""
    return OurTraining(
        build_context(OpenRun(folder, run, plan, RunFiles(folder, run)), mesh, timeline)
    )


def run_job(
    folder: Path, job_text: str, process: Process, startup_seconds: dict[str, float], build: Builder
) -> None:
    """Runs a job as one rank; the first one writes `RESULT` to the folder.

    Args:
        folder: has the run.
        job_text: a `BenchJob`, as JSON.
        process: this rank.
        startup_seconds: by part of startup so far; receives the rest.
        build: builds the training.

    Raises:
        UserError: the run or its data is unusable here.
    """
    start = time.perf_counter()

    def end_part(name: str) -> None:
        nonlocal start
        end = time.perf_counter()
        startup_seconds[name], start = end - start, end

    job = msgspec.json.decode(job_text, type=BenchJob)
    run = load_run(str(folder / RUN)).run
    plan = resolve(run, process.n_ranks)
    end_part("config")
    device = choose_device(process, run)
    refuse_device(run, device)
    with (
        start_ranks(process, device, lambda: _facts(run)),
        explain_device_errors(run, plan, device),
    ):
        mesh = build_mesh(plan.topology, process.rank, device)
        end_part("ranks")
        # Building the context does it again, from the cache filled here.
        if process.rank == 0:
            build_orders(run, plan, ("train", "valid"))
        end_part("data")
        timeline = Timeline(build_clock(device))
        training = build(folder, run, plan, mesh, timeline)
        end_part("model")
        result = measure(training, job, timeline, mesh, folder)
    if process.rank == 0:
        startup_seconds["first step"] = result.pop("first_step_seconds")
        result |= {"device": device_name(device), "startup_seconds": startup_seconds}
        (folder / RESULT).write_text(json.dumps(result), encoding="utf-8")


def _facts(run: Run) -> dict[str, str]:
    """Returns facts that must be equal on all ranks; random tokens may be in separate folders."""
    text = render_run(run.model_copy(update={"data": Data()}))
    return gather_facts(text, data_fingerprint(run))


@unfreeze_collector()
def measure(
    training: TimedTraining, job: BenchJob, timeline: Timeline, mesh: Mesh, folder: Path
) -> dict[str, Any]:
    """Runs a job; every rank calls it.

    Args:
        training: what is timed.
        job: the job.
        timeline: receives the phases of each step.
        mesh: of all ranks.
        folder: for the trace.

    Returns:
        the results; time of the slowest rank, memory of the largest one.
    """
    device = mesh.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    marks, losses = [timeline.clock.mark()], []

    def train(n_steps: int) -> None:
        for _ in range(n_steps):
            losses.append(training.step())
            marks.append(timeline.clock.mark())
        timeline.clock.wait()

    train(job.steps.warm_up)
    freeze_collector(COMPILE_STEPS)
    n_timed = job.steps.timed
    if job.seconds:
        warm = timeline.clock.seconds(marks[1], marks[-1]) / (job.steps.warm_up - 1)
        n_timed = max(n_timed, round(job.seconds / _largest([warm], mesh)[0]))
    marks.append(timeline.clock.mark())  # no step's time is the collector's
    train(n_timed)
    seconds = _largest([timeline.clock.seconds(a, b) for a, b in pairwise(marks)], mesh)
    result: dict[str, Any] = {
        "first_step_seconds": seconds[0],
        "step_seconds": seconds[job.steps.warm_up + 1 :],
        "peak_memory_bytes": int(_largest([peak_memory_bytes(device)], mesh)[0]),
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "n_threads": torch.get_num_threads(),
        "split": None,
        "profile": None,
    }
    if job.has_breakdown:
        result["split"] = _measure_breakdown(training, job.steps.breakdown, timeline, mesh)
    if job.profiles:
        profiler = _profile(training, timeline, mesh, with_callers=True)
        if profiler is not None:
            result["profile"] = describe_profile(profiler, device, folder)
    return result


def _measure_breakdown(
    training: TimedTraining, n_steps: int, timeline: Timeline, mesh: Mesh
) -> dict[str, Any]:
    """Measures parts of extra steps, each after an undisturbed one; returns this rank's means."""
    clock, undisturbed, marks = timeline.clock, [], []
    for _ in range(n_steps):
        start = clock.mark()
        training.step()
        undisturbed.append((start, clock.mark()))
        with timeline.recording(training.models) as step_marks:
            training.step()
        marks += step_marks
    clock.wait()
    parts = {
        part: 1000 * seconds / n_steps for part, seconds in timeline.part_seconds(marks).items()
    }
    whole, exposed = sum(parts.values()), 0.0
    profiler = None
    if mesh.topology.n_ranks > 1:
        profiler = _profile(training, timeline, mesh, with_callers=False)
    if profiler is not None:
        for part, share in exposed_shares(profiler).items():
            exposed += share * parts[part]
            parts[part] *= 1 - share
    return {
        "milliseconds": parts | {COMMUNICATION: exposed},
        "milliseconds_per_step": whole,
        "milliseconds_of_other_steps": 1000
        * sum(clock.seconds(*pair) for pair in undisturbed)
        / n_steps,
    }


def _profile(training: TimedTraining, timeline: Timeline, mesh: Mesh, *, with_callers: bool) -> Any:
    """Profiles steps on the first rank; the others run the same steps, and return None."""
    if mesh.rank == 0:
        return profile_steps(
            training.step, timeline, training.models, mesh.device, with_callers=with_callers
        )
    for _ in range(STEPS_UNDER_PROFILER):
        training.step()
    return None


def _largest(values: Sequence[float], mesh: Mesh) -> list[float]:
    """Returns the largest value over all ranks, element by element."""
    largest = torch.tensor(values, dtype=torch.float64)
    if mesh.topology.n_ranks > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [float(value) for value in largest]


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
    for (at, change, kind), (next_at, _, _) in pairwise([*edges, (0.0, 0, "")]):
        n_running[kind] += change
        is_exposed = n_running["communication"] and not n_running["computation"]
        for part in PARTS:
            if n_running[part]:
                seconds[part] += next_at - at
                exposed[part] += next_at - at if is_exposed else 0.0
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
