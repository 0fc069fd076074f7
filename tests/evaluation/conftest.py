"""A small random model, and a tokenizer of one token a letter."""

from __future__ import annotations

import pytest
import torch

from trainyard.config.load import load_run
from trainyard.model.gpt import GPT, initialize

SEQUENCE_LENGTH = 16
VOCABULARY_SIZE = 50
PADDED = 64


@pytest.fixture
def model() -> GPT:
    run = load_run(
        "tiny",
        [
            "model.d_model=32",
            "model.d_ff=64",
            f"model.sequence_length={SEQUENCE_LENGTH}",
            f"model.vocabulary_size={VOCABULARY_SIZE}",
            "model.dropout=0.5",
            "model.init_std=0.3",
        ],
    ).run
    model = GPT(run.model, PADDED)
    initialize(model, seed=3)
    with torch.no_grad():  # a padded id that were ever looked at would win everywhere
        model.embedding.weight[VOCABULARY_SIZE:] = 100.0
    return model.eval()


class Letters:
    """Id 0 ends a document; the others are characters of one, two or three bytes."""

    eod_id = 0
    letters = (b"|", b"a", b"b", "é".encode(), "漢".encode())

    def decode_bytes(self, ids: list[int]) -> bytes:
        return b"".join(self.letters[i] for i in ids)


@pytest.fixture
def letters() -> Letters:
    return Letters()
