"""The diagnosis from the examinations of all ranks: one verdict, with hints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from trainyard.doctor.environment import check_devices
from trainyard.doctor.examine import Examination
from trainyard.doctor.verdict import (
    PASS,
    REPLACE,
    Finding,
    Row,
    Shape,
    compare_nodes,
    expect,
    judge,
    worst_of,
)
from trainyard.errors import MachineError
from trainyard.planning.clusters import NODES, find_machine
from trainyard.planning.hardware import Machine, find_device

COMPARED_VERSIONS = ("NVIDIA driver", "AMD driver", "torch", "torchao")
MOST_NAMED = 4


@dataclass(frozen=True)
class Diagnosis:
    """All results on the machines."""

    examinations: Sequence[Examination]
    """The results of all ranks."""
    shape: Shape
    machine: Machine | None
    """The reference of the measurements; None: no figures are known for such a machine."""
    rows: Sequence[Row]
    findings: Sequence[Finding]

    @property
    def verdict(self) -> str:
        """The worst verdict; empty if there is no problem and no measurement had a reference."""
        measured = worst_of(row.verdict for row in self.rows)
        worst = worst_of([measured, *(each.verdict for each in self.findings)])
        return worst if measured or worst != PASS else ""

    @property
    def facts(self) -> dict[str, dict[str, dict[str, str]]]:
        """The facts of each machine, by host."""
        return {each.host: each.facts for each in self.examinations if each.facts}

    def refuse(self) -> None:
        """Raises if any verdict is replace.

        Raises:
            MachineError: names each item and its host.
        """
        named = [
            f"{row.name} on {', '.join(dict.fromkeys(bad.host for bad in row.slow[:MOST_NAMED]))}"
            for row in self.rows
            if row.verdict == REPLACE
        ]
        bad = [each for each in self.findings if each.verdict == REPLACE]
        named += dict.fromkeys(f"{each.name} on {each.place}" for each in bad)
        if named:
            hints = list(dict.fromkeys(each.hint for each in bad if each.hint))
            slow = "below two thirds of the expected rate: exclude the machine and have it repaired"
            raise MachineError(f"replace: {'; '.join(named)}", "; ".join(hints) or slow)

    def as_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON values."""
        return {
            "verdict": self.verdict or None,
            "compared_with": self.machine.name if self.machine else None,
            "hosts": list(self.shape.hosts),
            "device": self.examinations[0].device or None,
            "facts": self.facts,
            "findings": [asdict(each) for each in self.findings],
            "measured": [self._row_as_json(row) for row in self.rows],
        }

    def _row_as_json(self, row: Row) -> dict[str, Any]:
        values = {
            str(each.rank): measurement.value
            for each in self.examinations
            for measurement in each.measurements
            if measurement.name == row.name
        }
        return {
            "name": row.name,
            "unit": row.unit,
            "median": row.median,
            "worst": row.worst.value,
            "worst_rank": row.worst.rank,
            "worst_host": row.worst.host,
            "expected": row.expected,
            "verdict": row.verdict or None,
            "how": row.worst.how,
            "by_rank": values,
        }


def find_usual_machine(device: str) -> tuple[str, Machine] | None:
    """Finds the usual node of a GPU by its torch name; a CPU has none."""
    found = find_device(device)
    names = [name for name, node in NODES.items() if found and node.device == found.name]
    if not names or names[0] == "cpu":
        return None
    return names[0], find_machine(gpu=names[0])


def diagnose(
    examinations: Sequence[Examination], promised: Machine | None, n_nodes: int | None = None
) -> Diagnosis:
    """Judges the examinations of all ranks.

    Args:
        examinations: one per rank, in rank order.
        promised: the expected machine; None: judge by the devices only.
        n_nodes: expected number of machines.
    """
    first = examinations[0]
    shape = Shape([each.host for each in examinations], first.device not in ("", "cpu"))
    findings = [finding for each in examinations for finding in each.findings]
    if n_nodes is not None and shape.n_nodes != n_nodes:
        text = f"{shape.n_nodes} of {n_nodes} (--nodes) joined"
        hint = "check the launcher's options: it must start one process per device on every machine"
        place = ", ".join(dict.fromkeys(shape.hosts))
        findings.append(Finding("machines", text, REPLACE, hint, place))
    machine = promised
    if promised is not None:
        findings += _compare_devices(examinations, promised)
    elif usual := find_usual_machine(first.device):
        machine = usual[1]
    versions = {
        each.host: {
            name: each.facts["versions"][name]
            for name in COMPARED_VERSIONS
            if name in each.facts["versions"]
        }
        for each in examinations
        if each.facts
    }
    findings += compare_nodes(versions)
    expected = expect(machine, shape) if machine else {}
    measurements = [measurement for each in examinations for measurement in each.measurements]
    return Diagnosis(examinations, shape, machine, judge(measurements, expected, shape), findings)


def _compare_devices(examinations: Sequence[Examination], machine: Machine) -> list[Finding]:
    if machine.device.name == "CPU" or not examinations[0].device:
        return []
    found = []
    for host in dict.fromkeys(each.host for each in examinations):
        here = [each for each in examinations if each.host == host]
        names = [each.device for each in here if each.device != "cpu"]
        # A launcher may show each rank only its own device.
        n_found = max(len(names), *(each.n_devices for each in here))
        known = {name: device.name for name in names if (device := find_device(name))}
        kinds = [known.get(name, name) for name in names]
        wrong = check_devices(n_found, kinds, machine.devices_per_node, machine.device.name)
        found += [replace(each, place=host) for each in wrong]
    return found
