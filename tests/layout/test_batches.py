"""The batch ramp and the run's length, against a step-by-step count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainyard.config.load import load_run
from trainyard.config.run import BatchRamp, Run, Train
from trainyard.errors import ConfigError
from trainyard.layout.batches import BatchSchedule, batch_sizes
from trainyard.layout.resolve import resolve
from trainyard.units import Length


def with_ramp(length: str) -> BatchSchedule:
    ramp = f"train.batch_ramp={{start=4, increment=4, length='{length}'}}"
    batch = ["train.global_batch_size=8", "train.micro_batch_size=1"]
    return BatchSchedule(load_run("tiny", [ramp, *batch]).run)


@given(
    start=st.integers(1, 40),
    increment=st.integers(1, 40),
    n_increments=st.integers(1, 12),
    total=st.integers(1, 3000),
)
def test_stages_equal_counting_step_by_step(
    start: int, increment: int, n_increments: int, total: int
) -> None:
    full = start + increment * n_increments
    ramp = BatchRamp(start=start, increment=increment, length=Length(total, "sequences"))
    run = Run(train=Train(micro_batch_size=1, global_batch_size=full, batch_ramp=ramp))
    batches = BatchSchedule(run)
    consumed = 0
    for step in range(150):
        # Megatron-LM's rule, word for word in arithmetic.
        increments = int(consumed / (total / n_increments))
        expected = min(full, start + increments * increment)
        assert (batches.consumed(step), batches.batch_size(step)) == (consumed, expected)
        assert step == 0 or batches.steps_within(consumed) == step
        consumed += expected


def test_a_ramp_counted_in_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"batch_ramp.length='10 steps' is in steps"):
        with_ramp("10 steps")


def test_run_length_in_tokens_sequences_and_steps() -> None:
    for length in ("25600 tokens", "400 sequences", "50 steps"):
        plan = resolve(load_run("tiny", [f"train.length='{length}'"]).run)
        assert (plan.n_steps, plan.n_sequences, plan.n_tokens) == (50, 400, 25600)


def test_order_sizes_follow_megatron() -> None:
    plan = resolve(load_run("tiny", ["evaluate.interval=20", "evaluate.batches=3"]).run)
    assert plan.order_sequences == (400, (50 // 20 + 1) * 3 * 8, 3 * 8)


@given(start=st.integers(1, 40), increment=st.integers(1, 40), n_increments=st.integers(0, 12))
def test_sizes_a_batch_grows_through(start: int, increment: int, n_increments: int) -> None:
    full = start + increment * n_increments
    ramp = BatchRamp(start=start, increment=increment, length=Length(9000, "sequences"))
    train = Train(micro_batch_size=1, global_batch_size=full, batch_ramp=ramp)
    batches = BatchSchedule(Run(train=train))
    seen = {batches.batch_size(step) for step in range(9000 // start + 2)}
    assert set(batch_sizes(train)) == seen
    assert batch_sizes(Train(global_batch_size=7)) == [7]
