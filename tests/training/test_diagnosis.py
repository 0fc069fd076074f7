"""The report of a run that gives up: what it names is what was planted, on every rank alike."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.layouts import read_layout

from trainyard.parallel.placement import local_part
from trainyard.training.guard import diagnose
from trainyard.training.state import State
from trainyard.training.step import compute_gradients

from .small import build_small_context

WEIGHT = "blocks.2.mlp.up.weight"


def diagnose_planted(n_ranks: int, parallel: dict[str, Any], bad_rank: int | None = None) -> str:
    """Takes the seventh step with a weight that is not a number, on one rank or nowhere."""
    context = build_small_context(n_ranks, parallel=parallel)
    rank = dist.get_rank() if n_ranks > 1 else 0
    if rank == bad_rank:
        for local in context.model.local_parameters:
            if local.name == WEIGHT:
                local_part(local.parameter)[0, 0] = torch.nan
    state = State.at_start(context)
    state.step = 7
    return diagnose(context, state)


def blocks(text: str) -> dict[str, str]:
    _, _, below = text.partition("gradient norms:\n")
    return dict(re.split("  +", line.strip()) for line in below.splitlines())


def test_it_gives_the_norm_of_each_block() -> None:
    text = diagnose_planted(1, {})
    first, *others = text.splitlines()
    assert re.fullmatch(r"step 7, sequences 48 to 55: loss [0-9.]+, gradient norm [0-9.]+", first)
    assert others[:4] == [
        "  loss not finite on: none",
        "  weights not finite: none",
        "  gradients not finite: none",
        "  gradient norms:",
    ]
    context = build_small_context()
    _, totals = compute_gradients(context, 6, 0)
    squares: dict[str, float] = {}
    for local in context.model.local_parameters:
        block = ".".join(local.name.split(".")[: 2 if local.name.startswith("blocks") else 1])
        norm = local.gradient.norm().item() * totals.multiplier.item()
        squares[block] = squares.get(block, 0.0) + norm**2
    found = blocks(text)
    assert list(found) == [
        "embedding",
        "positions",
        *(f"blocks.{n}" for n in range(4)),
        "final_norm",
    ]
    for block, square in squares.items():
        assert float(found[block]) == pytest.approx(square**0.5, rel=5e-3)


def test_it_names_what_is_not_finite() -> None:
    text = diagnose_planted(1, {}, bad_rank=0)
    assert "loss nan, gradient norm nan" in text
    assert "  loss not finite on: rank 0\n" in text
    assert f"  weights not finite: {WEIGHT}\n" in text
    assert "  gradients not finite: embedding.weight, positions.weight, " in text
    assert " more\n" in text
    assert set(blocks(text).values()) == {"not finite"}


def test_gradients_before_a_bad_backward_pass_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    context = build_small_context()
    block = context.model.stages[0].blocks["1"]
    block.register_full_backward_hook(
        lambda _block, inputs, _outputs: (inputs[0] * torch.inf, *inputs[1:])
    )
    state = State.at_start(context)
    state.step = 1
    found = blocks(diagnose(context, state))
    bad = [name for name, norm in found.items() if norm == "not finite"]
    assert bad == ["embedding", "positions", "blocks.0"]


def test_weights_moments_and_gradients_are_as_before() -> None:
    context = build_small_context()
    state = State.at_start(context)
    state.step = 1
    before = [local.parameter.detach().clone() for local in context.model.local_parameters]
    diagnose(context, state)
    for old, local in zip(before, context.model.local_parameters, strict=True):
        assert torch.equal(old, local.parameter)
        assert local.parameter.grad is None
        assert not context.optimizer.state_of(local)


@pytest.mark.parametrize("name", ["dp2", "tp2 pp2", "dp2 tp2 zero3"])
def test_every_layout_says_what_a_single_device_says(
    run_ranks: Callable[..., list[Any]], name: str
) -> None:
    n_ranks, parallel = read_layout(name).n_ranks, read_layout(name).parallel
    alone = diagnose_planted(1, {})
    first, *others = run_ranks(n_ranks, diagnose_planted, n_ranks, parallel)
    assert all(other == first for other in others)
    assert blocks(first).keys() == blocks(alone).keys()
    for block, norm in blocks(alone).items():
        assert float(blocks(first)[block]) == pytest.approx(float(norm), rel=1e-2)


def test_it_names_the_rank_whose_loss_is_not_finite(run_ranks: Callable[..., list[Any]]) -> None:
    for text in run_ranks(4, diagnose_planted, 4, {}, 2):
        assert "  loss not finite on: rank 2\n" in text
        assert f"  weights not finite: {WEIGHT}\n" in text
