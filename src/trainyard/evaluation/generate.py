"""Text from a trained model, one token at a time."""

from __future__ import annotations

from collections.abc import Iterator
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
    prompt_ids: list[int],
    n_tokens: int,
    sampling: Sampling,
    eod_id: int | None = None,
    n_samples: int = 1,
) -> list[list[int]]:
    """Continues a prompt with several samples; returns the new token ids of each.

    Args:
        model: its train or eval mode is restored.
        prompt_ids: the prompt; an empty one starts a document, after `eod_id`.
        n_tokens: maximum length of a sample.
        sampling: how to choose tokens.
        eod_id: the end-of-document token; a sample ends before it.
        n_samples: number of samples.

    Raises:
        DataError: the prompt does not fit the model.
        CheckpointError: the model's weights have diverged.
    """
    found = generate_steps(model, prompt_ids, n_tokens, sampling, eod_id, n_samples)
    steps = [ids.tolist() for ids in found]
    samples = [[ids[sample] for ids in steps] for sample in range(n_samples)]
    return [ids[: ids.index(eod_id)] if eod_id in ids else ids for ids in samples]


@torch.no_grad()
def generate_steps(
    model: GPT,
    prompt_ids: list[int],
    n_tokens: int,
    sampling: Sampling,
    eod_id: int | None = None,
    n_samples: int = 1,
) -> Iterator[Tensor]:
    """Yields one token id of each sample, (B,), for `generate`.

    Ends early once every sample has reached `eod_id`; ignore a sample's tokens after its own. When
    the model's sequence_length is full, it recomputes the last half of the text and drops the rest:
    positions are learned, so the cache cannot slide.
    """
    sequence_length = len(model.token_positions)
    prompt_ids = _checked_prompt(prompt_ids, model.vocabulary_size, sequence_length, eod_id)
    device = model.head_weight.device
    # Drawn on the CPU, so that a seed works the same on every device.
    generator = torch.Generator().manual_seed(sampling.seed)
    text = torch.tensor([prompt_ids] * n_samples)  # (B, T)
    new = text
    caches = model.build_caches(sequence_length)
    finished = torch.zeros(n_samples, dtype=torch.bool)
    was_training = model.training
    model.eval()
    try:
        for _ in range(n_tokens):
            if caches[0].n_tokens == sequence_length:
                caches = model.build_caches(sequence_length)
                new = text[:, -max(1, sequence_length // 2) :]
            inputs: dict[str, Any] = {"caches": caches}
            if model.end_id is not None:
                seen = text[:, -(caches[0].n_tokens + new.shape[1]) :]
                inputs["document_ends"] = find_document_ends(seen, model.end_id).to(device)
            with torch.compiler.set_stance("force_eager"):  # each token has another length
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
