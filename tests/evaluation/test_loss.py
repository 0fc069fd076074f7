from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from trainyard.errors import DataError
from trainyard.evaluation import loss as subject
from trainyard.evaluation.loss import HeldOut, Predictor, evaluate_documents, loss_of_model
from trainyard.model.gpt import GPT

T = 16


def direct_loss(model: GPT, ids: list[int], first_label: int = 0) -> float:
    """The loss of predicting ids[1:] from what precedes each, in one forward pass."""
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([ids[:-1]])))[0].double()
    losses = F.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
    return float(losses[first_label:].sum())


def some_ids(n: int, seed: int = 0, below: int = 50) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(1, below, n).astype(np.uint16)


def loss_of(model: GPT, *batches: tuple[torch.Tensor, torch.Tensor]) -> HeldOut:
    return subject.held_out_loss(loss_of_model(model), batches, model.vocabulary_size)


def predictor(model: GPT, batch_size: int = 8) -> Predictor:
    measures = loss_of_model(model), loss_of_model(model, GPT.score_sequences)
    return Predictor(*measures, T, model.vocabulary_size, batch_size)


def test_held_out_loss_equals_the_direct_computation(model: GPT) -> None:
    ids = some_ids(3 * (T + 1)).reshape(3, T + 1).tolist()
    rows = torch.tensor(ids)
    tokens, labels = rows[:, :-1], rows[:, 1:].clone()
    labels[2, 5:] = -100
    found = loss_of(model, (tokens[:2], labels[:2]), (tokens[2:], labels[2:]))
    expected = direct_loss(model, ids[0]) + direct_loss(model, ids[1])
    expected += direct_loss(model, ids[2][:6])
    assert found.n_tokens == 2 * T + 5
    assert found.summed_loss == pytest.approx(expected, rel=1e-6)
    assert found.bits_per_byte is None
    assert found.token_counts is not None
    assert found.token_counts.tolist() == np.bincount(labels[labels >= 0], minlength=50).tolist()


def test_held_out_loss_leaves_the_mode_and_no_gradients(model: GPT) -> None:
    ones = torch.ones(1, T, dtype=torch.int64)
    first = loss_of(model, (ones, ones))
    model.train()  # dropout 0.5 would change the loss, were it on
    assert loss_of(model, (ones, ones)).summed_loss == first.summed_loss
    assert model.training
    with pytest.raises(IndexError):
        loss_of(model, (999 * ones, ones))
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("n_tokens", [1, T - 1, T, T + 1, 3 * T, 5 * T + 3])
def test_every_token_of_documents_is_predicted_once(
    model: GPT, letters: Any, n_tokens: int
) -> None:
    stream = some_ids(n_tokens, below=5)
    documents = np.split(stream, [n_tokens // 3, n_tokens // 3, n_tokens // 2])
    found = evaluate_documents(predictor(model, 2), documents, letters)
    whole = [letters.eod_id, *stream.tolist()]
    expected = sum(
        direct_loss(model, whole[start : start + T + 1]) for start in range(0, n_tokens, T)
    )
    assert found.n_tokens == n_tokens
    assert found.summed_loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("stride", [1, 4, 5, 15])
def test_windows_that_overlap_give_each_token_more_to_see(
    model: GPT, letters: Any, stride: int
) -> None:
    stream = some_ids(41, below=5)
    found = evaluate_documents(predictor(model, 3), [stream], letters, stride=stride)
    whole = [letters.eod_id, *stream.tolist()]
    expected = 0.0
    for start in range(1, len(whole), stride):
        end = min(start + stride, len(whole))
        # The context is what a window keeps of its T + 1 tokens beside a full stride.
        begin = max(0, start - (T + 1 - stride))
        expected += direct_loss(model, whole[begin:end], start - begin - 1)
    assert found.n_tokens == 41
    assert found.summed_loss == pytest.approx(expected, rel=1e-6)


def test_without_a_tokenizer_the_first_token_is_only_read(model: GPT) -> None:
    stream = some_ids(T + 1)
    found = evaluate_documents(predictor(model), [stream], None)
    assert (found.n_tokens, found.n_bytes) == (T, None)
    assert found.summed_loss == pytest.approx(direct_loss(model, stream.tolist()), rel=1e-6)


def test_bits_per_byte_by_hand() -> None:
    # 4 tokens of 1 bit each, for 2 bytes of text
    found = HeldOut(summed_loss=4 * math.log(2), n_tokens=4, n_bytes=2)
    assert found.bits_per_byte == pytest.approx(2.0)
    assert found.perplexity == pytest.approx(2.0)
    figures = {"loss": math.log(2), "perplexity": 2.0, "bits_per_byte": 2.0}
    assert found.as_dict() == pytest.approx({**figures, "n_tokens": 4, "n_bytes": 2})
    assert HeldOut(summed_loss=1e6, n_tokens=1).perplexity == math.inf


def test_bytes_are_those_of_the_text_without_ends_of_documents(letters: Any, model: GPT) -> None:
    ids = np.array([1, 3, 4, 0, 2, 0])  # "aé漢" and "b": 1 + 2 + 3 and 1 bytes
    assert subject.count_bytes(ids, letters) == 7
    assert evaluate_documents(predictor(model), [ids[:4], ids[4:]], letters).n_bytes == 7


def test_sequences_of_a_split_count_the_bytes_of_what_is_predicted(
    model: GPT, letters: Any
) -> None:
    batches = [(torch.tensor([[4, 4, 4]]), torch.tensor([[4, 1, -100]]))]
    loss = loss_of_model(model)
    found = subject.held_out_loss(loss, batches, model.vocabulary_size, letters)
    assert (found.n_tokens, found.n_bytes) == (2, 4)


def test_unigram_loss_by_hand() -> None:
    # seen 3, 1, 0 times; one added to each: probabilities 4/7, 2/7, 1/7
    loss = subject.unigram_loss(np.array([3, 1, 0]), np.array([2, 0, 1]))
    assert loss == pytest.approx(-(2 * math.log(4 / 7) + math.log(1 / 7)) / 3)


@pytest.mark.parametrize(
    ("documents", "stride", "problem"),
    [
        ([[1, 2], [3, 50]], None, r"document 1: token id 50 is outside .* vocabulary of 50"),
        ([[1, 2]], -1, f"stride -1 is not between 1 and .* {T}"),
        ([[1, 2]], T + 1, f"stride {T + 1} is not between 1 and .* {T}"),
        ([], None, "no token to predict\nhint: give a longer text"),
    ],
)
def test_what_cannot_be_predicted_is_named(
    model: GPT, documents: list[list[int]], stride: int | None, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        evaluate_documents(predictor(model), map(np.array, documents), None, stride=stride)
