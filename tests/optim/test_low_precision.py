from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benchmarks.baselines import build_adamw
from tests.optim.updates import apply_update, are_equal
from torch import Tensor, nn

from trainyard.config.precisions import stored
from trainyard.config.run import Optimizer
from trainyard.optim.adamw import LowPrecisionAdamW
from trainyard.optim.clip import StepStats, norms_of
from trainyard.parallel.model import LocalParameter
from trainyard.parallel.placement import Placement, whole
from trainyard.precision.block_scaled import BlockScaledTensor

SHAPES = {"qkv": (96, 64), "norm": (64,), "embedding": (20, 64)}
RATE = {"learning_rate": 1e-2, "weight_decay": 0.1}


def build(
    shapes: dict[str, tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[list[LocalParameter], LowPrecisionAdamW]:
    """Parameters of a block in bf16, "embedding" in fp32, and their optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for name, shape in shapes.items():
        value = 0.02 * torch.randn(shape, generator=generator)
        value = value if name == "embedding" else value.bfloat16()
        parameters.append(local(name, nn.Parameter(value)))
    return parameters, build_for(parameters, **settings)


def local(name: str, parameter: nn.Parameter) -> LocalParameter:
    formats = stored("fp8_lowbit", "adamw", name != "embedding", parameter.ndim)
    return LocalParameter(name, parameter, None, is_copy=False, stored=formats)


def build_for(
    parameters: list[LocalParameter], place: Placement | None = None, seed: int = 5, **settings: Any
) -> LowPrecisionAdamW:
    config = Optimizer.model_validate(RATE | settings)
    places = [(each, place or whole(each.parameter.shape)) for each in parameters]
    return LowPrecisionAdamW(places, config, seed, may_compile=False)


def fill(parameters: list[LocalParameter], step: int, size: float = 1.0) -> None:
    """Gives every parameter a gradient, as a backward pass and `ParallelModel` would."""
    for number, each in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + number)
        gradient = size * torch.randn(each.parameter.shape, generator=generator)
        each.parameter.grad = gradient.to(each.parameter.dtype)
        if each.stored.converts_gradient:
            each.convert_gradient()


def clear(parameters: list[LocalParameter]) -> None:
    for each in parameters:
        each.parameter.grad = each.converted_gradient = None


def totals_of(parameters: list[LocalParameter]) -> StepStats:
    norm = norms_of([each.gradient for each in parameters]).norm().float()
    return StepStats(torch.zeros(()), norm, torch.ones(()))


def everything(parameters: list[LocalParameter], optimizer: LowPrecisionAdamW) -> list[Tensor]:
    states = [tensor for each in parameters for tensor in optimizer.state_of(each).values()]
    return [tensor.detach().clone() for tensor in (*(h.parameter for h in parameters), *states)]


def master_of(optimizer: LowPrecisionAdamW) -> BlockScaledTensor:
    return optimizer.matrices["qkv"].states["master"]


@pytest.mark.parametrize("clip_norm", [0.5, math.inf])
@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_updates_are_those_of_adamw_with_the_clipped_gradients_of_the_codes(
    clip_norm: float, size: float
) -> None:
    parameters, optimizer = build()
    weights = {each.name: nn.Parameter(each.parameter.detach().float()) for each in parameters}
    reference = build_adamw(list(weights.values()), Optimizer.model_validate(RATE))
    for step in range(4):
        fill(parameters, step, size)
        for each in parameters:
            gradient = each.gradient
            exact = gradient.decode() if isinstance(gradient, BlockScaledTensor) else gradient
            weights[each.name].grad = exact.clone()
        found = totals_of(parameters)
        their_norm = nn.utils.clip_grad_norm_(weights.values(), clip_norm)
        torch.testing.assert_close(found.norm, their_norm, rtol=1e-6, atol=0)
        assert not apply_update(optimizer, found, clip_norm)
        clear(parameters)
        reference.step()
        if step == 0:  # nothing was rounded before: each number is one of the two next to it
            first = reference.state[weights["qkv"]]
            state = optimizer.matrices["qkv"].states
            close = {"rtol": 2**-10, "atol": 3e-9}
            torch.testing.assert_close(state["master"].decode(), weights["qkv"].detach(), **close)
            torch.testing.assert_close(state["exp_avg_sq"].decode(), first["exp_avg_sq"], **close)
            largest = first["exp_avg"].abs().max().item()
            torch.testing.assert_close(
                state["exp_avg"].decode(), first["exp_avg"], rtol=2**-3, atol=2**-16 * largest
            )
    moved = weights["qkv"].detach() - build()[0][0].parameter.float()
    error = master_of(optimizer).decode() - weights["qkv"].detach()
    assert error.norm() < 0.05 * moved.norm()  # first moments are right to 1 in 16
    for name in ("norm", "embedding"):
        parameter = parameters[[*SHAPES].index(name)].parameter.detach()
        torch.testing.assert_close(parameter.float(), weights[name].detach(), rtol=2**-8, atol=1e-6)
    assert torch.equal(parameters[0].parameter.detach(), master_of(optimizer).decode().bfloat16())


def test_updates_of_a_tenth_of_a_step_are_not_lost_and_rounded_to_the_nearest_they_are() -> None:
    parameters, optimizer = build({"qkv": (64, 64)}, weight_decay=0.0)
    master_of(optimizer).values.fill_(2.0**14)  # with exponents of 127: 2**14 each
    master_of(optimizer).exponents.fill_(127)
    step = 2.0**4  # to the next fp16 number
    nearest = torch.full((64, 64), 2.0**14)
    for _ in range(20):  # equal gradients: Adam's step is the learning rate
        parameters[0].parameter.grad = torch.full_like(parameters[0].parameter, -1.0)
        parameters[0].convert_gradient()
        optimizer.step(step / 10, torch.ones(()), torch.zeros(()))
        clear(parameters)
        nearest = (nearest + step / 10).half().float()
    assert nearest.unique().tolist() == [2.0**14]
    moved = (master_of(optimizer).decode() - 2.0**14) / step
    # The sum of 20 choices with a chance of 1/10, of 4,096 weights: 2 +- 1.34 / 64.
    assert moved.mean().item() == pytest.approx(2.0, abs=0.1)
    assert moved.std().item() == pytest.approx(math.sqrt(20 * 0.1 * 0.9), rel=0.1)


def test_the_second_moment_follows_gradients_that_change_it_little() -> None:
    parameters, optimizer = build({"qkv": (32, 64)}, betas=(0.9, 0.9995))
    for size, n in ((1.0, 10), (1.2, 400)):
        for _ in range(n):
            parameters[0].parameter.grad = torch.full_like(parameters[0].parameter, size)
            parameters[0].convert_gradient()
            optimizer.step(1e-2, torch.ones(()), torch.zeros(()))
            clear(parameters)
    kept = BlockScaledTensor.of(torch.full((1, 32), 1.2)).decode()[0, 0].item()
    expected = (1 - 0.9995**10) * 0.9995**400 + (1 - 0.9995**400) * kept**2
    found = optimizer.matrices["qkv"].states["exp_avg_sq"].decode().mean().item()
    assert found == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1, 2])
@pytest.mark.parametrize("first", [0, 1])
def test_a_gradient_that_is_not_finite_leaves_every_bit_as_it_was(
    bad: float, where: int, first: int
) -> None:
    """As the second update, or as the first one."""
    parameters, optimizer = build()
    if first == 0:
        fill(parameters, 0)
        apply_update(optimizer, totals_of(parameters), 1.0)
        clear(parameters)
    weights = [each.parameter.detach().clone() for each in parameters]
    before = everything(parameters, optimizer)
    fill(parameters, 1)
    gradient = torch.ones_like(parameters[where].parameter)
    gradient.view(-1)[7] = bad
    parameters[where].converted_gradient, parameters[where].parameter.grad = None, gradient
    if parameters[where].stored.converts_gradient:
        parameters[where].convert_gradient()
    found = totals_of(parameters)
    assert not found.norm.isfinite()
    assert apply_update(optimizer, found, 1.0)
    clear(parameters)
    if first == 0:
        assert are_equal(everything(parameters, optimizer), before)
    assert are_equal([each.parameter.detach() for each in parameters], weights)
    # The next update is as if the bad one had never been.
    fill(parameters, 2)
    apply_update(optimizer, totals_of(parameters), 1.0)
    after = everything(parameters, optimizer)
    again, other = build()
    for step in (0, 2)[first:]:
        fill(again, step)
        apply_update(other, totals_of(again), 1.0)
        clear(again)
    assert are_equal(after, everything(again, other))


def test_rounding_depends_on_seed_step_name_and_place_in_the_whole_alone() -> None:
    parameters, _ = build({"qkv": (96, 128)})
    start = parameters[0].parameter.detach().clone()
    generator = torch.Generator().manual_seed(3)
    gradients = [torch.randn(96, 128, generator=generator) for _ in range(3)]

    def train(name: str, rows: slice, columns: slice, seed: int = 5) -> list[Tensor]:
        part = local(name, nn.Parameter(start[rows, columns].clone()))
        offsets = (rows.start or 0, columns.start or 0)
        place = Placement((96, 128), offsets, tuple(part.parameter.shape))
        found = build_for([part], place, seed)
        for gradient in gradients:
            part.parameter.grad = gradient[rows, columns].bfloat16().contiguous()
            part.convert_gradient()
            found.step(1e-2, torch.ones(()), torch.zeros(()))
            clear([part])
        return everything([part], found)

    everywhere = slice(0, 96), slice(0, 128)
    expected = train("qkv", *everywhere)
    cuts = [
        (slice(0, 96), slice(64, 128)),
        (slice(33, 96), slice(0, 128)),
        (slice(5, 6), slice(32, 64)),
    ]
    for rows, columns in cuts:
        for tensor, found in zip(expected, train("qkv", rows, columns), strict=True):
            factor = tensor.shape[1] / 128
            narrow = slice(int(columns.start * factor), int(columns.stop * factor))
            assert are_equal([tensor[rows, narrow].contiguous()], [found])
    assert not are_equal(expected, train("qkv", *everywhere, seed=6))
    assert not are_equal(expected, train("up", *everywhere))
    assert are_equal(
        train("qkv", slice(96, 96), slice(0, 128))[:1], [start[:0]]
    )  # a rank without rows
