from __future__ import annotations

import torch
from benchmarks.baselines import build_adamw
from tests.optim.updates import fill_gradients

from trainyard.config.run import Model, Optimizer
from trainyard.model.gpt import GPT, initialize
from trainyard.optim.adamw import AdamW

SHAPE = Model(n_layers=2, d_model=16, n_heads=2, d_ff=32, sequence_length=8, vocabulary_size=50)
ONE, NO = torch.ones(()), torch.zeros(())


def build() -> GPT:
    model = GPT(SHAPE, 64)
    initialize(model, seed=1)
    return model


def test_matrices_and_embeddings_are_decayed_biases_and_norms_are_not() -> None:
    model = GPT(SHAPE, 64)
    for parameter in model.parameters():
        parameter.detach().fill_(1.0)
        parameter.grad = torch.zeros_like(parameter)
    optimizer = AdamW(list(model.parameters()), Optimizer(weight_decay=0.25))
    optimizer.step(0.5, ONE, NO)
    for name, parameter in model.named_parameters():
        plain = name.endswith(".bias") or "norm" in name
        assert (parameter == (1.0 if plain else 0.875)).all(), name


def test_updates_are_bitwise_those_of_torch_with_one_skipped() -> None:
    model, other = build(), build()
    settings = Optimizer(learning_rate=0.01, betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.5)
    optimizer = AdamW(list(model.parameters()), settings)
    reference = build_adamw(list(other.parameters()), settings)
    assert optimizer.moments == {}
    for step, skip in enumerate((NO, ONE, NO, NO)):
        fill_gradients(model, step)
        fill_gradients(other, step)
        divisor, rate = torch.tensor(1.5 + step), 0.01 / (step + 1)  # set by the schedule
        optimizer.step(rate, divisor, skip)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.grad_scale, reference.found_inf = divisor, skip  # type: ignore[attr-defined]
        reference.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        for name, moment in optimizer.moments[mine].items():
            assert torch.equal(moment, reference.state[theirs][name]), name
