"""The plan's list of a step's kernels against the one that torch's compiler has."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter

import pytest
from tests.circles import everyday

from trainyard.bench import roofline
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.time import step_time, update_bytes
from trainyard.planning.work import StagePass, Work, count_work
from trainyard.simulate.kernels import Kernel, count_kernels

EXPERTS = """model.n_experts=64 model.n_active_experts=8 model.d_expert=768"""
SHARED = """model.n_experts=16 model.n_active_experts=2 model.d_expert=2048 \
    model.n_shared_experts=1 model.n_dense_blocks=1 model.router=sigmoid model.balance=bias"""
PRESETS = {"gpt3-350m": 16, "gpt3-1.3b": 8, "modern-1.3b": 8, "llama-3.2-1b": 2}
"""Micro batches that fit one H100."""
CASES = [
    *itertools.product(PRESETS, ("bf16", "fp8"), ("none", "block")),
    ("gpt3-1.3b", "bf16", "attention"),
    (f"modern-1.3b {EXPERTS}", "bf16", "none"),
    (f"modern-1.3b {SHARED}", "bf16", "block"),
]
FEW = [("gpt3-1.3b", "bf16", "none"), ("modern-1.3b", "bf16", "block")]


def count(run: Run) -> Counter[Kernel]:
    # Not in this process, which must not run a backward pass before it forks.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(count_kernels, (run,))


def total(work: Work) -> tuple[StagePass, float]:
    """Sums the passes of a step, and the bytes of all its kernels but attention."""
    ((forward, backward),) = work.ranks[0].stages
    whole = (forward + backward).times(work.n_micro_batches)
    value_bytes = work.run.precision.formats.compute.n_bytes
    products = sum(each.n_bytes(value_bytes, work.program.cast_bytes) for each in whole.products)
    return whole, whole.memory_bytes + products + update_bytes(work.run) * work.ranks[0].n_updated


@pytest.mark.parametrize(("preset", "kind", "recompute"), everyday(CASES, FEW))
def test_plan_and_roofline_agree(
    preset: str, kind: str, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *more = preset.split()
    size = PRESETS[name] // (2 if more else 1)
    run = load_run(
        name,
        [
            *more,
            f"precision.kind={kind}",
            f"parallel.recompute={recompute}",
            *("model.n_layers=6", "model.dropout=0", "train.batch_ramp=none"),
            *(f"train.micro_batch_size={size}", f"train.global_batch_size={2 * size}"),
        ],
    ).run
    counted = count(run)
    # Counting takes longer than all of planning; the prices are those of bench --roofline.
    monkeypatch.setattr(roofline, "count_kernels", lambda _: counted)
    predicted = roofline.predict(run, "h100")
    plan = resolve(run, 1)
    work = count_work(run, plan)
    whole, n_bytes = total(work)
    flops: Counter[bool] = Counter()
    for kernel, n in counted.items():
        flops[kernel.is_attention] += n * kernel.flops
    assert whole.attention_flops == pytest.approx(flops[True], rel=1e-9)
    assert sum(each.flops for each in whole.products) == pytest.approx(flops[False], rel=1e-9)
    found_bytes = sum(n * each.n_bytes for each, n in counted.items() if not each.is_attention)
    assert n_bytes == pytest.approx(found_bytes, rel=0.06)
    launches = sum(each.launches for each in predicted.kernels)
    assert whole.kernels + work.update_kernels == pytest.approx(launches, rel=0.1)
    planned = step_time(run, plan, find_machine(gpu="h100")).seconds
    assert planned == pytest.approx(predicted.step_seconds, rel=0.03)
