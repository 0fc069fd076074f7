from __future__ import annotations

from pathlib import Path

import pytest

from trainyard.corpus.preparation.train_tokenizer import train_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 280 tokens."""
    folder: Path = tmp_path_factory.mktemp("tokens") / "small"
    train_tokenizer(["the cat sat on the mat with another cat in the hat " * 3], 280, folder)
    return folder
