"""A corpus that passes through every kind of piece, and what it must always become."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from trainyard.config.corpus import Corpus
from trainyard.corpus.preparation.train_tokenizer import train_tokenizer

WORDS = ["the", "cat", "sat", "on", "a", "mat", "with", "another", "hat", "in", "that", "flat"]
WORDS += ["and", "ate", "what", "it", "had", "got", "there"]


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("tokenizer") / "small"
    train_tokenizer([" ".join(WORDS) * 3], 280, folder)
    return folder


def write_corpus(folder: Path, n_files: int = 6, n_documents: int = 400) -> None:
    """Writes files of documents with metadata; some repeat an earlier one."""
    choice = random.Random(5)
    folder.mkdir(parents=True, exist_ok=True)
    earlier: list[str] = []
    for number in range(n_files):
        with (folder / f"shard {number}.jsonl").open("w", encoding="utf-8") as file:
            for _ in range(n_documents):
                text = " ".join(choice.choices(WORDS, k=choice.randrange(0, 120)))
                if earlier and choice.random() < 0.1:
                    text = choice.choice(earlier)
                earlier.append(text)
                meta = {"set": choice.choice(["web", "books", "code"])}
                file.write(json.dumps({"text": text, "meta": meta}) + "\n")


def describe_corpus(root: Path, tokenizer: Path, output: Path) -> Corpus:
    """Describes the corpus of `write_corpus` with steps of every kind, in two outputs."""
    return Corpus.model_validate(
        {
            "inputs": [str(root)],
            "output": str(output),
            "tokenizer": str(tokenizer),
            "count_by": "meta.set",
            "files_per_output": 3,
            "steps": [
                {"kind": "keep", "field": "meta.set", "values": ["web", "books"]},
                {"kind": "normalize"},
                {"kind": "deduplicate"},
                {"kind": "near_deduplicate", "words": 3},
            ],
        }
    )


def read_all(folder: Path) -> dict[str, bytes]:
    """Reads every file of a folder of outputs; there must be no folder left in it."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
