"""A diagnosis as a text table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainyard.doctor.diagnosis import Diagnosis
from trainyard.doctor.verdict import ORDER, PASS, Finding, Row
from trainyard.units import format_figure, format_number

MOST_SLOW = 8
NAME_WIDTH = 38


def render(diagnosis: Diagnosis) -> str:
    """Renders facts of the first machine, results of checks, and measurements."""
    shape, machine = diagnosis.shape, diagnosis.machine
    against = f"compared with {machine.name}" if machine else "not compared: set --cluster"
    ranks = format_number(len(shape.hosts), "rank")
    machines = format_number(shape.n_nodes, "machine")
    lines = [
        f"{ranks} on {machines}, {against}",
        *_facts(diagnosis),
        *_findings(diagnosis.findings),
        *_rows(diagnosis.rows),
    ]
    if not diagnosis.examinations[0].device:
        lines.append("torch is not installed: matmuls, memory and network are not measured")
    verdict = diagnosis.verdict or "none, no measurement was compared: set --cluster NAME"
    return "\n".join([*lines, "", f"verdict: {verdict}"])


def _facts(diagnosis: Diagnosis) -> Iterator[str]:
    host, facts = next(iter(diagnosis.facts.items()))
    yield ""
    yield host + (" (all machines: --json)" if diagnosis.shape.n_nodes > 1 else "")
    for section, values in facts.items():
        title = section
        for name, value in values.items():
            yield f"  {title:<10} {name:<16} {value}"
            title = ""


def _findings(findings: Sequence[Finding]) -> Iterator[str]:
    """Lists the results of checks, failures first; equal results of several machines once."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        # Texts of passed checks differ in timings.
        text = "" if each.verdict == PASS else each.text
        alike.setdefault((each.name, text), []).append(each)
    yield ""
    yield "checks"
    groups = sorted(alike.values(), key=lambda group: -ORDER.index(group[0].verdict))
    for first, *others in groups:
        places = list(dict.fromkeys(each.place for each in (first, *others)))
        where = places[0] if len(places) == 1 else f"{places[0]} and {len(places) - 1} more"
        yield f"  {first.verdict:<8} {first.name:<20} {where}: {first.text}"
        if first.hint:
            yield f"  {'':<8} {'':<20} hint: {first.hint}"


def _rows(rows: Sequence[Row]) -> Iterator[str]:
    yield ""
    titles = f"{'median':>9}{'worst':>9}{'expected':>10}{'share':>7}  verdict"
    yield f"{'measured':<{NAME_WIDTH}}{titles}"
    for row in rows:
        expected = f"{format_figure(row.expected):>10}" if row.expected else f"{'':>10}"
        share = f"{row.share:>6.0%} " if row.share is not None else f"{'':>7}"
        name = f"  {row.name}, {row.unit}"
        yield (
            f"{name:<{NAME_WIDTH}}{format_figure(row.median):>9}"
            f"{format_figure(row.worst.value):>9}{expected}{share}"
            f"  {row.verdict or '-':<8} {row.worst.how}".rstrip()
        )
        if row.slow:
            slow = [
                f"rank {s.rank} on {s.host} {format_figure(s.value)}" for s in row.slow[:MOST_SLOW]
            ]
            more = len(row.slow) - len(slow)
            yield f"    slow: {', '.join(slow)}" + (f" and {more} more" if more else "")
