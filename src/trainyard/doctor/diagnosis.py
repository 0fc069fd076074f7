"""The diagnosis from the examinations of all ranks: one verdict with hints, as JSON or a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainyard.doctor.examine import Examination
from trainyard.doctor.verdict import (
    ORDER,
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
from trainyard.units import format_figure, format_number

COMPARED_VERSIONS = ("NVIDIA driver", "AMD driver", "torch", "torchao")
MOST_NAMED, MOST_SLOW = 4, 8
NAME_WIDTH = 38


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
        worst = worst_of([measured, *(finding.verdict for finding in self.findings)])
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
        bad = [finding for finding in self.findings if finding.verdict == REPLACE]
        named += dict.fromkeys(f"{finding.name} on {finding.place}" for finding in bad)
        if named:
            hints = list(dict.fromkeys(finding.hint for finding in bad if finding.hint))
            slow = "below two thirds of the expected rate: exclude the machine and have it repaired"
            raise MachineError(f"replace: {'; '.join(named)}", "; ".join(hints) or slow)

    def as_json(self) -> dict[str, Any]:
        """Returns the diagnosis as JSON values."""
        measurements = [each for rank in self.examinations for each in rank.measurements]
        return {
            "verdict": self.verdict or None,
            "compared_with": self.machine.name if self.machine else None,
            "hosts": list(self.shape.hosts),
            "device": self.examinations[0].device or None,
            "facts": self.facts,
            "findings": [asdict(finding) for finding in self.findings],
            "measured": [
                {
                    **{"name": row.name, "unit": row.unit, "median": row.median},
                    **{"worst": row.worst.value, "worst_rank": row.worst.rank},
                    **{"worst_host": row.worst.host, "expected": row.expected},
                    **{"verdict": row.verdict or None, "how": row.worst.how},
                    "by_rank": {
                        str(each.rank): each.value for each in measurements if each.name == row.name
                    },
                }
                for row in self.rows
            ],
        }


def find_usual_machine(device: str) -> tuple[str, Machine] | None:
    """Finds the usual node of a GPU by its torch name; a CPU has none."""
    known = find_device(device)
    name = next((name for name, node in NODES.items() if known and node.device == known.name), None)
    return None if name in (None, "cpu") else (name, find_machine(gpu=name))


def diagnose(
    examinations: Sequence[Examination], profile: Machine | None, n_nodes: int | None = None
) -> Diagnosis:
    """Judges the examinations of all ranks.

    Args:
        examinations: one per rank, in rank order.
        profile: of the expected machine; None: judge by the devices only.
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
    machine = profile
    if profile is not None and profile.device.name != "CPU" and first.device:
        for host in dict.fromkeys(shape.hosts):
            on_host = [each for each in examinations if each.host == host]
            findings += _compare_devices(host, on_host, profile)
    elif profile is None and (usual := find_usual_machine(first.device)):
        machine = usual[1]
    versions = {
        each.host: {k: v for k, v in each.facts["versions"].items() if k in COMPARED_VERSIONS}
        for each in examinations
        if each.facts
    }
    findings += compare_nodes(versions)
    measurements = [measurement for each in examinations for measurement in each.measurements]
    rows = judge(measurements, expect(machine, shape) if machine else {}, shape)
    return Diagnosis(examinations, shape, machine, rows, findings)


def _compare_devices(
    host: str, examinations: Sequence[Examination], machine: Machine
) -> Iterator[Finding]:
    """Compares the devices of a node with the cluster's profile."""
    names = [each.device for each in examinations if each.device != "cpu"]
    # A launcher may show each rank only its own device.
    n_devices = max(len(names), *(each.n_devices for each in examinations))
    if n_devices < machine.devices_per_node:
        text = f"{n_devices} of the {machine.devices_per_node} in the cluster's profile"
        hint = "request all from the scheduler; if it granted them, one has failed: drain the node"
        if n_devices == 0:
            hint = "torch sees none: a login node, a job without GPUs, or a CPU-only torch"
        yield Finding("devices", text, REPLACE, hint, host)
    kinds = {device.name if (device := find_device(name)) else name for name in names}
    if others := sorted(kinds - {machine.device.name}):
        text = f"{', '.join(others)}, but the cluster's profile has {machine.device.name}"
        yield Finding("devices", text, REPLACE, "set the right cluster with --cluster", host)


def render(diagnosis: Diagnosis) -> str:
    """Renders facts of the first machine, results of checks, and measurements as a table."""
    shape, machine = diagnosis.shape, diagnosis.machine
    against = f"compared with {machine.name}" if machine else "not compared: set --cluster"
    ranks = format_number(len(shape.hosts), "rank")
    host, facts = next(iter(diagnosis.facts.items()))
    lines = [f"{ranks} on {format_number(shape.n_nodes, 'machine')}, {against}", ""]
    lines.append(host + (" (all machines: --json)" if shape.n_nodes > 1 else ""))
    for section, values in facts.items():
        titles = [section, *[""] * len(values)]
        for title, (name, value) in zip(titles, values.items(), strict=False):
            lines.append(f"  {title:<10} {name:<16} {value}")
    lines += ["", "checks", *_render_findings(diagnosis.findings), ""]
    columns = f"{'median':>9}{'worst':>9}{'expected':>10}{'share':>7}  verdict"
    lines.append(f"{'measured':<{NAME_WIDTH}}{columns}")
    lines += [line for row in diagnosis.rows for line in _render_row(row)]
    if not diagnosis.examinations[0].device:
        lines.append("torch is not installed: matmuls, memory and network are not measured")
    verdict = diagnosis.verdict or "none, no measurement was compared: set --cluster NAME"
    return "\n".join([*lines, "", f"verdict: {verdict}"])


def _render_findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Lists the results of checks, failures first; equal results of several machines once."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        # Texts of passed checks differ in timings.
        text = "" if finding.verdict == PASS else finding.text
        alike.setdefault((finding.name, text), []).append(finding)
    for group in sorted(alike.values(), key=lambda group: -ORDER.index(group[0].verdict)):
        first, places = group[0], list(dict.fromkeys(finding.place for finding in group))
        where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
        yield f"  {first.verdict:<8} {first.name:<20} {where}: {first.text}"
        if first.hint:
            yield f"  {'':<8} {'':<20} hint: {first.hint}"


def _render_row(row: Row) -> Iterator[str]:
    expected = format_figure(row.expected) if row.expected else ""
    share = f"{row.share:.0%} " if row.share is not None else ""
    name = f"  {row.name}, {row.unit}"
    yield (
        f"{name:<{NAME_WIDTH}}{format_figure(row.median):>9}{format_figure(row.worst.value):>9}"
        f"{expected:>10}{share:>7}  {row.verdict or '-':<8} {row.worst.how}".rstrip()
    )
    if row.slow:
        slow = [f"rank {s.rank} on {s.host} {format_figure(s.value)}" for s in row.slow[:MOST_SLOW]]
        more = len(row.slow) - len(slow)
        yield f"    slow: {', '.join(slow)}" + (f" and {more} more" if more else "")
