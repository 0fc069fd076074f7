from __future__ import annotations

import hashlib
import math

import pytest
import torch
from torch import Tensor

from trainyard.model.dropout import (
    Dropout,
    at_site,
    dropout,
    rows_of_heads,
    sequence_seeds,
)

# Standard deviations of a mean of independent draws; one in 30 million is beyond by chance.
SIGMAS = 5.5


def kept(
    rate: float = 0.1, step: int = 0, site: int = 0, seed: int = 1, shape: tuple[int, ...] = ()
) -> Tensor:
    """Which elements stay, of 8 sequences of 256 tokens of 384 features if not said otherwise."""
    B, T, D = shape or (8, 256, 384)
    seeds = at_site(sequence_seeds(seed, step, 0, B), site)
    return dropout(torch.ones(B, T, D), rate, seeds, torch.arange(T)) != 0


def deviation(products: Tensor, variance: float) -> float:
    """How many standard deviations the mean of independent products of mean 0 is from 0."""
    return float(products.mean()) * math.sqrt(products.numel() / variance)


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9, 0.999])
def test_rate_and_mean(rate: float) -> None:
    x = dropout(torch.ones(8, 256, 384), rate, sequence_seeds(1, 0, 0, 8), torch.arange(256))
    assert torch.equal(x.unique(), torch.tensor([0.0, 1 / (1 - rate)]))
    variance = rate / (1 - rate)  # of an element
    assert abs(deviation(x.double() - 1, variance)) < SIGMAS


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_no_two_elements_are_correlated(rate: float) -> None:
    centred = kept(rate).float() - (1 - rate)
    variance = rate * (1 - rate)
    others = {f"site {n}": kept(rate, site=n) for n in (1, 2, 3, 6, 95)}
    others |= {f"step {n}": kept(rate, step=n) for n in (1, 2, 1000)}
    others |= {f"seed {n}": kept(rate, seed=n) for n in (0, 2, 3)}
    products = {name: centred * (other.float() - (1 - rate)) for name, other in others.items()}
    for n in (1, 2, 3, 4, 8, 16, 64, 128):
        products[f"{n} tokens on"] = centred[:, n:] * centred[:, :-n]
        products[f"{n} features on"] = centred[..., n:] * centred[..., :-n]
    for n in (1, 2, 4):
        products[f"{n} sequences on"] = centred[n:] * centred[:-n]
    products["next token and feature"] = centred[:, 1:, 1:] * centred[:, :-1, :-1]
    products["next token, feature before"] = centred[:, 1:, :-1] * centred[:, :-1, 1:]
    found = {name: deviation(each, variance**2) for name, each in products.items()}
    assert {name: value for name, value in found.items() if abs(value) > SIGMAS} == {}


def test_any_two_features_and_any_two_tokens_are_as_good_as_independent() -> None:
    """Correlations of all pairs spread as those of coin tosses, none far out."""
    tokens = 2 * kept(0.5, shape=(32, 256, 256)).flatten(0, 1).float() - 1  # (8192, 256)
    for each in (tokens, tokens[:2048].t()):
        n_draws, n = each.shape
        scores = (each.t() @ each / math.sqrt(n_draws))[~torch.eye(n, dtype=torch.bool)]
        assert scores.std().item() == pytest.approx(1, abs=0.02)
        assert scores.abs().max() < 6.5


def test_rows_and_columns_lose_about_the_same() -> None:
    centred = kept(0.1).float() - 0.9
    for dimension, n in ((1, 256), (2, 384)):
        spread = centred.sum(dimension).pow(2) / (n * 0.1 * 0.9)  # 1 on average, variance 2
        assert abs(deviation(spread - 1, 2.0)) < SIGMAS


def test_keys_are_of_seed_step_and_number_alone() -> None:
    seeds = sequence_seeds(1, 2, 0, 1000)
    assert seeds.dtype == torch.int64
    assert torch.equal(sequence_seeds(1, 2, 300, 7), seeds[300:307])
    many = [seeds, sequence_seeds(1, 3, 0, 1000), sequence_seeds(2, 2, 0, 1000)]
    sites = [at_site(seeds, site) for site in (1, 2, 3, 288)]
    assert len(torch.cat(many + sites).unique()) == 7000
    assert torch.equal(at_site(at_site(seeds, 6), 2), at_site(seeds, 8))


def test_masks_are_those_described() -> None:
    """Computed anew with whole numbers: a run must go on with the same masks years later."""

    def mix(x: int) -> int:
        x = (x ^ x % 2**64 >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    increment = 0x9E3779B97F4A7C15
    start = hashlib.sha256(b"dropout 1234 3").digest()[:8]
    key = mix((int.from_bytes(start, "little") + 2 * increment) % 2**64)  # of the third sequence
    expected = []
    for token in range(20):
        bits = mix((key + ((4 << 48) + token) * increment) % 2**64)
        for feature in range(30):
            column = mix(feature * increment % 2**64)
            x = bits + (bits >> 32 | 1) * column
            h = (x + 0x2C1B3C6E * x * x) % 2**32
            expected.append((h + 2**31) % 2**32 >= 0.3 * 2**32)
    found = kept(0.3, seed=1234, step=3, site=4, shape=(3, 20, 30))
    assert found[2].flatten().tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_pass_where_values_do(dtype: torch.dtype) -> None:
    x = torch.randn(2, 8, 16).to(dtype).requires_grad_()
    out = dropout(x, 0.3, sequence_seeds(1, 0, 0, 2), torch.arange(8))
    assert out.dtype == dtype
    upstream = torch.randn(2, 8, 16).to(dtype)
    out.backward(upstream)
    mask = (out != 0).to(dtype)
    torch.testing.assert_close(out, x * mask / 0.7)
    torch.testing.assert_close(x.grad, upstream * mask / 0.7)


def test_nothing_is_kept_for_the_backward_pass_but_a_few_bits() -> None:
    stored = []

    def keep(tensor: Tensor) -> Tensor:
        stored.append(tensor)
        return tensor

    x = torch.randn(2, 8, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        dropout(x, 0.3, sequence_seeds(1, 0, 0, 2), torch.arange(8))
    assert sum(tensor.numel() for tensor in stored) == 2 * 8 + 64


def test_module_needs_keys() -> None:
    module, x = Dropout(0.3, site=2), torch.randn(3, 8, 16)
    positions, seeds = torch.arange(8), sequence_seeds(1, 0, 0, 3)
    assert module(x, None, positions) is x
    expected = dropout(x, 0.3, at_site(seeds, 2), positions)
    assert torch.equal(module(x, seeds, positions), expected)


@pytest.mark.parametrize("first_head", [0, 2])
def test_weights_of_heads_of_any_rank_are_the_same_compiled(first_head: int) -> None:
    def drop(x: Tensor, seeds: Tensor) -> Tensor:
        return dropout(x, 0.5, seeds, rows_of_heads(first_head, 2, 4, x.device))

    torch.compiler.reset()
    x, seeds = torch.ones(1, 2, 4, 4, dtype=torch.float64), sequence_seeds(1, 0, 0, 1)
    assert torch.equal(torch.compile(drop, fullgraph=True)(x, seeds), drop(x, seeds))
