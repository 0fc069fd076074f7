"""Matmuls by oneDNN: those of `F.linear`, forward and backward, and where they are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.training.small import build_small_context
from torch import Tensor

from trainyard.config.run import Model
from trainyard.model.compiled import compile_blocks
from trainyard.model.gpt import GPT, initialize
from trainyard.model.linear import Linear
from trainyard.parallel import model as parallel_model
from trainyard.precision import policy
from trainyard.precision.policy import LEAST_WORK, OneDnnProduct, has_onednn, use_onednn

pytestmark = pytest.mark.skipif(not has_onednn(), reason="this torch has no oneDNN")

SMALL = {"n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 48, "sequence_length": 16}
GPT3: dict[str, Any] = {**SMALL, "vocabulary_size": 64, "dropout": 0.0}
MODERN = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False}


@pytest.fixture(autouse=True)
def _zen4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_model, "is_amd_with_avx512", lambda: True)
    monkeypatch.setattr(policy, "LEAST_WORK", 0)


def results(multiply: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in (x, weight, bias) if each is not None]
    out = multiply(*leaves)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return [out.detach(), *(each.grad for each in leaves if each.grad is not None)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(5, 24), (3, 7, 24), (1, 1, 24), (512, 24), (0, 24)])
def test_outputs_and_gradients_are_those_of_linear(shape: tuple[int, ...], has_bias: bool) -> None:
    torch.manual_seed(1)
    x, weight = torch.randn(shape), torch.randn(24, 40).t()  # in any order of memory
    bias = torch.randn(40) if has_bias else None
    found = results(OneDnnProduct(), x, weight, bias)
    precise = [None if each is None else each.double() for each in (x, weight, bias)]
    expected = results(F.linear, *precise)  # type: ignore[arg-type]
    assert len(found) == len(expected) == 3 + has_bias
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=2e-5)


def uses_onednn(product: OneDnnProduct, n_rows: int, weight: Tensor) -> bool:
    with torch.no_grad(), torch.profiler.profile(acc_events=True) as profile:
        product(torch.randn(n_rows, weight.shape[1]), weight)
    names = {event.name for event in profile.events()}
    assert ("mkldnn::_linear_pointwise" in names) is not ("aten::linear" in names)
    return "mkldnn::_linear_pointwise" in names


def test_many_rows_and_small_matmuls_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, product = torch.randn(40, 24), OneDnnProduct(most_rows=8)
    assert uses_onednn(product, 8, weight) and not uses_onednn(product, 9, weight)
    monkeypatch.setattr(policy, "LEAST_WORK", LEAST_WORK)
    product, narrow, wide = OneDnnProduct(), torch.randn(192, 64), torch.randn(512, 512)
    assert uses_onednn(product, 1, wide) and uses_onednn(product, 2**25 // (192 * 64) + 1, narrow)
    assert not uses_onednn(product, 1024, narrow) and not uses_onednn(product, 1, wide[:511])


@pytest.mark.parametrize("has_avx512", [False, True])
def test_without_avx512_only_few_rows_are_taken(
    has_avx512: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "is_amd_with_avx512", lambda: has_avx512)
    model = GPT(Model(**GPT3), 64)
    use_onednn(model)
    assert isinstance(model.head_product, OneDnnProduct)
    assert (model.head_product.most_rows == policy.FEW_ROWS) is not has_avx512


@pytest.mark.parametrize("fields", [GPT3, GPT3 | MODERN], ids=["gpt3", "modern"])
def test_a_model_has_the_same_loss_and_gradients(fields: dict[str, Any]) -> None:
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    found = []
    for change in (lambda model: None, use_onednn):
        model = GPT(Model(**fields), 64)
        initialize(model, seed=1)
        change(model)
        loss = model.summed_loss(model(tokens), tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([loss, *(parameter.grad for parameter in model.parameters())])
        with torch.no_grad():
            found[-1].append(model.logits(model(tokens)))
    assert isinstance(model.head_product, OneDnnProduct)
    uses = [isinstance(m.product, OneDnnProduct) for m in model.modules() if isinstance(m, Linear)]
    assert uses == [True] * 8
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours
def test_compiled_blocks_do_without() -> None:
    tokens = torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(1))
    gradients = []
    for compiles in (False, True):
        model = GPT(Model(**GPT3 | MODERN), 64)
        initialize(model, seed=1)
        use_onednn(model)
        if compiles:
            compile_blocks(model)
        model.summed_loss(model(tokens), tokens).backward()  # type: ignore[no-untyped-call]
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-5)


def products_of(n_ranks: int = 1, **sections: dict[str, Any]) -> set[str]:
    model = build_small_context(n_ranks, **sections).model
    layers = [m for stage in model.stages.values() for m in stage.modules()]
    return {type(m.product).__name__ for m in layers if isinstance(m, Linear)}


def test_it_is_for_fp32_on_some_processors_of_amd_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert products_of() == {"OneDnnProduct"}
    assert products_of(precision={"kind": "bf16"}) == {"PlainProduct"}
    for module, condition in ((parallel_model, "is_amd_with_avx512"), (policy, "has_onednn")):
        with monkeypatch.context() as patch:
            patch.setattr(module, condition, lambda: False)
            assert products_of() == {"PlainProduct"}


def products_of_stages() -> set[str]:
    parallel_model.is_amd_with_avx512 = lambda: True
    return products_of(2, parallel={"pipeline": 2, "schedule": "zero_bubble", "zero_stage": 0})


def test_stages_of_a_zero_bubble_have_it_too(run_ranks: Callable[..., list[Any]]) -> None:
    assert run_ranks(2, products_of_stages) == [{"OneDnnProduct"}] * 2
