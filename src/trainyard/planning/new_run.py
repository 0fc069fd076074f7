"""Chooses the values of a new run for data, a machine and a time.

    chosen = choose_run(10_000_000_000, 50257, trainer, n_devices=8, seconds=86_400)
    chosen.preset                       # "gpt3-1.3b"
    chosen.values["model.n_layers"]     # 24

On devices of a cluster: the largest GPT-3 shape that trains in time on 20 tokens per parameter,
passing over the text at most four times (arXiv:2305.16264 finds that four passes are worth almost
as much as new text), with the batch and learning rate of the preset nearest in size. On this
machine: `suggest_run`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainyard.architecture import padded_vocabulary_size, parameter_count
from trainyard.config import rules
from trainyard.config.load import field_value, load_run
from trainyard.config.run import Data, Run
from trainyard.errors import MachineError
from trainyard.planning.deadline import (
    SHAPES,
    TOKENS_PER_PARAMETER,
    Trainer,
    TrainingEstimate,
    largest_model,
    shape_run,
)
from trainyard.planning.hardware import LocalMachine
from trainyard.planning.search import FIELDS
from trainyard.planning.suggest import SPLIT, suggest_run
from trainyard.units import format_seconds, parse_shares

MOST_PASSES = 4
_SIZES = ("125m", "350m", "760m", "1.3b", "2.7b", "6.7b", "13b", "175b")
_SHAPED = ("model.n_layers", "model.d_model", "model.n_heads", "model.d_ff")
_TIMED = ("train.length", "schedule.warmup", "schedule.decay")


@dataclass(frozen=True)
class NewRun:
    """Values of a run file, by `section.field`, and figures that explain them."""

    preset: str
    """Extended; empty: the file stands alone."""
    values: dict[str, Any]
    parameters: int
    passes: float
    """Over the training tokens."""
    seconds: float
    """Estimated training time."""


def choose_local_run(
    n_tokens: int, vocabulary_size: int, machine: LocalMachine, seconds: float
) -> NewRun:
    """Chooses a run for this machine."""
    found = suggest_run(n_tokens, vocabulary_size, machine, seconds)
    values: dict[str, Any] = {"data.split": SPLIT}
    for section, fields in found.values.items():
        values |= {f"{section}.{field}": value for field, value in fields.items()}
    return NewRun("", values, found.parameters, found.epochs, found.seconds)


def choose_run(
    n_tokens: int, vocabulary_size: int, trainer: Trainer, n_devices: int, seconds: float
) -> NewRun:
    """Chooses a run for devices.

    Args:
        n_tokens: of the token files; all but the held-out splits are trained on.
        vocabulary_size: of their tokenizer.
        trainer: predicts times.
        n_devices: total number of devices.
        seconds: the time one has.

    Raises:
        MachineError: not even the smallest model trains in time.
    """
    shares = parse_shares(Data().split)
    train_tokens = n_tokens * shares[0] / sum(shares)
    preset = ""
    found = _find("gpt3-125m", train_tokens, vocabulary_size, trainer, n_devices, seconds)
    while (nearest := _nearest_preset(found.run)) != preset:
        preset = nearest
        found = _find(preset, train_tokens, vocabulary_size, trainer, n_devices, seconds)
    base = load_run(preset).run
    fields = ("model.vocabulary_size", *_SHAPED, "train.global_batch_size", *_TIMED, *FIELDS)
    values = {field: field_value(found.run, field) for field in fields}
    ramps = {"train.batch_ramp": "none"} if base.train.batch_ramp else {}
    kept = ("optimizer.learning_rate", "schedule.minimum_learning_rate")
    return NewRun(
        preset,
        {
            field: value
            for field, value in values.items()
            if value is not None and (field not in FIELDS or value != field_value(base, field))
        }
        | ramps
        | {field: field_value(base, field) for field in kept},
        _parameters(found.run),
        TOKENS_PER_PARAMETER * _parameters(found.run) / train_tokens,
        found.seconds,
    )


def _find(
    preset: str,
    train_tokens: float,
    vocabulary_size: int,
    trainer: Trainer,
    n_devices: int,
    seconds: float,
) -> TrainingEstimate:
    """Returns the largest model in time, or a smaller one if the text is short."""
    run = rules.change(load_run(preset).run, {"model.vocabulary_size": vocabulary_size})
    found = largest_model(run, trainer, n_devices, seconds, keeps_length=False)[0]
    if not found.seconds <= seconds:
        takes = f"takes {format_seconds(found.seconds)}" if found.cost else "does not fit"
        raise MachineError(
            f"no model trains within {format_seconds(seconds)} on these devices: the smallest, "
            f"of {_parameters(found.run) / 1e6:.0f}M parameters, {takes}",
            "give a longer --time or more --gpus",
        )
    most = MOST_PASSES * train_tokens / TOKENS_PER_PARAMETER
    if _parameters(found.run) <= most:
        return found
    shaped = [shape_run(run, *shape, keeps_length=False) for shape in SHAPES]
    fitting = [each for each in shaped if _parameters(each) <= most]
    return trainer.train(fitting[-1] if fitting else shaped[0], n_devices)


def _parameters(run: Run) -> int:
    return parameter_count(run.model, padded_vocabulary_size(run.model))


def _nearest_preset(run: Run) -> str:
    """Returns the GPT-3 preset whose size is nearest by ratio."""

    def distance(name: str) -> float:
        return abs(math.log(_parameters(load_run(name).run) / _parameters(run)))

    return min((f"gpt3-{size}" for size in _SIZES), key=distance)
