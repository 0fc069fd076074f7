"""The pipeline: memory that does not grow with the micro batches, and casts that are shared."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.layouts import read_layout
from torch.distributed.pipelining import PipelineStage, schedules

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.model import linear
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.parallel.pipeline import _LeanStage, _SendingStage
from trainyard.simulate.accounting import Accounting
from trainyard.simulate.simulation import count_steps

SMALL = """train.compile=never train.micro_batch_size=1 train.global_batch_size=24
    model.n_layers=4 model.d_model=32 model.n_heads=2 model.d_ff=64 model.sequence_length=64
    model.vocabulary_size=90 model.dropout=0.0 parallel.zero_stage=0"""
CPU = torch.device("cpu")
MESSAGE_BYTES = 64 * 32 * 4
SCHEDULES = ("pp2 gpipe", "pp2", "pp2 interleaved", "pp2 zero-bubble-chunks")


def build_run(words: str, *overrides: str) -> Run:
    return load_run("tiny", [*SMALL.split(), *read_layout(words).overrides, *overrides]).run


def build(run: Run) -> ParallelModel:
    plan = resolve(run, dist.get_world_size())
    return ParallelModel(run, plan, build_mesh(plan.topology, dist.get_rank(), CPU))


def count(run: Run, numbers: list[int]) -> list[tuple[int, int]]:
    """Trains a step of each number of micro batches; gives bytes at the peak and after it."""
    plan = resolve(run, 2)
    mesh = build_mesh(plan.topology, dist.get_rank(), CPU)
    with Accounting() as accounts:
        counts = count_steps(run, plan, mesh, accounts, numbers)
    # Tokens and labels are those of a whole step.
    return [(each.peak_bytes - each.batch_bytes, each.held_bytes) for each in counts]


@pytest.mark.parametrize("schedule", everyday(SCHEDULES, SCHEDULES[-1:]))
def test_training_holds_no_more_for_more_micro_batches(
    schedule: str, run_ranks: Callable[..., list[Any]]
) -> None:
    run = build_run(f"{schedule} fp32")
    for few, many in run_ranks(2, partial(count, run, [8, 24])):
        assert many[1] - few[1] < MESSAGE_BYTES, "nothing of a message stays after a step"
        if "gpipe" not in schedule:  # which has all of them in flight
            assert many[0] - few[0] < MESSAGE_BYTES


def evaluate(run: Run, numbers: list[int]) -> list[int]:
    """Evaluates each number of sequences; gives bytes at the peak."""
    parallel_model = build(run)
    peaks = []
    for n in numbers:
        tokens = torch.zeros(n, 64, dtype=torch.int64)
        with Accounting() as accounts:
            parallel_model.held_out_loss(tokens, tokens)
        peaks.append(accounts.peak_bytes)
    return peaks


@pytest.mark.parametrize("schedule", everyday(SCHEDULES[1:], SCHEDULES[-1:]))
def test_evaluation_holds_no_more_for_more_micro_batches(
    schedule: str, run_ranks: Callable[..., list[Any]]
) -> None:
    batch_bytes = 2 * (24 - 8) * 64 * 8
    for few, many in run_ranks(2, partial(evaluate, build_run(f"{schedule} fp32"), [8, 24])):
        assert many - few < batch_bytes + MESSAGE_BYTES


def gradients_and_loss(run: Run) -> list[Any]:
    """Runs passes of two steps and of an evaluation after each; nothing is updated."""
    parallel_model = build(run)
    tokens = torch.arange(6 * 64).view(6, 64) % 90
    found: list[Any] = []
    for _ in range(2):
        found.append(parallel_model.forward_backward(tokens, tokens, None, 1.0).item())
        found.append(parallel_model.held_out_loss(tokens, tokens).item())
    found.extend(local.parameter.grad.numpy() for local in parallel_model.local_parameters)  # type: ignore[union-attr]
    return found


@contextmanager
def cast_each_time(*_: Any) -> Iterator[None]:
    yield


@pytest.mark.parametrize("schedule", everyday(SCHEDULES, SCHEDULES[-1:]))
def test_shared_casts_change_no_bit(
    schedule: str, run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = build_run(f"{schedule} bf16")
    shared = run_ranks(2, partial(gradients_and_loss, run))
    monkeypatch.setattr("trainyard.parallel.pipeline.cast_once", cast_each_time)
    apart = run_ranks(2, partial(gradients_and_loss, run))
    for ours, theirs in zip(shared, apart, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def order_of_calls(run: Run) -> str:
    """Runs the passes of 4 micro batches; gives the order of their parts on this rank.

    I(..) is a backward pass for inputs, B(..) a whole one, W(..) the rest; + adds to a gradient.
    """
    parallel_model, found = build(run), []

    def note(owner: Any, name: str, start: Callable[..., str], end: str = "") -> None:
        function = getattr(owner, name)

        def noted(*arguments: Any, **options: Any) -> Any:
            found.append(start(**options))
            result = function(*arguments, **options)
            found.append(end)
            return result

        setattr(owner, name, noted)  # this rank is a process of its own

    is_whole = lambda full_backward=True, **_: "B(" if full_backward else "I("  # noqa: E731
    note(_LeanStage, "backward_one_chunk", is_whole, ")")
    note(_LeanStage, "backward_weight_one_chunk", lambda **_: "W(", ")")
    note(linear, "_multiply_into", lambda beta=1.0: "+" if beta else "")
    tokens = torch.arange(4 * 64).view(4, 64) % 90
    parallel_model.forward_backward(tokens, tokens, None, 1.0)
    return "".join(found)


@pytest.mark.parametrize("compile", everyday(["never", "always"], ["never"]))
@pytest.mark.parametrize("words", ["pp2 zero-bubble fp32", "pp2 zero-bubble bf16"])
def test_a_zero_bubble_computes_weight_gradients_later(
    words: str, compile: str, run_ranks: Callable[..., list[str]]
) -> None:
    run = build_run(words, f"train.compile={compile}")
    first, second = run_ranks(2, partial(order_of_calls, run))
    weights = f"W({'+' * 8})"  # of two blocks
    assert first == f"I(){weights}" * 4
    assert second == f"I()I(){weights}I(){weights}I(){weights * 2}"


@pytest.mark.parametrize(
    ("words", "n_ranks", "n_sums"),
    [
        ("pp2 bf16", 2, 4 * 8),
        ("pp2 interleaved bf16", 2, 4 * 8),
        ("pp2 recompute-block bf16", 2, 4 * 8),
        ("dp2 pp2 zero1 bf16", 4, 4 * 8),
        ("dp2 zero1 bf16", 2, 3 * 16),  # the last of four is reduced block by block
        ("dp2 zero2 bf16", 2, 0),
    ],
)
def test_matmuls_add_to_gradients_that_stay(
    words: str, n_ranks: int, n_sums: int, run_ranks: Callable[..., list[str]]
) -> None:
    run = build_run(words)
    for calls in run_ranks(n_ranks, partial(order_of_calls, run)):
        assert calls.count("+") == n_sums


def test_the_private_methods_that_are_replaced_exist_and_are_explained() -> None:
    ours = set(vars(_LeanStage)) | set(vars(_SendingStage))
    private = {name for name in ours if re.match("_[a-z]", name) and hasattr(PipelineStage, name)}
    private.discard("_abc_impl")
    explained = (Path(__file__).parents[2] / "docs/decisions/014-cut-from-outside.md").read_text(
        encoding="utf-8"
    )
    named = set(re.findall(r"^- `(_\w+)`", explained, re.M))
    assert named == private | {"_batch_p2p"}
    assert hasattr(schedules, "_batch_p2p")
