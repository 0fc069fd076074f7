from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.config.run import Run
from trainyard.model.gpt import GPT
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.placement import place
from trainyard.parallel.reduce_scatter import CodedReduceScatter
from trainyard.parallel.replica import Replica
from trainyard.plan.resolve import resolve
from trainyard.precision.codes import Codes

E4M3_ROUNDING = 2.0**-4  # relative, at most


class Bytes(TorchDispatchMode):
    """Counts what goes into collectives of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, int] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.namespace == "c10d":
            flat = torch.utils._pytree.tree_leaves(args)
            n_bytes = max((t.nbytes for t in flat if isinstance(t, torch.Tensor)), default=0)
            name = function.__name__.split(".")[0]
            self.sent[name] = self.sent.get(name, 0) + n_bytes
        return function(*args, **(kwargs or {}))


def add_up(contributions: np.ndarray[Any, Any]) -> tuple[Any, dict[str, int]]:
    """Reduces row `rank` of (ranks, ranks, n); gives this rank's part of the sum, and the bytes."""
    mine = torch.from_numpy(contributions[dist.get_rank()].copy())
    scatter = CodedReduceScatter()
    group = dist.group.WORLD
    assert group is not None
    output = scatter.allocate((mine.shape[1],), dtype=torch.float32, device=mine.device)
    with Bytes() as count:
        scatter(output, mine.flatten(), group, dist.ReduceOp.SUM)
    return output.numpy(), count.sent


@pytest.mark.parametrize(
    "n_ranks, n_values", [(2, 1), (2, 32), (2, 1000), (3, 31), (3, 1000), (5, 31)]
)
def test_sums_are_within_one_rounding_of_each_contribution(
    n_ranks: int, n_values: int, run_ranks: Callable[..., list[Any]]
) -> None:
    random = np.random.default_rng(n_values)
    shape = (n_ranks, n_ranks, n_values)
    contributions = random.standard_normal(shape).astype(np.float32) * 1e-6
    contributions *= 10.0 ** random.integers(-3, 4, (n_ranks, 1, 1)).astype(np.float32)
    for rank, (found, sent) in enumerate(run_ranks(n_ranks, add_up, contributions)):
        parts = contributions[:, rank].astype(np.float64)
        largest = np.abs(parts).max(axis=-1, keepdims=True) * 2.0**-14
        allowed = np.maximum(np.abs(parts), largest) * E4M3_ROUNDING
        allowed[rank] = np.abs(parts[rank]) * 1e-6  # its own is not rounded
        assert (np.abs(found - parts.sum(0)) <= allowed.sum(0) + 1e-6 * np.abs(parts).sum(0)).all()
        n_blocks = math.ceil(n_values / 32)
        assert list(sent.values()) == [n_ranks * n_blocks * (32 + 1)]
        if n_values == 1000:
            assert next(iter(sent.values())) < 0.27 * contributions[rank].nbytes


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives(bad: float, run_ranks: Callable[..., list[Any]]) -> None:
    contributions = np.ones((2, 2, 100), dtype=np.float32)
    contributions[1, 0, 40] = bad  # of rank 1, for rank 0
    contributions[1, 1, 70] = bad  # of rank 1, for itself
    (first, _), (second, _) = run_ranks(2, add_up, contributions)
    assert (~np.isfinite(first)).nonzero()[0].tolist() == list(range(32, 64))
    assert (~np.isfinite(second)).nonzero()[0].tolist() == [70]


def build_run(kind: str, **parallel: Any) -> Run:
    sizes = {"n_layers": 3, "d_model": 64, "n_heads": 2, "d_ff": 96, "sequence_length": 32}
    return Run.model_validate(
        {
            "model": {**sizes, "vocabulary_size": 40, "vocabulary_multiple": 8, "dropout": 0.0},
            "train": {
                **{"micro_batch_size": 1, "global_batch_size": 12, "length": "3 steps"},
                "compile": "never",
            },
            "schedule": {"warmup": "0 steps", "decay": "3 steps"},
            "precision": {"kind": kind, "fp8": {"emulate": True}},
            "parallel": parallel,
        }
    )


def gradients_of(run: Run, n_ranks: int) -> tuple[list[Any], dict[str, int]]:
    """Does the passes of one step; gives this rank's gradients with their places, and the bytes."""
    rank = dist.get_rank() if n_ranks > 1 else 0
    plan = resolve(run, n_ranks)
    mesh = build_mesh(plan.topology, rank, torch.device("cpu"))
    replica = Replica(run, plan, mesh, torch.bfloat16)
    ids = torch.randint(0, 40, (12, 33), generator=torch.Generator().manual_seed(0))
    share, n_shares = mesh.data_share
    mine = ids.chunk(n_shares)[share]
    with Bytes() as count:
        replica.forward_backward(mine[:, :-1], mine[:, 1:], None, 1 / 384)
    found = []
    for held in replica.held:
        placed = place(held.parameter, held.dimension, replica.tensor_share)
        gradient = held.gradient
        value = gradient.decode() if isinstance(gradient, Codes) else gradient
        found.append((held.name, placed.shape, placed.offsets, value.double().numpy()))
    return found, count.sent


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero 1 of 2": (2, {"zero_stage": 1}),
    "zero 2 of 3": (3, {"zero_stage": 2}),
    "zero 3 of 4": (4, {"zero_stage": 3}),
    "hybrid 2 x 2": (4, {"zero_stage": 2, "replicas": 2}),
    "context 2": (2, {"zero_stage": 3, "context": 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_a_shared_model_are_near_those_of_one_device(
    layout: str, run_ranks: Callable[..., list[Any]]
) -> None:
    n_ranks, parallel = LAYOUTS[layout]
    run = build_run("fp8_lowbit", **parallel)
    expected, _ = gradients_of(build_run("fp8", zero_stage=1), 1)
    ranks = run_ranks(n_ranks, gradients_of, run, n_ranks)
    for number, (name, shape, _, exact) in enumerate(expected):
        whole = np.full(shape, np.nan)
        for found, _ in ranks:
            _, _, offsets, value = found[number]
            here = tuple(slice(o, o + n) for o, n in zip(offsets, value.shape, strict=True))
            whole[here] = value
        error = np.linalg.norm(whole[: len(exact)] - exact) / np.linalg.norm(exact)
        # A rounding of each contribution and one of the sum, 2.6 % each on average.
        assert error < (0.06 if "blocks" in name else 0.02), name
    sent = ranks[0][1]
    coded = sum(n for kind, n in sent.items() if "alltoall" in kind and "context" not in layout)
    in_blocks = 3 * sum(GPT(run.model, 40).get_parameter(n).numel() for n in block_names())
    data = n_ranks // parallel.get("replicas", 1)
    calls = 12 // n_ranks if parallel["zero_stage"] > 1 else 1
    if coded:  # with padding of each rank's part to whole rows and 32 values
        assert coded / calls == pytest.approx(in_blocks * 33 / 32, rel=0.02 if data != 3 else 0.04)


def block_names() -> list[str]:
    with torch.device("meta"):
        names = [name for name, _ in GPT(build_run("bf16").model, 40).named_parameters()]
    return [name for name in names if name.startswith("blocks.0.")]
