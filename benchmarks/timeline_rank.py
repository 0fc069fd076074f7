"""Logs what one rank asks of the fake device in a step, for `timeline.py`; run by it.

    .venv-cuda/bin/python tests/fake_cuda/start.py benchmarks/timeline_rank.py JOB.json RANK LOG

The model, its sharding, compiled blocks, NCCL's process groups and the optimizer are those of
training. Only this rank exists, or one of each pipeline stage: groups ask each other for the ids of
their communicators in a file, and nothing is received. So one process is any rank of 1,024.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from trainyard.config.load import load_run
from trainyard.launch.environment import Process
from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.parallel.mesh import Mesh, build_mesh, choose_device
from trainyard.parallel.model import ParallelModel
from trainyard.simulate.accounting import replaced
from trainyard.simulate.fake_world import _no_handshake
from trainyard.simulate.simulation import FakeSteps, micro_batches_per_step, prepare_simulation

WARM_UP_STEPS = 2
"""Blocks compile in the first; in the second, for a gradient that exists."""


class Marks(Heartbeat):
    """Writes the phases of a step into the log."""

    def __init__(self, library: Any) -> None:
        super().__init__()
        self._library = library

    def enter(self, phase: Phase, step: int) -> None:
        """Begins a phase."""
        super().enter(phase, step)
        self._library.fake_cuda_mark(phase.encode())


@contextmanager
def lonely_world(rank: int, n_ranks: int, store: Path) -> Iterator[None]:
    """Makes this process a rank whose devices have NCCL, and whose host has nobody to talk to."""
    new_group = dist.new_group

    def make(*arguments: Any, **keywords: Any) -> Any:
        if keywords.get("backend") == "gloo":
            keywords["backend"] = "fake"
        return new_group(*arguments, **keywords)

    import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend "fake"
    dist.init_process_group(
        "cpu:fake,cuda:nccl",
        store=dist.FileStore(str(store), n_ranks),
        rank=rank,
        world_size=n_ranks,
    )
    with replaced(dist, "new_group", make), _no_handshake():
        yield


def name_communicators(mesh: Mesh, library: Any) -> None:
    """Sends one number along each axis, after a mark with its name."""
    data = mesh.data
    groups = {
        "tensor": mesh.tensor,
        "context": mesh.context,
        "pipeline": mesh.pipeline,
        "ends": mesh.first_and_last_stage,
        "stage": mesh.stage,
        "shard": None if data is None else data.get_group(data.ndim - 1),
        "replicate": data.get_group(0) if data is not None and data.ndim > 1 else None,
        "all": dist.group.WORLD,
    }
    for name, group in groups.items():
        if group is not None:
            library.fake_cuda_mark(f"axis {name}".encode())
            dist.all_reduce(torch.zeros(1, device=mesh.device), group=group)


def main() -> None:
    """Trains for three steps, and logs the last."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    rank, log = int(sys.argv[2]), Path(sys.argv[3])
    run, n_ranks = load_run(job["run"], job["overrides"]).run, job["n_ranks"]
    library = ctypes.CDLL(None)
    plan = prepare_simulation(run, n_ranks)
    device = choose_device(Process(), run)
    n_micro_batches = micro_batches_per_step(run, plan)
    with ExitStack() as stack:
        stack.enter_context(lonely_world(rank, n_ranks, log.with_name("store")))
        vote: Any = getattr(PipelineStage, "_warmup_backward_result", None)
        if vote is not None:  # a product on the device, where nothing is computed
            agree = lambda *_, **__: torch.ones(1, dtype=torch.int32)  # noqa: E731
            stack.enter_context(replaced(PipelineStage, "_warmup_backward_result", agree))
        mesh = build_mesh(plan.topology, rank, device)
        model = ParallelModel(run, plan, mesh, is_filled=True)
        steps = FakeSteps(run, plan, model, Marks(library))
        for _ in range(WARM_UP_STEPS):
            steps.take(n_micro_batches)
        library.fake_cuda_log(str(log.with_suffix(".partial")).encode())
        name_communicators(mesh, library)
        library.fake_cuda_mark(b"step")
        steps.take(n_micro_batches)
        library.fake_cuda_log(None)
    log.with_suffix(".partial").rename(log)
    os._exit(0)  # nobody answers to the end of a process group


if __name__ == "__main__":
    main()
