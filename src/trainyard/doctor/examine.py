"""The examination of each rank: describes its machine, measures, and reports to rank 0.

All ranks measure at the same time, as in training: processes that share a processor share its rate,
and all ranks write to the disk together, as for a checkpoint.

    python -P -m trainyard.doctor.examine SETTINGS RESULTS

is one local rank of `trainyard doctor --ranks`; rank 0 writes the results of all.
"""

from __future__ import annotations

import logging
import platform
import socket
import sys
import tempfile
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trainyard import __version__
from trainyard.doctor import environment, filesystem
from trainyard.doctor.rank_group import RankGroup
from trainyard.doctor.verdict import PASS, READ, REPLACE, WARN, WRITE, Finding, Measurement
from trainyard.errors import MachineError, UserError
from trainyard.launch.environment import Process, hide_secrets, read_process, read_variables
from trainyard.launch.local import run_ranks
from trainyard.log import build_logger
from trainyard.planning.hardware import GIGA
from trainyard.units import format_bytes

if TYPE_CHECKING:
    import torch

    from trainyard.parallel.start import StartedRank

LEAST_BYTES_PER_SECOND = 20e6
"""Lowest rate of a slow disk that is not hung."""
PATIENCE_SECONDS = 60.0
"""For ranks to join, and to continue after the announced time of a phase."""
COMPILE_SECONDS = 60.0
"""To compile a small block, on a busy machine."""

logger = logging.getLogger("trainyard")


@dataclass(frozen=True)
class Settings:
    """Settings of an examination."""

    runs: str
    """The folder of the runs."""
    budget_seconds: float
    """Time per measurement."""
    file_bytes: int
    """Size of each rank's file."""
    cpu_lists: tuple[str, ...]
    """CPUs of local ranks in the cluster's profile."""


@dataclass
class Examination:
    """The results of one rank."""

    rank: int
    host: str
    device: str = ""
    """Device name in torch; empty without torch."""
    n_devices: int = 0
    """GPUs that it sees."""
    facts: environment.Facts = field(default_factory=dict)
    """Facts of its machine, from the first rank there."""
    findings: list[Finding] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)

    def find(self, findings: Iterable[Finding]) -> None:
        """Records findings of this machine."""
        self.findings += [replace(each, place=each.place or self.host) for each in findings]

    def measure(self, name: str, value: float, unit: str, how: str) -> None:
        """Records a measurement, and the timed operations."""
        self.measurements.append(Measurement(name, value, unit, self.rank, self.host, how))


def examine_in_processes(n_ranks: int, settings: Settings) -> list[Examination]:
    """Examines this machine with processes of its own.

    Args:
        n_ranks: at least 2.
        settings: the settings.

    Raises:
        MachineError: one failed; includes its rank and output.
    """
    with tempfile.TemporaryDirectory(prefix="trainyard-doctor-") as name:
        results = Path(name) / "results.json"
        command = [sys.executable, "-P", "-m", "trainyard.launch.watched", __name__]
        arguments = [msgspec.json.encode(settings).decode(), str(results)]
        run_ranks(n_ranks, [*command, *arguments], Path(name) / "logs")
        return msgspec.json.decode(results.read_bytes(), type=list[Examination])


def main() -> None:
    """Runs one rank from the command line."""
    build_logger(hide_secrets)
    process = read_process()
    try:
        results = examine(process, msgspec.json.decode(sys.argv[1], type=Settings))
    except UserError as error:
        logger.error("error: %s", error)
        sys.exit(error.exit_code)
    if process.rank == 0:
        Path(sys.argv[2]).write_bytes(msgspec.json.encode(results))


def examine(process: Process, settings: Settings) -> list[Examination]:
    """Examines the machines of all ranks; every rank calls it.

    Args:
        process: this rank.
        settings: the settings.

    Returns:
        the results of all ranks on rank 0; each other rank's own results.

    Raises:
        UserError: a rank is missing, cannot communicate with others, or cannot write to the disk.
    """
    if not environment.has_torch():
        own = _describe(process)
        _examine_folder(own, process, settings, RankGroup(process, None, PATIENCE_SECONDS))
        return [own]
    from trainyard.parallel.mesh import choose_device
    from trainyard.parallel.start import start_ranks

    device = choose_device(process)
    own = _describe(process)
    with (
        start_ranks(process, device, lambda: _gather_facts(process), PATIENCE_SECONDS) as ranks,
        RankGroup(process, ranks.store, PATIENCE_SECONDS) as group,
    ):
        _examine_device(own, ranks, settings, group)
        _examine_folder(own, process, settings, group)
        texts = group.gather(msgspec.json.encode(own).decode())
        return [msgspec.json.decode(text, type=Examination) for text in texts]


def _gather_facts(process: Process) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks; rejects a wrong network interface."""
    import torch

    wrong = _find_wrong_interface()
    if wrong and not process.is_on_one_machine:
        raise MachineError(f"{wrong[0]} on {socket.gethostname()}", wrong[1])
    versions = {"trainyard": __version__, "torch": torch.__version__}
    return versions | {"python": platform.python_version()}


def _find_wrong_interface() -> tuple[str, str] | None:
    settings = read_variables(environment.SETTINGS)
    return environment.find_wrong_interface(settings, [name for _, name in socket.if_nameindex()])


def _describe(process: Process) -> Examination:
    own = Examination(process.rank, socket.gethostname())
    if process.local_rank == 0:
        own.facts = environment.describe_machine(process)
        n_devices = sum(name.startswith("GPU ") for name in own.facts["devices"])
        own.find(environment.check_machine(n_devices))
        if wrong := _find_wrong_interface():  # not needed on one machine alone
            own.find([Finding("network interface", wrong[0], WARN, wrong[1])])
    return own


def _examine_device(
    own: Examination, ranks: StartedRank, settings: Settings, group: RankGroup
) -> None:
    import torch

    from trainyard.doctor.measure import measure_collectives, measure_device
    from trainyard.parallel.mesh import device_name

    process, device, budget = ranks.process, ranks.device, settings.budget_seconds
    own.device, own.n_devices = device_name(device), torch.cuda.device_count()
    pci = environment.pci_folder(device.index or 0) if device.type == "cuda" else None
    near = environment.read(pci / "local_cpulist") if pci else None
    own.find(environment.check_binding(process, settings.cpu_lists, near))
    group.wait()
    for measured in measure_device(device, budget):
        own.measure(*measured)
        group.enter("matmuls", budget)
    group.wait()
    if device.type == "cuda":
        group.enter("the comparison of compiled blocks", COMPILE_SECONDS)
        if process.local_rank == 0:
            own.find([compare_compiled(device)])
        group.wait()
    if process.n_ranks > 1:
        group.enter("the start of the collectives", budget)
        for measured in measure_collectives(device, budget):
            own.measure(*measured)
            group.enter("the collectives", budget)


def compare_compiled(device: torch.device) -> Finding:
    """Compares the gradients of a small block of all parts, compiled and eager."""
    import torch

    from trainyard.config.load import load_run
    from trainyard.model.compiled import Trial

    model = load_run("modern-125m", ["model.dropout=0.1"]).run.model
    try:
        Trial(model, torch.bfloat16, "none", device).refuse_wrong()
    except MachineError as error:
        return Finding("compiled blocks", error.problem, REPLACE, error.hint)
    return Finding("compiled blocks", "have the gradients of eager ones", PASS)


def _examine_folder(
    own: Examination, process: Process, settings: Settings, group: RankGroup
) -> None:
    """Tests the folder of the runs once on each machine; all ranks measure it together."""
    runs = Path(settings.runs)
    group.enter("the folder of the runs", settings.file_bytes / LEAST_BYTES_PER_SECOND)
    with ExitStack() as last:
        # Rank 0 enters first and leaves last, so that it can remove the folders it created.
        if process.rank == 0:
            folder = last.enter_context(filesystem.trial_folder(runs))
        group.wait()
        with ExitStack() as stack:
            if process.rank > 0:
                folder = stack.enter_context(filesystem.trial_folder(runs))
            if process.local_rank == 0:
                own.facts["folder"] = filesystem.describe_folder(runs)
                own.find(filesystem.try_guarantees(folder))
            if not process.is_on_one_machine:
                # Every machine looks for a file written and locked by rank 0.
                path = ""
                with ExitStack() as locked:
                    if process.rank == 0:
                        path = str(locked.enter_context(filesystem.locked_file(runs)))
                    path = group.broadcast(path)
                    if process.local_rank == 0 and process.rank > 0:
                        own.find(filesystem.look_for(Path(path)))
                    group.wait()
            written, read, how = filesystem.measure_rates(folder, settings.file_bytes, group.wait)
        group.wait()
    size = format_bytes(settings.file_bytes)
    own.measure(WRITE, written / GIGA, "GB/s", f"{size}, flushed")
    own.measure(READ, read / GIGA, "GB/s", f"{size}, {how}")


if __name__ == "__main__":
    main()
