from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from tests.waiting import WATCHDOG_SECONDS
from torch import Tensor

from trainyard.architecture import CPU_LOGIT_BYTES
from trainyard.model.loss import (
    LossOptions,
    WholeVocabulary,
    _chunks,
    score_sequences,
    summed_cross_entropy,
)

Made = tuple[Tensor, Tensor, Tensor]


def make(
    dtype: torch.dtype = torch.float64, n_rows: int = 22, V: int = 64, real: int = 50, D: int = 8
) -> Made:
    """Hidden states, a weight and labels, of which a fifth are -100."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, n_rows // 2, D, generator=generator, dtype=torch.float64)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, real, (2, n_rows // 2), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    precise = dtype if dtype == torch.float64 else torch.float32
    return hidden.to(dtype).requires_grad_(), weight.to(precise).requires_grad_(), labels


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, real: int, z_loss: float = 0.0) -> Tensor:
    logits = (hidden @ weight[:real].t()).flatten(0, 1)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1)[labels.flatten() >= 0].square().sum()


def gradients(loss: Tensor, made: Made) -> tuple[Tensor, Tensor]:
    return torch.autograd.grad(0.37 * loss, made[:2])


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("n_rows", "V", "real", "z_loss"),
    [(22, 64, 50, 0.0), (22, 64, 50, 0.3), (22, 64, 64, 0.3), (700, 50304, 50257, 0.3)],
)
def test_fp64_value_and_gradients_are_those_of_cross_entropy(
    n_rows: int, V: int, real: int, z_loss: float
) -> None:
    made = make(n_rows=n_rows, V=V, real=real)
    found = summed_cross_entropy(*made, LossOptions(real, z_loss=z_loss))
    torch.testing.assert_close(found, plain(*made, real), rtol=1e-13, atol=0)
    expected = plain(*made, real, z_loss)
    for mine, other in zip(gradients(found, made), gradients(expected, made), strict=True):
        assert relative(mine, other) < 1e-12


@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 6e-3)])
def test_lower_precisions_stay_near_fp64(
    dtype: torch.dtype,
    bound: float,
    is_compiled: bool,
    z_loss: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Its mathematics, without the compiler.
    monkeypatch.setattr("trainyard.model.loss._compiled", lambda function: function)
    options = LossOptions(50, compiles=is_compiled, z_loss=z_loss)
    made = make(dtype, n_rows=400, D=32)
    exact = tuple(
        x.detach().to(dtype).double().requires_grad_() if x.is_floating_point() else x for x in made
    )
    found, expected = summed_cross_entropy(*made, options), plain(*exact, 50)
    assert found.dtype == torch.float32
    assert abs(found.item() / expected.item() - 1) < bound
    expected = plain(*exact, 50, z_loss)
    for mine, other in zip(gradients(found, made), gradients(expected, exact), strict=True):
        assert relative(mine, other) < bound
    hidden_gradient, weight_gradient = gradients(summed_cross_entropy(*made, options), made)
    assert hidden_gradient.dtype == dtype
    assert weight_gradient.dtype == torch.float32


@pytest.mark.parametrize("is_compiled", [False, True])
def test_padding_changes_nothing_and_gets_no_gradient(
    is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainyard.model.loss._compiled", lambda function: function)
    options = LossOptions(50, compiles=is_compiled, z_loss=0.3)
    hidden, weight, labels = make()
    first = summed_cross_entropy(hidden, weight, labels, options)
    huge = weight.detach().clone()
    huge[50:] = 1e6
    huge.requires_grad_()
    second = summed_cross_entropy(hidden, huge, labels, options)
    assert torch.equal(first, second)
    hidden_gradient, weight_gradient = gradients(second, (hidden, huge, labels))
    assert torch.equal(hidden_gradient, gradients(first, (hidden, weight, labels))[0])
    assert weight_gradient[50:].count_nonzero() == 0


def test_where_nothing_is_labelled_loss_and_gradients_are_zero() -> None:
    hidden, weight, labels = make()
    made = (hidden, weight, torch.full_like(labels, -100))
    loss = summed_cross_entropy(*made, LossOptions(50))
    assert loss.item() == 0
    for gradient in gradients(loss, made):
        assert gradient.count_nonzero() == 0


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.bfloat16, 1e-2)])
def test_scale_is_a_factor_of_loss_and_gradients(dtype: torch.dtype, bound: float) -> None:
    made = make(dtype, n_rows=400)
    scaled, factor = summed_cross_entropy(*made, LossOptions(50), scale=0.003), 0.003
    whole = summed_cross_entropy(*made, LossOptions(50))
    torch.testing.assert_close(scaled, factor * whole, rtol=1e-6, atol=0)
    expected = torch.autograd.grad(whole, made[:2])
    for mine, other in zip(torch.autograd.grad(scaled, made[:2]), expected, strict=True):
        assert relative(mine, factor * other.double()) < bound
    with torch.no_grad():
        assert summed_cross_entropy(*made, LossOptions(50), scale=0.003).item() == pytest.approx(
            scaled.item()
        )


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_gradients_can_be_asked_for_again_and_one_by_one(factor: float) -> None:
    made = make()
    loss = factor * summed_cross_entropy(*made, LossOptions(50))
    hidden, weight = made[:2]
    expected = [gradient.clone() for gradient in torch.autograd.grad(loss, (hidden, weight))]
    loss = factor * summed_cross_entropy(*made, LossOptions(50))
    for _ in range(2):  # as a zero-bubble pipeline does: for inputs now, for weights later
        (of_hidden,) = torch.autograd.grad(loss, hidden, retain_graph=True)
        (of_weight,) = torch.autograd.grad(loss, weight, retain_graph=True)
        assert torch.equal(of_hidden, expected[0])
        assert torch.equal(of_weight, expected[1])
    loss.backward(retain_graph=True)
    loss.backward()
    assert torch.equal(weight.grad, 2 * expected[1])
    assert torch.equal(hidden.grad, 2 * expected[0])


@pytest.mark.parametrize("n_rows", [1, 1333, 1334, 1335, 4096])
def test_chunks_cover_all_rows_once_and_fit(n_rows: int) -> None:
    chunks = _chunks(torch.empty(n_rows, 1, dtype=torch.bfloat16), 50304)
    assert [row for start, end in chunks for row in range(start, end)] == list(range(n_rows))
    sizes = [end - start for start, end in chunks]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) * 50304 * 4 <= CPU_LOGIT_BYTES
    assert len(sizes) == -(-n_rows // 1334)


class Rank:
    """One of several threads that share a vocabulary; combines tensors with the others."""

    def __init__(self, number: int, first_row: int, meeting: Barrier, table: list[Tensor]) -> None:
        self.first_row = first_row
        self.sent: list[torch.Size] = []
        self._number, self._meeting, self._table = number, meeting, table

    def maximum(self, x: Tensor) -> Tensor:
        return self._gather(x).amax(0)

    def sum(self, x: Tensor) -> Tensor:
        return self._gather(x).sum(0)

    def _gather(self, x: Tensor) -> Tensor:
        self.sent.append(x.shape)
        self._table[self._number] = x
        self._meeting.wait(WATCHDOG_SECONDS)
        gathered = torch.stack(self._table)
        self._meeting.wait(WATCHDOG_SECONDS)  # nobody writes before everybody has read
        return gathered


def shared(
    made: Made, real: int, n_ranks: int, scale: float = 1.0, z_loss: float = 0.0
) -> tuple[list[Tensor], Tensor, Tensor, list[Rank]]:
    """Losses of every rank, the gradient of hidden states, that of the weight, and the ranks."""
    hidden, weight, labels = made
    table, meeting = [hidden] * n_ranks, Barrier(n_ranks)
    parts = [part.clone().requires_grad_() for part in weight.detach().chunk(n_ranks)]
    inputs = [hidden.detach().clone().requires_grad_() for _ in parts]
    ranks = [Rank(n, n * len(parts[0]), meeting, table) for n in range(n_ranks)]

    def compute(n: int) -> Tensor:
        loss = summed_cross_entropy(
            inputs[n], parts[n], labels, LossOptions(real, ranks[n], z_loss=z_loss), scale
        )
        loss.backward()
        return loss.detach()

    with ThreadPoolExecutor(n_ranks) as pool:
        losses = list(pool.map(compute, range(n_ranks)))
    of_hidden = torch.stack([each.grad for each in inputs]).double().sum(0)
    return losses, of_hidden, torch.cat([part.grad for part in parts]), ranks


# With 4 ranks of 16 rows: all real; the last with two real rows; the last, then three, with none.
@pytest.mark.parametrize("real", [64, 50, 48, 9])
@pytest.mark.parametrize("n_ranks", [1, 2, 4])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 6e-3)]
)
def test_a_shared_vocabulary_changes_nothing(
    dtype: torch.dtype, bound: float, n_ranks: int, real: int, z_loss: float
) -> None:
    made = make(dtype, n_rows=60, real=real)
    hidden, weight, labels = made
    exact = (hidden.detach().double().requires_grad_(), weight.detach().double(), labels)
    exact[1].copy_(weight.to(dtype)).requires_grad_()  # the matrix as it is used
    expected = 0.3 * plain(*exact, real)
    losses, of_hidden, of_weight, _ = shared(made, real, n_ranks, 0.3, z_loss)
    for loss in losses:
        assert torch.equal(loss, losses[0])
        assert loss.item() == pytest.approx(expected.item(), rel=bound)
    correct = torch.autograd.grad(0.3 * plain(*exact, real, z_loss), exact[:2])
    assert relative(of_hidden, correct[0]) < bound
    assert relative(of_weight, correct[1]) < bound
    assert of_weight[real:].count_nonzero() == 0
    assert of_hidden[labels == -100].count_nonzero() == 0


def test_ranks_exchange_three_numbers_a_token() -> None:
    _, _, _, ranks = shared(make(n_rows=22), 50, 2)
    assert [rank.sent for rank in ranks] == [[(22, 1), (2, 22, 1)]] * 2


def test_a_shared_vocabulary_without_gradients() -> None:
    made = make()
    with torch.no_grad():
        found = summed_cross_entropy(*made, LossOptions(50, Rank(0, 0, Barrier(1), [made[0]])))
    assert not found.requires_grad
    torch.testing.assert_close(found, summed_cross_entropy(*made, LossOptions(50)).detach())


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_improbable_labels_have_a_finite_loss(n_ranks: int, label: int) -> None:
    hidden = torch.full((1, 1, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    made = (hidden, weight, torch.tensor([[label]]))
    losses, of_hidden, of_weight, _ = shared(made, 2, n_ranks)
    assert [loss.item() for loss in losses] == [label * 2e4] * n_ranks
    assert of_hidden.item() == label * 2
    assert of_weight.flatten().tolist() == [label * 1e4, label * -1e4]


def test_a_shard_that_is_not_finite_makes_all_losses_so() -> None:
    hidden, weight, labels = make()
    weight = weight.detach().clone()
    weight[40] = torch.nan
    losses, _, _, _ = shared((hidden, weight, labels), 50, 2)
    assert all(loss.isnan() for loss in losses)


def test_scores_of_sequences_are_their_log_probabilities_and_greedy_tokens() -> None:
    hidden, weight, labels = (x.detach() for x in make(n_rows=22, V=64, real=50))
    hidden = torch.cat((hidden, hidden[:1]))
    log_probabilities = F.log_softmax(hidden @ weight[:50].t(), -1)  # (3, 11, 50)
    likeliest = log_probabilities.argmax(-1)
    labels = torch.cat((labels, torch.where(labels[:1] == -100, -100, likeliest[:1])))
    found = score_sequences(hidden, weight, labels, 50, WholeVocabulary())
    for row in range(3):
        here = labels[row] != -100
        chosen = log_probabilities[row][here].gather(1, labels[row][here, None])
        assert found[row, 0].item() == pytest.approx(chosen.sum().item(), rel=1e-12)
        assert found[row, 1] == (labels[row] != likeliest[row])[here].sum()
    assert found[2, 1] == 0


def test_of_equally_likely_tokens_the_first_is_greedy() -> None:
    weight = torch.tensor([[1.0], [2.0], [2.0], [3.0]])  # the last is padding
    labels = torch.tensor([[0], [1], [2], [-100]])
    found = score_sequences(torch.ones(4, 1, 1), weight, labels, 3, WholeVocabulary())
    assert found[:, 1].tolist() == [1, 0, 1, 0]
    assert found[3].tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(3))
def test_the_sum_over_a_large_vocabulary_is_accurate(seed: int) -> None:
    """In fp32 on a CPU; that of `log_softmax` is wrong by 3e-6 to 5e-6 here."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(1, 32, 16, generator=random)
    weight = 0.75 * torch.randn(128_256, 16, generator=random)
    labels = torch.zeros(1, 32, dtype=torch.int64)
    loss = summed_cross_entropy(hidden, weight, labels, LossOptions(128_256), 1 / 32)
    logits = F.linear(hidden, weight).double()
    assert abs(loss.double() - F.cross_entropy(logits[0], labels[0])) < 1.5e-6
