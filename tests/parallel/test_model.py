"""What a rank holds while it builds its part of the model."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.layouts import read_layout

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part

N_RANKS = 4
SMALL = ["train.micro_batch_size=1"]
LARGE = [*SMALL, "model.n_layers=12", "model.d_model=512", "model.n_heads=8", "model.d_ff=2048"]


def build(run: Run, *, is_filled: bool = False) -> ParallelModel:
    plan = resolve(run, N_RANKS)
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    return ParallelModel(run, plan, mesh, is_filled=is_filled)


def resident_bytes(what: str) -> int:
    (kib,) = re.findall(rf"{what}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(kib)


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="Linux with glibc measures the peak"
)
@pytest.mark.parametrize("name", ["dp4 zero3", "dp4 zero1", "tp4"])
def test_no_rank_ever_holds_the_whole_model(run_ranks: Callable[..., list[Any]], name: str) -> None:
    def measure(run: Run, small: Run) -> tuple[int, int]:
        build(small)  # imports what it needs
        ctypes.CDLL(None).malloc_trim(0)  # what tests before freed would be taken again
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        model = build(run)
        own = sum(4 * local_part(each.parameter).numel() for each in model.local_parameters)
        return resident_bytes("VmHWM") - before, own

    run = load_run("tiny", [*LARGE, *read_layout(name).overrides]).run
    whole = 4 * resolve(run, N_RANKS).n_parameters
    for peak, own in run_ranks(
        N_RANKS, measure, run, load_run("tiny", [*SMALL, *read_layout(name).overrides]).run
    ):
        assert 0.24 * whole < own < 0.27 * whole
        assert own < peak < 0.5 * whole


def test_weights_that_a_checkpoint_will_fill_are_zero(run_ranks: Callable[..., list[Any]]) -> None:
    def count(run: Run) -> int:
        model = build(run, is_filled=True)
        return sum(
            int(local_part(each.parameter).count_nonzero()) for each in model.local_parameters
        )

    assert run_ranks(N_RANKS, count, load_run("tiny", SMALL).run) == [0] * N_RANKS
