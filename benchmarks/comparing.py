"""Time to compare the keys of documents, band by band, as `prepare` shares it among processes.

    python benchmarks/comparing.py --documents 20_000_000 --processes 2 --output record.json

Keys are random 64-bit numbers, as those of documents that are all different: the most there is to
sort. Each band is compared by a process of its own, which uses 256 MiB; the exact comparison is one
more. Beside wall and CPU seconds of each stands what follows for 590 million documents.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from measuring import Figures, describe_machine, publish

from trainyard.config.corpus import Deduplicate, NearDeduplicate
from trainyard.corpus.preparation.duplicates import compared_columns, find_repeats

SLIMPAJAMA = 590_000_000
N_UNITS = 16


def write_keys(folder: Path, n_documents: int, n_columns: int) -> list[Path]:
    """Writes the keys of units, one column after the other, as `prepare` does."""
    files = []
    for unit in range(N_UNITS):
        random = np.random.default_rng(unit)
        shape = (n_documents // N_UNITS, n_columns)
        files.append(folder / f"{n_columns}-{unit}.npy")
        keys = random.integers(0, 2**64, shape, dtype=np.uint64)
        np.save(files[-1], np.asfortranarray(keys))
    return files


def compare(columns: list[int], files: list[Path], folder: Path) -> tuple[float, float]:
    """Compares one band; gives wall and CPU seconds."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        wall, cpu = time.perf_counter(), time.process_time()
        find_repeats(columns, files, Path(scratch) / "mask")
        return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    """Measures, prints, and writes the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2_000_000)
    parser.add_argument("--bands", type=int, default=14)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    near = NearDeduplicate(kind="near_deduplicate", bands=arguments.bands)
    steps: dict[str, Deduplicate | NearDeduplicate] = {
        "exact": Deduplicate(kind="deduplicate"),
        "near": near,
    }
    record: Figures = describe_machine(("numpy",)) | {"load_average": os.getloadavg()}
    with (
        tempfile.TemporaryDirectory() as name,
        ProcessPoolExecutor(arguments.processes) as pool,
    ):
        folder = Path(name)
        for kind, step in steps.items():
            keys = compared_columns(step)
            files = write_keys(folder, arguments.documents, sum(map(len, keys)))
            started = time.perf_counter()
            tasks = [pool.submit(compare, columns, files, folder) for columns in keys]
            walls, cpus = zip(*(task.result() for task in tasks), strict=True)
            mean = sum(cpus) / len(cpus)
            record[kind] = {
                "wall_seconds_of_each": [round(wall, 2) for wall in walls],
                "cpu_seconds_of_each": [round(cpu, 2) for cpu in cpus],
                "wall_seconds": round(time.perf_counter() - started, 2),
                "cpu_seconds_of_one_of_slimpajama": round(mean * SLIMPAJAMA / arguments.documents),
            }
    publish(record, arguments.output)


if __name__ == "__main__":
    main()
