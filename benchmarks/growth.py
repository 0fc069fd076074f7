"""How costs grow with their inputs: ranks, blocks, documents, tensors, files, devices (Linux).

    python benchmarks/growth.py --output benchmarks/records/suite-growth.json    # 25 minutes
    python benchmarks/growth.py --table      # writes docs/growth.md and its picture by the record

Each cell of `growth_cells.py` measures its costs at growing sizes of one input, each size in a
process of its own, and keeps the least of three; one, where that takes long. The slope is that of
log cost over log size, by least squares over the three largest sizes: at most 1 where nothing grows
faster than its input. The fixed share is the part of the largest cost that the line through the
smallest and the largest size has at size 0. CPU time, as others use the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from growth_cells import CELLS, SECONDS, Cell, Costs
from growth_page import RECORD, write_page
from measuring import Figures, describe_machine, publish, render

ROUNDS, LONG_SECONDS = 3, 60.0
FITTED = 3


def measure(name: str, size: int, rounds: int) -> Costs:
    """Measures the costs of a cell at one size, each round in a new process."""
    found: list[Costs] = []
    for _ in range(rounds):
        started = time.perf_counter()
        child = [sys.executable, __file__, "--child", name, str(size)]
        # Torch warns of each connection where the loopback address has no name.
        environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        output = subprocess.run(
            child, check=True, stdout=subprocess.PIPE, text=True, env=environment
        ).stdout
        found.append(json.loads(output.splitlines()[-1]))
        if time.perf_counter() - started > LONG_SECONDS:
            break
    print(f"{name} {size:,}: {len(found)} rounds", file=sys.stderr, flush=True)
    return {cost: min(each[cost] for each in found) for cost in found[0]}


def run_cell(name: str, cell: Cell, sizes: Sequence[int], rounds: int) -> Figures:
    """Measures a cell at all sizes, and fits each of its costs."""
    found = {size: measure(name, size, rounds) for size in sizes}
    costs = {}
    for cost, unit in cell.units.items():
        values = {size: costs[cost] for size, costs in found.items() if costs.get(cost, 0) > 0}
        digits = {size: float(f"{value:.4g}") for size, value in values.items()}
        shown = digits if unit == SECONDS else {size: int(v) for size, v in values.items()}
        costs[cost] = {
            "unit": unit,
            "sizes": list(shown),
            "values": list(shown.values()),
            "slope": round(fit_slope(values), 3),
            "fixed_share": round(fixed_share(values), 3),
        }
    return {"counted": cell.counted, "costs": costs}


def fit_slope(values: dict[int, float]) -> float:
    """Fits log cost over log size, at the largest sizes."""
    points = [(math.log(size), math.log(value)) for size, value in sorted(values.items())]
    return statistics.linear_regression(*zip(*points[-FITTED:], strict=True)).slope


def fixed_share(values: dict[int, float]) -> float:
    """Returns which share of the largest cost does not depend on the size."""
    (small, least), *_, (large, most) = sorted(values.items())
    at_zero = least - small * (most - least) / (large - small)
    return min(max(at_zero / most, 0.0), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CELLS, default=list(CELLS), metavar="CELL")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--table", action="store_true", help="only write page and picture")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, size = options.child
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(CELLS[name].measure(int(size), Path(folder))))
        return
    if options.table:
        write_page(json.loads(RECORD.read_text(encoding="utf-8")))
        return
    record = describe_machine(("torch", "numpy")) | {"load_average": os.getloadavg()}
    record["cells"] = {}
    for name in options.only:
        cell = CELLS[name]
        sizes, rounds = (cell.small, 1) if options.small else (cell.sizes, ROUNDS)
        record["cells"][name] = run_cell(name, cell, sizes, rounds)
        if options.output:  # what is measured is kept, should a later cell fail
            options.output.write_text(render(record), encoding="utf-8")
    publish(record, options.output)


if __name__ == "__main__":
    main()
