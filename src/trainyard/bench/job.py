"""The job of a benchmark: a run, its data, and the steps to time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainyard.config.run import Blend, Data, Evaluate, Run, TokenizerChoice
from trainyard.data.indexed import IndexedWriter, optimal_dtype
from trainyard.errors import ConfigError
from trainyard.layout.batches import BatchSchedule
from trainyard.training.run_folder import RunFiles, find_end_of_document
from trainyard.units import Length

RUN, RESULT = "run.toml", "result.json"
TRACE, OPERATORS = "trace.json", "operators.txt"
WARM_UP_STEPS, TIMED_STEPS, SPLIT_STEPS, PROFILED_STEPS = 3, 10, 5, 2
MOST_RANDOM_TOKENS = 4 * 2**20
STEPS_HINT = "--steps 20 times twenty steps; --steps 5-10 the fifth to the tenth, from 1"


@dataclass(frozen=True)
class Steps:
    """Which steps count."""

    warm_up: int
    """Warm-up steps, including the first."""
    timed: int

    @property
    def breakdown(self) -> int:
        """Extra steps whose parts are measured, each after an undisturbed one."""
        return min(SPLIT_STEPS, self.timed)


@dataclass(frozen=True)
class BenchJob:
    """The work of one candidate in one round."""

    steps: Steps
    has_breakdown: bool = True
    """Whether to run extra steps that measure the parts of a step."""
    profiles: bool = False
    """Whether to run more steps for a trace."""
    seconds: float = 0.0
    """Time for about this long, with extra steps if needed; needs two warm-up steps."""


def parse_steps(text: str, warm_up: int | None) -> Steps:
    """Parses `--steps`: a number, or the first and the last timed step, from 1.

    Args:
        text: such as "20", or "5-10", which is 4 warm-up steps and 6 timed ones.
        warm_up: warm-up steps; None if not given.

    Raises:
        ConfigError: it is neither, or contradicts `warm_up`.
    """
    match = re.fullmatch(r"([1-9][0-9]{0,8})(?:-([0-9]{1,9}))?", text)
    if not match or int(match[2] or match[1]) < int(match[1]):
        raise ConfigError(f"--steps {text!r} is not a number of steps or a range", STEPS_HINT)
    first, last = int(match[1]), int(match[2] or 0)
    if not last:
        return Steps(WARM_UP_STEPS if warm_up is None else warm_up, first)
    if warm_up is not None:
        raise ConfigError(
            f"--steps {text} begins after a warm-up of {first - 1}, but --warm-up is {warm_up}",
            f"leave out --warm-up, or give --steps {last - first + 1}",
        )
    return Steps(first - 1, last - first + 1)


def prepare_run(run: Run, steps: Steps, folder: Path) -> Run:
    """Returns the run as it is timed: full batches from the first step, and something to read.

    Args:
        run: the run.
        steps: the steps to time.
        folder: for random tokens, if the run names no data.
    """
    train = run.train.model_copy(update={"batch_ramp": None})
    if names_data(run):
        run = find_end_of_document(run, RunFiles(folder, run))
    # The step needs no tokenizer: it neither prints text nor counts its bytes.
    run = run.model_copy(update={"train": train, "tokenizer": TokenizerChoice()})
    if not names_data(run):
        run = _with_random_tokens(run, steps, folder)
    return Run.model_validate(run.model_dump())


def names_data(run: Run) -> bool:
    """Returns whether a run has token files of its own."""
    return bool(run.data.blend.prefixes or run.data.train.prefixes)


def describe_data(run: Run) -> str:
    """Describes what the steps read."""
    return "the run's token files" if names_data(run) else "random tokens"


def _with_random_tokens(run: Run, steps: Steps, folder: Path) -> Run:
    prefix = folder / "random_tokens"
    n_steps = steps.warm_up + steps.timed + 2 * steps.breakdown + 2 * PROFILED_STEPS
    n_sequences = BatchSchedule(run).consumed(n_steps)
    n_tokens = (run.model.sequence_length + 1) * n_sequences
    n_tokens = max(min(n_tokens, MOST_RANDOM_TOKENS), 2 * (run.model.sequence_length + 1))
    # The same on every machine, since ranks compare their data.
    generator = np.random.default_rng(run.train.seed)
    vocabulary_size = run.model.vocabulary_size
    with IndexedWriter(prefix, optimal_dtype(vocabulary_size)) as writer:
        tokens = generator.integers(0, vocabulary_size, n_tokens).astype(writer.dtype)
        writer.add_document(tokens)
    data = Data(train=Blend(prefixes=(str(prefix),)), cache_folder=str(folder / "cache"))
    train = run.train.model_copy(update={"length": Length(n_steps, "steps")})
    return run.model_copy(update={"data": data, "train": train, "evaluate": Evaluate(batches=0)})
