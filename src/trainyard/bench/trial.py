"""Times a few steps of a run, or of several layouts, on this machine's devices."""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from trainyard.bench.job import Steps, names_data, prepare_run
from trainyard.bench.rounds import BenchOptions, BenchRun, run_rounds
from trainyard.config.run import Data, Run
from trainyard.data.patterns import find_token_files
from trainyard.errors import ConfigError, MachineError
from trainyard.launch.environment import Process, read_process
from trainyard.planning.hardware import Machine, find_device

STEPS = Steps(warm_up=2, timed=5)
STEPS_OF_ONE_RUN, SECONDS_OF_ONE_RUN = Steps(warm_up=5, timed=10), 4.0

logger = logging.getLogger("trainyard")


def refuse_other_machines(machine: Machine, n_devices: int, process: Process) -> None:
    """Rejects a plan for other devices.

    Raises:
        ConfigError: names this machine's devices.
    """
    n_here, name = torch.cuda.device_count(), "cpu"
    if n_here:
        name = torch.cuda.get_device_name()
    here = find_device(name)
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


def time_runs(runs: Sequence[Run], n_ranks: int) -> list[float | None]:
    """Times the training step of each run, in separate processes.

    Args:
        runs: in the order they are timed.
        n_ranks: of each.

    Returns:
        the median step in seconds; None for a run whose processes failed, and on ranks other than
            the first.
    """
    process = read_process()
    order = BenchOptions(STEPS, 1, n_ranks)
    found: list[float | None] = []
    with tempfile.TemporaryDirectory(prefix="trainyard-plan-") as name:
        for number, run in enumerate(runs):
            folder = Path(name) / str(number)
            folder.mkdir()
            prepared = prepare_run(_with_data_that_is_here(run), STEPS, folder)
            candidate = BenchRun(f"layout {number + 1} of {len(runs)}", prepared)
            try:
                outcome = run_rounds([candidate], order, process, folder)[0]
            except MachineError as error:
                logger.warning("layout %d cannot be timed: %s", number + 1, error.problem)
                found.append(None)
                continue
            seconds = outcome.step_seconds if outcome.results else []
            found.append(statistics.median(seconds) if seconds else None)
    return found


def time_run(run: Run, n_ranks: int) -> float:
    """Times a run's training step for a few seconds, in separate processes.

    Returns:
        the mean seconds of a step, including effects of other load on this machine.

    Raises:
        UserError: the run or its data is unusable here.
        MachineError: a process failed.
    """
    order = BenchOptions(
        STEPS_OF_ONE_RUN, 1, n_ranks, takes_apart=False, seconds=SECONDS_OF_ONE_RUN
    )
    with tempfile.TemporaryDirectory(prefix="trainyard-time-") as name:
        prepared = prepare_run(run, order.steps, Path(name))
        (outcome,) = run_rounds([BenchRun("", prepared)], order, Process(), Path(name))
    return statistics.mean(outcome.step_seconds)


def _with_data_that_is_here(run: Run) -> Run:
    """Replaces missing token files with random tokens, which are as fast."""
    run = find_token_files(run, missing_ok=True)
    data = run.data
    prefixes = [*data.blend.prefixes, *data.train.prefixes]
    if names_data(run) and not all(Path(f"{prefix}.idx").is_file() for prefix in prefixes):
        return run.model_copy(update={"data": Data()})
    return run
