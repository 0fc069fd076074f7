from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainyard.architecture import padded_vocabulary_size
from trainyard.checkpoint.format import MANIFEST, Facts
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.data.vocabulary import Vocabulary, build_vocabulary, byte_symbols
from trainyard.model.gpt import GPT, initialize


@pytest.fixture(scope="session")
def run() -> Run:
    return load_run("tiny", ["model.n_layers=2", "model.d_model=16", "model.d_ff=48"]).run


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The 256 bytes and an end of document."""
    tokens = [*byte_symbols(), "<|endoftext|>"]
    ids = {token: token_id for token_id, token in enumerate(tokens)}
    return build_vocabulary(Path("tokenizer.json"), ids, [])


@pytest.fixture
def make_facts(run: Run) -> Callable[[int], Facts]:
    def make(step: int) -> Facts:
        return Facts(
            step=step,
            consumed_sequences=8 * step,
            consumed_tokens=512 * step,
            run=run.model_dump(mode="json"),
            plan={"n_steps": 50},
            versions={"torch": torch.__version__},
            data_fingerprint="abc",
            training={"skipped_steps": 1},
        )

    return make


@pytest.fixture
def model(run: Run) -> GPT:
    model = GPT(run.model, padded_vocabulary_size(run.model))
    initialize(model, seed=1)
    return model.eval()


@pytest.fixture
def tensors(model: GPT) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tensors = {f"model.{name}": value.detach() for name, value in model.named_parameters()}
    for name, value in model.named_parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            drawn = torch.rand(value.shape, generator=generator)
            tensors[f"optimizer.{name}.{moment}"] = drawn
    return tensors


@pytest.fixture
def edit_manifest() -> Callable[[Path, Callable[[dict[str, Any]], object]], None]:
    """Changes a manifest as an attacker would: with a right checksum."""

    def edit(checkpoint: Path, change: Callable[[dict[str, Any]], object]) -> None:
        content = json.loads((checkpoint / MANIFEST).read_bytes())
        del content["sha256"]
        change(content)
        body = json.dumps(content).encode()[1:]
        seal = f'{{"sha256": "{hashlib.sha256(body).hexdigest()}",'.encode()
        (checkpoint / MANIFEST).write_bytes(seal + body)

    return edit


def flip_bit(path: Path, position: int = -1, mask: int = 1) -> None:
    """Flips a bit of one byte of a file; the last is a value of a tensor."""
    content = bytearray(path.read_bytes())
    content[position] ^= mask
    path.write_bytes(content)
