"""Runs rounds of candidates, each in separate processes, one after the other.

Memory, its allocator and compiled code belong to a process: a second candidate in the same process
would start warm. The ranks of this process start theirs like `trainyard train`, here or under
torchrun, srun and mpiexec.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainyard.bench.job import OPERATORS, RESULT, TRACE, BenchJob, Steps, read_refusal
from trainyard.config.run import Run
from trainyard.errors import MachineError
from trainyard.launch.environment import Process
from trainyard.launch.local import run_one, run_ranks

logger = logging.getLogger("trainyard")


@dataclass(frozen=True)
class BenchRun:
    """A candidate to time."""

    name: str
    """Name in the log; empty: not shown."""
    run: Run
    baseline: str = ""
    """The baseline; empty: ours."""


@dataclass
class BenchResult:
    """Results of a candidate's rounds, in order."""

    candidate: BenchRun
    results: list[dict[str, Any]] = field(default_factory=list)
    trace: Path | None = None
    operators: Path | None = None

    @property
    def step_seconds(self) -> list[float]:
        """Of all rounds."""
        return [seconds for result in self.results for seconds in result["step_seconds"]]

    def speed_over(self, other: BenchResult) -> list[float]:
        """Returns how many times as fast as another this is, round by round."""
        return [
            statistics.median(theirs["step_seconds"]) / statistics.median(mine["step_seconds"])
            for mine, theirs in zip(self.results, other.results, strict=True)
        ]


@dataclass(frozen=True)
class BenchOptions:
    """The request for all candidates."""

    steps: Steps
    n_rounds: int
    n_ranks: int
    profiles: bool = False
    """The first round leaves traces."""
    takes_apart: bool = True
    """The first round measures the parts of a step."""
    seconds: float = 0.0
    """Time each for at least about this long."""


def run_rounds(
    candidates: Sequence[BenchRun], order: BenchOptions, process: Process, folder: Path
) -> list[BenchResult]:
    """Times all candidates, interleaved.

    Args:
        candidates: in listing order.
        order: the request.
        process: this one, as launched.
        folder: for their input and output; traces stay there.

    Raises:
        UserError: a process rejected its job; with several, their messages are on stderr.
        MachineError: a process failed; its message is on stderr.
    """
    outcomes = [BenchResult(candidate) for candidate in candidates]
    for number in range(order.n_rounds):
        for place, outcome in enumerate(outcomes):
            name = outcome.candidate.name
            if process.rank == 0 and name:
                logger.info("round %d of %d: %s", number + 1, order.n_rounds, name)
            here = folder / f"{number}-{place}"
            here.mkdir()
            is_first = number == 0
            job = BenchJob(
                order.steps,
                outcome.candidate.baseline,
                takes_apart=is_first and order.takes_apart,
                profiles=is_first and order.profiles,
                seconds=order.seconds,
            )
            job.write(here, outcome.candidate.run)
            _run(order, process, here, number * len(outcomes) + place)
            if process.rank == 0:
                text = (here / RESULT).read_text(encoding="utf-8")
                outcome.results.append(json.loads(text))
            if job.profiles:
                outcome.trace, outcome.operators = here / TRACE, here / OPERATORS
    return outcomes


def _run(order: BenchOptions, process: Process, folder: Path, attempt: int) -> None:
    command = [sys.executable, "-P", "-m", "trainyard.launch.watched"]
    command += ["trainyard.bench.worker", str(folder)]
    command += ["--spawned-at", str(time.time()), "--attempt", str(attempt)]
    if process.n_ranks == 1 and order.n_ranks > 1:
        run_ranks(order.n_ranks, command, folder / "logs")
        return
    try:
        run_one(process, [*command, "--leave-refusal"])
    except MachineError as error:
        raise (read_refusal(folder) or error) from None
