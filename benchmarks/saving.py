"""Rate of saving and loading a state, beside the disk itself and what others do (Linux).

    python benchmarks/saving.py --gigabytes 2 4 --scratch . --output record.json

The state is weights and both moments of a GPT with random values. In turn, in one process: a plain
write of its bytes to one file with a sync; the same where the kernel is told after each piece, and
past the page cache; our save, with checksums and without; `torch.save`, DCP and safetensors, each
with a sync. What each wrote is then read back, from the disk and again from memory. Last, how long
training stands still for a save in the background, beside a plain copy. A first round is not
counted.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from measuring import Figures, describe_machine, publish
from safetensors.torch import load_file, save_file
from torch import Tensor

from trainyard.architecture import padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint import shard
from trainyard.checkpoint.background import AsyncCheckpointer, Retention
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.load import load_into
from trainyard.checkpoint.save import ALONE, save_checkpoint
from trainyard.config.load import load_run

PIECE_BYTES = 8 * 2**20
FACTS = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})
State = dict[str, Tensor]
Work = Callable[[], object]


def make_state(gigabytes: float) -> State:
    """Makes weights and moments of a GPT with as many blocks as fit."""
    d_model = 1024 if gigabytes >= 1 else 64
    block_bytes = 12 * 12 * d_model**2
    rest_bytes = 12 * d_model * 50304
    n_layers = max(1, round((gigabytes * 1e9 - rest_bytes) / block_bytes))
    size = [f"model.{key}" for key in (f"n_layers={n_layers}", f"d_model={d_model}", "n_heads=16")]
    gpt = load_run("tiny", [*size, f"model.d_ff={4 * d_model}", "model.vocabulary_size=50257"]).run
    generator = torch.Generator().manual_seed(0)
    shapes = parameter_shapes(gpt.model, padded_vocabulary_size(gpt.model))
    state = {}
    for name, shape in shapes.items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            state[key] = torch.rand(shape, generator=generator)
    return state


def bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def pieces_of(state: State) -> Iterator[memoryview]:
    for tensor in state.values():
        values = bytes_of(tensor)
        for start in range(0, len(values), PIECE_BYTES):
            yield values[start : start + PIECE_BYTES]


def write_plain(state: State, folder: Path, *, tell: bool = False) -> None:
    with (folder / "raw").open("xb", buffering=0) as file:
        end = 0
        for piece in pieces_of(state):
            file.write(piece)
            if tell:
                os.posix_fadvise(file.fileno(), end, len(piece), os.POSIX_FADV_DONTNEED)
            end += len(piece)
        os.fsync(file.fileno())


def write_past_cache(n_bytes: int, folder: Path, piece: mmap.mmap) -> None:
    descriptor = os.open(folder / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT)
    for _ in range(0, n_bytes, PIECE_BYTES):
        os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)


def flush_all(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def write_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")
    flush_all(folder)


def write_dcp(state: State, folder: Path) -> None:
    writer = dcp.FileSystemWriter(folder, sync_files=True, thread_count=2)
    dcp.save(dict(state), storage_writer=writer, no_dist=True)


def write_safetensors(state: State, folder: Path) -> None:
    save_file(state, folder / "state.safetensors")
    flush_all(folder)


def read_plain(folder: Path) -> None:
    room = memoryview(bytearray(PIECE_BYTES))
    with (folder / "raw").open("rb", buffering=0) as file:
        while file.readinto(room):
            pass


def read_torch(target: State, folder: Path) -> None:
    fill(target, torch.load(folder / "state.pt", weights_only=True))


def read_dcp(target: State, folder: Path) -> None:
    dcp.load(dict(target), storage_reader=dcp.FileSystemReader(folder), no_dist=True)


def read_safetensors(target: State, folder: Path) -> None:
    fill(target, load_file(folder / "state.safetensors"))


def fill(target: State, found: State) -> None:
    for name, tensor in target.items():
        tensor.copy_(found[name])


@contextlib.contextmanager
def no_checksums() -> Iterator[None]:
    """Has our files written and read without checksums of values."""
    nothing = SimpleNamespace(update=lambda piece: None, hexdigest=lambda: "0" * 32)
    no_hashes: Any = SimpleNamespace(xxh3_128=lambda: nothing)
    shard.xxhash = no_hashes
    try:
        yield
    finally:
        shard.xxhash = xxhash


@dataclass(frozen=True)
class Case:
    """One way to save and load; `read` is None where the same bytes are read elsewhere."""

    write: Callable[[Path], object]
    read: Callable[[Path], object] | None = None
    checksums: bool = True


def cases_of(state: State, target: State) -> dict[str, Case]:
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    piece = mmap.mmap(-1, PIECE_BYTES)
    piece.write(max(pieces_of(state), key=len))

    def save(folder: Path) -> None:
        save_checkpoint(folder, FACTS, state)

    def load(folder: Path) -> None:
        load_into(folder / "step-00000001", target, 50257)

    return {
        "raw": Case(lambda folder: write_plain(state, folder), read_plain),
        "raw, told early": Case(lambda folder: write_plain(state, folder, tell=True)),
        "raw, past the cache": Case(lambda folder: write_past_cache(n_bytes, folder, piece)),
        "ours": Case(save, load),
        "ours without checksums": Case(save, load, checksums=False),
        "torch.save": Case(
            lambda folder: write_torch(state, folder), lambda folder: read_torch(target, folder)
        ),
        "DCP": Case(
            lambda folder: write_dcp(state, folder), lambda folder: read_dcp(target, folder)
        ),
        "safetensors": Case(
            lambda folder: write_safetensors(state, folder),
            lambda folder: read_safetensors(target, folder),
        ),
    }


def seconds_of(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def drop_from_memory(folder: Path) -> None:
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_case(case: Case, scratch: Path) -> dict[str, float]:
    with contextlib.ExitStack() as stack:
        if not case.checksums:
            stack.enter_context(no_checksums())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        os.sync()
        found = {"save": seconds_of(lambda: case.write(folder))}
        if case.read is not None:
            read = case.read
            drop_from_memory(folder)
            found["load from disk"] = seconds_of(lambda: read(folder))
            found["load from memory"] = seconds_of(lambda: read(folder))
    return found


def measure_stall(state: State, target: State, saver: AsyncCheckpointer) -> dict[str, float]:
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    found = {
        "plain copy": seconds_of(lambda: fill(target, state)),
        "stall": seconds_of(lambda: saver.save(FACTS, state, {}, n_bytes)),
    }
    saver.wait()
    return found


def measure_size(gigabytes: float, rounds: int, scratch: Path) -> Figures:
    state = make_state(gigabytes)
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    n_bytes = sum(tensor.nbytes for tensor in state.values())
    cases = cases_of(state, target)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in (*cases, "stall")}
    in_background = scratch / "background"
    saver = AsyncCheckpointer(in_background, ALONE, Retention(1), background=True)
    for number in range(rounds + 1):
        names = list(cases)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            for tensor in target.values():
                tensor.zero_()
            rows[name].append(measure_case(cases[name], scratch))
            if cases[name].read not in (None, read_plain):
                assert all(torch.equal(target[key], state[key]) for key in state), name
        rows["stall"].append(measure_stall(state, target, saver))
    shutil.rmtree(in_background)
    first_stall = rows["stall"][0]["stall"]
    counted = {name: found[1:] for name, found in rows.items()}
    return {
        "gigabytes": round(n_bytes / 1e9, 3),
        "tensors": len(state),
        **summarize(counted, n_bytes),
        "first_stall_seconds": round(first_stall, 3),
    }


def summarize(rows: dict[str, list[dict[str, float]]], n_bytes: int) -> Figures:
    """Gives rates by case, and ratios of medians and of each round."""
    found: Figures = {}
    for what in ("save", "load from disk", "load from memory"):
        seconds = {
            name: [row[what] for row in values]
            for name, values in rows.items()
            if what in values[0]
        }
        found[what] = {
            name: {
                "gigabytes_per_second": rate_of(values, n_bytes),
                "rate_over_raw": ratio_of(seconds["raw"], values),
                "all_seconds": [round(value, 3) for value in values],
            }
            for name, values in seconds.items()
        }
        ours, plain = seconds["ours"], seconds["ours without checksums"]
        found[what]["cost of checksums"] = ratio_of(ours, plain)
    copies, stalls = ([row[name] for row in rows["stall"]] for name in ("plain copy", "stall"))
    found["stall in the background"] = {
        "plain copy": {"seconds": [round(value, 4) for value in copies]},
        "ours": {"seconds": [round(value, 4) for value in stalls]},
        "stall_over_plain_copy": ratio_of(stalls, copies),
    }
    return found


def rate_of(seconds: list[float], n_bytes: int) -> Figures:
    return {
        "best": round(n_bytes / min(seconds) / 1e9, 3),
        "median": round(n_bytes / statistics.median(seconds) / 1e9, 3),
    }


def ratio_of(these: list[float], others: list[float]) -> Figures:
    """Divides seconds of these by those of others."""
    by_round = [a / b for a, b in zip(these, others, strict=True)]
    return {
        "of_medians": round(statistics.median(these) / statistics.median(others), 3),
        "median_of_rounds": round(statistics.median(by_round), 3),
        "of_best": round(min(these) / min(others), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure on")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    load = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        sizes = [measure_size(size, options.rounds, Path(scratch)) for size in options.gigabytes]
    notes = [
        "everything that is saved is on the disk when the clock stops",
        "raw: one file, in pieces of 8 MiB from where the tensors lie; read into one such piece",
        "told early: after each piece the kernel is advised that it will not be read soon, and "
        "begins to write; ours does so too",
        "past the cache: O_DIRECT, one piece again and again",
        "loads end in tensors that were there before; torch.load and safetensors make their own, "
        "which are copied",
        "DCP: FileSystemWriter(sync_files=True, thread_count=2), no_dist",
    ]
    record = describe_machine(("torch", "safetensors"))
    record |= {"load_average": load, "threads": torch.get_num_threads(), "notes": notes}
    record |= {"sizes": sizes}
    publish(record, options.output)


if __name__ == "__main__":
    main()
