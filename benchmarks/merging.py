"""Rate of joining the parts of a corpus, beside plain copies of the same bytes (Linux).

    python benchmarks/merging.py --megabytes 2000 --parts 16 --scratch . --output record.json

Token files of random ids are written in parts. Then, in turn and each in a process of its own on
one core: our merge; a copy of the same .bin and .idx files with `shutil.copyfile`, without and
with a sync to the disk, as the merge does; `cat` into one file, with a sync; and reading them for a
checksum. A first round is not counted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from measuring import Figures, describe_machine, measure, publish

from trainyard.corpus.preparation.join import Part, merge_parts
from trainyard.data.indexed import IndexedWriter, token_paths
from trainyard.files import BlockChecksum

DTYPE = np.dtype(np.uint16)


def run_merge(parts: Sequence[Part]) -> None:
    merge_parts(parts, Path("joined"), DTYPE)


def run_copyfile(parts: Sequence[Part]) -> None:
    for path in files_of(parts):
        shutil.copyfile(path, path.name)


def run_copyfile_and_sync(parts: Sequence[Part]) -> None:
    run_copyfile(parts)
    for path in files_of(parts):
        with Path(path.name).open("rb") as file:
            os.fsync(file.fileno())


def run_cat_and_sync(parts: Sequence[Part]) -> None:
    with Path("joined.bin").open("wb") as file:
        subprocess.run(["cat", *map(str, files_of(parts))], check=True, stdout=file)
        os.fsync(file.fileno())


def run_checksum(parts: Sequence[Part]) -> None:
    for path in files_of(parts):
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")


RUNS: dict[str, Callable[[Sequence[Part]], None]] = {
    "merge": run_merge,
    "copyfile": run_copyfile,
    "copyfile and sync": run_copyfile_and_sync,
    "cat and sync": run_cat_and_sync,
    "checksum alone": run_checksum,
}


def files_of(parts: Sequence[Part]) -> list[Path]:
    return [path for part in parts for path in token_paths(part.prefix)]


def make_parts(folder: Path, n_parts: int, n_bytes: int) -> list[Part]:
    """Writes parts of documents of 500 tokens on average, and `blocks.json` for `load_parts`."""
    random = np.random.default_rng(0)
    parts = []
    for number in range(n_parts):
        lengths = random.integers(1, 1000, n_bytes // n_parts // 1000)
        tokens = random.integers(0, 50257, int(lengths.sum()), dtype=np.uint16)
        with IndexedWriter(folder / f"{number:06d}", DTYPE) as writer:
            writer.add_documents(tokens, lengths)
        parts.append(Part(Path(writer.prefix), writer.bin_blocks))
    blocks = {str(part.prefix): part.blocks for part in parts}
    (folder / "blocks.json").write_bytes(msgspec.json.encode(blocks))
    return parts


def load_parts(folder: Path) -> list[Part]:
    blocks = msgspec.json.decode(
        (folder / "blocks.json").read_bytes(), type=dict[str, list[BlockChecksum]]
    )
    return [Part(Path(prefix), found) for prefix, found in blocks.items()]


def check(parts: Sequence[Part], joined: Path) -> bool:
    """Whether the merge wrote the tokens of the parts, in order."""
    bins = [str(token_paths(part.prefix)[0]) for part in parts]
    with subprocess.Popen(["cat", *bins], stdout=subprocess.PIPE) as source:
        done = subprocess.run(["cmp", "-", str(joined)], check=False, stdin=source.stdout)
    return done.returncode == 0


def measure_runs(parts: Sequence[Part], rounds: int, folder: Path) -> Figures:
    rows: dict[str, list[Figures]] = {name: [] for name in RUNS}
    same_bytes = False
    for number in range(rounds + 1):
        names = list(RUNS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            with tempfile.TemporaryDirectory(dir=folder) as place:
                script, source = str(Path(__file__).resolve()), str(parts[0].prefix.parent)
                command = [sys.executable, script, "--run", name, source]
                found = measure(command, 1, Path(place))
                if number:  # the first round finds the disk and its cache in another state
                    rows[name].append(found)
                if name == "merge":
                    same_bytes = check(parts, Path(place) / "joined.bin")
    return {"same_bytes": same_bytes, "cases": summarize(rows, parts)}


def summarize(rows: dict[str, list[Figures]], parts: Sequence[Part]) -> Figures:
    megabytes = sum(path.stat().st_size for path in files_of(parts)) / 1e6
    found: Figures = {"megabytes": round(megabytes, 1)}
    for name, values in rows.items():
        seconds = [value["work_seconds"] for value in values]
        merges = [value["work_seconds"] for value in rows["merge"]]
        found[name] = {
            "megabytes_per_second": {
                "best": round(megabytes / min(seconds), 1),
                "median": round(megabytes / statistics.median(seconds), 1),
            },
            "cpu_seconds": round(statistics.median(value["cpu_seconds"] for value in values), 2),
            "peak_mebibytes": round(max(value["peak_mebibytes"] for value in values)),
            "rate_of_merge_over_this": {
                "best": round(min(seconds) / min(merges), 2),
                "median": round(statistics.median(seconds) / statistics.median(merges), 2),
            },
            "all_seconds": [round(value, 2) for value in seconds],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=2000)
    parser.add_argument("--parts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure on")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        parts = load_parts(Path(options.run[1]))
        start = time.perf_counter()
        RUNS[options.run[0]](parts)
        seconds = time.perf_counter() - start
        Path("figures.json").write_text(json.dumps({"work_seconds": seconds}), encoding="utf-8")
        return
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        (Path(folder) / "parts").mkdir()
        parts = make_parts(Path(folder) / "parts", options.parts, options.megabytes * 10**6)
        found = measure_runs(parts, options.rounds, Path(folder))
    notes = [
        "the parts were just written, so all cases read them from memory",
        "the clock runs from the first call to the last return, without the start of Python",
        "the merge syncs the joined files, and writes the .idx anew",
        "copyfile and cat copy in the kernel, without a look at the bytes",
    ]
    record = describe_machine(("numpy",)) | {"load_average": load, "notes": notes} | found
    publish(record, options.output)


if __name__ == "__main__":
    main()
