"""Suggests a first run for a user's text: model, batch and length for the text and the machine.

    values = suggest_run(74_000, 1024, find_local_machine())

Two limits decide. The text: a model with many more parameters than the text has tokens memorizes
it. The machine: in the time given it should train on about ten tokens per parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainyard.architecture import padded_vocabulary_size, parameter_count
from trainyard.config.run import Model
from trainyard.planning.flops import model_flops_per_token
from trainyard.planning.hardware import LocalMachine

FIRST_RUN_SECONDS = 600.0
SPLIT = "90,5,5"
TRAIN_SHARE = 0.9
# n_layers and d_model, from 0.1M to 300M parameters in the blocks.
_SHAPES = (
    *((2, 64), (2, 96), (3, 128), (4, 128), (4, 192), (4, 256), (6, 320)),
    *((8, 512), (12, 768), (24, 1024)),
)
_PARAMETERS_PER_TOKEN = 10
_TOKENS_PER_PARAMETER = 10
_MOST_EPOCHS = 20


@dataclass(frozen=True)
class Suggestion:
    """Values of a run file, and figures that explain them."""

    values: dict[str, dict[str, Any]]
    epochs: float
    """Passes over the training tokens."""
    parameters: int
    seconds: float
    """Estimated training time on the machine."""


def suggest_run(
    n_tokens: int,
    vocabulary_size: int,
    machine: LocalMachine,
    seconds: float = FIRST_RUN_SECONDS,
) -> Suggestion:
    """Chooses model, batch, length and schedule.

    Args:
        n_tokens: of the token files; the train split is `TRAIN_SHARE`.
        vocabulary_size: of their tokenizer.
        machine: where the run will train.
        seconds: how long.
    """
    train_tokens = max(1, int(TRAIN_SHARE * n_tokens))
    n_layers, d_model = _choose_shape(train_tokens, machine, seconds)
    length = _sequence_length(train_tokens, machine)
    model = Model(
        n_layers=n_layers,
        d_model=d_model,
        n_heads=max(2, d_model // 64),
        d_ff=4 * d_model,
        sequence_length=length,
        vocabulary_size=vocabulary_size,
    )
    tokens_per_second = machine.flops_per_second / model_flops_per_token(
        model, padded_vocabulary_size(model)
    )
    tokens = min(_MOST_EPOCHS * train_tokens, tokens_per_second * seconds)
    micro = _micro_batch(train_tokens, length, machine)
    batch = micro * machine.count
    n_steps = max(20, round(tokens / (batch * length)))
    epochs = n_steps * batch * length / train_tokens
    rate = float(f"{min(3e-3, 0.3 / d_model):.0e}")
    kept = ("n_layers", "d_model", "n_heads", "d_ff", "sequence_length", "vocabulary_size")
    values: dict[str, dict[str, Any]] = {
        "model": {name: getattr(model, name) for name in kept}
        | {"dropout": 0.2 if epochs > 4 else 0.0},
        "train": {
            "micro_batch_size": micro,
            "global_batch_size": batch,
            "length": f"{n_steps} steps",
        },
        "optimizer": {"learning_rate": rate},
        "schedule": {
            "minimum_learning_rate": float(f"{rate / 10:.0e}"),
            "warmup": f"{max(2, n_steps // 20)} steps",
            "decay": f"{n_steps} steps",
        },
        "precision": {"kind": machine.precision},
        "evaluate": {"interval": max(1, n_steps // 10)},
        "checkpoint": {"interval": max(1, n_steps // 4)},
        "log": {"interval": max(1, n_steps // 50)},
    }
    held_out = math.ceil(0.05 * n_tokens / (batch * length))
    values["evaluate"] |= {"batches": min(16, held_out), "sample_interval": max(1, n_steps // 4)}
    parameters = parameter_count(model, padded_vocabulary_size(model))
    return Suggestion(values, epochs, parameters, n_steps * batch * length / tokens_per_second)


def _choose_shape(train_tokens: int, machine: LocalMachine, seconds: float) -> tuple[int, int]:
    """Returns the largest shape that both text and machine allow."""
    flops = machine.flops_per_second * seconds
    most = min(_PARAMETERS_PER_TOKEN * train_tokens, math.sqrt(flops / (6 * _TOKENS_PER_PARAMETER)))
    fitting = [shape for shape in _SHAPES if 12 * shape[0] * shape[1] ** 2 <= most]
    return fitting[-1] if fitting else _SHAPES[0]


def _micro_batch(train_tokens: int, length: int, machine: LocalMachine) -> int:
    """Returns a power of two, small enough that a small text gives enough steps."""
    most = 32768 if machine.is_gpu else 2048
    sequences = max(4, min(most, train_tokens // 32) // length)
    return 1 << int(math.log2(max(1, sequences // machine.count)))


def _sequence_length(train_tokens: int, machine: LocalMachine) -> int:
    if train_tokens < 20_000:
        return 64
    if train_tokens < 200_000:
        return 128
    return 1024 if machine.is_gpu and train_tokens > 10**8 else 256
