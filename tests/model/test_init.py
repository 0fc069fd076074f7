from __future__ import annotations

import math

import pytest
import torch

from trainyard.architecture import ParameterSpec, parameters_of, stage_layers
from trainyard.config.run import Model
from trainyard.model.gpt import GPT, initial_value, initialize

SHAPE = Model(n_layers=3, d_model=64, n_heads=4, d_ff=256, sequence_length=32, vocabulary_size=500)


def build(shape: Model, seed: int) -> dict[str, torch.Tensor]:
    model = GPT(shape, 512)
    initialize(model, seed)
    return dict(model.named_parameters())


def test_every_parameter_depends_on_seed_and_name_alone() -> None:
    torch.manual_seed(99)
    first = build(SHAPE, seed=1)
    torch.rand(7)
    # More heads and another order of drawing change nothing.
    heads = {"n_heads": 8, "n_key_value_heads": 8, "d_head": SHAPE.d_model // 8}
    second = build(SHAPE.model_copy(update=heads), seed=1)
    specs = parameters_of(stage_layers(SHAPE, 512))
    assert first.keys() == second.keys() == specs.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name
        assert torch.equal(value, initial_value(name, specs[name], 1)), name
    other = build(SHAPE, seed=2)
    assert not torch.equal(first["embedding.weight"], other["embedding.weight"])
    up = "blocks.{}.mlp.up.weight"
    assert not torch.equal(first[up.format(0)], first[up.format(1)])


def test_spread_is_that_of_gpt2() -> None:
    for name, value in build(SHAPE, seed=1).items():
        if name.endswith(".bias"):
            assert value.count_nonzero() == 0, name
        elif "norm" in name:
            assert torch.equal(value, torch.ones_like(value)), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            expected = 0.02 / math.sqrt(2 * 3) if residual else 0.02
            assert value.std().item() == pytest.approx(expected, rel=0.05), name
            assert value.mean().item() == pytest.approx(0, abs=0.1 * expected), name


def test_an_untied_head_is_drawn_on_its_own() -> None:
    drawn = build(SHAPE.model_copy(update={"tied_embeddings": False}), seed=1)
    assert not torch.equal(drawn["head.weight"], drawn["embedding.weight"])


@pytest.mark.parametrize("d_model", [64, 3])
def test_rows_of_padding_change_none_before_them(d_model: int) -> None:
    few, more = (
        initial_value("embedding.weight", ParameterSpec((n_rows, d_model), 0, 0.0, 0.02), 1)
        for n_rows in (501, 640)
    )
    assert torch.equal(more[:501], few)
