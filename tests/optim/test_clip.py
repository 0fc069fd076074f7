from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.optim.updates import apply_update, are_equal, fill_gradients
from torch import nn

from trainyard.config.run import Optimizer
from trainyard.optim.adamw import AdamW
from trainyard.optim.clip import StepStats, norms_of


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5))


def totals(module: nn.Module) -> StepStats:
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(norms_of(gradients)).float()
    return StepStats(torch.zeros(()), norm, torch.ones(()))


def everything(module: nn.Module, optimizer: AdamW) -> list[torch.Tensor]:
    parameters = [*module.parameters()]
    states = [moment for each in parameters for moment in optimizer.moments.get(each, {}).values()]
    return [tensor.detach().clone() for tensor in (*parameters, *states)]


def test_the_norm_of_a_large_gradient_is_that_of_its_parts() -> None:
    gradient = torch.randn(50_257, 256, generator=torch.Generator().manual_seed(0))
    exact = gradient.double().norm().item()
    assert norms_of([gradient]).item() == pytest.approx(exact, rel=1e-6)
    parts = norms_of([*gradient.chunk(3), torch.empty(0, 256)])
    assert torch.linalg.vector_norm(parts).item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [0.5, 1e6, math.inf])
@pytest.mark.parametrize("size", [1e-3, 10.0])
def test_updates_equal_clip_grad_norm_and_a_plain_step(clip_norm: float, size: float) -> None:
    settings = Optimizer(learning_rate=1e-2, weight_decay=0.3)
    ours, theirs = net(), net()
    our_optimizer, their_optimizer = (
        AdamW(list(module.parameters()), settings) for module in (ours, theirs)
    )
    for step in range(4):
        for module in (ours, theirs):
            fill_gradients(module, step, size)
        found = totals(ours)
        their_norm = nn.utils.clip_grad_norm_(theirs.parameters(), clip_norm)
        torch.testing.assert_close(found.norm, their_norm, rtol=1e-6, atol=0)
        assert not apply_update(our_optimizer, found, clip_norm)
        their_optimizer.step(1e-2, torch.ones(()), torch.zeros(()))
    pairs = zip(everything(ours, our_optimizer), everything(theirs, their_optimizer), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_what_is_not_finite_leaves_weights_and_state_untouched(bad: float, where: str) -> None:
    module = net()
    optimizer = AdamW(list(module.parameters()), Optimizer())
    fill_gradients(module, 0)
    apply_update(optimizer, totals(module), 1.0)
    before = everything(module, optimizer)
    fill_gradients(module, 1)
    found = totals(module)
    if where == "gradient":
        module[2].weight.grad[1, 1] = bad
        found = totals(module)
    else:
        found = replace(found, loss=torch.tensor(bad))
    assert apply_update(optimizer, found, 1.0)
    assert are_equal(before, everything(module, optimizer))
    fill_gradients(module, 2)
    assert not apply_update(optimizer, totals(module), 1.0)
    assert not torch.equal(before[0], module[0].weight)


def test_a_skipped_first_step_leaves_the_optimizer_as_new() -> None:
    modules = [net(), net()]
    optimizers = [AdamW(list(module.parameters()), Optimizer()) for module in modules]
    fill_gradients(modules[0], 0, math.nan)
    apply_update(optimizers[0], totals(modules[0]), 1.0)
    for module, optimizer in zip(modules, optimizers, strict=True):
        fill_gradients(module, 1)
        apply_update(optimizer, totals(module), 1.0)
    assert are_equal(*map(everything, modules, optimizers))
