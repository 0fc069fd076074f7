"""Our checkpoints beside PyTorch's DCP: four ranks over gloo, and one (Linux).

    python benchmarks/saving_ranks.py --rounds 5 --scratch . --output record.json

The state is GPT-3 125M with both moments, 1.5 GB, rows sharded over the ranks as FSDP2 does. In
turn, in one group of processes: our save with checksums, DCP's own format, and DCP writing
safetensors, each on the disk when the clock stops. The same ranks read it back from the disk; then
one process reads all of it alone, which is another layout. Last, one byte of the values is changed,
and each is read once more. A first round is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from measuring import Figures, describe_machine, publish
from saving import drop_from_memory
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from trainyard.architecture import padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.load import load_into
from trainyard.checkpoint.save import SavingRank, save_checkpoint
from trainyard.config.load import load_run
from trainyard.errors import CheckpointError
from trainyard.parallel.placement import local_part, place

FACTS = Facts(step=1, consumed_sequences=0, consumed_tokens=0, run={})
State = dict[str, DTensor]


@dataclass(frozen=True)
class Format:
    """One way to write a state and to read it."""

    write: Callable[[State, Path], object]
    read: Callable[[State, Path], object]


def ours() -> Format:
    def agree(text: str | None) -> str | None:
        dist.barrier()
        return text

    def write(state: State, folder: Path) -> None:
        tensors = {name: local_part(tensor) for name, tensor in state.items()}
        places = {name: place(tensor) for name, tensor in state.items()}
        n_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        ranks = SavingRank(dist.get_rank(), dist.get_world_size(), agree)
        save_checkpoint(folder, FACTS, tensors, places, ranks, n_bytes)

    def read(state: State, folder: Path) -> None:
        tensors = {name: local_part(tensor) for name, tensor in state.items()}
        places = {name: place(tensor) for name, tensor in state.items()}
        load_into(folder / "step-00000001", tensors, 50257, places)

    return Format(write, read)


FORMATS = {
    "ours": ours(),
    "DCP": Format(
        lambda state, folder: dcp.save(
            dict(state), storage_writer=dcp.FileSystemWriter(folder, sync_files=True)
        ),
        lambda state, folder: dcp.load(dict(state), storage_reader=dcp.FileSystemReader(folder)),
    ),
    # Its files are not synced; `sync` below waits for them.
    "DCP, safetensors": Format(
        lambda state, folder: dcp.save(
            dict(state),
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
        ),
        lambda state, folder: dcp.load(
            dict(state), storage_reader=HuggingFaceStorageReader(str(folder))
        ),
    ),
}


def make_state(*, fill: bool) -> State:
    """Makes this rank's rows of weights and moments."""
    run = load_run("gpt3-125m").run
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, shape in parameter_shapes(run.model, padded_vocabulary_size(run.model)).items():
        for key in (f"model.{name}", f"optimizer.{name}.exp_avg", f"optimizer.{name}.exp_avg_sq"):
            values = torch.rand(shape, generator=generator) if fill else torch.zeros(shape)
            state[key] = distribute_tensor(values, mesh, [Shard(0)])
    return state


def is_equal(state: State, target: State) -> bool:
    """Compares all rows that exist: the padding of the vocabulary is not saved."""
    return all(
        torch.equal(a.full_tensor()[:50257], b.full_tensor()[:50257])
        for a, b in zip(state.values(), target.values(), strict=True)
    )


def seconds_of(work: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def run_rank(rank: int, n_ranks: int, scratch: Path, rounds: int, results: Figures) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meeting-{n_ranks}", rank=rank, world_size=n_ranks
    )
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    state, target = make_state(fill=True), make_state(fill=False)
    for number in range(rounds + 1):
        names = list(FORMATS)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            folder = scratch / f"{name}-{n_ranks}-{number}"
            if rank == 0:
                folder.mkdir()
            for tensor in target.values():
                local_part(tensor).zero_()

            def save(name: str = name, folder: Path = folder) -> None:
                FORMATS[name].write(state, folder)
                if rank == 0:
                    sync(folder)

            row = {"save": seconds_of(save)}
            drop_from_memory(folder)
            row["load"] = seconds_of(lambda: FORMATS[name].read(target, folder))  # noqa: B023
            if number == 0:
                assert is_equal(state, target), name
            if rank == 0:
                row["bytes"] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
                results[f"{n_ranks} {name} {number}"] = row
    dist.destroy_process_group()


def load_alone(_rank: int, scratch: Path, rounds: int, results: Figures) -> None:
    """Reads what four ranks wrote in one process; then with one byte changed."""
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/meeting-alone", rank=0, world_size=1
    )
    torch.set_grad_enabled(False)
    target = make_state(fill=False)
    for number in range(rounds + 1):
        for name, each in FORMATS.items():
            folder = scratch / f"{name}-4-{number}"
            drop_from_memory(folder)
            row = {"load": seconds_of(lambda: each.read(target, folder))}  # noqa: B023
            results[f"resharded {name} {number}"] = row
    for name, each in FORMATS.items():
        folder = scratch / f"{name}-4-{rounds}"
        largest = max((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        with largest.open("r+b") as file:
            file.seek(largest.stat().st_size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        try:
            each.read(target, folder)
            results[f"changed byte {name}"] = "loaded"
        except CheckpointError:
            results[f"changed byte {name}"] = "refused"
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure on")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()
    results = mp.Manager().dict()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        folder, rounds = Path(scratch).resolve(), options.rounds
        for n_ranks in (1, 4):
            mp.spawn(run_rank, (n_ranks, folder, rounds, results), nprocs=n_ranks)
        mp.spawn(load_alone, (folder, rounds, results), nprocs=1)
    found = dict(results)
    summary: Figures = {}
    for who in ("1", "4", "resharded"):
        for name in FORMATS:
            rows = [found[f"{who} {name} {number}"] for number in range(1, rounds + 1)]
            summary[f"{who} {name}"] = {
                what: round(statistics.median(row[what] for row in rows), 3) for what in rows[0]
            } | {
                f"all {what}": [round(row[what], 3) for row in rows]
                for what in rows[0]
                if what != "bytes"
            }
    summary |= {key: value for key, value in found.items() if key.startswith("changed")}
    record = describe_machine(("torch", "safetensors")) | {"load_average": load}
    publish(record | {"rounds": rounds, "seconds": summary}, options.output)


if __name__ == "__main__":
    main()
