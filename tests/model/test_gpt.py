from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.config.run import Model, Recompute
from trainyard.model.dropout import Dropout, sequence_seeds
from trainyard.model.gpt import GPT, initialize
from trainyard.model.linear import add_to_gradients, cast_once

SHAPE = Model(
    n_layers=2,
    d_model=32,
    n_heads=4,
    d_ff=128,
    sequence_length=16,
    vocabulary_size=61,
    dropout=0.0,
    init_std=0.2,
)
MODERN = {
    "positions": "rotary",
    "norm": "rms",
    "mlp": "swiglu",
    "bias": False,
    "n_key_value_heads": 2,
    "query_key_norm": "head",
}


def build(
    shape: Model = SHAPE,
    dtype: torch.dtype = torch.float32,
    recompute: Recompute = "none",
) -> GPT:
    model = GPT(shape, 64, dtype, recompute)
    initialize(model, seed=3)
    # Biases and norms too, so that nothing is trivially right.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.train()


def with_dropout(rate: float) -> Model:
    return SHAPE.model_copy(update={"dropout": rate})


def some_tokens(n_tokens: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(0, 61, (3, n_tokens + 1), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_and_gradients(model: GPT) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, labels = some_tokens()
    loss = model.summed_loss(model(tokens, sequence_seeds(6, 0, 0, 3)), labels)
    loss.backward()
    return loss.detach(), {
        name: p.grad for name, p in model.named_parameters() if p.grad is not None
    }


def test_an_untied_head_is_a_matrix_of_its_own() -> None:
    tied, untied = build(), build(SHAPE.model_copy(update={"tied_embeddings": False}))
    assert tied.head_weight is tied.embedding.weight
    assert "head.weight" not in dict(tied.named_parameters())
    assert untied.head_weight is dict(untied.named_parameters())["head.weight"]


@pytest.mark.parametrize("recompute", ["attention", "block"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recomputing_gives_the_same_gradients(recompute: Recompute, dropout: float) -> None:
    shape = SHAPE.model_copy(update={"dropout": dropout})
    loss, gradients = loss_and_gradients(build(shape))
    again, same = loss_and_gradients(build(shape, recompute=recompute))
    assert torch.equal(loss, again)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, same[name]), name


def test_recomputing_stores_less() -> None:
    assert n_stored("block") < n_stored("attention") < n_stored("none")


def n_stored(recompute: Recompute) -> int:
    """Activations that wait for the backward pass."""
    model = build(recompute=recompute)
    stored: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        stored[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(some_tokens()[0])
    assert hidden.requires_grad
    return len(stored.keys() - {p.untyped_storage().data_ptr() for p in model.parameters()})


def test_bf16_stays_near_fp32_and_gradients_are_fp32() -> None:
    loss, gradients = loss_and_gradients(build())
    low, low_gradients = loss_and_gradients(build(dtype=torch.bfloat16))
    assert low.item() == pytest.approx(loss.item(), rel=1e-2)
    for name, gradient in gradients.items():
        found = low_gradients[name]
        assert found.dtype == torch.float32
        assert (found - gradient).norm() / gradient.norm() < 0.05, name


@torch.no_grad()
@pytest.mark.parametrize("pieces", [[1] * 16, [7, 1, 8], [16]])
@pytest.mark.parametrize("options", [{}, MODERN], ids=["gpt-3", "modern"])
def test_a_cache_gives_the_logits_of_the_whole_sequence(
    options: dict[str, Any], pieces: list[int]
) -> None:
    model = build(SHAPE.model_copy(update=options)).eval()
    tokens, _ = some_tokens()
    caches = model.build_caches(16)
    parts = [model.logits(model(part, caches=caches)) for part in tokens.split(pieces, 1)]
    expected = model.logits(model(tokens))
    assert expected.shape == (3, 16, 61)
    torch.testing.assert_close(torch.cat(parts, 1), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_no_token_sees_a_later_one() -> None:
    model = build().eval()
    tokens, _ = some_tokens()
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(-1).all()


def test_dropout_acts_in_training_with_seeds_alone() -> None:
    model = build(with_dropout(0.3))
    tokens, _ = some_tokens()
    seeds, others = sequence_seeds(1, 0, 0, 3), sequence_seeds(1, 1, 0, 3)
    plain, dropped = model(tokens), model(tokens, seeds)
    assert torch.equal(model(tokens, seeds), dropped)
    assert not torch.equal(dropped, plain)
    assert not torch.equal(model(tokens, others), dropped)
    model.eval()
    assert torch.equal(model(tokens, seeds), plain)
    assert torch.equal(build()(tokens, seeds), plain)  # a rate of zero


def test_every_site_drops_elements_of_its_own() -> None:
    """Were two sites alike, silencing one of them would change nothing at the other."""
    model, tokens = build(with_dropout(0.3)), some_tokens()[0]
    seen = []
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            module.register_forward_hook(
                lambda _module, inputs, out, name=name: seen.append((name, inputs[0], out))
            )
    model(tokens, sequence_seeds(1, 0, 0, 3))
    assert [name for name, _, _ in seen] == [
        "dropout",
        *("blocks.0.attention_dropout", "blocks.0.mlp_dropout"),
        *("blocks.1.attention_dropout", "blocks.1.mlp_dropout"),
    ]
    masks = [(out != 0).tolist() for _, _, out in seen]
    assert all(masks[i] != masks[j] for i in range(5) for j in range(i))


def test_micro_batches_of_any_size_have_the_same_gradients_with_dropout() -> None:
    def gradients(size: int) -> dict[str, Tensor]:
        model = build(with_dropout(0.2), torch.float64).double()
        tokens, labels = (torch.cat([each, each.flip(1)]) for each in some_tokens())
        for first in range(0, 6, size):
            here = slice(first, first + size)
            hidden = model(tokens[here], sequence_seeds(1, 2, first, size))
            model.summed_loss(hidden, labels[here], scale=1 / labels.numel()).backward()
        return {name: parameter.grad for name, parameter in model.named_parameters()}

    whole = gradients(6)
    for size in (1, 2, 3):
        for name, gradient in gradients(size).items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-11, atol=1e-14)


@torch.no_grad()
def test_positions_survive_a_model_built_without_memory() -> None:
    with torch.device("meta"):
        model = GPT(SHAPE, 64)
    model.to_empty(device="cpu")
    expected = build()
    model.load_state_dict(expected.state_dict())
    tokens, _ = some_tokens()
    assert torch.equal(model(tokens), expected(tokens))
    assert torch.equal(model.position_table.tokens, torch.arange(16))


def test_few_tokens_without_gradients_have_the_same_swiglu() -> None:
    model = build(SHAPE.model_copy(update=MODERN), torch.float64).double()
    tokens = some_tokens()[0][:1]
    with torch.no_grad():
        few = model(tokens)
    torch.testing.assert_close(few, model(tokens).detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("is_tied", [True, False])
def test_embedding_and_head_add_to_their_gradients_what_autograd_would(is_tied: bool) -> None:
    model = build(SHAPE.model_copy(update={"tied_embeddings": is_tied}), torch.float64).double()
    ends = [each for each in (model.embedding, model.head) if each is not None]
    micro_batches = torch.randint(0, 61, (3, 2, 9))

    def compute(add: Callable[[], None]) -> list[Tensor | None]:
        for tokens in micro_batches:
            add()
            hidden = model(tokens[:, :-1])
            model.summed_loss(hidden, tokens[:, 1:]).backward()
        found = [each.weight.grad for each in ends]
        model.zero_grad()
        return found

    by_autograd = compute(lambda: None)
    with cast_once(ends, torch.float64):
        added = compute(lambda: add_to_gradients(ends))
    assert all(each.sums is None for each in ends)
    for expected, found in zip(by_autograd, added, strict=True):
        torch.testing.assert_close(found, expected)
