"""A layout tried on this machine before the real job: the small run, cut and on a single device.

    python -m trainyard.train.rehearsal FOLDER fp64 bf16

is one rank of the cut run, which `rehearse` starts: it trains FOLDER/layout-0.toml and so on, each
in every precision, and leaves what it found in files beside them. Everything runs on the CPU.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainyard.config.load import load_run, render_run
from trainyard.config.run import Run
from trainyard.errors import UserError
from trainyard.launch.environment import Process, read_process
from trainyard.launch.local import run_ranks
from trainyard.log import build_logger
from trainyard.parallel.start import gather_facts, start_ranks
from trainyard.plan.rehearsal import Rehearsal
from trainyard.precision.float8 import refuse_missing_torchao
from trainyard.train.parity import (
    BOUNDS,
    DTYPES,
    Difference,
    Outcome,
    compare,
    load_outcome,
    save_outcome,
    train_three_steps,
)

logger = logging.getLogger("trainyard")


@dataclass(frozen=True)
class Result:
    """How far one layout of a rehearsal is from the single device in one precision."""

    layout: Run
    precision: str
    difference: Difference

    @property
    def bound(self) -> float:
        """The largest difference that rounding explains."""
        return BOUNDS[self.precision]

    @property
    def is_same(self) -> bool:
        """Whether the layout computes what the single device computes."""
        return self.difference.is_within(self.bound)


def precisions_of(run: Run) -> list[str]:
    """Lists the precisions to try a run in: fp64, and its own.

    Raises:
        ConfigError: the run needs a package that is not installed.
    """
    if run.precision.multiplies_in_fp8:
        refuse_missing_torchao(run)
    return ["fp64", run.precision.kind]


def rehearse(rehearsal: Rehearsal, precisions: Sequence[str]) -> list[Result]:
    """Trains the layouts of a rehearsal in processes of this machine, and compares them.

    Args:
        rehearsal: what to train.
        precisions: names in `DTYPES`.

    Raises:
        MachineError: a process ended before its time; tells which, and what it said.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-") as name:
        folder = Path(name)
        for number, layout in enumerate(rehearsal.layouts):
            (folder / f"layout-{number}.toml").write_text(render_run(layout), encoding="utf-8")
        if rehearsal.n_ranks == 1:
            train_layouts(folder, precisions, Process())
        else:
            command = [sys.executable, "-P", "-m", "trainyard.train.rehearsal", name, *precisions]
            run_ranks(rehearsal.n_ranks, command, folder / "logs")
        return list(_compare_all(rehearsal, precisions, folder))


def train_layouts(folder: Path, precisions: Sequence[str], process: Process) -> None:
    """Trains every layout in a folder, as one rank of it, and writes the outcomes there."""
    for path in sorted(folder.glob("layout-*.toml")):
        run = load_run(str(path)).run
        for precision in precisions:
            outcome = train_three_steps(run, process.rank, process.n_ranks, precision)
            save_outcome(outcome, _outcome_path(folder, path.stem, precision, process.rank))


def _compare_all(rehearsal: Rehearsal, precisions: Sequence[str], folder: Path) -> Iterator[Result]:
    for precision in precisions:
        reference = train_three_steps(rehearsal.alone, 0, 1, precision)
        for number, layout in enumerate(rehearsal.layouts):
            ranks: list[Outcome] = [
                load_outcome(_outcome_path(folder, f"layout-{number}", precision, rank))
                for rank in range(rehearsal.n_ranks)
            ]
            yield Result(layout, precision, compare(reference, ranks))


def _outcome_path(folder: Path, layout: str, precision: str, rank: int) -> Path:
    return folder / f"{layout}.{precision}.rank-{rank}.safetensors"


def main() -> None:
    """Runs one rank from the command line, as `rehearse` does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("precisions", nargs="+", choices=DTYPES)
    arguments = parser.parse_args()
    build_logger()
    process = read_process()
    runs = "".join(path.read_text() for path in sorted(arguments.folder.glob("layout-*.toml")))
    try:
        with start_ranks(process, torch.device("cpu"), lambda: gather_facts(runs, "random ids")):
            train_layouts(arguments.folder, arguments.precisions, process)
    except UserError as error:
        logger.error("error: %s", error)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
