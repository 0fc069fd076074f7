"""Times runs in rounds, each run in separate processes, one after the other.

Each round starts the processes of every run in turn, so that other load on the machine affects all
alike. With `--compare fp32,bf16 --rounds 2`:

    round 1: fp32    round 1: bf16    round 2: fp32    round 2: bf16

Memory, its allocator and compiled code belong to a process: a second run in the same process would
start warm. The ranks of this process start theirs like `trainyard train`, here or under torchrun,
srun and mpiexec.
"""

from __future__ import annotations

import json
import logging
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from trainyard.bench.job import (
    OPERATORS,
    RESULT,
    RUN,
    TRACE,
    BenchJob,
    Steps,
    names_data,
    prepare_run,
)
from trainyard.bench.worker import REFUSAL
from trainyard.config.devices import find_device
from trainyard.config.load import render_run
from trainyard.config.run import Data, Run
from trainyard.data.patterns import find_token_files
from trainyard.errors import ConfigError, MachineError, UserError
from trainyard.launch.environment import Process, read_process
from trainyard.launch.local import run_ranks, watched_command
from trainyard.planning.hardware import Machine

LAYOUT_JOB = BenchJob(Steps(warm_up=2, timed=5), has_breakdown=False)
START_JOB = BenchJob(Steps(warm_up=5, timed=10), has_breakdown=False, seconds=4.0)

logger = logging.getLogger("trainyard")


@dataclass
class BenchRun:
    """A run to time, and the results of its rounds, in order."""

    name: str
    """Name in the log; empty: not shown."""
    run: Run
    worker: Sequence[str] = ("trainyard.bench.worker",)
    """The module of its processes, and arguments of its own."""
    results: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[Path] = field(default_factory=list)
    """The trace and the top operators of the first round, if wanted."""

    @property
    def step_seconds(self) -> list[float]:
        """The seconds of each timed step, of all rounds."""
        return [seconds for result in self.results for seconds in result["step_seconds"]]

    def speed_over(self, other: BenchRun) -> list[float]:
        """Returns how many times as fast as another this is, round by round."""
        return [
            statistics.median(theirs["step_seconds"]) / statistics.median(mine["step_seconds"])
            for mine, theirs in zip(self.results, other.results, strict=True)
        ]


@dataclass(frozen=True)
class Rounds:
    """What is asked of all runs."""

    job: BenchJob
    """In the first round; later ones only time steps."""
    n_rounds: int
    n_ranks: int


def run_rounds(runs: Sequence[BenchRun], rounds: Rounds, process: Process, folder: Path) -> None:
    """Times runs, interleaved; on the first rank they have their results afterwards.

    Args:
        runs: in listing order.
        rounds: the request.
        process: this one, as launched.
        folder: for their input and output; traces stay there.

    Raises:
        UserError: a process rejected its job; with several, their messages are on stderr.
        MachineError: a process failed; its message is on stderr.
    """
    job = rounds.job
    for number in range(rounds.n_rounds):
        for index, timed in enumerate(runs):
            if process.rank == 0 and timed.name:
                logger.info("round %d of %d: %s", number + 1, rounds.n_rounds, timed.name)
            here = folder / f"{number}-{index}"
            here.mkdir()
            (here / RUN).write_text(render_run(timed.run), encoding="utf-8")
            command = watched_command(*timed.worker, str(here), msgspec.json.encode(job).decode())
            attempt = number * len(runs) + index
            command += ["--spawned-at", str(time.time()), "--attempt", str(attempt)]
            if process.n_ranks == 1 and rounds.n_ranks > 1:
                run_ranks(rounds.n_ranks, command, here / "logs")
            else:
                try:
                    run_ranks(process, [*command, "--leave-refusal"])
                except MachineError as error:
                    raise (_read_refusal(here / REFUSAL) or error) from None
            if process.rank == 0:
                text = (here / RESULT).read_text(encoding="utf-8")
                timed.results.append(json.loads(text))
            if job.profiles:
                timed.profiles += [here / TRACE, here / OPERATORS]
        job = replace(job, has_breakdown=False, profiles=False)


def _read_refusal(path: Path) -> UserError | None:
    if not path.exists():
        return None
    problem, hint, exit_code = json.loads(path.read_text(encoding="utf-8"))
    error = UserError(problem, hint)
    error.exit_code = exit_code
    return error


def refuse_other_machines(machine: Machine, n_devices: int, process: Process) -> None:
    """Rejects a plan for other devices.

    Raises:
        ConfigError: names this machine's devices.
    """
    import torch

    n_here = torch.cuda.device_count()
    here = find_device(torch.cuda.get_device_name() if n_here else "cpu")
    wanted = machine.device.name
    if here is not None and here.name != wanted:
        raise ConfigError(
            f"--measure times steps on this machine, which has {here.name}; the plan is for "
            f"{wanted}",
            "run it there, or plan for this machine's devices: --cluster local",
        )
    if process.n_ranks > 1 and process.n_ranks != n_devices:
        raise ConfigError(
            f"a launcher has started {process.n_ranks} ranks, the plan is for {n_devices} devices",
            f"--gpus {process.n_ranks}",
        )
    if process.n_ranks == 1 and 0 < n_here < n_devices:
        raise ConfigError(
            f"--measure needs {n_devices} devices, this machine has {n_here}",
            f"start it on all nodes with srun, torchrun or mpiexec, or give --gpus {n_here}",
        )


def time_layouts(runs: Sequence[Run], n_ranks: int) -> list[float | None]:
    """Times the training step of the same run in several layouts, in separate processes.

    Args:
        runs: in the order they are timed.
        n_ranks: of each.

    Returns:
        the median step in seconds; None for a run whose processes failed, and on ranks other than
            the first.
    """
    medians: list[float | None] = []
    for number, run in enumerate(runs, start=1):
        name = f"layout {number} of {len(runs)}"
        try:
            seconds = _time(name, _with_available_data(run), LAYOUT_JOB, n_ranks, read_process())
        except MachineError as error:
            logger.warning("layout %d cannot be timed: %s", number, error.problem)
            seconds = []
        medians.append(statistics.median(seconds) if seconds else None)
    return medians


def time_run(run: Run, n_ranks: int) -> float:
    """Times a run's training step for a few seconds, in separate processes.

    Returns:
        the mean seconds of a step, including effects of other load on this machine.

    Raises:
        UserError: the run or its data is unusable here.
        MachineError: a process failed.
    """
    return statistics.mean(_time("", run, START_JOB, n_ranks, Process()))


def _time(name: str, run: Run, job: BenchJob, n_ranks: int, process: Process) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="trainyard-time-") as folder:
        timed = BenchRun(name, prepare_run(run, job.steps, Path(folder)))
        run_rounds([timed], Rounds(job, 1, n_ranks), process, Path(folder))
    return timed.step_seconds


def _with_available_data(run: Run) -> Run:
    """Replaces missing token files with random tokens, which are as fast."""
    run = find_token_files(run, missing_ok=True)
    prefixes = [*run.data.blend.prefixes, *run.data.train.prefixes]
    if names_data(run) and not all(Path(f"{prefix}.idx").is_file() for prefix in prefixes):
        return run.model_copy(update={"data": Data()})
    return run
