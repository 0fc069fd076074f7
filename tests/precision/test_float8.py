"""Products in fp8: against plain arithmetic, in which blocks, on which devices, gathered or not."""

from __future__ import annotations

import importlib.util
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.precision.by_hand import ByHand
from tests.training.small import build_small_context
from torch import Tensor

from trainyard.config.load import load_run
from trainyard.config.precisions import Fp8
from trainyard.config.run import Run
from trainyard.errors import ConfigError, MachineError
from trainyard.model.gpt import GPT
from trainyard.model.linear import Linear, MatmulFunction, PlainProduct
from trainyard.precision import float8
from trainyard.precision.float8 import blocks_in_fp8, build_product, refuse_device
from trainyard.training.state import State
from trainyard.training.step import train_step

SMALL = {
    **{"n_layers": 4, "d_model": 32, "n_heads": 2, "d_ff": 64, "sequence_length": 16},
    **{"vocabulary_size": 90, "vocabulary_multiple": 8, "dropout": 0.0},
}


def forward_and_backward(
    product: MatmulFunction, x: Tensor, weight: Tensor, gradient: Tensor
) -> list[Tensor]:
    """Gives the output, and the gradients of input and weight (twice), of three sequences."""
    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    out = product(leaves[0].view(3, 16, 32), leaves[1])
    out.backward(gradient.view(3, 16, 64))  # type: ignore[no-untyped-call]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    alone = [product.input_gradient(gradient, weight), product.weight_gradient(gradient, x)]
    return [out.detach().flatten(0, 1), *gradients, *alone]


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_products_are_those_of_numbers_rounded_by_hand(scaling: str) -> None:
    generator = torch.Generator().manual_seed(7)

    def spread(*shape: int) -> Tensor:
        """Numbers of very different size, so that some have few digits left in fp8."""
        values = torch.randn(*shape, generator=generator)
        return values * torch.exp2(torch.randint(-12, 3, shape, generator=generator))

    x, weight, gradient = spread(48, 32), spread(64, 32), spread(48, 64) * 2e-5
    product = build_product(Fp8(scaling=scaling, emulate=True))  # type: ignore[arg-type]
    by_hand = ByHand(Fp8(scaling=scaling))  # type: ignore[arg-type]
    found = forward_and_backward(product, x, weight, gradient)
    expected = forward_and_backward(by_hand, x.double(), weight.double(), gradient.double())
    plain = [x @ weight.T, *([gradient @ weight, gradient.T @ x] * 2)]
    for one, reference, unrounded in zip(found, expected, plain, strict=True):
        size = reference.norm()
        assert (one - reference).norm() < 1e-6 * size  # sums in fp32
        assert (unrounded - reference).norm() > 1e-2 * size


def test_a_bias_is_added_and_the_precision_stays() -> None:
    x, weight, bias = torch.eye(16).bfloat16(), torch.full((16, 16), 0.5), torch.arange(16.0)
    out = build_product(Fp8(emulate=True))(x, weight.bfloat16(), bias.bfloat16())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), (0.5 + bias).expand(16, 16))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_stays_none(scaling: str, value: float) -> None:
    x, weight = torch.ones(16, 16), torch.ones(16, 16)
    x[3, 4] = value
    product = build_product(Fp8(scaling=scaling, emulate=True))  # type: ignore[arg-type]
    assert not product(x, weight)[3].isfinite().any()


def run_in_fp8(*overrides: str, **model: Any) -> Run:
    fields = {**SMALL, **model}
    model_overrides = [f"model.{name}={str(value).lower()}" for name, value in fields.items()]
    fp8 = ["precision.kind=fp8", "precision.fp8.emulate=true"]
    return load_run("tiny", [*model_overrides, *fp8, *overrides]).run


@pytest.mark.parametrize(
    ("n_precise", "blocks", "expected"),
    [(0, (0, 5), "01234"), (1, (0, 5), "123"), (2, (0, 5), "2"), (1, (3, 5), "3")],
)
def test_first_and_last_blocks_stay_precise(
    n_precise: int, blocks: tuple[int, int], expected: str
) -> None:
    run = run_in_fp8(f"precision.fp8.precise_blocks={n_precise}", n_layers=5)
    model = GPT(run.model, 96, torch.bfloat16, blocks=blocks)
    float8.convert_to_float8(model, run)
    assert "".join(blocks_in_fp8(model, run)) == expected
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            in_fp8 = not isinstance(module.product, PlainProduct)
            assert in_fp8 == (name.split(".")[1] in expected), name
    bf16 = load_run("tiny").run
    assert blocks_in_fp8(model, bf16) == {}


def test_no_gpu_is_refused_unless_emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = run_in_fp8("precision.fp8.emulate=false")
    with pytest.raises(MachineError, match="MI300; this machine has no GPU") as caught:
        refuse_device(run)
    assert caught.value.problem.startswith("precision.kind='fp8' needs fp8 matmuls")
    assert "precision.fp8.emulate=true" in caught.value.hint
    with pytest.raises(MachineError, match="this is the CPU"):
        refuse_device(run, torch.device("cpu"))
    for allowed in (run_in_fp8(), load_run("tiny").run):
        refuse_device(allowed)
        refuse_device(allowed, torch.device("cpu"))


def test_without_torchao_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs torchao, which is not installed") as caught:
        refuse_device(run_in_fp8())
    assert caught.value.hint == "pip install torchao, or precision.kind=bf16"
    refuse_device(load_run("tiny").run)


@pytest.mark.parametrize(
    ("capability", "architecture", "refused"),
    [
        ((8, 0), "", "has compute capability 8.0"),
        ((8, 9), "", ""),
        ((9, 0), "", ""),
        ((9, 0), "gfx90a:sramecc+", "is gfx90a"),
        ((9, 4), "gfx942:sramecc+", ""),
    ],
)
def test_a_device_is_refused_by_what_it_is(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], architecture: str, refused: str
) -> None:
    properties = SimpleNamespace(gcnArchName=architecture)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", "6.4" if architecture else None)
    run, device = run_in_fp8("precision.fp8.emulate=false"), torch.device("cuda", 0)
    if not refused:
        refuse_device(run, device)
        return
    with pytest.raises(MachineError, match=f"a GPU {refused}"):
        refuse_device(run, device)
    refuse_device(run_in_fp8(), device)


def take_steps(precision: dict[str, Any], n_steps: int = 20) -> list[float]:
    train = {"micro_batch_size": 8, "global_batch_size": 8, "compile": "never"}
    sections = {"model": SMALL, "train": train, "optimizer": {"learning_rate": 3e-3}}
    context = build_small_context(**sections, precision=precision)
    state, losses = State.at_start(context), []
    for step in range(n_steps):
        state.step = step
        losses.append(train_step(context, state).loss.item())
    return losses


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_it_learns_as_bf16_does(scaling: str) -> None:
    settings = {"emulate": True, "precise_blocks": 0, "scaling": scaling}
    in_bf16, in_fp8 = take_steps({"kind": "bf16"}), take_steps({"kind": "fp8", "fp8": settings})
    first, *_, expected = in_bf16
    last = in_fp8[-1]
    assert in_bf16 != in_fp8
    assert last == pytest.approx(expected, rel=1e-2)
    assert last < first


def test_compiled_kernels_take_maxima_without_the_instructions_that_break_fp8_stores() -> None:
    """Else a neighboring transposed store of fp8 writes NaN (triton-lang/triton#11111)."""
    from torch._inductor.codegen.triton import TritonOverrides

    build_product(Fp8())
    assert "tl.where" in TritonOverrides.maximum("a", "b")
    assert "tl.where" in TritonOverrides.minimum("a", "b")
