"""Copies on several ranks: equal after an update, and named where a single bit of one is not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.layouts import read_layout
from tests.training.small import build_small_context

from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.training.guard import differing_copies, fingerprint
from trainyard.training.state import State
from trainyard.training.step import train_step

NORM = "blocks.1.mlp_norm.weight"
UP = "blocks.1.mlp.up.weight"
EMBEDDING = "embedding.weight"


def train_a_step(parallel: dict[str, Any], **model: Any) -> ParallelModel:
    """Builds this rank's model, and takes a step."""
    model |= {"n_layers": 2}
    context = build_small_context(dist.get_world_size(), parallel=parallel, model=model)
    train_step(context, State.at_start(context))
    return context.model


def flip_one_bit(parallel_model: ParallelModel, name: str) -> None:
    (local,) = [each for each in parallel_model.local_parameters if each.name == name]
    bits = local_part(local.parameter).view(torch.int32).flatten()
    bits[len(bits) // 2] ^= 1  # the lowest bit of the fraction


def compare(parallel: dict[str, Any], flips: dict[int, str], *, tied: bool = True) -> list[str]:
    """Compares once unharmed, then with a bit flipped on some ranks."""
    parallel_model = train_a_step(parallel, tied_embeddings=tied)
    assert differing_copies(parallel_model) == []
    if dist.get_rank() in flips:
        flip_one_bit(parallel_model, flips[dist.get_rank()])
    return differing_copies(parallel_model)


@pytest.mark.parametrize(
    ("name", "flips", "expected"),
    [
        ("dp2", {1: UP}, [f"{UP}: rank 0 differs from rank 1"]),
        ("dp4 hsdp2 zero3", {3: UP}, [f"{UP}: rank 1 differs from rank 3"]),
        ("tp2", {1: NORM}, [f"{NORM}: rank 0 differs from rank 1"]),
        ("pp2", {1: EMBEDDING}, [f"{EMBEDDING}: rank 0 differs from rank 1"]),
        ("dp2 tp2", {2: NORM}, [f"{NORM}: rank 2 differs from ranks 0-1, 3"]),
        # Only the last stage knows this name.
        ("dp2 pp2", {3: UP}, [f"{UP}: rank 2 differs from rank 3"]),
        ("dp2 zero3", {0: UP}, []),  # held once
    ],
)
def test_a_flipped_bit_is_named_on_every_rank(
    run_ranks: Callable[..., list[Any]],
    name: str,
    flips: dict[int, str],
    expected: list[str],
) -> None:
    for found in run_ranks(read_layout(name).n_ranks, compare, read_layout(name).parallel, flips):
        assert found == expected


def test_an_untied_embedding_is_nobody_elses(run_ranks: Callable[..., list[Any]]) -> None:
    untied = partial(compare, tied=False)
    assert run_ranks(2, untied, {"pipeline": 2}, {0: EMBEDDING}) == [[], []]


def test_three_different_copies_and_many_parts(run_ranks: Callable[..., list[Any]]) -> None:
    def compare_all() -> list[str]:
        parallel_model = train_a_step({})
        for local in parallel_model.local_parameters:
            local_part(local.parameter).add_(max(0, dist.get_rank() - 1))
        return differing_copies(parallel_model)

    first, *others = run_ranks(4, compare_all)
    assert all(other == first for other in others)
    assert first[0] == "embedding.weight: rank 2 differs from rank 3 and from ranks 0-1"
    assert len(first) == 17
    assert first[-1].startswith("and ")


def test_one_rank_has_nothing_to_compare() -> None:
    assert differing_copies(build_small_context().model) == []


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


@pytest.mark.parametrize("index", [0, 2**18 - 1, 2**18, 2**20 + 7, 2**21])
def test_a_flipped_bit_in_any_chunk_changes_the_number(index: int) -> None:
    values = torch.zeros(2**21 + 1)  # eight chunks and a value
    before = int(fingerprint(values))
    values.view(torch.int32)[index] ^= 1 << index % 31
    assert int(fingerprint(values)) != before


def test_the_number_waits_for_no_device() -> None:
    assert fingerprint(torch.empty(2**20, device="meta")).is_meta  # which has nothing to read


def test_values_that_change_places_or_signs_change_the_number() -> None:
    values = torch.arange(1.0, 9.0)
    numbers = [values, values.flip(0), -values, values.roll(1), values.view(2, 4).T.contiguous()]
    assert len({int(fingerprint(each)) for each in numbers}) == len(numbers)
    assert int(fingerprint(torch.empty(0, 4))) == 0
