from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainyard.architecture import padded_vocabulary_size
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import save_checkpoint
from trainyard.config.load import load_run
from trainyard.data.vocabulary import byte_symbols
from trainyard.model.gpt import GPT


@pytest.fixture(autouse=True)
def quiet_transformers():
    logging.getLogger("transformers").setLevel(logging.ERROR)


@pytest.fixture
def tokenizer_folder(tmp_path) -> Path:
    """A byte-level tokenizer in GPT-2's two files: 256 bytes, two merges, an end of document."""
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    tokens = [*byte_symbols(), "he", "ll", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\n", encoding="utf-8")
    return folder


@pytest.fixture
def make_checkpoint(tmp_path) -> Callable[..., tuple[Path, GPT]]:
    """Saves a model with random weights and biases, every one of which shows in the logits."""

    def make(*overrides: str, spoilt: tuple[str, float] | None = None) -> tuple[Path, GPT]:
        run = load_run("tiny", list(overrides)).run
        model = GPT(run.model, padded_vocabulary_size(run.model)).eval()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.1, generator=generator)
            if spoilt:
                model.get_parameter(spoilt[0]).fill_(spoilt[1])
        tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
        facts = Facts(
            step=1, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json")
        )
        (tmp_path / "run").mkdir(exist_ok=True)
        return save_checkpoint(tmp_path / "run" / "checkpoints", facts, tensors), model

    return make
