"""What ranks really send in a step, call by call, against the formulas of the plan.

Every collective and every send of a step is counted below PyTorch's dispatcher, by the group it is
on, while real ranks train over gloo, by what `trainyard plan --simulate` counts with. Calls and
bytes must be those of `plan.traffic`, exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday, skip_if_torch_is_old
from torch import Tensor

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.model.dropout import sequence_seeds
from trainyard.model.gpt import GPT
from trainyard.optim.optimizer import build_optimizer
from trainyard.parallel.mesh import Mesh, build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.tensor import apply_tensor_parallel
from trainyard.planning.resolve import resolve
from trainyard.planning.traffic import rank_traffic
from trainyard.simulate.accounting import Accounting

# Calls and bytes by axis and kind of call.
Counts = dict[tuple[str, str], tuple[int, int]]

BASE = """train.compile=never train.micro_batch_size=1 train.global_batch_size=8 precision.kind=fp32
    model.n_layers=4 model.sequence_length=32 model.dropout=0.0 parallel.zero_stage=0"""
FP8 = "precision.kind=fp8 precision.fp8.emulate=true"
MODERN = """model.positions=rotary model.norm=rms model.mlp=swiglu model.bias=false
    model.query_key_norm=head model.n_heads=8 model.n_key_value_heads=4 model.d_head=12"""
OLMO = f"{MODERN} model.query_key_norm=all model.norm_place=after"
LOW_BIT = "precision.kind=fp8_lowbit precision.fp8.emulate=true"
GATHER = "precision.fp8.all_gather=true"

# Changes to the run, and the number of ranks.
TABLE = {
    "modern, tensor": (f"tensor=2 {MODERN}", 2),
    "modern, tensor, sequence, zero 3": (f"tensor=2 sequence=true zero_stage=3 {MODERN}", 4),
    "olmo, tensor, bf16": (f"tensor=2 precision.kind=bf16 {OLMO}", 2),
    "olmo, tensor, sequence, zero 3": (f"tensor=2 sequence=true zero_stage=3 {OLMO}", 4),
    "olmo, tensor, recompute attention": (f"tensor=2 recompute=attention {OLMO}", 2),
    "olmo, tensor, dropout, recompute block": (
        f"tensor=2 recompute=block {OLMO} model.dropout=0.1",
        2,
    ),
    "olmo, tensor, sequence, recompute block": (
        f"tensor=2 sequence=true recompute=block {OLMO}",
        2,
    ),
    "olmo, tensor, zero bubble": (f"tensor=2 pipeline=2 schedule=zero_bubble {OLMO}", 4),
    "olmo, tensor, zero bubble, two chunks": (
        f"tensor=2 pipeline=2 chunks=2 schedule=zero_bubble {OLMO}",
        4,
    ),
    "olmo, tensor, ulysses": (f"tensor=2 context=2 {OLMO}", 4),
    "modern, ulysses": (f"context=2 {MODERN}", 2),
    "modern, ring, bf16": (f"context=2 context_method=ring precision.kind=bf16 {MODERN}", 2),
    "modern, pipeline": (f"pipeline=2 {MODERN}", 2),
    "tensor, dropout, recompute block": ("tensor=2 recompute=block model.dropout=0.1", 2),
    "tensor, bf16, recompute attention": ("tensor=2 recompute=attention precision.kind=bf16", 2),
    "tensor, sequence, untied": ("tensor=2 sequence=true model.tied_embeddings=false", 2),
    "ulysses, recompute attention": ("context=2 recompute=attention", 2),
    "ring of 4, bf16": ("context=4 context_method=ring precision.kind=bf16", 4),
    "zero 0": ("", 2),
    "zero 1": ("zero_stage=1", 2),
    "replicas, zero 2": ("zero_stage=2 data_replicate=2", 4),
    "zero 3, bf16, uneven shares": (
        "zero_stage=3 precision.kind=bf16 train.global_batch_size=6",
        3,
    ),
    "gpipe on 4": ("pipeline=4 schedule=gpipe", 4),
    "1f1b, bf16, zero 3": ("pipeline=2 zero_stage=3 precision.kind=bf16", 4),
    "interleaved, untied": (
        "pipeline=2 chunks=2 schedule=interleaved model.tied_embeddings=false",
        2,
    ),
    "zero bubble, zero 1": ("pipeline=2 chunks=2 schedule=zero_bubble zero_stage=1", 4),
    "tensor, sequence, pipeline, zero 3": ("tensor=2 sequence=true pipeline=2 zero_stage=3", 8),
    "fp8, weights in bf16": (f"zero_stage=1 {FP8}", 2),
    "weights as fp8, zero 1, replicas": (f"zero_stage=1 data_replicate=2 {FP8} {GATHER}", 4),
    "weights as fp8, zero 3, tensor": (f"zero_stage=3 tensor=2 {FP8} {GATHER}", 4),
    "weights as fp8, pipeline, zero 3": (f"zero_stage=3 pipeline=2 {FP8} {GATHER}", 4),
    "low-precision, zero 2, uneven shares": (
        f"zero_stage=2 {LOW_BIT} train.global_batch_size=6",
        3,
    ),
    "low-precision, zero 1, tensor, sequence": (
        f"zero_stage=1 tensor=2 sequence=true {LOW_BIT}",
        4,
    ),
    "muon, zero 3, tensor, bf16": (
        "zero_stage=3 tensor=2 precision.kind=bf16 optimizer.kind=muon",
        4,
    ),
    "muon, zero 0, pipeline": ("pipeline=2 optimizer.kind=muon", 4),
    "muon, zero 2, replicas": ("zero_stage=2 data_replicate=2 optimizer.kind=muon", 4),
    "low-precision, weights as fp8, pipeline": (f"zero_stage=3 pipeline=2 {LOW_BIT} {GATHER}", 4),
}


def build_run(changes: str) -> Run:
    words = [word if "." in word else f"parallel.{word}" for word in changes.split()]
    run = load_run("tiny", [*BASE.split(), *words]).run
    skip_if_torch_is_old(run)
    return run


def name_groups(mesh: Mesh) -> dict[str, str]:
    """Gives the axis of each group of this rank."""
    axes: dict[str, list[Any]] = {
        "tensor": [mesh.tensor],
        "context": [mesh.context],
        "pipeline": [mesh.pipeline, mesh.first_and_last_stage],
        "stage": [mesh.stage],
        "shard": [mesh.data.get_group(mesh.data.ndim - 1)] if mesh.data is not None else [],
        "replicate": [mesh.data.get_group(0)] if mesh.topology.replicate > 1 and mesh.data else [],
    }
    return {g.group_name: axis for axis, groups in axes.items() for g in groups if g is not None}


def count_step(run: Run, n_ranks: int) -> tuple[Counts, Counts]:
    """Counts the second step of this rank, after what is built at first use; and asks the plan."""
    plan = resolve(run, n_ranks)
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    dtype = torch.float32 if run.precision.kind == "fp32" else torch.bfloat16
    parallel_model = ParallelModel(run, plan, mesh, dtype)
    size = run.train.global_batch_size // plan.topology.data
    tokens = torch.zeros(size, run.model.sequence_length, dtype=torch.int64)
    seeds = sequence_seeds(1, 0, 0, size) if run.model.dropout else None
    optimizer = build_optimizer(parallel_model, run)
    for _ in range(2):
        with Accounting() as count:
            parallel_model.forward_backward(tokens, tokens, seeds, 1.0)
            optimizer.step(1e-3, torch.ones(()), torch.zeros(()))
        for local in parallel_model.local_parameters:
            local.parameter.grad = local.converted_gradient = None
    axes = name_groups(mesh)
    # Shares travel round a ring by calls that could send to all, but send to one neighbour.
    rings = run.parallel.context_method == "ring"
    counted = {}
    for (group, kind), calls in count.calls.items():
        axis = axes[group]
        sent = "send" if axis == "context" and rings else kind
        assert (axis, sent) not in counted, "the ends of a pipeline only add up"
        counted[axis, sent] = (calls, count.message_bytes[group, kind])
    traffic = rank_traffic(run, plan, mesh.coordinates.pipeline)
    return counted, {(t.axis, t.collective): (t.calls, t.n_bytes) for t in traffic}


EVERY_DAY = (
    *("tensor, sequence, untied", "ulysses, recompute attention", "replicas, zero 2"),
    "muon, zero 3, tensor, bf16",
    *(
        "1f1b, bf16, zero 3",
        "weights as fp8, zero 3, tensor",
        "low-precision, zero 2, uneven shares",
    ),
)


@pytest.mark.parametrize("name", everyday(TABLE, EVERY_DAY))
def test_ranks_send_what_the_plan_says(
    name: str, run_ranks: Callable[..., list[tuple[Counts, Counts]]]
) -> None:
    changes, n_ranks = TABLE[name]
    run = build_run(changes)
    results = run_ranks(n_ranks, partial(count_step, run, n_ranks))
    for counted, planned in results:
        assert counted == planned
        assert counted, "some axis is longer than 1"


def count_kept(run: Run, *, compiled: bool) -> float:
    """Counts what a block keeps for its backward pass, in times the whole residual stream."""
    model = GPT(run.model, run.model.vocabulary_size, torch.bfloat16)
    apply_tensor_parallel(model, dist.group.WORLD, run.parallel)
    (block,) = model.blocks.values()
    if compiled:
        block.compile()
    weights = {parameter.shape.numel() for parameter in block.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(x: Tensor) -> Tensor:
        if x.numel() not in weights:
            kept[x.untyped_storage()._cdata] = x, x.untyped_storage().nbytes()
        return x

    n_tokens, D = run.model.sequence_length, run.model.d_model
    x = torch.zeros(1, n_tokens // 2, D, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = block(x, None, model.residual_positions)
    out.sum().backward()
    return sum(n_bytes for _, n_bytes in kept.values()) / (n_tokens * D * 2)


@pytest.mark.parametrize("compiled", everyday([False, True], [False]))
def test_gathered_tokens_are_gathered_again_instead_of_kept(
    compiled: bool, run_ranks: Callable[..., list[float]]
) -> None:
    changes = "tensor=2 sequence=true model.n_layers=1 model.sequence_length=160"
    # Only what ranks exchange follows from `recompute`: the model itself keeps everything.
    runs = [build_run(f"{changes} recompute={choice}") for choice in ("block", "none")]
    assert [run.parallel.gathers_again for run in runs] == [False, True]
    once, again = (run_ranks(2, partial(count_kept, run, compiled=compiled)) for run in runs)
    # Inputs of two products: whole, or as cut; a compiled block computes even those again.
    assert min(once) - max(again) >= 2 * (1 - 1 / 2)


def test_every_kind_of_call_of_every_axis_is_in_the_table() -> None:
    kinds = set()
    for changes, n_ranks in TABLE.values():
        run = build_run(changes)
        plan = resolve(run, n_ranks)
        kinds |= {(t.axis, t.collective) for t in rank_traffic(run, plan, 0)}
    assert kinds == {
        ("tensor", "all-reduce"),
        ("tensor", "all-gather"),
        ("tensor", "reduce-scatter"),
        ("context", "all-to-all"),
        ("context", "send"),
        ("pipeline", "send"),
        ("pipeline", "all-reduce"),
        ("shard", "all-reduce"),
        ("shard", "all-gather"),
        ("shard", "reduce-scatter"),
        ("shard", "all-to-all"),
        ("replicate", "all-reduce"),
        ("stage", "all-to-all"),
    }
