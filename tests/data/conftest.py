from __future__ import annotations

from pathlib import Path

import pytest
import tiktoken

from trainyard.data.tokenizer import Tokenizer, load_tokenizer
from trainyard.data.vocabulary import load_vocabulary


@pytest.fixture(scope="session")
def gpt2_folder(shared_data: Path) -> Path:
    return shared_data / "gpt2"


@pytest.fixture(scope="module")
def gpt2(gpt2_folder: Path) -> Tokenizer:
    return load_tokenizer(gpt2_folder)


@pytest.fixture(scope="session")
def reference(gpt2_folder: Path) -> tiktoken.Encoding:
    """OpenAI's tokenizer, which splits by a pattern of its own and shares no code with ours."""
    tokens = load_vocabulary(gpt2_folder).token_bytes[:-1]
    return tiktoken.Encoding(
        "gpt2",
        pat_str=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
        special_tokens={"<|endoftext|>": len(tokens)},
    )
