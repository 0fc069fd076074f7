"""A mixture of experts: resumed bit for bit, and in other layouts with other degrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.circles import everyday
from tests.layouts import read_layout

from trainyard.checkpoint.load import build_model_from_checkpoint, load_tensors
from trainyard.layout.resolve import resolve
from trainyard.training.checkpoints import build_saver, load_newest, save_state
from trainyard.training.state import State, TrainContext

from .small import SECTIONS, build_small_context, build_small_run, take_steps

MODEL: dict[str, Any] = {
    **{"d_model": 32, "n_heads": 4, "d_ff": 64, "sequence_length": 16, "bias": False},
    **{"mlp": "swiglu", "n_experts": 8, "n_active_experts": 2, "d_expert": 16},
    **{"n_shared_experts": 1, "n_dense_blocks": 1, "balance": "bias", "init_std": 0.2},
}
# Experts on as many ranks, on others, cut by features, and fewer than the ranks that shard them.
ROWS = (
    ("dp2 ep2 zero1", "dp1"),
    ("dp4 ep2 zero3", "tp2 pp2 sequence"),
    ("dp4 ep4 zero2", "dp2 ep2 tp2 zero1"),
    ("cp2 dp2 ep4 zero1", "dp4 hsdp2 ep2 zero3"),
    ("dp2 ep2 pp2 zero1", "dp4 zero3"),
)


def sections(layout: str, kind: str = "adamw") -> dict[str, dict[str, Any]]:
    # With 1e-8, Adam's update has a jump where a gradient is 0: rounding is not small there.
    optimizer = SECTIONS["optimizer"] | {"epsilon": 1e-6, "kind": kind}
    return {"model": MODEL, "optimizer": optimizer, "parallel": read_layout(layout).parallel}


def build(layout: str, folder: Path, kind: str = "adamw") -> TrainContext:
    n_ranks = read_layout(layout).n_ranks
    return replace(build_small_context(n_ranks, **sections(layout, kind)), folder=folder)


def go_on(layout: str, source: Path, folder: Path, step: int, kind: str) -> list[float]:
    """Takes two steps from a checkpoint, or from the start, and saves to `folder`."""
    context = build(layout, source, kind)
    state = load_newest(context, lambda each: each == step) if step else State.at_start(context)
    results = take_steps(context, state, 2)
    context = replace(context, folder=folder)
    saver = build_saver(context)
    save_state(context, state, saver, None)
    saver.wait()
    return [float(each.loss) for each in results]


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = load_tensors(folder / "checkpoints" / f"step-{step:08d}", prefix="")
    # Rows of padding depend on the layout.
    return {name: value[:40] if "embed" in name else value for name, value in tensors.items()}


@pytest.mark.parametrize("row", ROWS)
def test_each_row_is_a_run(row: tuple[str, str]) -> None:
    for each in row:
        resolve(build_small_run(**sections(each)), read_layout(each).n_ranks)


@pytest.mark.parametrize("kind", everyday(["adamw", "muon"], ["adamw"]))
@pytest.mark.parametrize(("layout", "other"), everyday(ROWS, ROWS[:2]))
def test_it_resumes_bit_for_bit_and_in_other_layouts(
    layout: str, other: str, kind: str, tmp_path: Path, run_ranks: Callable[..., list[list[float]]]
) -> None:
    here, again, there = (tmp_path / each for each in ("here", "again", "there"))
    for folder in (here, again, there):
        folder.mkdir()

    def train(layout: str, source: Path, folder: Path, step: int) -> list[float]:
        n_ranks = read_layout(layout).n_ranks
        (losses, *_) = run_ranks(n_ranks, go_on, layout, source, folder, step, kind)
        return losses

    train(layout, here, here, 0)
    losses = train(layout, here, here, 2)
    assert train(layout, here, again, 2) == losses
    expected, found = saved(here, 4), saved(again, 4)
    assert "model.blocks.3.mlp.router.balance" in expected
    assert expected["model.blocks.3.mlp.router.balance"].any()
    assert expected["model.blocks.3.mlp.experts.up.weight"].shape == (8, 2, 16, 32)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert train(other, here, there, 2) == pytest.approx(losses, rel=1e-5)
    found = saved(there, 4)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
    model, _, _ = build_model_from_checkpoint(here / "checkpoints" / "step-00000004")
    for name, value in model.state_dict().items():
        assert torch.equal(value[:40] if "embed" in name else value, expected[f"model.{name}"])
