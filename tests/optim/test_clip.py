from __future__ import annotations

import copy
import math

import pytest
import torch
from tests.optim.updates import apply_update
from torch import nn

from trainyard.config.run import Optimizer
from trainyard.optim.adamw import AdamW
from trainyard.optim.clip import StepStats, norms_of


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 33), nn.LayerNorm(33), nn.Linear(33, 5))


def fill_gradients(module: nn.Module, seed: int, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.grad = size * torch.randn(parameter.shape, generator=generator)


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
def test_a_gradient_that_is_not_finite_leaves_weights_and_state_untouched(bad: float) -> None:
    module = net()
    optimizer = AdamW(list(module.parameters()), Optimizer())
    fill_gradients(module, 0, 1.0)
    apply_update(optimizer, totals(module), 1.0)
    before = everything(module, optimizer)
    fill_gradients(module, 1, 1.0)
    module[2].weight.grad[1, 1] = bad
    assert apply_update(optimizer, totals(module), 1.0)
    for old, new in zip(before, everything(module, optimizer), strict=True):
        assert torch.equal(old, new)
    fill_gradients(module, 2, 1.0)
    assert not apply_update(optimizer, totals(module), 1.0)
    assert not torch.equal(before[0], module[0].weight)


def test_a_skipped_first_step_leaves_the_optimizer_as_new() -> None:
    module = net()
    untouched = copy.deepcopy(module)
    optimizer = AdamW(list(module.parameters()), Optimizer())
    fill_gradients(module, 0, math.nan)
    apply_update(optimizer, totals(module), 1.0)
    for old, new in zip(untouched.parameters(), module.parameters(), strict=True):
        assert torch.equal(old, new)
    moments = everything(module, optimizer)[len([*module.parameters()]) :]
    assert moments and all(moment.count_nonzero() == 0 for moment in moments)
    fill_gradients(module, 1, 1.0)
    fill_gradients(untouched, 1, 1.0)
    apply_update(optimizer, totals(module), 1.0)
    apply_update(AdamW([*untouched.parameters()], Optimizer()), totals(untouched), 1.0)
    for new, other in zip(module.parameters(), untouched.parameters(), strict=True):
        assert torch.equal(new, other)  # the skipped step is not counted


def test_a_loss_that_is_not_finite_skips_the_step() -> None:
    module = net()
    optimizer = AdamW(list(module.parameters()), Optimizer())
    fill_gradients(module, 0, 1.0)
    apply_update(optimizer, totals(module), 1.0)
    before = everything(module, optimizer)
    spoilt = StepStats(torch.tensor(math.nan), totals(module).norm, torch.ones(()))
    assert apply_update(optimizer, spoilt, 1.0)
    for old, new in zip(before, everything(module, optimizer), strict=True):
        assert torch.equal(old, new)
    assert not apply_update(optimizer, totals(module), 1.0)
    assert not torch.equal(before[0], module[0].weight)
