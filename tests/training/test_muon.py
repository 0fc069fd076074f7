"""Training with Muon: its states in checkpoints, in the same and in other layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.circles import everyday
from tests.training.small import build_small_context, take_steps
from tests.training.test_low_precision import differing, save, saved

from trainyard.checkpoint.format import read_manifest
from trainyard.cli.check import describe_checkpoint
from trainyard.planning.saving import checkpoint_bytes
from trainyard.training.checkpoints import load_newest
from trainyard.training.state import State, TrainContext


def build(n_ranks: int, folder: Path, parallel: dict[str, Any]) -> TrainContext:
    context = build_small_context(
        n_ranks,
        optimizer={"kind": "muon", "learning_rate": 1e-2},
        train={"global_batch_size": 12},
        parallel={"zero_stage": 1, **parallel},
    )
    return replace(context, folder=folder)


def begin(n_ranks: int, folder: Path, parallel: dict[str, Any]) -> None:
    """Saves after 2 steps and after 4."""
    context = build(n_ranks, folder, parallel)
    state = State.at_start(context)
    for _ in range(2):
        take_steps(context, state, 2)
        save(context, state)


def resume(n_ranks: int, source: Path, folder: Path, n: int, parallel: dict[str, Any]) -> None:
    """Loads step 2 of another folder, goes on, and saves to `folder`."""
    context = build(n_ranks, source, parallel)
    state = load_newest(context, lambda step: step == 2)
    take_steps(context, state, n)
    save(replace(context, folder=folder), state)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp3 zero 3": (3, {"zero_stage": 3}),
    "tp2": (2, {"tensor": 2}),
    "dp2 pp2": (4, {"pipeline": 2}),
    "dp2 tp2 hybrid": (4, {"tensor": 2, "data_replicate": 2}),
}


@pytest.mark.parametrize("layout", everyday(LAYOUTS, ("tp2",)))
def test_a_checkpoint_is_exact_in_the_same_and_in_other_layouts(
    layout: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    n_ranks, parallel = LAYOUTS[layout]
    here, there, alone = (tmp_path / name for name in ("here", "there", "alone"))
    for folder in (here, there, alone):
        folder.mkdir()
    run_ranks(n_ranks, begin, n_ranks, here, parallel)
    # To one rank, and from there back to this layout, bit by bit.
    resume(1, here, alone, 0, {})
    assert not differing(saved(here, 2), saved(alone, 2))
    run_ranks(n_ranks, resume, n_ranks, alone, there, 2, parallel)
    assert not differing(saved(here, 4), saved(there, 4))


def test_a_checkpoint_has_one_state_for_each_matrix_of_a_block(tmp_path: Path) -> None:
    begin(1, tmp_path, {})
    path = tmp_path / "checkpoints" / "step-00000004"
    manifest = read_manifest(path)
    assert "momentum of 16 of 52" in describe_checkpoint(manifest)["optimizer"]
    states = {name.rpartition(".")[2] for name in manifest.tensors if "mlp.up.weight" in name}
    assert states == {"weight", "momentum"}
    context = build(1, tmp_path, {})
    n_bytes = sum(each.numel() * each.element_size() for each in saved(tmp_path, 4).values())
    assert n_bytes == checkpoint_bytes(context.run, context.plan.n_parameters)
