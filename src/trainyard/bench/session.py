"""One process of a candidate: builds it like training, measures, reports."""

from __future__ import annotations

import json
import time
from pathlib import Path

import torch

from trainyard.bench.baselines import build_baseline
from trainyard.bench.job import RESULT, RUN, BenchJob
from trainyard.bench.measure import OurTraining, TimedTraining, measure
from trainyard.bench.start import StartupTimes
from trainyard.bench.timeline import Timeline, build_clock
from trainyard.config.load import load_run, render_run
from trainyard.config.run import Data, Run
from trainyard.data.loader import build_orders, data_fingerprint
from trainyard.launch.environment import Process
from trainyard.parallel.mesh import Mesh, build_mesh, choose_device, device_name, name_device_errors
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.planning.resolve import Plan, resolve
from trainyard.precision.float8 import refuse_device
from trainyard.training.worker import build_context


def run_job(folder: Path, process: Process, start: StartupTimes) -> None:
    """Runs the job of a folder as one rank; the first one writes `RESULT` there.

    Args:
        folder: from `BenchJob.write`.
        process: this rank.
        start: startup times so far.

    Raises:
        UserError: the run or its data is unusable here.
    """
    with start.timing("config"):
        job = BenchJob.read(folder)
        run = load_run(str(folder / RUN)).run
        plan = resolve(run, process.n_ranks)
    device = choose_device(process, run)
    refuse_device(run, device)
    began = time.perf_counter()
    with start_ranks(process, device, lambda: _facts(run)), name_device_errors(run, plan, device):
        mesh = build_mesh(plan.topology, process.rank, device)
        start.seconds["ranks"] = time.perf_counter() - began
        timeline = Timeline(build_clock(device))
        with start.timing("data"):
            # Building the context does it again, from the cache filled here.
            if process.rank == 0:
                build_orders(run, plan, ("train", "valid"))
        with start.timing("model"):
            candidate = build_candidate(folder, run, plan, mesh, job, timeline)
        found = measure(candidate, job, timeline, mesh, folder)
    if process.rank == 0:
        start.seconds["first step"] = found.pop("first_step_seconds")
        found |= {"device": device_name(device), "startup_seconds": start.seconds}
        (folder / RESULT).write_text(json.dumps(found), encoding="utf-8")


def build_candidate(
    folder: Path, run: Run, plan: Plan, mesh: Mesh, job: BenchJob, timeline: Timeline
) -> TimedTraining:
    """Builds a candidate: ours, or a baseline."""
    if job.baseline:
        torch.backends.cuda.enable_cudnn_sdp(enabled=True)  # baselines compute as torch chooses
        return build_baseline(job.baseline, run, plan, mesh.device, timeline)
    return OurTraining(build_context(folder, run, plan, mesh, timeline))


def _facts(run: Run) -> dict[str, str]:
    """Returns facts that must be equal on all ranks; random tokens may be in separate folders."""
    text = render_run(run.model_copy(update={"data": Data()}))
    return gather_facts(text, data_fingerprint(run))
