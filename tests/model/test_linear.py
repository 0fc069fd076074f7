"""Casts of weights that several passes share, and blocks of rows that stay in a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from trainyard.architecture import LayerSpec
from trainyard.config.run import Model
from trainyard.model.gpt import MLP
from trainyard.model.linear import (
    Linear,
    Norm,
    add_to_gradients,
    cast_once,
    compute_beside_exchange,
    compute_sums,
    defer_sums,
    sum_product,
)

SQUARE = LayerSpec("square", "linear", (8, 8), "replicated", has_bias=True)
PAIRED = replace(SQUARE, fused=(4, (1, 1)))
NORM = LayerSpec("norm", "norm", (8,), "replicated", has_bias=True)


def test_passes_share_a_cast_and_the_weight_gets_each_gradient() -> None:
    layer, norm = Linear(SQUARE), Norm(NORM, Model())
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


@pytest.mark.parametrize("spec", [SQUARE, PAIRED], ids=["rows in order", "rows of two in turn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_added_to_the_same_memory_with_the_same_bits(
    dtype: torch.dtype, spec: LayerSpec
) -> None:
    layer, norm = Linear(spec), Norm(NORM, Model())
    parameters = (*layer.parameters(), *norm.parameters())
    for parameter in parameters:
        torch.nn.init.normal_(parameter)
    inputs = torch.randn(3, 2, 4, 8, dtype=dtype)

    def compute(add: Callable[[], None]) -> list[list[torch.Tensor]]:
        found = []
        for x in inputs:
            add()
            norm(layer(x)).square().sum().backward()
            found.append([parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None
        return found

    by_autograd = compute(lambda: None)[-1]
    with cast_once([layer, norm], dtype):
        first, *_, last = compute(lambda: add_to_gradients([layer, norm]))
    assert layer.sums is None
    assert all(torch.equal(a, b) for a, b in zip(by_autograd, last, strict=True))
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(first, last, strict=True))


@pytest.mark.parametrize("n_micro_batches", [1, 3])
def test_compiled_backward_passes_add_without_a_pass_of_their_own(n_micro_batches: int) -> None:
    layer = Linear(SQUARE)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    x = torch.randn(n_micro_batches, 4, 8, dtype=torch.bfloat16)
    found = []
    for function in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        with cast_once([layer], torch.bfloat16):
            for each in x:
                add_to_gradients([layer])
                function(each).float().square().sum().backward()
        found.append([layer.weight.grad, layer.bias.grad])
        layer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_matmuls_of_gradients_exist_in_torch() -> None:
    schema = str(torch.ops.aten.addmm.dtype_out._schema)
    assert "ScalarType out_dtype" in schema and "Tensor(a!) out" in schema


def test_gradients_of_swiglu_are_those_of_its_formula() -> None:
    mlp = MLP(Model(n_layers=1, d_model=8, n_heads=1, d_ff=12, mlp="swiglu", bias=False)).double()
    for parameter in mlp.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 7, 8, dtype=torch.float64)
    up, down = (each.weight.detach().requires_grad_() for each in (mlp.up, mlp.down))
    gate, value = (x @ up.t()).unflatten(-1, (12, 2)).unbind(-1)
    expected = (gate * gate.sigmoid() * value) @ down.t()
    found = mlp(x)
    torch.testing.assert_close(found, expected)
    upstream = torch.randn_like(found)
    found.backward(upstream)
    expected.backward(upstream)
    torch.testing.assert_close(mlp.up.weight.grad, up.grad)
    torch.testing.assert_close(mlp.down.weight.grad, down.grad)


def test_sums_that_wait_are_computed_once_and_fail_as_themselves() -> None:
    total, a, b = torch.zeros(2, 2), torch.ones(2, 3), torch.ones(3, 2)
    with defer_sums(for_exchange=True) as sums:
        sum_product(total, a, b)
        assert not total.any() and len(sums) == 1
        compute_beside_exchange()
        assert total.eq(3).all() and not sums
        sums.append(partial(sum_product, total, a, b))  # as a compiled block does: it asks again
        compute_sums(sums)  # does not wait for itself
        assert total.eq(6).all() and not sums

    def fail() -> None:
        raise torch.OutOfMemoryError("no room")

    with (
        pytest.raises(torch.OutOfMemoryError, match="no room"),
        defer_sums(for_exchange=True) as sums,
    ):
        sums.append(fail)
        compute_beside_exchange()
    sum_product(total, a, b)
    assert total.eq(9).all(), "nothing waits afterwards"
