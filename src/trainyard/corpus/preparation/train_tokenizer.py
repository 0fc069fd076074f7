"""Trains the tokenizer of a corpus."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from trainyard.data.vocabulary import (
    END_OF_DOCUMENT,
    build_vocabulary,
    byte_symbols,
    save_vocabulary,
)
from trainyard.errors import DataError
from trainyard.files import explain_disk_errors


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int, folder: Path, *, or_fewer: bool = False
) -> Path:
    """Trains a byte-level BPE with GPT-2's splitting rule and saves `folder/tokenizer.json`.

    `<|endoftext|>` is the last id, as in GPT-2. The same texts give the same file. With `or_fewer`
    it has fewer tokens if the texts give no more.

    Raises:
        DataError: the size is too small, or the texts hold too few different words for it.
        MachineError: the folder cannot be written.
    """
    from tokenizers import Tokenizer as HuggingFaceTokenizer
    from tokenizers import models, pre_tokenizers, trainers

    if vocabulary_size < 257:
        hint = "it holds 256 bytes and <|endoftext|>, so ask for 257 or more; 4096 suits a laptop"
        raise DataError(f"a vocabulary of {vocabulary_size} tokens is too small", hint)
    with explain_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    engine = HuggingFaceTokenizer(models.BPE())
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size - 1, initial_alphabet=byte_symbols(), show_progress=False
    )
    engine.train_from_iterator(texts, trainer)
    ids = engine.get_vocab()
    if len(ids) != vocabulary_size - 1 and not or_fewer:
        raise DataError(
            f"the text gives only {len(ids) + 1} tokens, not {vocabulary_size}",
            f"give more text, or ask for {len(ids) + 1} tokens or fewer",
        )
    merges = json.loads(engine.to_str())["model"]["merges"]
    path = folder / "tokenizer.json"
    vocabulary = build_vocabulary(path, {**ids, END_OF_DOCUMENT: len(ids)}, merges)
    save_vocabulary(vocabulary, path)
    return path
