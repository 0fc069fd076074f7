"""The memory that the plan foretells, against the simulated step and against real ranks.

    python benchmarks/planned_memory.py --output record.json

Two parts. The formulas of `planning.memory` and the peak of the simulated step, for small and large
models in every kind of layout, and for the recipes on the ranks of their guides. And the simulated
step, on the CPU, against real ranks over gloo: all tensors there are at once, counted below
PyTorch's dispatcher, and what its allocator gave out, which has what kernels take for themselves
too. Host memory is not counted.

The first part goes on where a record that is there already ends.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measuring import Figures, describe_machine, render
from torch import multiprocessing
from torch.profiler import ProfilerActivity, profile

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.parallel.mesh import build_mesh
from trainyard.planning.memory import rank_memory
from trainyard.simulate.accounting import Accounting
from trainyard.simulate.simulation import count_steps, micro_batches_per_step, simulate

BASE = """train.compile=never train.micro_batch_size=1 train.global_batch_size=8 model.dropout=0.0
    precision.kind=bf16 parallel.zero_stage=0"""
SMALL = """model.n_layers=4 model.d_model=256 model.n_heads=4 model.d_ff=1024
    model.sequence_length=512 model.vocabulary_size=8000"""


@dataclass(frozen=True)
class Case:
    """A run on a number of ranks; changes without a section are those of `parallel`."""

    source: str
    n_ranks: int
    changes: str = ""

    def load(self) -> Run:
        base = f"{BASE} {SMALL}" if self.source == "tiny" else "train.compile=never"
        words = [word if "." in word else f"parallel.{word}" for word in self.changes.split()]
        return load_run(self.source, [*base.split(), *words]).run


# The same small model in all layouts; the recipes on the ranks of their guides; larger presets.
CASES = (
    Case("tiny", 1),
    Case("tiny", 1, "precision.kind=fp16"),
    Case("tiny", 1, "precision.kind=fp32"),
    Case("tiny", 1, "model.dropout=0.1"),
    Case("tiny", 1, "recompute=block"),
    Case("tiny", 1, "recompute=attention"),
    Case("tiny", 1, "train.global_batch_size=1"),
    Case("tiny", 1, "model.tied_embeddings=false"),
    Case("tiny", 2),
    Case("tiny", 2, "train.global_batch_size=2"),
    Case("tiny", 2, "zero_stage=1"),
    Case("tiny", 2, "zero_stage=1 train.global_batch_size=2 model.dropout=0.1"),
    Case("tiny", 2, "zero_stage=2"),
    Case("tiny", 4, "zero_stage=2 train.global_batch_size=4"),
    Case("tiny", 4, "zero_stage=2 data_replicate=2"),
    Case("tiny", 2, "zero_stage=3"),
    Case("tiny", 8, "zero_stage=3"),
    Case("tiny", 4, "zero_stage=3 recompute=block"),
    Case("tiny", 8, "zero_stage=3 recompute=block model.n_layers=24"),
    Case("tiny", 8, "zero_stage=3 model.n_layers=24 train.global_batch_size=32"),
    Case("tiny", 8, "pipeline=2 zero_stage=3 model.n_layers=24 train.global_batch_size=32"),
    Case("tiny", 2, "tensor=2"),
    Case("tiny", 2, "tensor=2 sequence=true"),
    Case("tiny", 4, "tensor=4 sequence=true recompute=block model.dropout=0.1"),
    Case("tiny", 4, "tensor=4 sequence=true model.n_layers=24 model.dropout=0.1"),
    Case("tiny", 4, "tensor=4 sequence=true model.n_layers=24 recompute=attention"),
    Case("tiny", 4, "tensor=2 sequence=true pipeline=2 chunks=2 schedule=zero_bubble"),
    Case("tiny", 2, "context=2"),
    Case("tiny", 2, "context=2 recompute=block zero_stage=2"),
    Case("tiny", 4, "context=4 context_method=ring"),
    Case("tiny", 2, "pipeline=2"),
    Case("tiny", 4, "pipeline=4"),
    Case("tiny", 4, "pipeline=4 train.global_batch_size=32"),
    Case("tiny", 4, "pipeline=4 schedule=gpipe"),
    Case("tiny", 2, "pipeline=2 chunks=2 schedule=interleaved"),
    Case("tiny", 2, "pipeline=2 chunks=2 schedule=zero_bubble"),
    Case("tiny", 2, "pipeline=2 chunks=2 schedule=interleaved train.global_batch_size=32"),
    Case("tiny", 2, "pipeline=2 chunks=2 schedule=zero_bubble train.global_batch_size=32"),
    Case("tiny", 4, "pipeline=4 schedule=zero_bubble"),
    Case("tiny", 2, "pipeline=2 recompute=attention"),
    Case("tiny", 2, "pipeline=2 recompute=block precision.kind=fp16"),
    Case("tiny", 4, "pipeline=2 zero_stage=1"),
    Case("tiny", 4, "pipeline=2 zero_stage=3"),
    Case("tiny", 8, "pipeline=2 tensor=2 sequence=true zero_stage=1"),
    Case("recipes/laptop/gpt-10m.toml", 1),
    Case("recipes/laptop/wikipedia.toml", 1),
    Case("recipes/laptop/gpt-10m.toml", 2, "train.micro_batch_size=8"),
    Case("recipes/lumi/125m.toml", 8),
    Case("recipes/lumi/13b.toml", 16),
    Case("recipes/msamp/345m-bf16.toml", 8),
    Case("recipes/msamp/345m-deepspeed-fp16.toml", 1),
    Case("recipes/msamp/6.7b-bf16.toml", 8),
    Case("recipes/msamp/13b-bf16.toml", 8),
    Case("recipes/msamp/13b-deepspeed-bf16.toml", 8),
    Case("recipes/azure/125m.toml", 8),
    Case("recipes/azure/64m.toml", 8),
    Case("recipes/azure/356m.toml", 8),
    Case("recipes/azure/1.3b.toml", 16),
    Case("recipes/azure/13b.toml", 32),
    Case("recipes/polaris/gpt13b.toml", 8),
    Case("recipes/polaris/gpt25b.toml", 16),
    Case("recipes/azure/30b.toml", 64),
    Case("recipes/azure/175b.toml", 1024),
    Case("recipes/benchmark64/full.toml", 64),
    Case("recipes/lumi/175b.toml", 512),
)


def compare_formulas(done: list[Figures]) -> Iterator[Figures]:
    """Yields what the formulas say of both ends of each pipeline, and what the simulation finds."""
    known = {(each["source"], each["n_ranks"], each["changes"]) for each in done}
    yield from done
    for case in CASES:
        if (case.source, case.n_ranks, case.changes) in known:
            continue
        run = case.load()
        plan = resolve(run, case.n_ranks)
        n_places = plan.topology.pipeline
        for place in sorted({0, n_places - 1}):
            found = simulate(run, case.n_ranks, place * case.n_ranks // n_places)
            yield {
                "source": case.source,
                "n_ranks": case.n_ranks,
                "changes": case.changes,
                "pipeline_rank": place,
                "simulated_bytes": found.peak_bytes,
                "moment": found.moment,
                "seconds": round(found.seconds, 1),
            }


def judge(rows: list[Figures]) -> None:
    """Adds what the formulas say, without what libraries take, which is not simulated."""
    for row in rows:
        run = Case(row["source"], row["n_ranks"], row["changes"]).load()
        memory = rank_memory(run, resolve(run, row["n_ranks"]), row["pipeline_rank"])
        planned = memory.peak_bytes - memory.items["context and libraries"]
        row["planned_bytes"] = planned
        row["difference"] = round(planned / row["simulated_bytes"] - 1, 4)


REAL_CASES = {
    "single": (1, ""),
    "recompute": (1, "recompute=block"),
    "zero 0": (2, ""),
    "zero 1": (2, "zero_stage=1"),
    "zero 2": (2, "zero_stage=2"),
    "zero 3": (2, "zero_stage=3"),
    "tensor, sequence": (2, "tensor=2 sequence=true"),
    "pipeline": (2, "pipeline=2"),
    "interleaved": (2, "pipeline=2 chunks=2 schedule=interleaved"),
    "zero bubble": (2, "pipeline=2 chunks=2 schedule=zero_bubble"),
    "ulysses": (2, "context=2"),
    "three axes": (8, "pipeline=2 tensor=2 sequence=true zero_stage=1"),
}


def measure(rank: int, case: Case, folder: str) -> None:
    """Trains real steps as one rank; leaves the peaks of accounts and allocator in a file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if case.n_ranks > 1:
        store = dist.FileStore(f"{folder}/store", case.n_ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=case.n_ranks)
    run = case.load()
    plan = resolve(run, case.n_ranks)
    n = micro_batches_per_step(run, plan)
    mesh = build_mesh(plan.topology, rank, torch.device("cpu"))
    books = Accounting()
    with books:
        counted = count_steps(run, plan, mesh, books, [n, n])[-1].peak_bytes
    # All over again: the profiler sees memory from its start on, and accounts have some too.
    del books
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        count_steps(run, plan, mesh, Accounting(), [n, n])
    allocated = peak = 0
    results: Any = profiled.profiler.kineto_results  # type: ignore[union-attr]
    for event in results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    Path(folder, f"{rank}.json").write_text(json.dumps([counted, peak]))
    if case.n_ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


def compare_real() -> Iterator[Figures]:
    """Yields the peaks of real ranks and of the simulated ones, for the first and the last."""
    for name, (n_ranks, changes) in REAL_CASES.items():
        case = Case("tiny", n_ranks, f"{changes} precision.kind=fp32")
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(measure, (case, folder), n_ranks)  # type: ignore[no-untyped-call]
            for rank in sorted({0, n_ranks - 1}):
                counted, allocated = json.loads(Path(folder, f"{rank}.json").read_text())
                simulated = simulate(case.load(), n_ranks, rank, on_gpu=False).peak_bytes
                yield {
                    "layout": name,
                    "rank": rank,
                    "simulated_bytes": simulated,
                    "counted_bytes": counted,
                    "allocated_bytes": allocated,
                    "difference_to_counted": round(simulated / counted - 1, 4),
                    "difference_to_allocated": round(simulated / allocated - 1, 4),
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--formulas-only", action="store_true")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", category=UserWarning)
    before = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    record: Figures = {**describe_machine(["torch"]), "formulas": [], "real": []}
    record["real"] = before.get("real", [])
    for row in compare_formulas(before.get("formulas", [])):
        record["formulas"].append(row)
        arguments.output.write_text(render(record))
    judge(record["formulas"])
    if not arguments.formulas_only:
        record["real"] = list(compare_real())
    arguments.output.write_text(render(record))
    differences = [row["difference"] for row in record["formulas"]]
    print(f"{len(differences)} planned: {min(differences):+.1%} to {max(differences):+.1%}")


if __name__ == "__main__":
    main()
