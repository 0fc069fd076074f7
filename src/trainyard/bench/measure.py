"""One rank of a candidate: warm-up, timed steps, then steps for the breakdown.

Timed steps run undisturbed: the breakdown and traces use extra steps, whose time is reported too,
to show the overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainyard.bench.job import BenchJob
from trainyard.bench.profile import (
    STEPS_UNDER_PROFILER,
    describe_profile,
    exposed_shares,
    profile_steps,
)
from trainyard.bench.timeline import Timeline
from trainyard.parallel.mesh import Mesh
from trainyard.training.metrics import peak_memory_bytes
from trainyard.training.state import State, TrainContext
from trainyard.training.step import WARM_UP_STEPS, restoring_collector, spare_collector, train_step

COMMUNICATION = "communication"


class TimedTraining(Protocol):
    """A training loop, step by step."""

    @property
    def models(self) -> Sequence[nn.Module]:
        """The models for `Timeline.recording`."""

    def step(self) -> Tensor:
        """Runs the next step; returns its loss, on the device."""


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


@restoring_collector()
def measure(
    candidate: TimedTraining, job: BenchJob, timeline: Timeline, mesh: Mesh, folder: Path
) -> dict[str, Any]:
    """Runs a job; every rank calls it.

    Args:
        candidate: trains.
        job: the job.
        timeline: receives the candidate's phases.
        mesh: of all ranks; a single one for baselines.
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
            losses.append(candidate.step())
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
    found: dict[str, Any] = {
        "first_step_seconds": seconds[0],
        "step_seconds": seconds[job.steps.warm_up :],
        "peak_memory_bytes": int(_largest([peak_memory_bytes(device)], mesh)[0]),
        "first_loss": losses[0].item(),
        "last_loss": losses[-1].item(),
        "n_threads": torch.get_num_threads(),
        "split": None,
        "profile": None,
    }
    if job.takes_apart:
        found["split"] = _take_apart(candidate, job.steps.taken_apart, timeline, mesh)
    if job.profiles and mesh.rank == 0:
        profiler = profile_steps(
            candidate.step, timeline, candidate.models, device, with_places=True
        )
        found["profile"] = describe_profile(profiler, device, folder)
    elif job.profiles:
        _follow(candidate)
    return found


def _take_apart(
    candidate: TimedTraining, n_steps: int, timeline: Timeline, mesh: Mesh
) -> dict[str, Any]:
    """Measures parts of extra steps, each after an undisturbed one; returns this rank's means."""
    clock, plain, marks = timeline.clock, [], []
    for _ in range(n_steps):
        start = clock.mark()
        candidate.step()
        plain.append((start, clock.mark()))
        with timeline.recording(candidate.models) as of_step:
            candidate.step()
        marks += of_step
    clock.wait()
    taken = timeline.add_up(marks)
    parts = {part: 1000 * seconds / n_steps for part, seconds in taken.items()}
    whole = sum(parts.values())
    undisturbed = 1000 * sum(clock.seconds(*pair) for pair in plain) / n_steps
    exposed = 0.0
    if mesh.topology.n_ranks > 1:
        if mesh.rank == 0:
            profiler = profile_steps(
                candidate.step, timeline, candidate.models, mesh.device, with_places=False
            )
            for part, share in exposed_shares(profiler).items():
                exposed += share * parts[part]
                parts[part] *= 1 - share
        else:
            _follow(candidate)
    return {
        "milliseconds": parts | {COMMUNICATION: exposed},
        "milliseconds_per_step": whole,
        "milliseconds_of_other_steps": undisturbed,
    }


def _follow(candidate: TimedTraining) -> None:
    """Runs, on other ranks, the steps that the first rank profiles."""
    for _ in range(STEPS_UNDER_PROFILER):
        candidate.step()


def _largest(values: Sequence[float], mesh: Mesh) -> list[float]:
    """Returns the largest of all ranks, place by place."""
    found = torch.tensor(values, dtype=torch.float64)
    if mesh.topology.n_ranks > 1:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    largest: list[float] = found.tolist()
    return largest
