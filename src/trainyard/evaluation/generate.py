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
from trainyard.model.documents import find_document_ends
from trainyard.model.gpt import GPT


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
            raise ConfigError(f"seed {self.seed} is outside 0 to 2^63 - 1", "choose another")
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
    longest = max(map(len, prompts), default=0) + n_tokens
    lengths = set(map(len, prompts))

    def of_length(length: int) -> list[list[int]]:
        return [prompt for prompt in prompts if len(prompt) == length]

    if len(lengths) > 1 and longest > len(model.token_positions):
        batches = {
            length: iter(generate(model, of_length(length), n_tokens, sampling, eod_id))
            for length in sorted(lengths)
        }
        return [next(batches[len(prompt)]) for prompt in prompts]
    steps = [ids.tolist() for ids in generate_steps(model, prompts, n_tokens, sampling, eod_id)]
    found = [[ids[number] for ids in steps] for number in range(len(prompts))]
    return [ids[: ids.index(eod_id)] if eod_id in ids else ids for ids in found]


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
    sequence_length = len(model.token_positions)
    checked = [
        _checked_prompt(prompt, model.vocabulary_size, sequence_length, eod_id)
        for prompt in prompts
    ]
    device = model.head_weight.device
    # Drawn on the CPU, so that a seed works the same on every device.
    generator = torch.Generator().manual_seed(sampling.seed)
    longest = max(map(len, checked))
    end_id = -1 if model.end_id is None else model.end_id  # the padding, -1 if it is no token
    text = torch.tensor([[end_id] * (longest - len(ids)) + ids for ids in checked])  # (B, T)
    has_documents = model.end_id is not None or min(map(len, checked)) < longest
    new = text.clamp(min=0)
    caches = model.build_caches(sequence_length)
    finished = torch.zeros(len(text), dtype=torch.bool)
    was_training = model.training
    model.eval()
    try:
        for _ in range(n_tokens):
            if caches[0].n_tokens == sequence_length:
                caches = model.build_caches(sequence_length)
                new = text[:, -max(1, sequence_length // 2) :]
            inputs: dict[str, Any] = {"caches": caches}
            if has_documents:
                n_seen = caches[0].n_tokens + new.shape[1]
                ends = find_document_ends(text[:, -n_seen:], end_id)
                inputs["document_ends"] = ends.to(device)
            with _eagerly():
                hidden = model(new.to(device), **inputs)[:, -1]  # (B, D)
            chosen = choose(model.logits(hidden).cpu(), sampling, generator)
            yield chosen
            new = chosen[:, None]
            text = torch.cat([text, new], dim=1)
            finished |= chosen == eod_id if eod_id is not None else False
            if finished.all():
                return
    finally:
        model.train(was_training)


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
    logits = logits[:, : sampling.vocabulary_size]
    if logits.isnan().any():
        raise CheckpointError(
            "the model's scores are not numbers (NaN): its weights have diverged",
            "use an earlier checkpoint; the loss in metrics.jsonl shows when it diverged",
        )
    if sampling.temperature == 0:
        return logits.argmax(-1)
    scores, ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scores, ids = scores[:, : sampling.top_k], ids[:, : sampling.top_k]
    probabilities = scores.softmax(-1)
    likelier = probabilities.cumsum(-1) - probabilities  # cumulative probability of likelier tokens
    probabilities[likelier >= sampling.top_p] = 0
    place = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(-1, place)[:, 0]


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
