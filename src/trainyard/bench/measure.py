"""One rank of a candidate: builds it like training, warms up, times steps and parts of steps.

Timed steps run undisturbed: the breakdown and traces use extra steps, whose time is reported too,
to show the overhead.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.bench.job import RESULT, RUN, BenchJob
from trainyard.bench.timeline import (
    STEPS_UNDER_PROFILER,
    Timeline,
    build_clock,
    describe_profile,
    exposed_shares,
    profile_steps,
)
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Data, Run
from trainyard.data.loader import build_orders, data_fingerprint
from trainyard.launch.environment import Process
from trainyard.parallel.mesh import Mesh, build_mesh, choose_device, device_name, name_device_errors
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.planning.resolve import Plan, resolve
from trainyard.precision.float8 import refuse_device
from trainyard.training.metrics import peak_memory_bytes
from trainyard.training.state import State, TrainContext
from trainyard.training.step import WARM_UP_STEPS, restoring_collector, spare_collector, train_step
from trainyard.training.worker import build_context

COMMUNICATION = "communication"


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
    return OurTraining(build_context(folder, run, plan, mesh, timeline))


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
    with start_ranks(process, device, lambda: _facts(run)), name_device_errors(run, plan, device):
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


@restoring_collector()
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
    spare_collector(WARM_UP_STEPS)
    n_timed = job.steps.timed
    if job.seconds:
        warm = timeline.clock.seconds(marks[1], marks[-1]) / (job.steps.warm_up - 1)
        n_timed = max(n_timed, round(job.seconds / _largest([warm], mesh)[0]))
    train(n_timed)
    seconds = _largest([timeline.clock.seconds(a, b) for a, b in pairwise(marks)], mesh)
    result: dict[str, Any] = {
        "first_step_seconds": seconds[0],
        "step_seconds": seconds[job.steps.warm_up :],
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
