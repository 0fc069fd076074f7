"""How well step times are predicted: on measured steps, and on tables that others published.

    python benchmarks/planning.py FOLDER --fit --output planning.json  # fits and judges constants
    python benchmarks/planning.py FOLDER                               # judges the shipped ones
    python benchmarks/planning.py --unseen FOLDER                      # rows nobody looked at
    python benchmarks/planning.py --rows FOLDER                        # rows of many sources
    python benchmarks/planning.py                                      # published tables alone

FOLDER holds `single.csv` and `multi.csv`, iteration times of Megatron-DeepSpeed on A100s with full
recomputation, in the columns of github.com/VIA-Research/vTrain.

Five constants are fitted, each within bounds, by moving one after the other; the error is that of
rows which the fit has not seen (--folds). Which terms the model has was chosen on all rows of the
folder, so only rows that are in no such folder judge it without favour. Of published tables only
FSDP's (published_fsdp.csv) are fitted: H100's sustained share, Composer's attention and exchange.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from measuring import describe_machine, render
from planning_published import judge_published, read_published, show_published
from planning_tables import (
    COMPOSER,
    MEGATRON_DEEPSPEED,
    UNFUSED_SOFTMAX,
    judge_composer,
    make_run,
    published_rows,
    show,
)

from trainyard.config.run import Model, Parallel
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.planning.hardware import Efficiencies, Machine
from trainyard.planning.time import time_of
from trainyard.planning.work import Work, count_work

Constants = dict[str, float]

NETWORK = 12.5e9
"""Bytes per second of each GPU between the nodes of that cluster: half of a DGX A100's. Assumed at
first; tensor ranks on two nodes were 22 to 26 per cent too fast with more."""
BOUNDS = {
    "memory_share": (0.5, 0.92),  # copies reach 0.9
    "link_share": (0.3, 0.85),
    "network_share": (0.3, 0.92),
    "launch_seconds": (2e-6, 40e-6),
    "link_latency_seconds": (1e-6, 5e-6),  # unbounded it takes the blame for other things
}
START = {
    "memory_share": 0.8,
    "link_share": 0.7,
    "network_share": 0.7,
    "launch_seconds": 10e-6,
    "link_latency_seconds": 3e-6,
}


@dataclass(frozen=True)
class Row:
    """A measured step."""

    table: str
    job: tuple[int, ...]
    """Devices, batch and model: what layouts may be compared in."""
    work: Work
    seconds: float


def read_rows(folder: Path) -> list[Row]:
    return [
        measured_row(table, {name.strip(): value for name, value in line.items()})
        for table in ("multi", "single")
        for line in csv.DictReader((folder / f"{table}.csv").read_text().splitlines())
    ]


def measured_row(table: str, line: dict[str, str]) -> Row:
    names = ("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers")
    devices, batch, micro, width, heads, layers = (int(line[name]) for name in names)
    tensor, pipeline = int(line["tensor parallelism"]), int(line["pipeline parallelism"])
    sequence = int(line["sequence length"])
    run = make_run(
        Model(n_layers=layers, d_model=width, n_heads=heads, d_ff=4 * width).model_copy(
            update={"sequence_length": sequence}
        ),
        (batch, micro),
        Parallel(
            zero_stage=1,
            tensor=tensor,
            pipeline=pipeline,
            schedule="gpipe",
            recompute="block",
        ),
        "fp16",
    )  # gpipe takes any number of micro batches, as long as 1f1b does
    plan = resolve(run, devices)
    cut = range(0, layers + 1, layers // pipeline)  # into equal parts, unlike ours
    plan = replace(plan, stages=tuple(itertools.pairwise(cut)))
    is_fused = heads // tensor * micro % 4 == 0
    work = count_work(run, plan, MEGATRON_DEEPSPEED if is_fused else UNFUSED_SOFTMAX)
    job = (devices, batch, width, layers)
    return Row(table, job, work, float(line["iteration time (ms)"]) / 1e3)


def with_constants(machine: Machine, constants: Constants) -> Machine:
    shares = dict(constants)
    latency = shares.pop("link_latency_seconds")
    efficiencies = Efficiencies(**asdict(machine.efficiencies) | shares)
    return replace(machine, efficiencies=efficiencies, link_latency_seconds=latency)


def predict(row: Row, machine: Machine) -> float:
    return time_of(row.work, machine).seconds


def fit(rows: Sequence[Row], machine: Machine) -> Constants:
    """Moves one constant at a time, by ever smaller steps, while the error falls."""

    def error(constants: Constants) -> float:
        tried = with_constants(machine, constants)
        errors = defaultdict(list)
        for row in rows:
            errors[row.table].append(abs(math.log(predict(row, tried) / row.seconds)))
        return statistics.mean(map(statistics.mean, errors.values()))  # tables count the same

    best, step = dict(START), 1.3
    least = error(best)
    while step > 1.02:
        has_moved = False
        for name, (low, high) in BOUNDS.items():
            for factor in (step, 1 / step):
                tried = best | {name: min(max(best[name] * factor, low), high)}
                if (found := error(tried)) < least - 1e-6:
                    best, least, has_moved = tried, found, True
                    break
        if not has_moved:
            step = math.sqrt(step)
    return best


def cross_validate(rows: Sequence[Row], machine: Machine, n_folds: int) -> list[float]:
    """Predicts each row by constants fitted on the other folds."""
    order = list(range(len(rows)))
    random.Random(0).shuffle(order)
    predicted = [0.0] * len(rows)
    for fold in range(n_folds):
        unseen = set(order[fold::n_folds])
        known = [row for index, row in enumerate(rows) if index not in unseen]
        fitted = with_constants(machine, fit(known, machine))
        for index in unseen:
            predicted[index] = predict(rows[index], fitted)
    return predicted


def judge(rows: Sequence[Row], predicted: Sequence[float]) -> dict[str, Any]:
    """Errors by table, and whether the first three layouts of each job have a good one."""
    figures: dict[str, Any] = {}
    for table in sorted({row.table for row in rows}):
        pairs = [(row, p) for row, p in zip(rows, predicted, strict=True) if row.table == table]
        signed = sorted(p / row.seconds - 1 for row, p in pairs)
        errors = sorted(map(abs, signed))
        figures[table] = {
            "rows": len(pairs),
            "mean_absolute_error": statistics.mean(errors),
            "median_absolute_error": statistics.median(errors),
            "absolute_error_of_90_per_cent": errors[int(0.9 * len(errors))],
            "largest_absolute_error": errors[-1],
            "mean_signed_error": statistics.mean(signed),
            "from_10_to_90_per_cent": [signed[int(q * len(signed))] for q in (0.1, 0.9)],
            "choice": judge_choice(pairs),
        }
    return figures


def judge_choice(pairs: Iterable[tuple[Row, float]]) -> dict[str, Any]:
    jobs = defaultdict(list)
    for row, predicted in pairs:
        jobs[row.job].append((predicted, row.seconds))
    figures: dict[str, Any] = {}
    for fewest in (2, 4):
        several = [sorted(job) for job in jobs.values() if len(job) >= fewest]
        regrets = {
            k: [min(s for _, s in job[:k]) / min(s for _, s in job) - 1 for job in several]
            for k in (1, 3)
        }
        figures[f"jobs_of_{fewest}_layouts_or_more"] = {
            "jobs": len(several),
            "first_three_within_10_per_cent": statistics.mean(r <= 0.1 for r in regrets[3]),
            "mean_loss_of_first": statistics.mean(regrets[1]),
            "mean_loss_of_first_three": statistics.mean(regrets[3]),
            "largest_loss_of_first_three": max(regrets[3]),
        }
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--fit", action="store_true", help="cross-validate, and fit on all rows")
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--unseen", type=Path, help="rows that no term and no constant is from")
    parser.add_argument("--rows", type=Path, help="folder of published_2026.csv")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    machine = replace(find_machine(gpu="a100-80g"), network_bytes_per_second=NETWORK)
    record: dict[str, Any] = describe_machine(())
    if arguments.folder:
        rows = read_rows(arguments.folder)
        record["shipped constants"] = judge(rows, [predict(row, machine) for row in rows])
        if arguments.fit:
            predicted = cross_validate(rows, machine, arguments.folds)
            record["rows the fit has not seen"] = judge(rows, predicted)
            record["fitted"] = fit(rows, machine)
            one_node = [row for row in rows if row.table == "single"]
            alone = with_constants(machine, fit(one_node, machine))
            others = [row for row in rows if row.table == "multi"]
            several = judge(others, [predict(row, alone) for row in others])
            record["several nodes, by constants fitted on one node"] = several
        print(render(record))
    if arguments.unseen:
        rows = read_rows(arguments.unseen)
        record["unseen"] = judge(rows, [predict(row, machine) for row in rows])
    if arguments.rows:
        record["rows of many sources"] = judge_published(read_published(arguments.rows))
        print(show_published(record["rows of many sources"]))
    record["published"] = published_rows()
    record["FSDP, its program"] = judge_composer(COMPOSER)
    record["FSDP, as this program"] = judge_composer(None)
    print(show(record["published"]))
    if arguments.output:
        arguments.output.write_text(render(record))


if __name__ == "__main__":
    main()
