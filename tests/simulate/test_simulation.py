"""The simulated step against the real one: messages of the formulas, bytes of real ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.parallel.test_traffic import EVERY_DAY, TABLE, build_run, layout_of

from trainyard import architecture
from trainyard.config.run import Run
from trainyard.layout.flops import flops_per_token, score_flops
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import build_mesh
from trainyard.planning.memory import rank_memory
from trainyard.planning.traffic import Traffic, rank_traffic
from trainyard.planning.work import count_work
from trainyard.simulate.accounting import Accounting
from trainyard.simulate.simulation import (
    Simulation,
    count_steps,
    micro_batches_per_step,
    simulate,
)

ALL_AXES = "dp4 tp2 sequence pp4 cp2 zero1 batch128"
# More ranks than matrices of a size: some have none, and the one simulated has the largest.
UNEVEN = "dp14 hsdp2 zero1 pp2 muon batch28"
CHEAP = ("cp2 recompute-attention", "cp2 modern", "dp2 pp2 interleaved chunks4 zero1")
LAYOUTS = (*TABLE, ALL_AXES, f"{ALL_AXES} muon", UNEVEN)
REAL = (
    *("dp1", "recompute-block bf16", "modern", "fp8", "cp4 ring bf16", "pp2 interleaved"),
    *("dp2", "dp2 zero1 bf16", "dp2 zero2", "dp2 zero3", "dp2 zero1 muon", "dp4 hsdp2 zero2 muon"),
    *("tp2 sequence", "pp2", "cp2", "tp2 recompute-block dropout", "dp2 pp2 zero3 bf16"),
    *("dp2 tp2 sequence zero1 modern", "dp2 pp2 tp2 sequence zero1"),
    *("dp2 ep2 zero1 equal-load bf16", "dp4 ep2 zero3 equal-load recompute-block"),
    *("cp2 ep2 tp2 sequence equal-load", "experts bf16"),
    *("dp2 fp8 emulated zero3", "dp2 fp8_lowbit zero2", "dp2 tp2 zero3 fp8 emulated gather"),
)


def measure(run: Run, n_ranks: int) -> tuple[int, set[Traffic]]:
    """Trains two real steps on this rank; gives the peak of the second, and its messages."""
    plan = resolve(run, n_ranks)
    rank = dist.get_rank() if dist.is_initialized() else 0
    mesh = build_mesh(plan.topology, rank, torch.device("cpu"))
    n = micro_batches_per_step(run, plan)
    with Accounting() as accounts:
        counts = count_steps(run, plan, mesh, accounts, [n, n])[-1]
    return counts.peak_bytes, set(counts.messages())


@pytest.mark.parametrize(
    "name",
    everyday(REAL, ("dp2 ep2 zero1 equal-load bf16", "tp2 sequence", "cp2", "dp2 pp2 zero3 bf16")),
)
def test_real_ranks_hold_and_send_what_is_simulated(
    name: str, run_ranks: Callable[..., list[tuple[int, set[Traffic]]]]
) -> None:
    run, n_ranks = build_run(name), layout_of(name).n_ranks
    # This process must not run a backward pass before it forks: some builds of torch refuse then.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        rank = partial(measure, run, n_ranks)
        real = [pool.apply(rank)] if n_ranks == 1 else run_ranks(n_ranks, rank)
        numbers = sorted({0, n_ranks - 1})
        found = [pool.apply(simulate, (run, n_ranks, n), {"on_gpu": False}) for n in numbers]
    for number, simulation in zip(numbers, found, strict=True):
        peak, messages = real[number]
        assert set(simulation.messages) == messages
        assert simulation.peak_bytes == pytest.approx(peak, rel=0.05)


@pytest.mark.parametrize(
    "name",
    everyday(LAYOUTS, (*EVERY_DAY, *CHEAP, ALL_AXES)),
)
def test_messages_are_those_of_the_formulas(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, n_ranks = build_run(name), layout_of(name).n_ranks
    if "micro2" in name:  # each sequence is a piece
        monkeypatch.setattr(architecture, "PIECE_TOKENS", run.model.sequence_length)
    # Of ranks that share a key, the last one sends most.
    rank = n_ranks - 1 if "multi-query" in name else n_ranks // 2
    plan = resolve(run, n_ranks)
    planned = rank_traffic(run, plan, plan.topology.coordinates(rank).pipeline)
    assert set(simulate(run, n_ranks, rank).messages) == set(planned)


@pytest.mark.parametrize("name", ["", "modern", "deepseek"])
def test_products_have_the_flop_of_the_formula(name: str) -> None:
    """As torch counts it, every token sees all others."""
    run = build_run(name)
    found = simulate(run, 1, 0).flops
    model, n_tokens = run.model, 8 * run.model.sequence_length
    products = sum(n for name, n in found.items() if "attention" not in name)
    scores = model.n_layers * score_flops(model) * n_tokens
    assert found["_scaled_dot_product_flash_attention_for_cpu"] == scores
    formula = flops_per_token(model, resolve(run, 1).padded_vocabulary_size, "megatron")
    assert products + 3 * scores == formula * n_tokens


def test_products_of_muon_have_the_flop_of_the_formula() -> None:
    adamw, muon = (simulate(build_run(name), 1, 0) for name in ("", "muon"))
    run = build_run("muon")
    D, F, L = run.model.d_model, run.model.d_ff, run.model.n_layers
    # Four matrices of D x D, and two of D x F, in five iterations.
    flops = 5 * L * (4 * 6 * D**3 + 2 * (4 * D * D * F + 2 * D**3))
    assert sum(muon.flops.values()) - sum(adamw.flops.values()) == flops
    products = count_work(run, resolve(run, 1)).update_products
    assert sum(2 * p.rows * p.inner * p.columns * p.count for p in products) == flops


def test_an_update_by_muon_fits_where_it_is_planned_to() -> None:
    """Where little else takes memory, and each rank gets whole updates."""
    wide = "model.d_model=256 model.d_ff=1024 model.vocabulary_size=128 model.sequence_length=8"
    run = build_run("tp2 muon", *wide.split(), "train.global_batch_size=2")
    found, planned = simulate(run, 4, 0), rank_memory(run, resolve(run, 4), 0)
    assert found.moment == planned.moment == "update"
    n_bytes = planned.peak_bytes - planned.items["context and libraries"]
    assert found.peak_bytes <= n_bytes < 1.1 * found.peak_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kind", "scaling"), [("fp8", "tensorwise"), ("fp8_lowbit", "rowwise")])
def test_scaled_products_are_products(kind: str, scaling: str) -> None:
    """Of a device that has them, on a machine that may not."""
    run = build_run(f"zero1 {kind}", f"precision.fp8.scaling={scaling}")
    bf16 = simulate(build_run("zero1 bf16"), 1, 0)
    found = simulate(run, 1, 0)
    D, F = run.model.d_model, run.model.d_ff
    n_tokens = 8 * run.model.sequence_length
    n_scaled = run.model.n_layers - 2 * run.precision.fp8.precise_blocks
    assert found.flops["_scaled_mm"] == 3 * n_scaled * (8 * D * D + 4 * D * F) * n_tokens
    assert sum(found.flops.values()) == sum(bf16.flops.values())
    assert {m.axis for m in found.messages} == {m.axis for m in bf16.messages} == set()


@pytest.mark.exhaustive
def test_low_bit_state_is_what_is_kept() -> None:
    bf16, low = (simulate(build_run(f"zero1 {kind}"), 2, 0) for kind in ("bf16", "fp8_lowbit"))
    model = build_run("").model
    D, F = model.d_model, model.d_ff
    n_values = model.n_layers * (4 * D * D + 2 * D * F) // 2  # of blocks' matrices, on each rank
    # Weight, master and both moments: 2, 2, 1, 2 bytes and three scales, in place of 12. Vectors
    # are bf16 and have fp32 masters besides.
    n_vectors = model.n_layers * (9 * D + F + 3 * D) // 2
    less = (12 - (2 + 2 + 1 + 2 + 3 / 32)) * n_values - 2 * n_vectors
    assert bf16.held_bytes - low.held_bytes == pytest.approx(less, rel=0.02)


@pytest.mark.exhaustive
def test_emulated_products_are_counted_as_they_are() -> None:
    real, emulated = (simulate(build_run(name), 1, 0) for name in ("fp8", "fp8 emulated"))
    assert "_scaled_mm" not in emulated.flops
    assert sum(emulated.flops.values()) == sum(real.flops.values())
    assert emulated.peak_bytes >= real.peak_bytes
    assert any("emulated" in text for text in emulated.differences)
    assert not any("emulated" in text for text in real.differences)


def test_micro_batches_that_are_counted_are_as_if_they_were_run() -> None:
    runs = [build_run("pp2 tp2", f"train.global_batch_size={n}") for n in (4, 7)]
    few, many = (simulate(run, 4, 0) for run in runs)
    assert (few.n_simulated, few.n_micro_batches) == (4, 4)
    assert (many.n_simulated, many.n_micro_batches) == (4, 7)
    run = runs[-1]
    found = _simulate_all(run, 4)
    # Some numbers of 4 bytes are on no line.
    assert many.peak_bytes == pytest.approx(found.peak_bytes, abs=100)
    # Messages between stages take memory only while they are on their way.
    ids = 2 * run.model.sequence_length * torch.int64.itemsize
    assert found.peak_bytes == few.peak_bytes + 3 * ids, "tokens and labels of each micro batch"
    assert many.flops == found.flops
    assert many.messages == found.messages


def _simulate_all(run: Run, n_ranks: int) -> Simulation:
    """Simulates with every micro batch run, which a schedule that holds them all would need."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainyard.simulate.simulation._shorten", lambda _run, n: (n, n))
        return simulate(run, n_ranks, 0)


def test_the_peak_is_told_with_its_moment_and_tensors() -> None:
    found = simulate(
        build_run("recompute-block", "model.n_layers=8", "model.vocabulary_size=100"), 1, 0
    )
    assert found.moment == "backward of block 7, micro batch 2 of 3"
    assert found.held_bytes < found.peak_bytes
    assert sum(n_bytes for _, n_bytes in found.largest) < found.peak_bytes
    names = [name for name, _ in found.largest]
    assert "weights: blocks.0.mlp.up.weight" in names


def test_nothing_of_the_fake_world_stays() -> None:
    resize = torch.UntypedStorage.resize_
    simulate(build_run("pp2"), 2, 0)
    assert not dist.is_initialized()
    assert torch.UntypedStorage.resize_ is resize
    assert torch.ones(1).item() == 1.0


def test_no_weights_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> Any:
        raise AssertionError(f"{name} is drawn")

    monkeypatch.setattr("trainyard.model.gpt.initial_value", refuse)
    simulate(build_run("tp2"), 2, 0)
