"""Chooses the values of a new run for data, a machine and a time.

    chosen = choose_run(10_000_000_000, 50257, estimator, n_devices=8, seconds=86_400)
    chosen.preset                       # "gpt3-1.3b"
    chosen.values["model.n_layers"]     # 24

On devices of a cluster: the largest GPT-3 shape that trains in time on 20 tokens per parameter,
passing over the text at most four times (arXiv:2305.16264 finds that four passes are worth almost
as much as new text), with the batch and learning rate of the preset nearest in size.

On this machine, for a first run, two limits decide. The text: a model with many more parameters
than the text has tokens memorizes it. The machine: in the time given it should train on about ten
tokens per parameter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trainyard.architecture import padded_vocabulary_size
from trainyard.config import rules
from trainyard.config.load import field_value, load_run
from trainyard.config.run import Data, Run
from trainyard.errors import MachineError
from trainyard.layout.flops import model_flops_per_token
from trainyard.planning.hardware import LocalMachine
from trainyard.planning.ladder import (
    LARGE_SHAPES,
    SMALL_SHAPES,
    TOKENS_PER_PARAMETER,
    Estimator,
    TrainingEstimate,
    count_parameters,
    largest_model,
    shape_run,
)
from trainyard.planning.search import FIELDS
from trainyard.units import format_seconds, parse_shares

FIRST_RUN_SECONDS = 600.0
FIRST_RUN_SPLIT, FIRST_RUN_TRAIN_SHARE = "90,5,5", 0.9
MOST_PASSES = 4
MOST_LOST_SECONDS = 1800.0
"""Most training that a failure undoes, in a first run."""
_SIZES = ("125m", "350m", "760m", "1.3b", "2.7b", "6.7b", "13b", "175b")
_SHAPED = ("model.n_layers", "model.d_model", "model.n_heads", "model.d_ff")
_TIMED = ("train.length", "schedule.warmup", "schedule.decay")
_PARAMETERS_PER_TOKEN = 10
_TOKENS_PER_PARAMETER = 10
_MOST_EPOCHS = 20


@dataclass(frozen=True)
class NewRun:
    """Values of a run file, by `section.field`, and figures that explain them."""

    preset: str
    """The preset to extend; empty: the file stands alone."""
    values: dict[str, Any]
    parameters: int
    passes: float
    """Number of times that training reads the training tokens."""
    seconds: float
    """Estimated training time."""

    @property
    def tables(self) -> dict[str, Any]:
        """The values as the tables of a run file."""
        tables: dict[str, Any] = {}
        for field, value in self.values.items():
            section, _, name = field.partition(".")
            tables.setdefault(section, {})[name] = value
        return tables


def choose_local_run(
    n_tokens: int, vocabulary_size: int, machine: LocalMachine, seconds: float = FIRST_RUN_SECONDS
) -> NewRun:
    """Chooses model, batch, length and schedule of a run for this machine.

    Args:
        n_tokens: of the token files; the train split is `FIRST_RUN_TRAIN_SHARE`.
        vocabulary_size: of their tokenizer.
        machine: where the run will train.
        seconds: how long.
    """
    train_tokens = max(1, int(FIRST_RUN_TRAIN_SHARE * n_tokens))
    length = _sequence_length(train_tokens, machine)
    flops = machine.flops_per_second * seconds
    most = min(_PARAMETERS_PER_TOKEN * train_tokens, math.sqrt(flops / (6 * _TOKENS_PER_PARAMETER)))
    fitting = [shape for shape in SMALL_SHAPES if 12 * shape[0] * shape[1] ** 2 <= most]
    sizes = {"model.sequence_length": length, "model.vocabulary_size": vocabulary_size}
    run = rules.change(Run(), sizes)
    run = shape_run(run, (fitting or SMALL_SHAPES[:1])[-1], keeps_length=True)
    tokens_per_second = machine.flops_per_second / model_flops_per_token(
        run.model, padded_vocabulary_size(run.model)
    )
    tokens = min(_MOST_EPOCHS * train_tokens, tokens_per_second * seconds)
    micro = _micro_batch(train_tokens, length, machine)
    batch = micro * machine.count
    n_steps = max(20, round(tokens / (batch * length)))
    passes = n_steps * batch * length / train_tokens
    rate = float(f"{min(3e-3, 0.3 / run.model.d_model):.0e}")
    held_out = math.ceil(0.05 * n_tokens / (batch * length))
    values = {field: field_value(run, field) for field in (*_SHAPED, *sizes)} | {
        "model.dropout": 0.2 if passes > 4 else 0.0,
        "train.micro_batch_size": micro,
        "train.global_batch_size": batch,
        "train.length": f"{n_steps} steps",
        "optimizer.learning_rate": rate,
        "schedule.minimum_learning_rate": float(f"{rate / 10:.0e}"),
        "schedule.warmup": f"{max(2, n_steps // 20)} steps",
        "schedule.decay": f"{n_steps} steps",
        "precision.kind": machine.precision,
        "evaluate.interval": max(1, n_steps // 10),
        "evaluate.batches": min(16, held_out),
        "evaluate.sample_interval": max(1, n_steps // 4),
        "checkpoint.interval": max(1, n_steps // max(4, round(seconds / MOST_LOST_SECONDS))),
        "log.interval": max(1, n_steps // 50),
        "data.split": FIRST_RUN_SPLIT,
    }
    seconds = n_steps * batch * length / tokens_per_second
    return NewRun("", values, count_parameters(run), passes, seconds)


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


def choose_run(
    n_tokens: int, vocabulary_size: int, estimator: Estimator, n_devices: int, seconds: float
) -> NewRun:
    """Chooses a run for devices.

    Args:
        n_tokens: of the token files; all but the held-out splits are trained on.
        vocabulary_size: of their tokenizer.
        estimator: predicts times.
        n_devices: total number of devices.
        seconds: the time one has.

    Raises:
        MachineError: not even the smallest model trains in time.
    """
    shares = parse_shares(Data().split)
    train_tokens = n_tokens * shares[0] / sum(shares)
    most_parameters = MOST_PASSES * train_tokens / TOKENS_PER_PARAMETER

    def find(preset: str) -> TrainingEstimate:
        """Returns the largest model in time, or a smaller one if the text is short."""
        run = rules.change(load_run(preset).run, {"model.vocabulary_size": vocabulary_size})
        best = largest_model(run, estimator, n_devices, seconds, keeps_length=False)[0]
        if not best.seconds <= seconds:
            raise MachineError(
                f"no model trains within {format_seconds(seconds)} on these devices: the smallest, "
                f"of {count_parameters(best.run) / 1e6:.0f}M parameters, {best.duration}",
                "give a longer --time or more --gpus",
            )
        if count_parameters(best.run) <= most_parameters:
            return best
        shaped = [shape_run(run, shape, keeps_length=False) for shape in LARGE_SHAPES]
        fitting = [one for one in shaped if count_parameters(one) <= most_parameters]
        return estimator.estimate((fitting or shaped[:1])[-1], n_devices)

    preset, best = "", find("gpt3-125m")
    while (nearest := _nearest_preset(best.run)) != preset:
        preset, best = nearest, find(nearest)
    base = load_run(preset).run
    fields = ("model.vocabulary_size", *_SHAPED, "train.global_batch_size", *_TIMED)
    values = {field: field_value(best.run, field) for field in (*fields, *FIELDS)}
    values = {
        field: value
        for field, value in values.items()
        if value is not None and (field in fields or value != field_value(base, field))
    }
    if base.train.batch_ramp:
        values["train.batch_ramp"] = "none"
    for field in ("optimizer.learning_rate", "schedule.minimum_learning_rate"):
        values[field] = field_value(base, field)
    passes = TOKENS_PER_PARAMETER * count_parameters(best.run) / train_tokens
    return NewRun(preset, values, count_parameters(best.run), passes, best.seconds)


def _nearest_preset(run: Run) -> str:
    """Returns the GPT-3 preset whose size is nearest by ratio."""

    def distance(name: str) -> float:
        return abs(math.log(count_parameters(load_run(name).run) / count_parameters(run)))

    return min((f"gpt3-{size}" for size in _SIZES), key=distance)
