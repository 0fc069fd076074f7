from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.model.test_gpt import MODERN, SHAPE, build

from trainyard.errors import CheckpointError, ConfigError, DataError
from trainyard.evaluation import generate as generating
from trainyard.evaluation.generate import Sampling, choose, find_largest, generate
from trainyard.model.attention import KeyValueCache
from trainyard.model.gpt import GPT

T = 16
NAN, INF = float("nan"), float("inf")
GREEDY = Sampling(temperature=0)


def greedy_by_full_forward(model: GPT, ids: list[int], n_tokens: int) -> list[int]:
    """Takes the best token again and again, with everything computed afresh."""
    text, start = list(ids), 0
    for _ in range(n_tokens):
        if len(text) - start > T:  # the window is full: the last half is kept
            start = len(text) - T // 2
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([text[start:]])))[0, -1]
        text.append(int(logits.argmax()))
    return text[len(ids) :]


@pytest.mark.parametrize("n_prompt", [1, 5, T - 1, T])
def test_greedy_equals_the_argmax_of_a_full_forward_pass(model: GPT, n_prompt: int) -> None:
    prompt = torch.randint(50, (n_prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    # 40 tokens: the cache is filled and started again several times.
    assert generate(model, [prompt], 40, GREEDY) == [greedy_by_full_forward(model, prompt, 40)]


@pytest.mark.parametrize("n_prompt", [5, T])
def test_a_document_begins_after_the_end_token(model: GPT, n_prompt: int) -> None:
    prompt = torch.randint(50, (n_prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    texts = []
    for model.end_id in (None, prompt[2]):
        texts.append(generate(model, [prompt], 40, GREEDY))
        assert texts[-1] == [greedy_by_full_forward(model, prompt, 40)]
    assert texts[0] != texts[1]
    assert generate(model, [prompt[3:5]], 4, GREEDY) == generate(model, [prompt[:5]], 4, GREEDY)


MODELS: dict[str, dict[str, Any]] = {
    "gpt-3": {},
    "rotary": {"positions": "rotary"},
    "modern": MODERN,
    "documents": {"attention_within_documents": True, "end_of_document_id": 3},
    "documents without an end": {"attention_within_documents": True},
}


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_a_batch_gives_each_prompt_what_it_gets_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(SHAPE.model_copy(update=options), torch.float64).double()
    prompts = [[5, 3, 8, 1, 4, 4], [7], [3, 2, 9], []]
    together = generate(model, prompts, 10, GREEDY, eod_id=3)
    assert together == [generate(model, [ids], 10, GREEDY, eod_id=3)[0] for ids in prompts]
    assert len(set(map(tuple, together))) == 4
    seen: list[torch.Tensor] = []

    def note(logits: torch.Tensor, *_: Any) -> torch.Tensor:
        seen.append(logits)
        return torch.full((len(logits),), 6)

    monkeypatch.setattr(generating, "choose", note)
    monkeypatch.setattr(model, "logits", lambda hidden: hidden @ model.head_weight.t())
    generate(model, prompts[:3], 4, GREEDY)
    logits = torch.stack(seen, 1)
    for number, prompt in enumerate(prompts[:3]):
        seen.clear()
        generate(model, [prompt], 4, GREEDY)
        torch.testing.assert_close(logits[[number]], torch.stack(seen, 1), rtol=0, atol=1e-12)


def test_prompts_that_do_not_fit_together_are_continued_by_length(model: GPT) -> None:
    prompts = [[1, 2, 3, 4, 5], [6], [5, 4, 3, 2, 1]]
    together = generate(model, prompts, 2 * T, GREEDY)
    assert together == [greedy_by_full_forward(model, prompt, 2 * T) for prompt in prompts]


def test_padding_of_the_vocabulary_is_never_chosen(model: GPT) -> None:
    samples = generate(model, 4 * [[1]], 100, Sampling(5.0, top_k=0, top_p=1))
    assert max(max(ids) for ids in samples) < 50
    few = generate(model, 4 * [[1]], 100, Sampling(5.0, 0, 1.0, vocabulary_size=5))
    assert {i for ids in few for i in ids} == set(range(5))


def test_texts_depend_on_the_seed_and_samples_of_one_prompt_differ(model: GPT) -> None:
    texts = [generate(model, [[1, 2]], 20, Sampling(1.0, 0, 1.0, seed)) for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    for prompts in ([[1, 2], [1, 2]], [[1, 2], [3], [1, 2]]):
        first, *_, second = generate(model, prompts, 2 * T, Sampling(1.0, 0, 1.0))
        assert len(first) == len(second) == 2 * T
        assert first != second


def draw(probabilities: list[float], sampling: Sampling, n: int = 4000) -> dict[int, float]:
    logits = torch.tensor(probabilities).log().expand(n, -1)
    ids = choose(logits, sampling, torch.Generator().manual_seed(0))
    return {int(i): float((ids == i).float().mean()) for i in ids.unique()}


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0, top_k=2, top_p=1), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1.0, 0, top_p=0.3), {1: 1}),
        (Sampling(1.0, 0, top_p=0.6), {1: 4 / 7, 3: 3 / 7}),
        (Sampling(1.0, 0, top_p=0.75), {1: 4 / 9, 3: 3 / 9, 2: 2 / 9}),
        (Sampling(1.0, 0, top_p=1e-9), {1: 1}),
        (Sampling(0.5, 0, 1), {0: 1 / 30, 1: 16 / 30, 2: 4 / 30, 3: 9 / 30}),  # squares
        (Sampling(1e4, 0, 1), dict.fromkeys(range(4), 1 / 4)),
    ],
)
def test_temperature_and_bounds_choose_among_the_likeliest(
    sampling: Sampling, expected: dict[int, float]
) -> None:
    assert draw([0.1, 0.4, 0.2, 0.3], sampling) == pytest.approx(expected, abs=0.03)


def test_a_sample_ends_at_the_end_of_document(model: GPT) -> None:
    whole = generate(model, [[1]], 12, GREEDY)[0]
    stop = whole[4]
    assert generate(model, [[1]], 12, GREEDY, eod_id=stop) == [whole[: whole.index(stop)]]
    steps = list(generating.generate_steps(model, [[1]], 12, GREEDY, eod_id=stop))
    assert len(steps) == whole.index(stop) + 1  # no step after every sample has ended
    # An empty prompt starts a document.
    empty = generate(model, [[]], 3, GREEDY, eod_id=49)
    assert empty == generate(model, [[49]], 3, GREEDY, eod_id=49)


def test_the_mode_of_the_model_is_restored_and_weights_that_diverged_are_named(model: GPT) -> None:
    evaluated = generate(model, [[1]], 5, GREEDY)
    model.train()
    assert generate(model, [[1]], 5, GREEDY) == evaluated
    assert model.training
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(CheckpointError, match=r"scores are not numbers .* diverged"):
        generate(model, [[1]], 3, GREEDY)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "the prompt is empty, and no end-of-document"),
        ([1] * 17, r"the prompt has 17 tokens; the model's limit is 16\nhint"),
        ([1, 50], "token 1 of the prompt is id 50; .* 0 to 49"),
        ([1, -1], "token 1 of the prompt is id -1; .* 0 to 49"),
    ],
)
def test_a_wrong_prompt_is_refused(model: GPT, prompt: list[int], problem: str) -> None:
    with pytest.raises(DataError, match=problem):
        generate(model, [prompt], 3, GREEDY)


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("temperature", (-0.1, 1e-45, NAN, INF)),
        ("top_p", (0.0, -1.0, 1.01, NAN)),
        ("seed", (-1, 2**63)),
        ("top_k", (-1,)),
    ],
)
def test_wrong_options_are_refused(option: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"^{option} {value} is .*\n?hint: "):
            Sampling(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(seed=3, top_k=7), Sampling(top_k=0)])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_the_decoder_of_gpus_gives_the_same_text(
    options: dict[str, Any], sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(SHAPE.model_copy(update=options), torch.float64).double()
    # 40 tokens: the cache is filled and started again; of unlike prompts no more than fit.
    for prompts, n in (([[5, 3, 8, 1], [2, 3, 4, 4]], 40), ([[5, 3, 8, 1, 4, 4], [7]], 10)):
        expected = generate(model, prompts, n, sampling, eod_id=3)
        with monkeypatch.context() as patch:
            patch.setattr(generating, "_decode", generating._decode_on_gpu)
            assert generate(model, prompts, n, sampling, eod_id=3) == expected


@pytest.mark.parametrize("decode", ["_decode", "_decode_on_gpu"])
@pytest.mark.parametrize(("n_tokens", "expected"), [(5, 9), (40, T)])
def test_caches_are_no_longer_than_the_text(
    model: GPT, decode: str, n_tokens: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = set()
    append = KeyValueCache.append

    def append_and_note(cache: KeyValueCache, *parts: torch.Tensor) -> Any:
        found = append(cache, *parts)
        lengths.add(cache._keys.shape[2])
        return found

    monkeypatch.setattr(KeyValueCache, "append", append_and_note)
    monkeypatch.setattr(generating, "_decode", getattr(generating, decode))
    generate(model, [[5, 3, 8, 1], [2, 3, 4, 4]], n_tokens, GREEDY)
    assert lengths == {expected}


def test_draws_choose_as_multinomial_does() -> None:
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(0))
    draws, same_draws = (torch.Generator().manual_seed(1) for _ in range(2))
    probabilities, ids = logits.softmax(-1).sort(descending=True, stable=True)
    place = torch.multinomial(probabilities, 1, generator=same_draws)
    sampling = Sampling(temperature=1, top_k=0, top_p=1)
    assert choose(logits, sampling, draws).equal(ids.gather(-1, place)[:, 0])


def test_the_largest_are_in_the_order_of_a_stable_sort() -> None:
    scores = torch.randn(20, 300, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    scores[:, ::7], scores[:, 1::7], scores[:, 2] = 0.0, -0.0, -INF
    for n in (1, 50, 299):
        found, ids = find_largest(scores, n)
        expected = scores.sort(descending=True, stable=True)
        assert found.equal(expected.values[:, :n]) and ids.equal(expected.indices[:, :n])
