"""A run of seconds on many ranks, for every test that breaks one; and what must come out of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainyard.checkpoint.format import list_checkpoints, read_manifest
from trainyard.checkpoint.load import load_tensors
from trainyard.checkpoint.verify import check_checkpoint
from trainyard.data.indexed import IndexedWriter

VOCABULARY_SIZE = 512


def write_tokens(folder: Path, seed: int = 7, n_documents: int = 60) -> Path:
    """Writes token files whose next token mostly follows from the last; returns their prefix."""
    prefix = folder / "corpus_text_document"
    random = np.random.default_rng(seed)
    with IndexedWriter(prefix, np.dtype(np.uint16)) as writer:
        for _ in range(n_documents):
            steps = random.choice([1, 1, 1, 2, 7], size=random.integers(50, 400))
            writer.add_document((np.cumsum(steps) % VOCABULARY_SIZE).astype(np.uint16))
    return prefix


def small_overrides(tokens: Path, n_steps: int) -> list[str]:
    """Overrides of the preset `tiny`, with dropout and everything that has a random state."""
    return [
        f"data.blend.prefixes=['{tokens}']",
        f"data.cache_folder='{tokens.parent / 'cache'}'",
        "data.split='80,10,10'",
        f"train.length='{n_steps} steps'",
        f"schedule.decay='{n_steps} steps'",
        "schedule.warmup='2 steps'",
        "model.d_model=32",
        "model.d_ff=64",
        "model.n_heads=2",
        "model.sequence_length=32",
        "model.dropout=0.1",
        "train.micro_batch_size=2",
        "evaluate.batches=1",
        "log.interval=1",
        "log.tensorboard=false",
        "checkpoint.keep_last=2",
    ]


@dataclass(frozen=True)
class Outcome:
    """What a run has become, to the last bit."""

    tensors: dict[str, torch.Tensor]
    """Weights and moments of the last checkpoint."""
    facts: dict[str, Any]
    """What that checkpoint knows of the way there."""
    metrics: dict[tuple[str, int], tuple[float, ...]]
    """Loss and gradient norm of each step, and each held-out loss; what was said last."""


def read_outcome(folder: Path) -> Outcome:
    """Reads what the run of a folder has become; every byte of its checkpoints is checked."""
    checkpoints = list_checkpoints(folder / "checkpoints")
    for path in checkpoints:
        check_checkpoint(path)
    manifest = read_manifest(checkpoints[0])
    facts = {
        "step": manifest.step,
        "consumed_sequences": manifest.consumed_sequences,
        "consumed_tokens": manifest.consumed_tokens,
        "training": manifest.training,
        "kept": sorted(path.name for path in (folder / "checkpoints").iterdir()),
    }
    return Outcome(load_tensors(checkpoints[0], ""), facts, _read_metrics(folder))


def differences(expected: Outcome, found: Outcome, but: Sequence[str] = ()) -> list[str]:
    """Says in what two runs differ, which is nothing at all where nothing was lost.

    Args:
        expected: of the undisturbed run.
        found: of the other.
        but: facts that may differ.
    """
    problems = []
    if expected.tensors.keys() != found.tensors.keys():
        problems.append("the names of the tensors")
    for name in expected.tensors.keys() & found.tensors.keys():
        one, other = expected.tensors[name], found.tensors[name]
        # As bits, since 0 equals -0.
        if one.dtype != other.dtype or not torch.equal(_bits(one), _bits(other)):
            problems.append(name)
    for name, fact in expected.facts.items():
        if name not in but and fact != found.facts[name]:
            problems.append(f"{name}: {fact}, now {found.facts[name]}")
    for place in sorted(expected.metrics.keys() | found.metrics.keys()):
        one_value, other_value = expected.metrics.get(place), found.metrics.get(place)
        if one_value != other_value:
            problems.append(f"{place[0]} at step {place[1]}: {one_value}, now {other_value}")
    return problems


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _read_metrics(folder: Path) -> dict[tuple[str, int], tuple[float, ...]]:
    found: dict[tuple[str, int], tuple[float, ...]] = {}
    for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        if event["kind"] in ("train", "evaluate"):
            values = (event["loss"], event.get("gradient_norm", 0.0))
            found[event["kind"], event["step"]] = values
    return found
