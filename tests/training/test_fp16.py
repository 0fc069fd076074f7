"""Training in fp16: the loss scale cancels out, overflows are skipped alike, and it learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.layouts import read_layout
from torch import Tensor

from trainyard.config.precisions import FORMATS, FP32
from trainyard.errors import CheckpointError, GuardError
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.placement import local_part
from trainyard.training.loop import stop_if_stuck
from trainyard.training.state import State

from .small import build_small_context, take_steps, weights


def fp16(initial: float, **loss_scale: float) -> dict[str, Any]:
    return {"kind": "fp16", "loss_scale": {"initial": initial, **loss_scale}}


def scale_of(state: State) -> float:
    assert state.scaler is not None
    return float(state.scaler.scale.item())


@pytest.mark.parametrize("initial", [1.0, 2.0**20])
def test_the_scale_is_in_no_number_that_others_see(
    initial: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_fp32 = replace(FORMATS["fp16"], compute=FP32)  # which no scale overflows
    monkeypatch.setitem(FORMATS, "fp16", in_fp32)
    found = []
    for context in (build_small_context(), build_small_context(precision=fp16(initial))):
        state = State.at_start(context)
        results = take_steps(context, state, 5)
        assert state.skipped.total == 0
        seen = state.spikes.as_saved()
        assert seen.losses == tuple(result.loss.item() for result in results)
        assert seen.gradient_norms == tuple(result.gradient_norm.item() for result in results)
        found.append((*seen.losses, *seen.gradient_norms, weights(context)))
    (*expected, expected_weights), (*numbers, found_weights) = found
    assert numbers == pytest.approx(expected, rel=1e-6)
    for old, new in zip(expected_weights, found_weights, strict=True):
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-7)


def train_with_overflow(parallel: dict[str, Any], bad_rank: int) -> dict[str, Any]:
    """Takes four steps; in the second and third a gradient of one rank overflows."""
    context = build_small_context(2, parallel=parallel, precision=fp16(2.0**8))
    state = State.at_start(context)
    right = ParallelModel.forward_backward
    skipped, scales, is_same = [], [], []
    for step in range(4):

        def planted(
            parallel_model: ParallelModel, *arguments: Any, step: int = step, **options: Any
        ) -> Tensor:
            loss = right(parallel_model, *arguments, **options)
            if step in (1, 2) and dist.get_rank() == bad_rank:
                local_part(parallel_model.local_parameters[0].gradient).view(-1)[0] = math.inf
            return loss

        ParallelModel.forward_backward = planted  # type: ignore[method-assign]
        before = weights(context)
        (result,) = take_steps(context, state, 1)
        skipped.append(result.skipped.item())
        scales.append(scale_of(state))
        after = weights(context)
        is_same.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=True)))
    return {"skipped": skipped, "scales": scales, "same": is_same, "kept": state.as_json()}


@pytest.mark.parametrize(
    ("name", "bad_rank"),
    everyday(product(("dp2", "dp2 zero3", "tp2", "pp2"), (0, 1)), [("dp2 zero3", 1), ("pp2", 0)]),
)
def test_an_overflow_on_one_rank_is_skipped_by_all(
    name: str, bad_rank: int, run_ranks: Callable[..., list[dict[str, Any]]]
) -> None:
    found, other = run_ranks(2, train_with_overflow, read_layout(name).parallel, bad_rank)
    assert found == other
    assert found["skipped"] == [0, 1, 1, 0]
    assert found["same"] == [False, True, True, False]
    assert found["scales"] == [2.0**8, 2.0**8, 2.0**7, 2.0**7]  # a hysteresis of 2
    kept = found["kept"]
    assert kept["skipped_steps"] == 2
    assert [(each["step"], each["why"]) for each in kept["skipped_ranges"]] == [
        (1, "not finite"),
        (2, "not finite"),
    ]
    assert kept["loss_scale"] == {"scale": 2.0**7, "good_steps": 1, "patience": 0}


def test_the_search_for_a_scale_does_not_end_the_run() -> None:
    context = build_small_context(precision=fp16(2.0**22), guard={"skipped_steps_limit": 1})
    state = State.at_start(context)
    (first, *_) = take_steps(context, state, 4)
    assert (first.skipped.item(), state.skipped.total, state.skipped.in_a_row) == (1, 4, 0)
    assert math.isfinite(first.loss.item())
    stop_if_stuck(context, state)
    results = take_steps(context, state, 14)
    assert results[-1].skipped.item() == 0
    assert state.skipped.total == 1 + 22 - round(math.log2(scale_of(state)))


def test_at_its_minimum_overflows_end_the_run() -> None:
    scale = fp16(2.0**32, minimum=2.0**30)
    context = build_small_context(precision=scale, guard={"skipped_steps_limit": 3})
    state = State.at_start(context)
    for step, in_a_row in enumerate([0, 0, 0, 1, 2]):
        take_steps(context, state, 1)
        assert state.skipped.in_a_row == in_a_row
        stop_if_stuck(context, state)
        assert step + 1 == state.skipped.total
    take_steps(context, state, 1)
    with pytest.raises(GuardError, match="3 steps in a row up to step 6") as caught:
        stop_if_stuck(context, state)
    assert "loss 3." in caught.value.problem
    assert "gradients not finite: none" not in caught.value.problem


def test_a_loss_that_is_not_finite_ends_the_run_at_any_scale() -> None:
    context = build_small_context(precision=fp16(2.0**32), guard={"skipped_steps_limit": 2})
    with torch.no_grad():
        context.model.local_parameters[0].parameter.fill_(math.nan)
    state = State.at_start(context)
    take_steps(context, state, 2)
    with pytest.raises(GuardError, match="2 steps in a row up to step 2"):
        stop_if_stuck(context, state)


def test_a_checkpoint_keeps_the_scale_and_refuses_a_damaged_one() -> None:
    context = build_small_context(precision=fp16(2.0**10, window=3))
    state = State.at_start(context)
    take_steps(context, state, 4)
    saved = state.as_json()
    assert saved["loss_scale"] == {"scale": 2.0**11, "good_steps": 1, "patience": 2}
    assert State.from_json(context, 4, saved).as_json() == saved
    older = {key: value for key, value in saved.items() if key != "loss_scale"}
    assert scale_of(State.from_json(context, 4, older)) == 2.0**10
    damaged = {"scale": -1.0, "good_steps": 0, "patience": 0}
    with pytest.raises(CheckpointError, match=r"not valid: loss_scale\.scale"):
        State.from_json(context, 4, saved | {"loss_scale": damaged})
    assert State.at_start(build_small_context()).as_json()["loss_scale"] is None
