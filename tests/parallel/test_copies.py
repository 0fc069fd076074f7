"""Copies on several ranks: equal after an update, and named where a single bit of one is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from trainyard.config.run import Run
from trainyard.parallel.copies import differing_copies, fingerprint
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.placement import local_part
from trainyard.parallel.replica import Replica
from trainyard.plan.resolve import resolve

MODEL = {
    "n_layers": 2,
    "d_model": 16,
    "n_heads": 2,
    "d_ff": 32,
    "sequence_length": 8,
    "vocabulary_size": 40,
    "vocabulary_multiple": 8,
}
NORM = "blocks.1.mlp_norm.weight"
UP = "blocks.1.mlp.up.weight"
EMBEDDING = "embedding.weight"


def build_replica(parallel: dict[str, Any], model: dict[str, Any]) -> Replica:
    """Builds this rank's replica, and does one step's passes and an update as training would."""
    run = Run.model_validate(
        {
            "model": MODEL | model,
            "parallel": {"zero_stage": 0, **parallel},
            "train": {
                "micro_batch_size": 1,
                "global_batch_size": 4,
                "length": "3 steps",
                "compile": "never",
            },
            "precision": {"kind": "fp32"},
        }
    )
    plan = resolve(run, dist.get_world_size())
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    replica = Replica(run, plan, mesh, torch.float32)
    share, n_shares = mesh.data_share
    ids = torch.randint(0, 40, (4, 9), generator=torch.Generator().manual_seed(1))
    mine = ids.chunk(n_shares)[share]
    replica.forward_backward(mine[:, :-1], mine[:, 1:], None, scale=0.1)
    with torch.no_grad():
        for held in replica.held:
            local_part(held.parameter).sub_(local_part(held.gradient))
    return replica


def flip_one_bit(replica: Replica, name: str) -> None:
    (held,) = [each for each in replica.held if each.name == name]
    bits = local_part(held.parameter).view(torch.int32).flatten()
    bits[len(bits) // 2] ^= 1  # the lowest bit of the fraction


def compare(
    parallel: dict[str, Any],
    flips: dict[int, str],
    model: dict[str, Any] | None = None,
) -> list[str]:
    """Compares once unharmed, then with a bit flipped on some ranks."""
    replica = build_replica(parallel, model or {})
    assert differing_copies(replica) == []
    if dist.get_rank() in flips:
        flip_one_bit(replica, flips[dist.get_rank()])
    return differing_copies(replica)


@pytest.mark.parametrize(
    ("n_ranks", "parallel", "flips", "expected"),
    [
        pytest.param(2, {}, {1: UP}, [f"{UP}: rank 0 differs from rank 1"], id="replicate x2"),
        pytest.param(
            4,
            {"replicas": 2, "zero_stage": 3},
            {3: UP},
            [f"{UP}: rank 1 differs from rank 3"],
            id="hybrid",
        ),
        pytest.param(
            2, {"tensor": 2}, {1: NORM}, [f"{NORM}: rank 0 differs from rank 1"], id="tp2 norm"
        ),
        pytest.param(
            2,
            {"pipeline": 2},
            {1: EMBEDDING},
            [f"{EMBEDDING}: rank 0 differs from rank 1"],
            id="pp2 tied",
        ),
        pytest.param(
            4,
            {"tensor": 2},
            {2: NORM},
            [f"{NORM}: rank 2 differs from ranks 0-1, 3"],
            id="tp2 x dp2 norm",
        ),
        pytest.param(
            4,
            {"pipeline": 2},
            {3: UP},
            [f"{UP}: rank 2 differs from rank 3"],
            id="pp2 x dp2: a name that only the last stage knows",
        ),
        pytest.param(2, {"zero_stage": 3}, {0: UP}, [], id="zero 3, held once"),
    ],
)
def test_a_flipped_bit_is_named_on_every_rank(
    run_ranks: Callable[..., list[Any]],
    n_ranks: int,
    parallel: dict[str, Any],
    flips: dict[int, str],
    expected: list[str],
) -> None:
    for found in run_ranks(n_ranks, compare, parallel, flips):
        assert found == expected


def test_an_untied_embedding_is_nobody_elses(run_ranks: Callable[..., list[Any]]) -> None:
    untied = {"tied_embeddings": False}
    assert run_ranks(2, compare, {"pipeline": 2}, {0: EMBEDDING}, untied) == [[], []]


def test_three_different_copies_and_many_parts(run_ranks: Callable[..., list[Any]]) -> None:
    def compare_all() -> list[str]:
        replica = build_replica({}, {})
        for held in replica.held:
            local_part(held.parameter).add_(max(0, dist.get_rank() - 1))
        return differing_copies(replica)

    first, *others = run_ranks(4, compare_all)
    assert all(other == first for other in others)
    assert first[0] == "embedding.weight: rank 2 differs from rank 3 and from ranks 0-1"
    assert len(first) == 17
    assert first[-1].startswith("and ")


def test_one_rank_has_nothing_to_compare() -> None:
    run = Run.model_validate({"model": MODEL, "train": {"global_batch_size": 4}})
    plan = resolve(run, 1)
    mesh = build_mesh(plan.topology, 0, torch.device("cpu"))
    assert differing_copies(Replica(run, plan, mesh, torch.float32)) == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_flipped_bit_changes_the_number(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    n_bytes = values.element_size()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[n_bytes]
    before = int(fingerprint(values))
    for index in range(values.numel()):
        for bit in range(8 * n_bytes):
            flipped = values.clone()
            mask = torch.tensor(1, dtype=integers) << bit
            flipped.view(integers).flatten()[index] ^= mask
            assert int(fingerprint(flipped)) != before


@settings(max_examples=50)
@given(st.integers(0, 2**21), st.integers(0, 31))
def test_a_flipped_bit_in_any_chunk_changes_the_number(index: int, bit: int) -> None:
    values = torch.zeros(2**21 + 1)  # eight chunks and a value
    before = int(fingerprint(values))
    values.view(torch.int32)[index] ^= torch.tensor(1, dtype=torch.int32) << bit
    assert int(fingerprint(values)) != before


def test_the_number_waits_for_no_device() -> None:
    assert fingerprint(torch.empty(2**20, device="meta")).is_meta  # which has nothing to read


def test_values_that_change_places_or_signs_change_the_number() -> None:
    values = torch.arange(1.0, 9.0)
    numbers = [values, values.flip(0), -values, values.roll(1), values.view(2, 4).T.contiguous()]
    assert len({int(fingerprint(each)) for each in numbers}) == len(numbers)
    assert int(fingerprint(torch.empty(0, 4))) == 0
