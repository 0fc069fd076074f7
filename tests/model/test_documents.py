"""Packed documents compute what each computes alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from trainyard.config.run import Model
from trainyard.model.dropout import sequence_seeds
from trainyard.model.gpt import GPT, initialize
from trainyard.model.positions import (
    cumulative_lengths,
    document_mask,
    find_document_ends,
    pack_lengths,
)

END, T = 9, 24
SHAPE = Model(
    n_layers=2,
    d_model=32,
    n_heads=4,
    d_ff=64,
    sequence_length=T,
    vocabulary_size=10,
    dropout=0.0,
    init_std=0.2,
    attention_within_documents=True,
    end_of_document_id=END,
)
PARTS = {
    "learned": {},
    "rotary": {"positions": "rotary", "n_key_value_heads": 2, "query_key_norm": "head"},
}
# Documents of one token, of several; one that ends with the sequence, and one that does not.
TEXTS = [
    [END, 1, 2, END, END, 3, 4, 5, 6, 7, 8, 1, 2, 3, END, 5, 5, 5, 5, 5, 5, 5, 5, END],
    [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, END, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8],
    [1] * T,
]


def build(part: str, **changes: object) -> GPT:
    model = GPT(SHAPE.model_copy(update=PARTS[part] | changes), 16, torch.float64)
    initialize(model, seed=3)
    return model.double()


def documents_of(ids: list[int]) -> list[slice]:
    ends = [place + 1 for place, token in enumerate(ids[:-1]) if token == END]
    return [slice(*pair) for pair in pairwise([0, *ends, len(ids)])]


def gradients(model: GPT, losses: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(torch.stack(losses).sum(), list(model.parameters())))


@pytest.mark.parametrize("part", PARTS)
def test_logits_and_gradients_are_those_of_the_documents_alone(part: str) -> None:
    model = build(part)
    tokens = torch.tensor(TEXTS)
    labels = tokens.roll(-1, 1)
    packed = model(tokens)
    together = gradients(model, [model.summed_loss(packed, labels)])
    losses = []
    for row, ids in enumerate(TEXTS):
        for here in documents_of(ids):
            alone = model(tokens[row : row + 1, here])
            torch.testing.assert_close(packed[row : row + 1, here], alone, rtol=0, atol=1e-12)
            losses.append(model.summed_loss(alone, labels[row : row + 1, here]))
    for found, expected in zip(together, gradients(model, losses), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
def test_one_document_is_computed_as_without_the_option(part: str) -> None:
    tokens = torch.tensor([TEXTS[2], TEXTS[2][::-1]])
    plain = build(part, attention_within_documents=False)
    torch.testing.assert_close(build(part)(tokens), plain(tokens), rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("recompute", ["none", "attention", "block"])
def test_dropout_lets_no_other_document_in(part: str, recompute: str) -> None:
    model = build(part, dropout=0.3)
    for block in model.blocks.values():
        block.recompute = recompute
    model.train()
    assert model.embedding is not None
    vectors: list[Tensor] = []
    model.embedding.register_forward_hook(lambda *call: vectors.append(call[-1]))
    out = model(torch.tensor(TEXTS), sequence_seeds(6, 0, 0, len(TEXTS)))
    for row, ids in enumerate(TEXTS):
        for here in documents_of(ids):
            total = out[row, here].pow(3).sum()
            (gradient,) = torch.autograd.grad(total, vectors[0], retain_graph=True)
            reached = gradient.abs().sum(-1).nonzero().tolist()
            assert reached == [[row, token] for token in range(*here.indices(T))]


@pytest.mark.parametrize("part", PARTS)
def test_cached_tokens_of_earlier_documents_are_not_seen(part: str) -> None:
    model = build(part)
    tokens = torch.tensor(TEXTS)
    whole = model(tokens)
    caches = model.build_caches(T)
    for start, end in pairwise([0, 4, 5, 6, 13, T]):
        ends = find_document_ends(tokens[:, :end], END)
        found = model(tokens[:, start:end], document_ends=ends, caches=caches)
        torch.testing.assert_close(found, whole[:, start:end], rtol=0, atol=1e-12)


def test_ends_masks_and_lengths() -> None:
    tokens = torch.tensor([[1, 2, END, 3, 4, END, 5], [END, 1, 1, 1, 1, 1, END], [1] * 7])
    ends = find_document_ends(tokens, END)
    assert ends.tolist() == [[3, 6, 7, 7], [1, 7, 7, 7], [7, 7, 7, 7]]
    # Flash attention takes the documents of all sequences in a row.
    assert cumulative_lengths(ends).tolist() == [0, 3, 6, 7, 7, 8, 14, 14, 14, 21, 21, 21, 21]
    seen = document_mask(ends, torch.arange(7), torch.arange(7))[0, 0] == 0
    assert [row.nonzero()[:, 0].tolist() for row in seen] == [
        *([0], [0, 1], [0, 1, 2]),
        *([3], [3, 4], [3, 4, 5]),
        [6],
    ]
    assert document_mask(ends, torch.tensor([6, 3]), torch.tensor([3, 0, 6]))[0, 0].tolist() == [
        [-torch.inf, -torch.inf, 0],
        [0, -torch.inf, -torch.inf],
    ]


@pytest.mark.parametrize("mean", [2, 10, 1000])
@pytest.mark.parametrize("size", [1, 3, 4])
def test_packed_lengths_have_no_empty_documents(mean: int, size: int) -> None:
    generator = torch.Generator().manual_seed(mean)
    tokens = torch.randint(0, mean, (12, 100), generator=generator)
    ends = find_document_ends(tokens, 0)
    packed, longest = pack_lengths(ends, size)
    assert packed.dtype == torch.int32
    lengths = []
    for rows, of_batch in zip(packed.split(size), ends.split(size), strict=True):
        expected = cumulative_lengths(of_batch).unique().tolist()
        found = rows.flatten().tolist()
        assert found[: len(expected)] == expected
        assert set(found[len(expected) :]) <= {100 * size}
        lengths += [end - start for start, end in pairwise(expected)]
    assert max(lengths) <= longest <= min(100, 2 * max(lengths))
    most = max(len(cumulative_lengths(each).unique()) for each in ends.split(size))
    assert most <= packed.shape[1] * size < 1.25 * most + size + 1
