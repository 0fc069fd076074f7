"""Rows of many sources beside plans: errors by device, parallelism, precision and style of program.

A row has a run's settings, a machine, and a published speed (`published_2026.csv` in the FOLDER of
planning.py, with cluster files beside it). It is planned as this program would run it, and as the
nearest other `Program`. An error is planned by published step time, less 1: negative means planned
too fast. Of PyTorch's style are programs with FSDP, compiled or not; of NVIDIA's Megatron-LM, NeMo
and their relatives.
"""

from __future__ import annotations

import csv
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planning_tables import (
    FLASH_ATTENTION,
    MEGATRON_CORE,
    MEGATRON_DEEPSPEED,
    MEGATRON_LM,
)

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.errors import UserError
from trainyard.layout.resolve import Plan, resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Machine
from trainyard.planning.time import step_time
from trainyard.planning.work import Program, own_program

PROGRAMS: dict[str, tuple[str, Program | None]] = {
    # By the first word of a row's id: style and program, None for this one with flash attention.
    **dict.fromkeys(("tt", "tt2", "aws", "fms", "olmo", "4090x2", "muon"), ("PyTorch", None)),
    **dict.fromkeys(("nanotron", "fa2"), ("PyTorch", FLASH_ATTENTION)),
    **dict.fromkeys(("mb", "nemo", "mlm", "mcore", "llama3"), ("NVIDIA", MEGATRON_CORE)),
    **dict.fromkeys(("nara", "kort"), ("NVIDIA", MEGATRON_DEEPSPEED)),
    **dict.fromkeys(("pythia", "frontier"), ("NVIDIA", FLASH_ATTENTION)),
    "megascale": ("NVIDIA", MEGATRON_LM),
}
"""Megatron-LM of 2021 and 2022 has no fused attention, as MEGATRON_DEEPSPEED. PyTorch takes flash
attention where this program takes cuDNN's."""


@dataclass(frozen=True)
class PublishedRow:
    """A published step and its plan's inputs."""

    id: str
    source: str
    kinds: dict[str, str]
    """What rows are compared by."""
    run: Run
    plan: Plan
    machine: Machine
    program: Program
    seconds: float

    def error(self, program: Program | None = None, machine: Machine | None = None) -> float:
        time = step_time(self.run, self.plan, machine or self.machine, program)
        return time.seconds / self.seconds - 1


def read_published(folder: Path) -> list[PublishedRow]:
    """Reads the rows; prints those which this program cannot run."""
    rows = []
    for line in csv.DictReader((folder / "published_2026.csv").read_text().splitlines()):
        option, name = line["hardware"].split()
        if name.endswith(".toml"):
            name = str(folder / "clusters" / name)
        try:
            run = load_run(line["preset"], line["settings"].split()).run
            plan = resolve(run, int(line["devices"]))
        except UserError as error:
            print(f"{line['id']}: {error.problem}")
            continue
        machine = find_machine(**{option.lstrip("-"): name})
        style, program = PROGRAMS[line["id"].split("-")[0]]
        if program is None:
            is_compiled = run.train.compile != "never"
            own = own_program(run.model, run.precision.fp8.scaling, is_compiled=is_compiled)
            program = replace(own, attention_speed=1)
        kinds = {
            "style": f"{style}'s, {line['precision']}",
            "device": Path(name).stem,
            "parallelism": line["kind"],
            "precision": line["precision"],
        }
        seconds = float(line["published_step_s"])
        rows.append(
            PublishedRow(line["id"], line["source"], kinds, run, plan, machine, program, seconds)
        )
    return rows


def summarize(errors: Sequence[float]) -> dict[str, float]:
    sizes = sorted(map(abs, errors))
    return {
        "rows": len(sizes),
        "median": statistics.median(sizes),
        "90_per_cent_below": sizes[min(int(0.9 * len(sizes)), len(sizes) - 1)],
        "median_signed": statistics.median(errors),
    }


def judge_published(rows: Sequence[PublishedRow]) -> dict[str, Any]:
    """Errors of all rows and by kind: of the plan, and of their own programs."""
    found: dict[str, Any] = {}
    for name, program_of in PREDICTIONS.items():
        groups: dict[str, list[float]] = defaultdict(list)
        for row in rows:
            error = row.error(program_of(row))
            for group in ("all", *(f"{kind}: {value}" for kind, value in row.kinds.items())):
                groups[group].append(error)
        found[name] = {group: summarize(errors) for group, errors in sorted(groups.items())}
    return found


PREDICTIONS: dict[str, Callable[[PublishedRow], Program | None]] = {
    "plan": lambda row: None,
    "its program": lambda row: row.program,
}


def show_published(found: dict[str, Any]) -> str:
    """Formats figures of `judge_published` in per cent: median, 90 per cent below, signed."""
    lines = ["| rows | n | plan: median, 90 % below, signed | its program |", "|---|---|---|---|"]
    for group, plan in found["plan"].items():
        figures = [
            " / ".join(f"{100 * each[name]:.1f}" for name in list(each)[1:])
            for each in (plan, found["its program"][group])
        ]
        lines.append(f"| {group} | {plan['rows']} | {figures[0]} | {figures[1]} |")
    return "\n".join(lines)
