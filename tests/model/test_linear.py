"""Casts of weights that several passes share."""

from __future__ import annotations

import torch

from trainyard.architecture import LayerSpec
from trainyard.model.linear import LayerNorm, Linear, cast_once

SQUARE = LayerSpec("square", "linear", (8, 8), "replicated", has_bias=True)
NORM = LayerSpec("norm", "norm", (8,), "replicated", has_bias=True)


def test_passes_share_a_cast_and_the_weight_gets_each_gradient() -> None:
    layer, norm = Linear(SQUARE), LayerNorm(NORM, 1e-5)
    parameters = (*layer.parameters(), *norm.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    inputs = torch.randn(3, 4, 8, dtype=torch.bfloat16)

    def compute() -> list[torch.Tensor]:
        for loss in [norm(layer(x)).square().sum() for x in inputs]:
            loss.backward()
        gradients = []
        for parameter in parameters:
            assert parameter.grad is not None and parameter.grad.dtype == torch.float32
            gradients.append(parameter.grad)
            parameter.grad = None
        return gradients

    apart = compute()
    with cast_once([layer, norm], torch.bfloat16):
        casts = [layer.cast(torch.bfloat16)[0] for _ in range(2)]
        assert casts[0].data_ptr() == casts[1].data_ptr()
        assert [each.dtype for each in casts] == [torch.bfloat16] * 2
        assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
        together = compute()
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_casts_end_with_the_block_so_that_an_update_counts() -> None:
    layer = Linear(SQUARE)
    torch.nn.init.normal_(layer.weight)
    for _ in range(2):
        with cast_once([layer], torch.bfloat16):
            assert torch.equal(layer.cast(torch.bfloat16)[0], layer.weight.bfloat16())
        assert layer.casts is None
        with torch.no_grad():
            layer.weight.add_(1.0)


def test_weights_in_that_precision_already_are_left_alone() -> None:
    layer = Linear(SQUARE)
    with cast_once([layer], torch.float32):
        assert layer.casts is None
        assert layer.cast(torch.float32)[0] is layer.weight
