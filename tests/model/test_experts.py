"""Experts against a loop over tokens, written from the papers' equations, and routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from trainyard.architecture import block_layers
from trainyard.config.run import Model
from trainyard.model.experts import Groups, LoopProduct, Router, TorchProduct
from trainyard.model.gpt import GPT, initialize

SHAPE: dict[str, Any] = {
    **{"n_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "sequence_length": 16},
    **{"vocabulary_size": 64, "bias": False, "mlp": "swiglu", "norm": "rms", "init_std": 0.2},
    **{"n_experts": 8, "n_active_experts": 2, "d_expert": 24, "balance": "none"},
}
MODELS = {
    "softmax": {},
    "not normalized": {"router_normalized": False, "router_scale": 1.7},
    "sigmoid": {"router": "sigmoid", "router_scale": 2.5, "balance": "bias"},
    "groups": {"router": "sigmoid", "n_expert_groups": 4, "n_active_groups": 2},
    "shared": {"n_shared_experts": 2, "n_dense_blocks": 1},
    "gelu": {"mlp": "gelu", "n_active_experts": 3},
    "balanced": {"balance": "loss", "balance_coefficient": 0.3, "router_z_loss": 0.2},
}


def mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """One expert on one token: (D,), (2, F, D) or (F, D), (D, F)."""
    if up.ndim == 2:
        return down @ F.gelu(up @ x, approximate="tanh")
    return down @ (F.silu(up[0] @ x) * (up[1] @ x))


def gates_of(x: Tensor, router: Router) -> tuple[dict[int, Tensor], Tensor, Tensor]:
    """Numbers and gates of a token's experts, its scores, and the exponentials' log sum."""
    model, logits = router.model, router.weight @ x
    scores = logits.softmax(0) if model.router == "softmax" else logits.sigmoid()
    ranked = scores.detach().clone()
    if router.balance is not None:
        ranked += router.balance
    if model.n_active_groups < model.n_expert_groups:
        groups = ranked.chunk(model.n_expert_groups)
        sums = [float(sum(sorted(each.tolist())[-2:])) for each in groups]
        best = sorted(range(len(sums)), key=lambda n: -sums[n])[: model.n_active_groups]
        for number, group in enumerate(groups):
            if number not in best:
                group.fill_(-1e9)
    chosen = sorted(range(len(ranked)), key=lambda n: -float(ranked[n]))[: model.n_active_experts]
    total = sum(scores[n] for n in chosen) if model.router_normalized else torch.ones(())
    return (
        {n: model.router_scale * scores[n] / total for n in chosen},
        scores / scores.sum(),
        logits.logsumexp(0),
    )


def by_hand(model: GPT, x: Tensor, block: Any) -> tuple[Tensor, Tensor]:
    """Maps (B, T, D) token by token, and gives the balance and z-loss."""
    experts, router = block.mlp.experts, block.mlp.router
    settings, penalty = router.model, torch.zeros((), dtype=x.dtype)
    out = []
    for sequence in x:
        shares = []
        counts = [0] * settings.n_experts
        for token in sequence:
            gates, share, log_sum = gates_of(token, router)
            outputs = [
                gate * mlp(token, experts.up.weight[n], experts.down.weight[n])
                for n, gate in gates.items()
            ]
            if block.mlp.shared is not None:
                gate, value = block.mlp.shared.up.weight.view(-1, 2, len(token)).unbind(1)
                outputs += [mlp(token, torch.stack([gate, value]), block.mlp.shared.down.weight)]
            out.append(sum(outputs, torch.zeros_like(token)))
            shares.append(share)
            penalty = penalty + settings.router_z_loss * log_sum**2
            for n in gates:
                counts[n] += 1
        # alpha x sum of f_i P_i, equations 17 to 20 of arXiv:2412.19437, for each of its tokens.
        T, A, E = len(sequence), settings.n_active_experts, settings.n_experts
        mean = torch.stack(shares).mean(0)
        loss = sum(E / (A * T) * n * p for n, p in zip(counts, mean, strict=True))
        if settings.balance == "loss":
            penalty = penalty + settings.balance_coefficient * T * loss
    return torch.stack(out).view_as(x), penalty


@pytest.mark.parametrize("name", MODELS)
def test_experts_compute_what_a_loop_over_tokens_does(name: str) -> None:
    torch.manual_seed(1)
    model = GPT(Model(**(SHAPE | MODELS[name])), 64, torch.float64).double()
    initialize(model, 3)
    block: Any = model.blocks["1"]
    if block.mlp.router.balance is not None:
        block.mlp.router.balance.normal_(0, 0.1)
    block.mlp.router.scale.fill_(0.25)
    x = torch.randn(3, 16, 32, dtype=torch.float64)
    upstream = torch.randn_like(x)
    found = []
    for run in (lambda x: (block.mlp(x), 0.0), lambda x: by_hand(model, x, block)):
        given = x.clone().requires_grad_()
        block.mlp.zero_grad()
        out, penalty = run(given)
        ((out * upstream).sum() + 0.25 * penalty).backward()
        gradients = {name: p.grad for name, p in block.mlp.named_parameters()}
        found.append({"out": out, "x": given.grad} | gradients)
    for key, expected in found[1].items():
        torch.testing.assert_close(found[0][key], expected, rtol=1e-10, atol=1e-10, msg=key)
    assert block.mlp.router.load.sum() == 3 * 16 * block.mlp.router.model.n_active_experts


def router_of(**settings: Any) -> Router:
    model = Model(**(SHAPE | settings))
    router = Router(block_layers(model)["mlp.router"], model)
    with torch.no_grad():
        router.weight.zero_()
    return router


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_of_equal_scores_the_first_experts_win(dtype: torch.dtype) -> None:
    router = router_of(n_experts=64, n_active_experts=6)
    _, chosen, _ = router(torch.randn(2, 500, 32, dtype=dtype))
    assert (chosen == torch.arange(6)).all()
    with torch.no_grad():
        router.weight[40:, 0] = 1.0
    x = torch.zeros(1, 2, 32, dtype=dtype)
    x[0, 0, 0] = 1
    _, chosen, _ = router(x)
    assert chosen.tolist() == [[[40, 41, 42, 43, 44, 45], [0, 1, 2, 3, 4, 5]]]


def test_gates_are_computed_in_fp32() -> None:
    router = router_of(router_normalized=False)
    gates, _, _ = router(torch.randn(1, 4, 32, dtype=torch.bfloat16))
    assert gates.dtype == torch.float32
    torch.testing.assert_close(gates, torch.full((1, 4, 2), 1 / 8), rtol=0, atol=0)


@pytest.mark.parametrize("counts", [[5, 0, 19, 8], [0, 0, 0, 32], [8, 8, 8, 8]])
def test_grouped_matmuls_of_torch_are_those_of_the_loop(counts: list[int]) -> None:
    torch.manual_seed(2)
    groups = Groups(torch.tensor(counts), sum(counts))
    x, weight = torch.randn(32, 16).bfloat16(), torch.randn(4, 24, 16).bfloat16()
    gradient = torch.randn(32, 24).bfloat16()
    loop, grouped = LoopProduct(), TorchProduct()
    torch.testing.assert_close(grouped(x, weight, groups), loop(x, weight, groups))
    of_x = [each(gradient, weight.transpose(1, 2), groups) for each in (loop, grouped)]
    torch.testing.assert_close(*of_x)
    of_weight = [each.weight_gradient(gradient, x, groups) for each in (loop, grouped)]
    torch.testing.assert_close(*of_weight)


def test_load_is_counted_once_where_a_block_recomputes() -> None:
    for recompute in ("none", "attention", "block"):
        model = GPT(Model(**SHAPE), 64, recompute=recompute)
        initialize(model, 1)
        tokens = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
        model.train()
        model.summed_loss(model(tokens), tokens).backward()
        loads = [block.mlp.router.load for block in model.blocks.values()]
        assert [float(each.sum()) for each in loads] == [2 * 16 * 2] * 2, recompute


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    model = GPT(Model(**SHAPE), 64)
    initialize(model, 1)
    tokens = torch.zeros(1, 1, dtype=torch.int64)
    model.summed_loss(model(tokens), tokens).backward()
    block: Any = model.blocks["0"]
    used = block.mlp.router.load > 0
    assert used.sum() == 2
    norms = block.mlp.experts.up.weight.grad.flatten(1).norm(dim=1)
    assert ((norms > 0) == used).all()


def test_a_bias_moves_against_the_load() -> None:
    from tests.training.small import build_small_context, take_steps

    from trainyard.training.state import State

    sizes = {"n_experts": 8, "balance": "bias", "balance_coefficient": 0.05, "bias": False}
    context = build_small_context(model=sizes)
    router = context.model.routers[0]
    assert router.balance is not None
    before = router.balance.clone()
    take_steps(context, State.at_start(context), 1)
    load = router.load
    assert load.sum() == 8 * 8 * 2  # sequences, tokens and experts of each
    expected = before - 0.05 * (load - load.mean()).sign()
    torch.testing.assert_close(router.balance, expected)
    context.model.balance_experts(torch.ones(()))
    torch.testing.assert_close(router.balance, expected)  # a skipped step changes nothing


def test_a_bias_balances_a_skewed_router() -> None:
    router = router_of(balance="bias", router_z_loss=0.0)
    assert router.balance is not None
    torch.manual_seed(4)
    with torch.no_grad():
        router.weight.normal_(0, 0.02)
        router.weight[:2] += 0.06
    x = torch.randn(1, 4000, 32) + 0.5

    def imbalance() -> float:
        _, _, counts = router(x)
        load = counts[0].float()
        router.balance.sub_(0.0005 * (load - load.mean()).sign())
        return float(load.max() / load.mean())

    first = imbalance()
    for _ in range(600):
        last = imbalance()
    assert first > 2 and last < 1.2, (first, last)


REFUSED = {
    "n_active_experts=9 is more than the 8": {"n_active_experts": 9},
    "more than the 4": {"n_expert_groups": 4, "n_active_groups": 2, "n_active_experts": 5},
    "n_experts=8 must be divisible by n_expert_groups=3": {"n_expert_groups": 3},
    "n_active_groups=5 is more than n_expert_groups=4": {
        "n_expert_groups": 4,
        "n_active_groups": 5,
    },
    "n_dense_blocks=2 leaves none of n_layers=2": {"n_dense_blocks": 2},
    "bias=true is not for experts": {"bias": True},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){message}.*nearest"):
        Model(**(SHAPE | REFUSED[message]))


def test_one_matrix_of_a_layer_is_a_shard_of_its_experts() -> None:
    layers = block_layers(Model(**SHAPE), 2, 4)
    assert layers["mlp.experts.up"].weight == (2, 2, 12, 32)
    assert layers["mlp.experts.down"].weight == (2, 32, 12)
    whole = block_layers(Model(**SHAPE))["mlp.experts.up"]
    assert whole.values_per_token == 2 * 2 * 24 * 32
