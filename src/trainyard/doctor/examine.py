"""The examination of each rank: describes its machine, measures, and reports to rank 0.

All ranks measure at the same time, as in training: processes that share a processor share its rate,
and all ranks write to the disk together, as for a checkpoint.
"""

from __future__ import annotations

import json
import os
import platform
import socket
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainyard import __version__
from trainyard.doctor import environment, filesystem, network
from trainyard.doctor.rank_group import RankGroup
from trainyard.doctor.verdict import PASS, READ, REPLACE, WARN, WRITE, Finding, Measurement
from trainyard.errors import MachineError
from trainyard.launch.environment import Process, read_variables
from trainyard.planning.hardware import GIGA
from trainyard.units import format_bytes

if TYPE_CHECKING:
    import torch

    from trainyard.parallel.start import StartedRank

LEAST_BYTES_PER_SECOND = 20e6
"""Lowest rate of a slow disk that is not hung."""


COMPILE_SECONDS = 60.0
"""To compile a small block, on a busy machine."""


@dataclass(frozen=True)
class Order:
    """Settings of an examination."""

    runs: Path
    """The folder of the runs."""
    budget_seconds: float = 0.5
    """Time per measurement."""
    file_bytes: int = 2**30
    """Size of each rank's file."""
    cpu_lists: tuple[str, ...] = ()
    """CPUs of local ranks in the cluster's profile."""
    patience_seconds: float = 60.0
    """Timeout for ranks to join and to continue."""


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

    def measure(self, found: Iterable[tuple[str, float, str, str]]) -> None:
        """Records measurements: name, value, unit, and the timed operations."""
        for name, value, unit, how in found:
            self.measurements.append(Measurement(name, value, unit, self.rank, self.host, how))

    @classmethod
    def parse(cls, text: str) -> Examination:
        """Parses the output of `render`."""
        values: dict[str, Any] = json.loads(text)
        values["findings"] = [Finding(**each) for each in values["findings"]]
        values["measurements"] = [Measurement(**each) for each in values["measurements"]]
        return cls(**values)

    def render(self) -> str:
        """Returns it as JSON."""
        return json.dumps(asdict(self))


def examine(process: Process, order: Order) -> list[Examination]:
    """Examines the machines of all ranks; every rank calls it.

    Args:
        process: this rank.
        order: the settings.

    Returns:
        the results of all ranks on rank 0; each other rank's own results.

    Raises:
        UserError: a rank is missing, cannot communicate with others, or cannot write to the disk.
    """
    if not environment.has_torch():
        own = _look(process)
        _examine_folder(own, process, order, RankGroup(process, None, order.patience_seconds))
        return [own]
    from trainyard.parallel.mesh import choose_device
    from trainyard.parallel.start import start_ranks

    device = choose_device(process)
    own = _look(process)
    with (
        start_ranks(
            process, device, lambda: _gather_facts(process), order.patience_seconds
        ) as ranks,
        RankGroup(process, ranks.store, order.patience_seconds) as group,
    ):
        _examine_device(own, ranks, order, group)
        _examine_folder(own, process, order, group)
        return [Examination.parse(text) for text in group.gather(own.render())]


def _gather_facts(process: Process) -> dict[str, str]:
    """Returns the facts that must be equal on all ranks; rejects a wrong network interface."""
    import torch

    wrong = _find_wrong_interface()
    if wrong and not process.is_on_one_machine:
        raise MachineError(f"{wrong[0]} on {socket.gethostname()}", wrong[1])
    versions = {"trainyard": __version__, "torch": torch.__version__}
    return versions | {"python": platform.python_version()}


def _look(process: Process) -> Examination:
    own = Examination(process.rank, socket.gethostname())
    if process.local_rank == 0:
        own.facts = environment.describe_environment(process)
        own.facts["network"] = network.describe_network()
        own.facts["variables"] = read_variables(network.SETTINGS)
        n_devices = sum(name.startswith("GPU ") for name in own.facts["devices"])
        own.find(environment.check_limits(n_devices, bool(network.rdma_devices())))
        own.find(environment.check_load(os.getloadavg()[0], os.cpu_count() or 1))
        wrong = _find_wrong_interface()
        if wrong:  # not needed on one machine alone
            own.find([Finding("network interface", wrong[0], WARN, wrong[1])])
    return own


def _find_wrong_interface() -> tuple[str, str] | None:
    settings = read_variables(network.SETTINGS)
    return network.find_wrong_interface(settings, network.interface_names())


def _examine_device(own: Examination, ranks: StartedRank, order: Order, group: RankGroup) -> None:
    import torch

    from trainyard.doctor.matmuls import measure_device
    from trainyard.parallel.mesh import device_name

    process, device = ranks.process, ranks.device
    own.device, own.n_devices = device_name(device), torch.cuda.device_count()
    near = None
    if device.type == "cuda":
        bus_id = environment.bus_id_of(device.index or 0)
        near = environment.cpus_near(bus_id) if bus_id else None
    own.find(environment.check_binding(process, order.cpu_lists, near))
    group.wait()
    for found in measure_device(device, order.budget_seconds):
        own.measure([found])
        group.enter("matmuls", order.budget_seconds)
    group.wait()
    if device.type == "cuda":
        group.enter("the comparison of compiled blocks", COMPILE_SECONDS)
        if process.local_rank == 0:
            own.find(compare_compiled(device))
        group.wait()
    if process.n_ranks > 1:
        from trainyard.doctor.collectives import Talk

        group.enter("the start of the collectives", order.budget_seconds)
        for found in Talk(device, order.budget_seconds).measure():
            own.measure([found])
            group.enter("the collectives", order.budget_seconds)


def compare_compiled(device: torch.device) -> list[Finding]:
    """Compares the gradients of a small block of all parts, compiled and eager."""
    import torch

    from trainyard.config.load import load_run
    from trainyard.model.compiled import Trial

    model = load_run("modern-125m", ["model.dropout=0.1"]).run.model
    try:
        Trial(model, torch.bfloat16, "none", device).refuse_wrong()
    except MachineError as error:
        return [Finding("compiled blocks", error.problem, REPLACE, error.hint)]
    return [Finding("compiled blocks", "have the gradients of eager ones", PASS)]


def _examine_folder(own: Examination, process: Process, order: Order, group: RankGroup) -> None:
    """Tests the folder of the runs once on each machine; all ranks measure it together."""
    group.enter("the folder of the runs", order.file_bytes / LEAST_BYTES_PER_SECOND)
    with ExitStack() as last:
        # Rank 0 enters first and leaves last, so that it can remove the folders it created.
        if process.rank == 0:
            folder = last.enter_context(filesystem.trial_folder(order.runs))
        group.wait()
        with ExitStack() as stack:
            if process.rank > 0:
                folder = stack.enter_context(filesystem.trial_folder(order.runs))
            if process.local_rank == 0:
                own.facts["folder"] = filesystem.describe_folder(order.runs)
                own.find(filesystem.try_promises(folder))
            if not process.is_on_one_machine:
                own.find(_try_sharing(process, order.runs, group))
            rates = filesystem.measure_rates(folder, order.file_bytes, group.wait)
        group.wait()
    size = format_bytes(order.file_bytes)
    own.measure([(WRITE, rates.write / GIGA, "GB/s", f"{size}, flushed")])
    own.measure([(READ, rates.read / GIGA, "GB/s", f"{size}, {rates.read_how}")])


def _try_sharing(process: Process, runs: Path, group: RankGroup) -> list[Finding]:
    """Looks on every machine for a file written and locked by rank 0."""
    found: list[Finding] = []
    with ExitStack() as stack:
        path = ""
        if process.rank == 0:
            path = str(stack.enter_context(filesystem.locked_file(runs)))
        path = group.broadcast(path)
        if process.local_rank == 0 and process.rank > 0:
            found = filesystem.look_for(Path(path))
        group.wait()
    return found
