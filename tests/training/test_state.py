"""The state of a run: what a step tells it, what a checkpoint keeps, and how data is skipped."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from trainyard.errors import CheckpointError
from trainyard.optim.clip import StepStats
from trainyard.training import step as steps
from trainyard.training.checkpoints import load_state
from trainyard.training.state import State, TrainContext
from trainyard.training.step import StepResult

from .small import BATCH, build_small_context, take_steps, weights

YES, NO = torch.tensor(1.0), torch.tensor(0.0)


def take_planted(
    context: TrainContext,
    state: State,
    n: int,
    plant: dict[int, tuple[float, float]],
    patch: pytest.MonkeyPatch,
) -> list[StepResult]:
    """Trains, with loss and gradient norm of some steps multiplied."""
    right = steps.reduce_step_stats

    def reduce_step_stats(*arguments: Any) -> StepStats:
        totals = right(*arguments)
        loss, norm = plant.get(state.step, (1.0, 1.0))
        return StepStats(totals.loss * loss, totals.norm * norm, totals.multiplier)

    patch.setattr(steps, "reduce_step_stats", reduce_step_stats)
    results = take_steps(context, state, n)
    patch.undo()
    return results


@pytest.mark.parametrize(
    ("policy", "planted", "is_told", "is_left_out"),
    [
        *(("warn", (2.0, 1.0), 1, 0), ("rollback", (1.0, 30.0), 1, 0)),
        *(("skip", (2.0, 1.0), 1, 1), ("skip", (1.0, 30.0), 1, 1), ("off", (100.0, 100.0), 0, 0)),
    ],
)
def test_a_planted_spike_is_told_and_left_out_by_policy(
    policy: str,
    planted: tuple[float, float],
    is_told: int,
    is_left_out: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = build_small_context(guard={"spikes": policy, "spike_window": 8})
    state = State.at_start(context)
    take_planted(context, state, 10, {}, monkeypatch)
    assert state.read_outcomes() == []
    before = weights(context)
    (result,) = take_planted(context, state, 1, {10: planted}, monkeypatch)
    assert (result.spike.item(), result.skipped.item()) == (is_told, is_left_out)
    is_same = all(torch.equal(old, new) for old, new in zip(before, weights(context), strict=True))
    assert is_same == bool(is_left_out)
    take_planted(context, state, 2, {}, monkeypatch)
    assert state.read_outcomes() == [10] * is_told
    left_out = {"from_sequence": 80, "to_sequence": 88, "step": 10, "why": "spike"}
    assert state.ranges == [left_out] * is_left_out
    assert state.skipped.total == is_left_out


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf), (math.inf, 1.0)])
def test_what_is_not_finite_is_left_out_whatever_the_policy(
    bad: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = build_small_context(guard={"spikes": "off"})
    state = State.at_start(context)
    before = weights(context)
    results = take_planted(context, state, 2, {0: bad, 1: bad}, monkeypatch)
    assert [result.skipped.item() for result in results] == [1, 1]
    assert all(torch.equal(old, new) for old, new in zip(before, weights(context), strict=True))
    assert state.skipped.in_a_row == 2
    assert state.read_outcomes() == []
    assert [each["why"] for each in state.ranges] == ["not finite"] * 2
    assert [each["from_sequence"] for each in state.ranges] == [0, BATCH]


def test_a_checkpoint_keeps_it_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    context = build_small_context(guard={"spikes": "skip", "spike_window": 8})
    state = State.at_start(context)
    take_planted(context, state, 12, {7: (math.nan, 1.0), 10: (3.0, 3.0)}, monkeypatch)
    state.data_offset = 5
    saved = state.as_json()
    again = State.from_json(context, 12, json.loads(json.dumps(saved | {"held_out_loss": 2.5})))
    assert again.as_json() == saved
    assert (again.step, again.data_offset, again.skipped.total) == (12, 5, 2)
    assert [each["why"] for each in again.ranges] == ["not finite", "spike"]
    assert torch.equal(again.spikes._values, state.spikes._values)


def test_a_checkpoint_of_an_older_version_has_less() -> None:
    state = State.from_json(build_small_context(), 40, {"skipped_steps": 3})
    assert (state.step, state.skipped.total, state.data_offset, state.ranges) == (40, 3, 0, [])


@pytest.mark.parametrize(
    ("saved", "place"),
    [
        ({"skipped_steps": -1}, "skipped_steps"),
        ({"data_offset": "7"}, "data_offset"),
        ({"spikes": {"losses": [1.0]}}, "spikes"),
        ({"spikes": {"losses": ["1"], "gradient_norms": [1.0]}}, "spikes.losses.0"),
        ({"spikes": {"losses": [math.nan], "gradient_norms": [1.0]}}, "spikes.losses.0"),
        ({"spikes": {"spikes_in_a_row": -1}}, "spikes.spikes_in_a_row"),
        ({"spikes": {"more": 1}}, "spikes.more"),
        ({"spikes": []}, "spikes"),
        ({"skipped_ranges": [{"from_sequence": 0}]}, "skipped_ranges.0"),
    ],
)
def test_a_damaged_state_is_refused(saved: dict[str, Any], place: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        State.from_json(build_small_context(), 40, saved)
    problem = "the training state in the checkpoint of step 40 is not valid: "
    assert caught.value.problem.startswith(problem + place)


def at_step(context: TrainContext, step: int) -> State:
    return State.from_json(context, step, {})


def test_going_back_leaves_out_the_data_since() -> None:
    context = build_small_context()
    ahead, back = at_step(context, 30), at_step(context, 20)
    back.skip_data(ahead, 80, "spike at step 29")
    assert back.data_offset == 80
    assert back.first_sequence(20) == ahead.first_sequence(30)
    assert back.ranges == [
        {
            "from_sequence": 160,
            "to_sequence": 240,
            "step": 20,
            "why": "rollback: spike at step 29",
        }
    ]
    assert back.n_rollbacks_here == 1
    # Training goes on to step 24 with that offset, and comes back here a second time.
    back.step = 24
    again = at_step(context, 20)
    again.skip_data(back, 32, "spike at step 24")
    assert again.first_sequence(20) == back.first_sequence(24) == 272
    assert [(r["from_sequence"], r["to_sequence"]) for r in again.ranges] == [
        (160, 240),
        (240, 272),
    ]
    assert again.n_rollbacks_here == 2


def test_going_back_forgets_what_was_left_out_on_the_abandoned_way() -> None:
    context = build_small_context()
    ahead = at_step(context, 18)
    for step in (18, 25):  # one before the checkpoint of step 20, one after it
        ahead.step = step
        ahead.add(YES, NO, NO)
    ahead.step = 30
    ahead.read_outcomes()
    saved = at_step(context, 20)
    saved.ranges = ahead.ranges[:1]
    saved.skip_data(ahead, 80, "spike at step 30")
    assert [each["step"] for each in saved.ranges] == [18, 20]
    saved.step = 40
    assert saved.n_rollbacks_here == 0


def test_weights_that_were_left_to_a_checkpoint_never_train_without_it(tmp_path: Path) -> None:
    context = replace(build_small_context(), folder=tmp_path)
    assert load_state(context).step == 0
    context.model.is_filled = True  # the checkpoint was there when the model was built
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* can be used"):
        load_state(context)
