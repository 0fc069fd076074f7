"""A small random model, and a tokenizer of one token a letter."""

from __future__ import annotations

import pytest
import torch

from trainyard.config.run import Model
from trainyard.model.gpt import GPT, initialize

SEQUENCE_LENGTH = 16
VOCABULARY_SIZE = 50
PADDED = 64


@pytest.fixture
def model() -> GPT:
    shape = Model(
        **{"n_layers": 2, "d_model": 32, "n_heads": 4, "d_ff": 64, "dropout": 0.5, "init_std": 0.3},
        **{"sequence_length": SEQUENCE_LENGTH, "vocabulary_size": VOCABULARY_SIZE},
    )
    model = GPT(shape, PADDED)
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
