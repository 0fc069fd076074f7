"""Checkpoints of more tensor ranks than heads of keys: resumed in other layouts, and exported."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.circles import everyday
from tests.layouts import read_layout

from trainyard.checkpoint.load import load_tensors
from trainyard.export.huggingface import compare_logits, export_huggingface
from trainyard.layout.resolve import resolve
from trainyard.training.checkpoints import build_saver, load_newest, save_state
from trainyard.training.state import State, TrainContext

from .small import SECTIONS, build_small_context, build_small_run, take_steps

SHAPE = {"d_model": 64, "n_heads": 4, "d_ff": 128, "sequence_length": 16}
# From one layout into another, and back; keys have one head, or two.
ROWS = (
    ("tp4 sequence, modern few-keys", "dp2 zero3"),
    ("tp4 sequence, rotary rms swiglu no-bias multi-query", "tp2 pp2"),
    ("tp4, rotary rms swiglu no-bias few-keys", "dp2 tp2 zero1"),
)


def sections(layout: str, variant: str) -> dict[str, dict[str, Any]]:
    return {
        "model": SHAPE | read_layout(f"dp1 {variant}").sections["model"],
        # With 1e-8, Adam's update has a jump where a gradient is 0: rounding is not small there.
        "optimizer": SECTIONS["optimizer"] | {"epsilon": 1e-6},
        "parallel": read_layout(layout).parallel,
    }


def build(layout: str, variant: str, folder: Path) -> TrainContext:
    n_ranks = read_layout(layout).n_ranks
    return replace(build_small_context(n_ranks, **sections(layout, variant)), folder=folder)


def save(context: TrainContext, state: State) -> None:
    saver = build_saver(context)
    save_state(context, state, saver, None)
    saver.wait()


def go_on(layout: str, variant: str, source: Path, folder: Path, step: int) -> list[float]:
    """Takes two steps from a checkpoint, or from the start, and saves to `folder`."""
    context = build(layout, variant, source)
    state = load_newest(context, lambda each: each == step) if step else State.at_start(context)
    results = take_steps(context, state, 2)
    save(replace(context, folder=folder), state)
    return [float(each.loss) for each in results]


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    tensors = load_tensors(folder / "checkpoints" / f"step-{step:08d}", prefix="")
    # Rows of padding depend on the layout.
    return {name: value[:40] if "embed" in name else value for name, value in tensors.items()}


@pytest.mark.parametrize(("name", "other"), ROWS)
def test_each_row_is_a_run(name: str, other: str) -> None:
    layout, variant = name.split(", ")
    for each in (layout, other):
        resolve(build_small_run(**sections(each, variant)), read_layout(each).n_ranks)


@pytest.mark.parametrize(("name", "other"), everyday(ROWS, ROWS[:2]))
def test_it_resumes_in_other_layouts_and_exports(
    name: str, other: str, tmp_path: Path, run_ranks: Callable[..., list[list[float]]]
) -> None:
    layout, variant = name.split(", ")
    here, there, back, on = (tmp_path / each for each in ("here", "there", "back", "on"))
    for folder in (here, there, back, on):
        folder.mkdir()

    def train(layout: str, source: Path, folder: Path, step: int) -> list[float]:
        n_ranks = read_layout(layout).n_ranks
        (losses, *_) = run_ranks(n_ranks, go_on, layout, variant, source, folder, step)
        return losses

    train(layout, here, here, 0)
    losses = train(layout, here, here, 2)
    assert train(other, here, there, 2) == pytest.approx(losses, rel=1e-5)
    found, expected = saved(there, 4), saved(here, 4)
    assert found.keys() == expected.keys() and "model.blocks.3.attention.qkv.weight" in found
    for tensor, value in expected.items():
        torch.testing.assert_close(found[tensor], value, rtol=1e-3, atol=1e-5, msg=tensor)
    assert train(layout, there, back, 4) == pytest.approx(train(other, here, on, 4), rel=1e-5)

    pytest.importorskip("transformers")
    checkpoint = here / "checkpoints" / "step-00000004"
    export_huggingface(checkpoint, tmp_path / "export", torch.float32)
    assert compare_logits(checkpoint, tmp_path / "export") < 1e-5
