"""Training with low-precision state or Muon: how well it learns, what it holds, checkpoints."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.circles import everyday
from tests.layouts import Layout, read_layout
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainyard.checkpoint.format import Facts, read_manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_tensors
from trainyard.checkpoint.resume import newest_checkpoint
from trainyard.checkpoint.save import save_checkpoint
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.cli.check import describe_checkpoint
from trainyard.export.huggingface import compare_logits, export_huggingface
from trainyard.launch.environment import read_versions
from trainyard.layout.sizes import checkpoint_bytes
from trainyard.parallel.model import ParallelModel
from trainyard.training.checkpoints import build_saver, load_newest, save_state
from trainyard.training.guard import diagnose, differing_copies
from trainyard.training.state import State, TrainContext
from trainyard.training.step import compute_gradients

from . import small
from .small import build_small_context

SHAPE = {"d_model": 64, "d_ff": 128, "sequence_length": 16, "dropout": 0.1}
LOW_BIT = {"kind": "fp8_lowbit", "fp8": {"emulate": True}}


def build(n_ranks: int = 1, folder: Path = Path(), **parallel: Any) -> TrainContext:
    context = build_small_context(
        n_ranks,
        model=SHAPE,
        precision=LOW_BIT,
        parallel={"zero_stage": 1, **parallel},
        train={"micro_batch_size": 2, "global_batch_size": 12},
    )
    return replace(context, folder=folder)


def take_steps(context: TrainContext, state: State, n: int, bad_step: int | None = None) -> None:
    """Takes steps; at one of them the gradient of a matrix is not finite on the first rank."""
    right = ParallelModel.forward_backward
    for _ in range(n):
        if state.step == bad_step and context.is_first_rank:

            def planted(parallel_model: ParallelModel, *arguments: Any, **options: Any) -> Tensor:
                loss = right(parallel_model, *arguments, **options)
                matrix = next(
                    h for h in parallel_model.local_parameters if h.name.endswith("qkv.weight")
                )
                cast(Any, matrix.converted_gradient).exponents[0, 0] = 255
                return loss

            ParallelModel.forward_backward = planted  # type: ignore[method-assign]
        small.take_steps(context, state, 1)
        ParallelModel.forward_backward = right  # type: ignore[method-assign]


def save(context: TrainContext, state: State) -> None:
    saver = build_saver(context)
    save_state(context, state, saver, None)
    saver.wait()


def build_muon(n_ranks: int, folder: Path, **parallel: Any) -> TrainContext:
    context = build_small_context(
        n_ranks,
        optimizer={"kind": "muon", "learning_rate": 1e-2},
        train={"global_batch_size": 12},
        parallel={"zero_stage": 1, **parallel},
    )
    return replace(context, folder=folder)


BUILDS = {"fp8_lowbit": build, "muon": build_muon}


def begin(kind: str, layout: Layout, folder: Path) -> str:
    """Trains 3 steps and saves; with low-precision state the second step is skipped."""
    context = BUILDS[kind](layout.n_ranks, folder, **layout.parallel)
    state = State.at_start(context)
    take_steps(context, state, 3, bad_step=1 if kind == "fp8_lowbit" else None)
    assert state.skipped.total == (kind == "fp8_lowbit")
    save(context, state)
    take_steps(context, state, 2)
    save(context, state)
    assert not differing_copies(context.model)
    return diagnose(context, state)


def resume(kind: str, layout: Layout, source: Path, folder: Path, n_steps: int) -> int:
    """Loads step 3 of another folder, goes on, and saves to `folder`."""
    context = BUILDS[kind](layout.n_ranks, source, **layout.parallel)
    state = load_newest(context, lambda step: step == 3)
    take_steps(context, state, n_steps)
    save(replace(context, folder=folder), state)
    return state.skipped.total


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    tensors = load_tensors(folder / "checkpoints" / f"step-{step:08d}", prefix="")
    for name, tensor in tensors.items():
        if "embedding" in name:
            tensors[name] = tensor[:40]  # padding depends on the layout
    return tensors


def differing(one: dict[str, Tensor], two: dict[str, Tensor]) -> list[str]:
    assert one.keys() == two.keys()
    return [
        name
        for name, tensor in one.items()
        if not torch.equal(tensor.view(torch.uint8), two[name].view(torch.uint8))
    ]


LAYOUTS = ("dp3 zero3", "tp2", "dp2 pp2", "dp2 hsdp2 tp2")
EVERY_DAY = [("fp8_lowbit", "tp2"), ("muon", "tp2")]


@pytest.mark.parametrize(("kind", "name"), everyday(product(BUILDS, LAYOUTS), EVERY_DAY))
def test_a_checkpoint_is_exact_in_the_same_and_in_other_layouts(
    kind: str, name: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    layout = read_layout(name)
    here, there, alone = (tmp_path / name for name in ("here", "there", "alone"))
    for folder in (here, there, alone):
        folder.mkdir()
    (said, *_) = run_ranks(layout.n_ranks, begin, kind, layout, here)
    assert "weights not finite: none" in said and "blocks.3" in said
    # To one rank, and from there back to this layout: codes, scales and all else, bit by bit.
    n_skipped = resume(kind, read_layout("dp1"), here, alone, 0)
    assert not differing(saved(here, 3), saved(alone, 3))
    assert {n_skipped, *run_ranks(layout.n_ranks, resume, kind, layout, alone, there, 2)} == {
        int(kind == "fp8_lowbit")
    }
    assert not differing(saved(here, 5), saved(there, 5))


def held_bytes() -> int:
    """Counts the memory of the tensors made since `gc.freeze`."""
    gc.collect()
    storages = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, torch.nn.Parameter, DTensor):
            local = each.to_local() if isinstance(each, DTensor) else each
            storage = local.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def bytes_at_the_update(n_ranks: int, parallel: dict[str, Any]) -> tuple[int, int]:
    """Measures the growth from no model to a second update, and counts block matrices alone."""
    gc.freeze()  # an earlier test may have left tensors in this process
    context = build(n_ranks, **parallel)
    state = State.at_start(context)
    take_steps(context, state, 1)
    _, totals = compute_gradients(context, 1, 0)
    n_bytes = 0
    for local in context.model.local_parameters:
        if local.stored.gradient.is_scaled:
            codes = cast(Any, local.converted_gradient)
            states = context.optimizer.state_of(local)
            for tensor in (codes.values, codes.exponents, *states.values()):
                n_bytes += tensor.nbytes
            assert local.parameter.grad is None
    del totals
    return held_bytes(), n_bytes


@pytest.mark.parametrize("zero_stage", everyday((0, 1, 2, 3), (2,)))
def test_state_and_gradients_take_6_bytes_a_parameter(
    zero_stage: int, run_ranks: Callable[..., list[Any]]
) -> None:
    n_ranks = 2 if zero_stage else 1
    found = run_ranks(n_ranks, bytes_at_the_update, n_ranks, {"zero_stage": zero_stage or 1})
    matrices = 4 * 64 * (3 * 64 + 64 + 2 * 128)
    vectors = 4 * (3 * 64 + 64 + 128 + 64 + 4 * 64)
    others = (40 + 16 + 2) * 64
    assert sum(n_bytes for _, n_bytes in found) == (6 + 4 / 32) * matrices
    in_all = (8 + 4 / 32) * matrices + 18 * vectors + 16 * others
    # At ZeRO 1 and 2 the weights that were gathered are released after the backward pass.
    assert sum(growth for growth, _ in found) == pytest.approx(in_all, rel=0.02)


def test_evaluate_export_and_check_read_what_it_saves(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    context = build(folder=tmp_path)
    state = State.at_start(context)
    take_steps(context, state, 2)
    save(context, state)
    path = newest_checkpoint(tmp_path / "checkpoints")
    assert path is not None
    report = check_checkpoint(path)
    facts = describe_checkpoint(report.manifest)
    assert "both moments of every weight" in facts["optimizer"]
    assert "bfloat16, float32" in facts["weights"]
    values = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    assert 0 < values - checkpoint_bytes(context.run, context.plan.n_parameters) < 40_000  # headers

    model, _, _ = build_model_from_checkpoint(path)
    for local in context.model.local_parameters:
        found = model.get_parameter(local.name).detach()
        assert torch.equal(found[:40], local.parameter.detach().float()[:40]), local.name
    export_huggingface(path, tmp_path / "export", torch.float32)
    assert compare_logits(path, tmp_path / "export") < 1e-4


def test_it_begins_with_imported_weights_in_fp32(tmp_path: Path) -> None:
    context = build(folder=tmp_path)
    wanted = {
        f"model.{local.name}": 0.01 * torch.randn(local.parameter.shape)
        for local in context.model.local_parameters
    }
    state = State.at_start(context)
    take_steps(context, state, 1)
    save(context, state)
    facts = read_manifest(tmp_path / "checkpoints" / "step-00000001")
    begun = {"step": 0, "consumed_sequences": 0, "consumed_tokens": 0, "training": {}}
    names = ("run", "plan", "data_fingerprint")
    known = {name: getattr(facts, name) for name in names} | begun
    save_checkpoint(tmp_path / "checkpoints", Facts(**known, versions=read_versions()), wanted)
    state = load_newest(context, lambda step: step == 0)
    assert state.step == 0
    for local in context.model.local_parameters:
        weight = wanted[f"model.{local.name}"].to(local.parameter.dtype)
        assert torch.equal(local.parameter.detach(), weight)
        kept = context.optimizer.state_of(local)
        if local.stored.gradient.is_scaled:
            matrix = cast(Any, context.optimizer).matrices[local.name]
            close = {"rtol": 2**-11, "atol": 1e-9}
            torch.testing.assert_close(matrix.states["master"].decode(), weight.float(), **close)
        elif local.stored.converts_gradient:
            assert torch.equal(kept["master"], weight.float())
        else:
            assert not kept
    take_steps(context, state, 1)


def test_a_checkpoint_of_muon_has_one_state_for_each_matrix_of_a_block(tmp_path: Path) -> None:
    context = build_muon(1, tmp_path)
    state = State.at_start(context)
    take_steps(context, state, 4)
    save(context, state)
    path = tmp_path / "checkpoints" / "step-00000004"
    manifest = read_manifest(path)
    assert "momentum of 16 of 52" in describe_checkpoint(manifest)["optimizer"]
    states = {name.rpartition(".")[2] for name in manifest.tensors if "mlp.up.weight" in name}
    assert states == {"weight", "momentum"}
    n_bytes = sum(each.numel() * each.element_size() for each in saved(tmp_path, 4).values())
    assert n_bytes == checkpoint_bytes(context.run, context.plan.n_parameters)
