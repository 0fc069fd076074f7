"""Sizes of checkpoints against what ranks really write, and intervals against published ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.circles import everyday

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.layout.sizes import checkpoint_bytes, rank_bytes
from trainyard.planning import saving

ROOT = Path(__file__).parents[2]
HOUR = 3600.0

LAYOUTS = {
    "one rank": (1, ""),
    "ZeRO 0": (2, "zero_stage=0"),
    "ZeRO 1, tensor": (4, "tensor=2 zero_stage=1"),
    "ZeRO 3, replicas": (4, "zero_stage=3 data_replicate=2"),
    "context": (4, "context=2"),
    "pipeline, ZeRO 0": (4, "pipeline=2 zero_stage=0"),
    "interleaved, tensor": (4, "pipeline=2 chunks=2 schedule=interleaved tensor=2"),
    "more shares than rows": (4, "pipeline=2 zero_stage=3"),
    "experts": (4, "expert=2"),
    "experts, ZeRO 0": (4, "expert=2 zero_stage=0"),
    "experts, pipeline, tensor": (8, "expert=2 pipeline=2 tensor=2"),
}
EXPERTS = """model.bias=false model.n_experts=6 model.d_expert=12 model.n_shared_experts=1
    model.n_dense_blocks=2 model.balance=bias"""


def run_of(changes: str, *overrides: str) -> Run:
    parallel = [f"parallel.{change}" for change in changes.split()]
    shape = ["model.n_layers=5", "model.d_model=20", "model.n_heads=2", "model.d_ff=44"]
    shape += EXPERTS.split() if "expert" in changes else []
    return load_run("tiny", [*shape, "train.micro_batch_size=1", *parallel, *overrides]).run


@pytest.mark.parametrize("layout", [*LAYOUTS])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_ranks_write_every_parameter_once(layout: str, tied: str) -> None:
    n_ranks, changes = LAYOUTS[layout]
    run = run_of(changes, f"model.tied_embeddings={tied}")
    plan = resolve(run, n_ranks)
    written = [rank_bytes(run, plan, rank) for rank in range(n_ranks)]
    n_untrained = 3 * run.model.n_experts  # balances, which have no moments
    n_bytes = 12 * plan.n_parameters - 8 * n_untrained
    assert sum(written) == checkpoint_bytes(run, plan.n_parameters) == n_bytes
    assert saving.host_bytes(run, plan) == max(written)


def count_bytes(run: Run, n_ranks: int) -> int:
    """Counts what this rank writes of the weights of a real model, thrice."""
    import torch
    import torch.distributed as dist

    from trainyard.parallel.mesh import build_mesh
    from trainyard.parallel.model import ParallelModel
    from trainyard.parallel.placement import local_part

    plan = resolve(run, n_ranks)
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    parallel_model = ParallelModel(run, plan, mesh, torch.float32)
    trained = {local.name for local in parallel_model.local_parameters}
    return sum(
        local_part(local.parameter).nbytes * (3 if local.name in trained else 1)
        for local in parallel_model.saved_tensors
        if not local.is_copy and parallel_model.is_writer(local)
    )


@pytest.mark.parametrize("layout", everyday([*LAYOUTS][1:], ("interleaved, tensor",)))
def test_real_ranks_write_as_many_bytes(layout: str, run_ranks: Callable[..., list[Any]]) -> None:
    n_ranks, changes = LAYOUTS[layout]
    run = run_of(changes)
    plan = resolve(run, n_ranks)
    expected = [rank_bytes(run, plan, rank) for rank in range(n_ranks)]
    assert run_ranks(n_ranks, count_bytes, run, n_ranks) == expected


def test_a_save_that_is_not_in_the_background_takes_no_memory() -> None:
    run = run_of("", "checkpoint.background=false")
    assert saving.host_bytes(run, resolve(run)) == 0


def test_175b_is_two_tebibytes_and_little_for_each_rank() -> None:
    run = load_run(
        "gpt3-175b", ["parallel.tensor=8", "parallel.pipeline=8", "train.batch_ramp=none"]
    ).run
    plan = resolve(run, 512)
    assert checkpoint_bytes(run, plan.n_parameters) / 2**40 == pytest.approx(1.91, abs=0.005)
    assert saving.host_bytes(run, plan) / 2**30 == pytest.approx(4.0, abs=0.2)


@pytest.mark.parametrize(
    "n_nodes, rate, save_seconds, interval_hours, useful",
    [
        # E[ETTR] with 15 minutes for a restart, computed independently for these intervals.
        (8, 6.5e-3, 60, 4, 0.991),
        (63, 6.5e-3, 1, 1 / 6, 0.993),
        (128, 6.5e-3, 60, 3, 0.934),
        (128, 1.6e-2, 60, 0.5, 0.927),
        (1024, 6.5e-3, 1, 1 / 30, 0.918),
        (1024, 6.5e-3, 60, 3, 0.512),
    ],
)
def test_useful_time(
    n_nodes: int, rate: float, save_seconds: float, interval_hours: float, useful: float
) -> None:
    between = saving.mean_seconds_between_failures(n_nodes, rate)
    found = saving.useful_share(interval_hours * HOUR, save_seconds, between)
    assert found == pytest.approx(useful, abs=0.0006)


@pytest.mark.parametrize("n_nodes", [8, 128, 1024])
@pytest.mark.parametrize("save_seconds", [1.0, 60.0, 600.0])
def test_no_interval_is_much_better_than_the_suggested_one(
    n_nodes: int, save_seconds: float
) -> None:
    between = saving.mean_seconds_between_failures(n_nodes)
    suggested = saving.suggest_interval(save_seconds, between)
    best = max(
        saving.useful_share(suggested * 1.1**power, save_seconds, between)
        for power in range(-60, 60)
    )
    # The formula neglects that a restart, too, takes time in which nothing fails.
    assert saving.useful_share(suggested, save_seconds, between) > best - 0.005


def test_the_table_of_file_systems_and_the_page_that_shows_it() -> None:
    script = ROOT / "benchmarks" / "checkpoint_interval.py"
    printed = subprocess.run(
        [sys.executable, script, "--nodes", "128"], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines()[2:]]
    assert [row[1] for row in rows] == ["19.2", "64", "128", "256"]
    assert [row[2] for row in rows] == ["2.04", "0.61", "0.31", "0.15"], "the guide's"
    # 2.3 x 2^40 bytes over 10^9 bytes a second each.
    assert [row[3] for row in rows] == ["2.20", "0.66", "0.33", "0.16"]
    assert [row[4] for row in rows] == ["114 min", "63 min", "44 min", "31 min"]
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    assert any(printed in page for page in pages), "no page in docs/ has this very table"
