from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from trainyard.parallel.data import Bf16ReduceScatter, CodedReduceScatter
from trainyard.simulate.accounting import Accounting

E4M3_ROUNDING = 2.0**-4  # relative, at most


def add_up(
    contributions: np.ndarray[Any, Any], kind: Callable[[], Any] = CodedReduceScatter
) -> tuple[Any, list[int]]:
    """Reduces row `rank` of (ranks, ranks, n); gives this rank's part of the sum, and the bytes."""
    mine = torch.from_numpy(contributions[dist.get_rank()].copy())
    scatter = kind()
    group = dist.group.WORLD
    assert group is not None
    output = scatter.allocate((mine.shape[1],), dtype=torch.float32, device=mine.device)
    with Accounting() as count:
        scatter(output, mine.flatten(), group, dist.ReduceOp.SUM)
    return output.numpy(), [*count.message_bytes.values()]


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
        assert sent == [n_ranks * n_blocks * (32 + 1)]
        if n_values == 1000:
            assert sent[0] < 0.27 * contributions[rank].nbytes


@pytest.mark.parametrize("n_ranks", [2, 3, 5])
def test_sums_in_bf16_are_within_one_rounding_of_each_rank(
    n_ranks: int, run_ranks: Callable[..., list[Any]]
) -> None:
    random = np.random.default_rng(n_ranks)
    contributions = random.standard_normal((n_ranks, n_ranks, 1000)).astype(np.float32)
    for rank, (found, sent) in enumerate(
        run_ranks(n_ranks, add_up, contributions, Bf16ReduceScatter)
    ):
        parts = contributions[:, rank].astype(np.float64)
        error = np.abs(found - parts.sum(0))
        assert (error <= 1.01 * n_ranks * 2.0**-8 * np.abs(parts).sum(0)).all()
        assert error.max() > 0, "it is rounded"
        assert sent == [contributions[rank].nbytes // 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_arrives(bad: float, run_ranks: Callable[..., list[Any]]) -> None:
    contributions = np.ones((2, 2, 100), dtype=np.float32)
    contributions[1, 0, 40] = bad  # of rank 1, for rank 0
    contributions[1, 1, 70] = bad  # of rank 1, for itself
    (first, _), (second, _) = run_ranks(2, add_up, contributions)
    assert (~np.isfinite(first)).nonzero()[0].tolist() == list(range(32, 64))
    assert (~np.isfinite(second)).nonzero()[0].tolist() == [70]
