from __future__ import annotations

import torch

from trainyard.config.run import Model, Optimizer
from trainyard.model.gpt import GPT
from trainyard.model.init import initialize
from trainyard.optim.adamw import build_adamw

SHAPE = Model(n_layers=2, d_model=16, n_heads=2, d_ff=32, sequence_length=8, vocabulary_size=50)


def test_matrices_and_embeddings_are_decayed_biases_and_norms_are_not() -> None:
    model = GPT(SHAPE, 64)
    optimizer = build_adamw(list(model.parameters()), Optimizer(weight_decay=0.25))
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        plain = name.endswith(".bias") or "norm" in name
        assert decay.pop(id(parameter)) == (0.0 if plain else 0.25), name
    assert not decay


def test_settings_arrive_and_the_step_is_that_of_the_paper() -> None:
    model = GPT(SHAPE, 64)
    initialize(model, seed=1)
    settings = Optimizer(learning_rate=0.01, betas=(0.8, 0.9), epsilon=1e-6, weight_decay=0.5)
    optimizer = build_adamw(list(model.parameters()), settings)
    weight = model.blocks["1"].mlp.up.weight
    expected, mean, square = weight.detach().double(), 0.0, 0.0
    for step in (1, 2, 3):
        rate = 0.01 / step  # set by the schedule at each step
        for group in optimizer.param_groups:
            group["lr"] = rate
        gradient = torch.randn(weight.shape, generator=torch.Generator().manual_seed(step))
        weight.grad = gradient
        optimizer.step()
        mean = 0.8 * mean + 0.2 * gradient.double()
        square = 0.9 * square + 0.1 * gradient.double() ** 2
        moved = mean / (1 - 0.8**step) / ((square / (1 - 0.9**step)).sqrt() + 1e-6)
        expected = expected - rate * (moved + 0.5 * expected)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-5, atol=1e-7)
