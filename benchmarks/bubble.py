"""How long the ranks of a pipeline stand idle, against the formulas of their schedules.

    python benchmarks/bubble.py --output bubble.json

Of p ranks with v chunks each and m micro batches a step, the share of the time that a rank waits is

    gpipe, 1f1b       (p - 1) / (m + p - 1)
    interleaved       (p - 1) / (v m + p - 1)
    zero_bubble       (p - 1) / (3 v m + p - 1)

if stages take equally long, a backward pass twice as long as a forward pass (half of it for the
gradients of weights, which zero bubble computes when there is nothing else to do), and messages no
time. Two parts, both through `parallel.pipeline.Pipeline` and gloo:

- 4 ranks whose stages sleep instead of computing, so that they need no core each: this shows the
  order of passes and what it costs to send, and says nothing about how fast a model is.
- 2 ranks on a core each, with real blocks. Their stages are not quite equal, and share caches and
  memory, so idle time beyond the formula is to be expected.

Busy is what passes inside the forward and backward passes of stages; all else is idle, messages and
PyTorch's own work on the schedule too. Steps begin and end together on all ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from measuring import Figures, describe_machine, render
from torch import Tensor, multiprocessing, nn

from trainyard.config.load import load_run
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.pipeline import Pipeline

MICRO_BATCHES = (4, 8, 16)
# Schedule and chunks.
CASES = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
MODEL = """model.n_layers=8 model.d_model=256 model.n_heads=4 model.d_ff=1024 model.dropout=0.0
    model.sequence_length=256 model.vocabulary_size=256 precision.kind=fp32
    train.micro_batch_size=1 train.compile=never parallel.pipeline=2 parallel.zero_stage=0"""
PASSES = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def formula(schedule: str, p: int, v: int, m: int) -> float:
    rounds = {"gpipe": m, "1f1b": m, "interleaved": v * m, "zero_bubble": 3 * v * m}[schedule]
    return (p - 1) / (rounds + p - 1)


class _Wait(torch.autograd.Function):
    """Passes a tensor on, after a while in each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_seconds: float, backward_seconds: float) -> Tensor:
        ctx.backward_seconds = backward_seconds
        time.sleep(forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        time.sleep(ctx.backward_seconds)
        return gradient.contiguous(), None, None


class Sleeper(nn.Module):
    """Stands in for a stage: sleeps `seconds` in the forward pass and for each half of a backward.

    The gradient of its weights can be computed apart from that of its input, as zero bubble does.
    """

    def __init__(self, seconds: float, *, takes_tokens: bool) -> None:
        super().__init__()
        self.seconds, self.takes_tokens = seconds, takes_tokens
        self.d_model, self.compute_dtype = 64, torch.float32
        self.position_table = SimpleNamespace(residual=torch.arange(16))
        self.blocks = nn.ModuleDict()
        self.start = nn.Parameter(torch.ones(self.d_model)) if takes_tokens else None
        self.weight = nn.Parameter(torch.ones(self.d_model))

    def forward(self, x: Tensor) -> Tensor:
        if self.start is not None:
            x = self.start.expand(*x.shape, -1)
        waited: Tensor = _Wait.apply(x, self.seconds, self.seconds)  # type: ignore[no-untyped-call]
        weight: Tensor = _Wait.apply(self.weight, 0.0, self.seconds)  # type: ignore[no-untyped-call]
        return waited + weight

    def summed_loss(self, hidden: Tensor, labels: Tensor, scale: float) -> Tensor:
        return hidden.sum() * scale

    def layers_that_add(self) -> list[nn.Module]:
        return []


class Clock:
    """Adds up the time inside the passes of a pipeline's stages."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.busy_seconds = 0.0
        for stage in pipeline._stages:
            for name in PASSES:
                setattr(stage, name, partial(self._time, getattr(stage, name)))

    def _time(self, one_pass: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return one_pass(*arguments, **options)
        finally:
            self.busy_seconds += time.perf_counter() - start


def sleepers(schedule: str, chunks: int, seconds: float) -> Pipeline:
    """Builds a pipeline of which a rank needs the same time whatever the number of chunks."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    numbers = range(rank, n_ranks * chunks, n_ranks)
    stages: Any = {n: Sleeper(seconds / chunks, takes_tokens=n == 0) for n in numbers}
    example = torch.zeros(1, 16, dtype=torch.int64)
    group = dist.group.WORLD
    assert group is not None
    fields = [f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"]
    parallel = load_run("tiny", [*MODEL.split(), *fields, "train.global_batch_size=4"]).run.parallel
    return Pipeline(stages, n_ranks * chunks, group, parallel, example, layers=[])


def blocks(schedule: str, chunks: int) -> Pipeline:
    """Builds a pipeline of real blocks."""
    fields = [f"parallel.schedule={schedule}", f"parallel.chunks={chunks}"]
    run = load_run("tiny", [*MODEL.split(), *fields, "train.global_batch_size=4"]).run
    plan = resolve(run, 2)
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    pipeline = ParallelModel(run, plan, mesh, torch.float32)._pipeline
    assert pipeline is not None
    return pipeline


def time_steps(pipeline: Pipeline, n_micro_batches: int, n_steps: int) -> list[list[float]]:
    """Gives, for each step, its seconds and then the busy seconds of each rank."""
    clock = Clock(pipeline)
    length = 16 if isinstance(pipeline._stages[0].submod, Sleeper) else 256
    tokens = torch.zeros(n_micro_batches, length, dtype=torch.int64)
    steps = []
    for _ in range(n_steps + 1):  # the first builds the schedule and connects
        dist.barrier()
        clock.busy_seconds, start = 0.0, time.perf_counter()
        pipeline._measure = lambda model, hidden, ids: model.summed_loss(hidden, ids, 1.0)
        pipeline._run("step", (tokens, tokens, {}), n_micro_batches, [])
        dist.barrier()
        seconds = time.perf_counter() - start
        busy = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(busy, torch.tensor(clock.busy_seconds))
        steps.append([seconds, *(each.item() for each in busy)])
        for stage in pipeline._stages:
            stage.submod.zero_grad()
    return steps[1:]


def be_rank(rank: int, n_ranks: int, folder: str, seconds: float, n_steps: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store{n_ranks}", n_ranks)
    dist.init_process_group("gloo", rank=rank, world_size=n_ranks, store=store)
    rows = []
    for schedule, chunks in CASES:
        build = partial(sleepers, seconds=seconds) if n_ranks == 4 else blocks
        for m in MICRO_BATCHES:
            steps = time_steps(build(schedule, chunks), m, n_steps)
            row = describe(schedule, n_ranks, chunks, m, steps)
            rows.append(row)
            if rank == 0:
                print(
                    f"{schedule:12} {n_ranks} ranks, {chunks} chunks, {m:2} micro batches: idle "
                    f"{row['idle']:.3f}, formula {row['formula']:.3f}",
                    flush=True,
                )
    if rank == 0:
        Path(folder, f"rows{n_ranks}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def describe(schedule: str, p: int, v: int, m: int, steps: list[list[float]]) -> Figures:
    shares = [[1 - busy / step[0] for busy in step[1:]] for step in steps]
    middle = [statistics.median(rank) for rank in zip(*shares, strict=True)]
    return {
        "schedule": schedule,
        "chunks": v,
        "micro_batches": m,
        "idle": round(statistics.mean(middle), 4),
        "formula": round(formula(schedule, p, v, m), 4),
        "idle_least_step": round(min(statistics.mean(share) for share in shares), 4),
        "idle_by_rank": [round(share, 4) for share in middle],
        "median_step_seconds": round(statistics.median(step[0] for step in steps), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--milliseconds",
        type=float,
        default=40,
        help="that all stages of a rank sleep, three times for a micro batch",
    )
    parser.add_argument("--steps", type=int, default=5, help="for each line")
    parser.add_argument("--only-sleepers", action="store_true", help="no real blocks")
    parser.add_argument("--output", type=Path, default=Path("bubble.json"))
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore", category=FutureWarning)
    record = describe_machine(["torch"])
    record["sleep_milliseconds"] = arguments.milliseconds
    with tempfile.TemporaryDirectory() as folder:
        parts = {4: "4 ranks that sleep", 2: "2 ranks with real blocks"}
        if arguments.only_sleepers:
            del parts[2]
        for n_ranks, part in parts.items():
            options = (n_ranks, folder, arguments.milliseconds / 1000, arguments.steps)
            multiprocessing.start_processes(be_rank, options, n_ranks, start_method="fork")
            rows = Path(folder, f"rows{n_ranks}.json").read_text(encoding="utf-8")
            record[part] = json.loads(rows)
    record["blocks"] = MODEL.split()
    arguments.output.write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main()
