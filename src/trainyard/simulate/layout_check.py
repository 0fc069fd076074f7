"""Tries a layout on this machine before the real job: a small run, sharded and on one device.

    python -m trainyard.simulate.layout_check FOLDER

is one rank of the sharded run, started by `check_layouts`. It trains each FOLDER/00-fp64.toml in
the precision of its name, and writes outcomes beside them. Everything runs on the CPU.
"""

from __future__ import annotations

import itertools
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainyard.config.load import load_run, render_run
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.errors import MachineError, UserError
from trainyard.launch.environment import Process, read_process
from trainyard.launch.local import run_ranks
from trainyard.log import build_logger
from trainyard.parallel.model import MissingGradientError
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.precision.float8 import refuse_device
from trainyard.simulate.parity import (
    BOUNDS,
    Difference,
    IncompleteError,
    Outcome,
    compare,
    load_outcome,
    save_outcome,
    train_three_steps,
)
from trainyard.simulate.shrink import DEGREE, LayoutCheck

logger = logging.getLogger("trainyard")


@dataclass(frozen=True)
class Result:
    """Difference between one layout and the single device in one precision."""

    layout: Run
    precision: str
    difference: Difference | str
    """A text if there is nothing to compare: a rank's problem."""

    @property
    def bound(self) -> float:
        """The largest difference that rounding explains."""
        return BOUNDS[self.precision]

    @property
    def is_same(self) -> bool:
        """Whether the layout computes what the single device computes."""
        found = self.difference
        return isinstance(found, Difference) and found.is_within(self.bound)


@dataclass(frozen=True)
class _Case:
    """One layout in one precision, and the file its ranks read."""

    layout: Run
    n_ranks: int
    precision: str
    path: Path


def precisions_of(run: Run) -> list[str]:
    """Lists the precisions to try a run in: fp64 and its own.

    With experts fp64 alone: elsewhere rounding decides which ones a token uses.

    Raises:
        ConfigError: the run needs a package that is not installed.
    """
    refuse_device(change(run, {"precision.fp8.emulate": True}))
    return ["fp64", *([] if run.model.n_experts else [run.precision.kind])]


def check_layouts(check: LayoutCheck, precisions: Sequence[str]) -> list[Result]:
    """Trains the layouts of a check in local processes, and compares them.

    Args:
        check: what to train.
        precisions: names in `BOUNDS`; layouts of degrees above 2 train in the first only.

    Raises:
        MachineError: a process ended early; names it, with its output.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-") as name:
        cases = list(_write_cases(check, precisions, Path(name)))
        for folder in dict.fromkeys(case.path.parent for case in cases):
            try:
                _train_ranks(folder, int(folder.name))
            except (MachineError, MissingGradientError):
                if not list(folder.glob("*.finding")):
                    raise
        return list(_compare_all(check.alone, cases))


def _write_cases(check: LayoutCheck, precisions: Sequence[str], folder: Path) -> Iterator[_Case]:
    """Writes the cases to train, in one folder per number of ranks."""
    layouts = list(zip(check.layouts, check.topologies, strict=True))
    every = itertools.product(precisions, layouts)
    for number, (precision, (layout, topology)) in enumerate(every):
        # A degree of 2 shows how low precision rounds.
        if layout.parallel.context > DEGREE and precision != precisions[0]:
            continue
        path = folder / str(topology.n_ranks) / f"{number:02}-{precision}.toml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(render_run(layout), encoding="utf-8")
        yield _Case(layout, topology.n_ranks, precision, path)


def _train_ranks(folder: Path, n_ranks: int) -> None:
    if n_ranks == 1:
        train_cases(folder, Process())
        return
    watched = [sys.executable, "-P", "-m", "trainyard.launch.watched"]
    command = [*watched, "trainyard.simulate.layout_check", str(folder)]
    run_ranks(n_ranks, command, folder / "logs")


def train_cases(folder: Path, process: Process) -> None:
    """Trains every case in a folder as one rank, and writes the outcomes there.

    Raises:
        MissingGradientError: a parameter has none; also written to a file beside the case.
    """
    for path in sorted(folder.glob("*.toml")):
        precision = path.stem.partition("-")[2]
        run = load_run(str(path)).run
        try:
            outcome = train_three_steps(run, process.rank, process.n_ranks, precision)
        except MissingGradientError as error:
            path.with_suffix(f".rank-{process.rank}.finding").write_text(str(error))
            raise
        save_outcome(outcome, _outcome_path(path, process.rank))


def _compare_all(alone: Run, cases: list[_Case]) -> Iterator[Result]:
    """Compares the trained cases; ranks that find a problem stop at that case."""
    references: dict[str, Outcome] = {}
    for case in cases:
        findings = sorted(case.path.parent.glob(f"{case.path.stem}.*.finding"))
        outcomes = [_outcome_path(case.path, rank) for rank in range(case.n_ranks)]
        if findings:
            yield Result(case.layout, case.precision, findings[0].read_text())
        elif all(path.exists() for path in outcomes):
            if case.precision not in references:
                references[case.precision] = train_three_steps(alone, 0, 1, case.precision)
            ranks = [load_outcome(path) for path in outcomes]
            try:
                found: Difference | str = compare(references[case.precision], ranks)
            except IncompleteError as error:
                found = str(error)
            yield Result(case.layout, case.precision, found)


def _outcome_path(path: Path, rank: int) -> Path:
    return path.with_suffix(f".rank-{rank}.safetensors")


def main() -> None:
    """Runs one rank from the command line, for `check_layouts`."""
    folder = Path(sys.argv[1])
    build_logger()
    process = read_process()
    runs = "".join(path.read_text() for path in sorted(folder.glob("*.toml")))
    try:
        with start_ranks(process, torch.device("cpu"), lambda: gather_facts(runs, "random ids")):
            train_cases(folder, process)
    except UserError as error:
        logger.error("error: %s", error)
        sys.exit(error.exit_code)
    except MissingGradientError:
        sys.exit(2)


if __name__ == "__main__":
    main()
