"""Text from a trained model, one token at a time."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainyard.errors import CheckpointError, ConfigError, DataError
from trainyard.model.attention import KeyValueCache
from trainyard.model.gpt import GPT
from trainyard.model.linear import Layer, cast_once
from trainyard.model.positions import document_starts, find_document_ends
from trainyard.parallel.placement import is_distributed

TOKENS_A_WAIT = 16
"""On a GPU the host waits once for this many tokens, and then sees whether all texts have ended."""
Choice = tuple["Sampling", torch.Generator]
"""How to choose tokens, and what draws."""


@dataclass(frozen=True)
class Sampling:
    """How to choose the next token from the logits.

    Attributes:
        temperature: divides the logits; below 1 sharpens the distribution, 0 is greedy decoding;
            otherwise at least 0.0001.
        top_k: sample from this many most likely tokens; 0 for all.
        top_p: sample from the most likely tokens that together reach this probability; 1 for all.
        seed: the same seed gives the same text; 0 to 2^63 - 1.
        vocabulary_size: ids from this on are never chosen, for tokenizers with fewer tokens than
            the model; None: all.

    Raises:
        ConfigError: a value is out of range.
    """

    temperature: float = 0.8
    top_k: int = 50
    top_p: float = 0.95
    seed: int = 0
    vocabulary_size: int | None = None

    def __post_init__(self) -> None:
        """Rejects invalid values."""
        if self.temperature != 0 and not 1e-4 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature {self.temperature} is neither 0 nor at least 0.0001",
                "0: greedy decoding; 1: sample as the model was trained",
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed {self.seed} is outside 0 to 2^63 - 1", "such as 0")
        if self.top_k < 0:
            raise ConfigError(f"top_k {self.top_k} is below 0", "0 allows every token")
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p {self.top_p} is not above 0 and at most 1", "1 allows every token"
            )


def generate(
    model: GPT,
    prompts: Sequence[list[int]],
    n_tokens: int,
    sampling: Sampling,
    eod_id: int | None = None,
) -> list[list[int]]:
    """Continues prompts, all in one batch; returns the new token ids of each.

    Greedy decoding gives each prompt the tokens that it gets alone. If the texts do not fit the
    model's sequence_length, prompts of one length are a batch, one length after the other.

    Args:
        model: its train or eval mode is restored.
        prompts: the ids of each, such as one prompt several times for several samples; an empty
            one starts a document, after `eod_id`.
        n_tokens: maximum length of a continuation.
        sampling: how to choose tokens.
        eod_id: the end-of-document token; a continuation ends before it.

    Raises:
        DataError: a prompt does not fit the model.
        CheckpointError: the model's weights have diverged.
    """
    lengths = sorted(set(map(len, prompts)))
    if len(lengths) > 1 and lengths[-1] + n_tokens > model.sequence_length:
        batches = {}
        for length in lengths:
            batch = [prompt for prompt in prompts if len(prompt) == length]
            batches[length] = iter(generate(model, batch, n_tokens, sampling, eod_id))
        return [next(batches[len(prompt)]) for prompt in prompts]
    steps = [ids.tolist() for ids in generate_steps(model, prompts, n_tokens, sampling, eod_id)]
    texts = [[ids[number] for ids in steps] for number in range(len(prompts))]
    return [ids[: ids.index(eod_id)] if eod_id in ids else ids for ids in texts]


@torch.no_grad()
def generate_steps(
    model: GPT,
    prompts: Sequence[list[int]],
    n_tokens: int,
    sampling: Sampling,
    eod_id: int | None = None,
) -> Iterator[Tensor]:
    """Yields one token id for each prompt, (B,), for `generate`.

    Ends early once every prompt has reached `eod_id`; ignore a prompt's tokens after its own.
    Shorter prompts are padded on the left; the padding counts as documents before them, which their
    tokens do not see and from which their positions do not count. When the model's sequence_length
    is full, it recomputes the last half of the texts, of one length, and drops the rest: positions
    are learned, so the cache cannot slide.
    """
    sequence_length = model.sequence_length
    checked = [
        _checked_prompt(prompt, model.vocabulary_size, sequence_length, eod_id)
        for prompt in prompts
    ]
    # Drawn on the CPU, so that a seed works the same on every device.
    generator = torch.Generator().manual_seed(sampling.seed)
    longest = max(map(len, checked))
    end_id = -1 if model.end_id is None else model.end_id  # the padding, -1 if it is no token
    text = torch.tensor([[end_id] * (longest - len(ids)) + ids for ids in checked])  # (B, T)
    has_documents = model.end_id is not None or min(map(len, checked)) < longest
    # Sharded weights are gathered by the hooks of `forward`.
    is_whole = not any(map(is_distributed, model.parameters()))
    on_gpu = model.head_weight.device.type == "cuda"
    decode = _decode_on_gpu if on_gpu and is_whole else _decode
    finished = torch.zeros(len(text), dtype=torch.bool)
    was_training = model.training
    model.eval()
    try:
        document_end = end_id if has_documents else None
        for chosen in decode(model, text, n_tokens, (sampling, generator), document_end):
            yield chosen
            finished |= chosen == eod_id if eod_id is not None else False
            if finished.all():
                return
    finally:
        model.train(was_training)


def _decode(
    model: GPT, text: Tensor, n_tokens: int, choice: Choice, end_id: int | None
) -> Iterator[Tensor]:
    """Yields the tokens after a text, (B,) each; `end_id` is None for one document each."""
    sequence_length = model.sequence_length
    caches, new = model.build_caches(text.shape[1] + n_tokens), text
    for _ in range(n_tokens):
        if caches[0].n_tokens == sequence_length:
            caches = model.build_caches(sequence_length)
            new = text[:, -max(1, sequence_length // 2) :]
        hidden = _continue(model, text, new, caches, end_id)
        chosen = choose(model.logits(hidden).cpu(), *choice)
        yield chosen
        new = chosen[:, None]
        text = torch.cat([text, new], dim=1)


def _continue(
    model: GPT, text: Tensor, new: Tensor, caches: list[KeyValueCache], end_id: int | None
) -> Tensor:
    """Computes the last hidden state of each text, (B, D), from the cache and its new tokens."""
    inputs: dict[str, Any] = {"caches": caches}
    if end_id is not None:
        n_seen = caches[0].n_tokens + new.shape[1]
        ends = find_document_ends(text[:, -n_seen:], end_id)
        inputs["document_ends"] = ends.to(model.head_weight.device)
    with _eagerly():
        hidden: Tensor = model(new.clamp(min=0).to(model.head_weight.device), **inputs)
    return hidden[:, -1]


def _decode_on_gpu(
    model: GPT, text: Tensor, n_tokens: int, choice: Choice, end_id: int | None
) -> Iterator[Tensor]:
    """Yields what `_decode` does; the host waits once for several tokens."""
    sequence_length = model.sequence_length
    layers = [module for module in model.modules() if isinstance(module, Layer)]
    with cast_once(layers, model.compute_dtype):
        decoder = _Decoder(model, choice[0], len(text), text.shape[1] + n_tokens)
        while n_tokens:
            cache = decoder.caches[0]
            starts_anew = cache.n_tokens in (0, sequence_length)
            start = text[:, -max(1, sequence_length // 2) :] if cache.n_tokens else text
            n_before = start.shape[1] - 1 if starts_anew else cache.n_tokens
            n_next = min(TOKENS_A_WAIT, n_tokens, sequence_length - n_before)
            decoder.draw(n_next, choice[1])
            if starts_anew:
                decoder.start(start, end_id)
            for _ in range(n_next - starts_anew):
                decoder.step()
            chosen = decoder.read(n_next)
            yield from chosen
            text = torch.cat([text, chosen.t()], dim=1)
            n_tokens -= n_next


class _Decoder:
    """Continues texts on a GPU; all that a token depends on is there.

    Args:
        model: on the GPU.
        sampling: how to choose tokens.
        n_texts: B.
        n_tokens: of each text when it ends.

    Attributes:
        caches: one per block.
    """

    def __init__(self, model: GPT, sampling: Sampling, n_texts: int, n_tokens: int) -> None:
        self._model, self._sampling = model, sampling
        self.caches = model.build_caches(n_tokens)
        device = model.head_weight.device
        self._ids, self._starts = torch.zeros(2, n_texts, dtype=torch.int64, device=device)
        self._end_id = -1
        self._place = torch.zeros(1, dtype=torch.int64, device=device)
        self._number = torch.zeros_like(self._place)  # of the token since the last wait
        self._chosen = torch.zeros(TOKENS_A_WAIT, n_texts, dtype=torch.int64, device=device)
        n_draws = _count_candidates(sampling, model.vocabulary_size)
        self._draws = torch.ones(TOKENS_A_WAIT, n_texts, n_draws, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def draw(self, n_tokens: int, generator: torch.Generator) -> None:
        """Draws what chooses the next tokens, as `torch.multinomial` does on a CPU."""
        self._number.zero_()
        if self._sampling.temperature:
            shape = n_tokens, *self._draws.shape[1:]
            draws = torch.empty(shape, pin_memory=self._ids.is_cuda)
            for draws_of_token in draws:
                draws_of_token.exponential_(generator=generator)
            self._draws[:n_tokens].copy_(draws, non_blocking=True)

    def start(self, text: Tensor, end_id: int | None) -> None:
        """Reads whole texts, (B, T), and chooses the next token of each."""
        for cache in self.caches:
            cache.n_tokens, cache.place = 0, None
        hidden = _continue(self._model, text, text, self.caches, end_id)
        n_tokens = text.shape[1]
        starts = torch.zeros(len(text), dtype=torch.int64)
        if end_id is not None:
            self._end_id = end_id
            ends = find_document_ends(text, end_id)
            starts = document_starts(ends, torch.tensor([n_tokens - 1]))[:, 0]
        self._starts.copy_(starts)
        self._ids.copy_(text[:, -1])
        self._place.fill_(n_tokens - 1)
        for cache in self.caches:
            cache.place = self._place
        self._take(hidden)

    def step(self) -> None:
        """Reads the newest tokens, and chooses the next ones."""
        if self._ids.is_cuda:
            self._graph = self._graph or self._record()
            self._graph.replay()
        else:
            self._compute()
        self.caches[0].n_tokens += 1

    def read(self, n_tokens: int) -> Tensor:
        """Waits for the tokens since `draw`: (n_tokens, B).

        Raises:
            CheckpointError: a logit is NaN.
        """
        chosen = self._chosen[:n_tokens].cpu()
        if (chosen < 0).any():
            raise _diverged()
        return chosen

    def _take(self, hidden: Tensor) -> None:
        """Chooses tokens by the hidden states before them, (B, D), and goes to their place."""
        logits = self._model.logits(hidden)
        draws = self._draws[self._number][0]
        chosen = choose_by_draws(logits, self._sampling, draws)
        chosen = chosen.masked_fill(logits.isnan().any(-1), -1)
        self._chosen.index_copy_(0, self._number, chosen[None])
        self._number += 1
        self._place += 1
        self._starts.copy_(torch.where(self._ids == self._end_id, self._place, self._starts))
        self._ids.copy_(chosen.clamp(min=0))

    def _compute(self) -> None:
        hidden = self._model.decode(self._ids, self._starts, self._place, self.caches)
        self._take(hidden)

    def _record(self) -> torch.cuda.CUDAGraph:
        """Records a step; one before it, without effect, lets libraries prepare."""
        state = (self._ids, self._starts, self._place, self._number, self._chosen)
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), _eagerly():
            self._compute()
        torch.cuda.current_stream().wait_stream(stream)
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), _eagerly():
            self._compute()
        return graph


def _eagerly() -> AbstractContextManager[None]:
    """Calls no compiled blocks, since each token has another length; without a compiler none is."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Picks one token for each row of logits: (B, V) -> (B,).

    Raises:
        CheckpointError: a logit is NaN.
    """
    if logits[:, : sampling.vocabulary_size].isnan().any():
        raise _diverged()
    shape = len(logits), _count_candidates(sampling, logits.shape[1])
    draws = torch.empty(shape, dtype=logits.dtype)
    if sampling.temperature:
        draws.exponential_(generator=generator)
    return choose_by_draws(logits, sampling, draws)


def choose_by_draws(logits: Tensor, sampling: Sampling, draws: Tensor) -> Tensor:
    """Picks one token for each row of logits: (B, V) -> (B,), without waiting for a device.

    Args:
        logits: of all tokens.
        sampling: how to choose.
        draws: exponentially distributed, one for each candidate, the most likely first; they
            decide as in `torch.multinomial`.
    """
    logits = logits[:, : sampling.vocabulary_size]
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores = logits / sampling.temperature
    n_candidates = draws.shape[1]
    if scores.is_cuda and n_candidates < scores.shape[1]:
        scores, ids = find_largest(scores, n_candidates)
    else:
        scores, ids = scores.sort(descending=True, stable=True)
        scores, ids = scores[:, :n_candidates], ids[:, :n_candidates]
    probabilities = scores.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities  # cumulative probability of likelier tokens
    probabilities.masked_fill_(likelier >= sampling.top_p, 0)
    place = (probabilities / draws).argmax(-1, keepdim=True)
    return ids.gather(-1, place)[:, 0]


def find_largest(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Returns the first `n` of each row in a stable descending sort, and their places; in fp32.

    `topk` alone orders equal scores in any way, and in bf16 many are equal.
    """
    bits = (scores + 0.0).view(torch.int32)  # no -0.0
    in_order = (bits ^ (bits >> 31 & 0x7FFFFFFF)).long() << 32
    places = torch.arange(scores.shape[1], device=scores.device)
    keys = in_order + (scores.shape[1] - places)
    ids = keys.topk(n).indices
    return scores.gather(-1, ids), ids


def _count_candidates(sampling: Sampling, n_logits: int) -> int:
    n_logits = min(n_logits, sampling.vocabulary_size or n_logits)
    return min(sampling.top_k or n_logits, n_logits)


def _diverged() -> CheckpointError:
    return CheckpointError(
        "the model's scores are not numbers (NaN): its weights have diverged",
        "use an earlier checkpoint; the loss in metrics.jsonl shows when it diverged",
    )


def _checked_prompt(
    prompt_ids: list[int], vocabulary_size: int, sequence_length: int, eod_id: int | None
) -> list[int]:
    if not prompt_ids and eod_id is None:
        raise DataError(
            "the prompt is empty, and no end-of-document token is known to start from",
            "give a prompt of at least one token",
        )
    prompt_ids = prompt_ids or [eod_id or 0]
    if len(prompt_ids) > sequence_length:
        raise DataError(
            f"the prompt has {len(prompt_ids)} tokens; the model's limit is {sequence_length}",
            "shorten the prompt, or use a model with a larger model.sequence_length",
        )
    for place, token_id in enumerate(prompt_ids):
        if not 0 <= token_id < vocabulary_size:
            raise DataError(
                f"token {place} of the prompt is id {token_id}; the model knows 0 to "
                f"{vocabulary_size - 1}",
                "use the tokenizer the model was trained with",
            )
    return prompt_ids
