"""Speed and memory of one training step on a CPU, beside transformers, litgpt and nanoGPT.

    python3 tools/set_up.py bench
    .venv-bench/bin/python benchmarks/cpu_step.py --family llama --rounds 8 --output record.json

Each candidate trains in a process of its own, because how memory is allocated belongs to the
process; all but transformers-default keep freed memory as `trainyard train` does. All processes of
a cell run at once and take turns, so that other work on the machine slows all of them alike; read
the ratios. A turn is an untimed step, which warms memory, and a timed one. A step is forward,
backward, clipping and AdamW on one fixed batch, without dropout. Cells in bf16 have fewer
candidates, and are left out on a CPU without bf16 matmuls, which would take minutes for a turn;
`--emulated` keeps them. Where the load is high, `--threads 1` and CPU seconds are steadier.

The same mathematics: transformers, nanoGPT, and of Llama litgpt, start from our weights, the first
loss of transformers must equal ours, and losses after the timed steps are in the record. GELU has
its tanh form, the fastest, but in nanoGPT its exact one, which it has no setting for; with weights
as small as the first, losses agree all the same. nanoGPT is its own model.py at the commit in
`peers.toml`, with its loss and its configure_optimizers, which uses the fused AdamW on CUDA alone.
litgpt has no GPT-2: its GPT here has the same blocks and tied embeddings, but rotary positions on a
quarter of each head instead of learned ones, and other initial weights. Peers train as their users
do: bf16 by autocast, clip_grad_norm_, and the fused AdamW with decay on matrices alone.
`transformers-default` is what comes out of the box: fp32, eager, its own composed GELU, AdamW
without options. A peer that is missing is left out, and the record says why.

GFLOP of a step = 6 x (weights in products) x tokens + 12 L B T T H K. `products` times just the
matrix products of the blocks and the head, in all three directions: the rate nothing can exceed by
much.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cpu_step_cases import ALL, CELLS, LEAST, PEERS, SHAPES, Cell, build
from measuring import describe_machine, profile_operators, render
from peers import find_peer

from trainyard.config.devices import cpu_multiplies_bf16_natively

FIRST_LOSS_BOUND = {"float32": 2e-6, "bfloat16": 2e-3}


def serve(cell: Cell, candidate: str, threads: int) -> None:
    """Takes one step for each line that comes in, and says how it went, or where its time went."""
    import torch

    from trainyard.parallel.mesh import keep_freed_memory

    torch.set_num_threads(threads)
    if not candidate.endswith("-default"):
        keep_freed_memory(1)
    step = build(cell, candidate)
    for line in sys.stdin:
        if line.strip():
            print(json.dumps(profile_operators(step)), flush=True)
            continue
        wall, cpu = time.perf_counter(), time.process_time()
        value = step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
        print(json.dumps({"wall": wall, "cpu": cpu, "value": value, "peak": peak}), flush=True)


class Candidate:
    def __init__(self, cell: str, name: str, threads: int, path: str) -> None:
        command = [sys.executable, __file__, "--serve", name, "--cells", cell]
        command += ["--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answers: list[dict[str, float]] = []

    def step(self) -> None:
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        self.answers.append(json.loads(self.process.stdout.readline()))

    def take_turn(self) -> None:
        """Takes an untimed step, since memory is cold after a wait, and a timed one."""
        self.step()
        self.answers.pop()
        self.step()

    def profile(self) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        print("profile", file=self.process.stdin, flush=True)
        shares: dict[str, float] = json.loads(self.process.stdout.readline())
        return shares

    def close(self) -> None:
        self.process.communicate()


def find_missing(clones: Path | None) -> tuple[dict[str, str], str]:
    """Returns which peers are missing and why, and the path on which Python finds the others."""
    missing = {name: "not installed" for name in ("litgpt",) if not importlib.util.find_spec(name)}
    found = find_peer("nanoGPT", clones)
    if isinstance(found, str):
        missing["nanoGPT"] = found
        return missing, os.environ.get("PYTHONPATH", "")
    return missing, os.pathsep.join([str(found), os.environ.get("PYTHONPATH", "")]).rstrip(":")


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    cell, rounds, threads = CELLS[name], arguments.rounds, arguments.threads
    missing, path = arguments.missing, arguments.path
    names = [who for who in cell.candidates if who.split("-")[0] not in missing]
    if cell.family != "gpt2":
        names = [who for who in names if who != "nanoGPT"]
    candidates = {who: Candidate(name, who, threads, path) for who in names}
    for candidate in candidates.values():  # compiles, makes the optimizer's state, touches memory
        candidate.step()
    for number in range(rounds):
        order = list(candidates.values())
        for candidate in order[number % len(order) :] + order[: number % len(order)]:
            candidate.take_turn()
    profile = candidates["ours"].profile()
    for candidate in candidates.values():
        candidate.close()
    answers = {who: candidate.answers for who, candidate in candidates.items()}
    described = {"cell": asdict(cell) | {"gflop": cell.gflop}, "missing": missing}
    return summary(cell, answers) | {"profile": profile} | described


def summary(cell: Cell, answers: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    products = [answer["value"] for answer in answers.pop("products")[1:]]
    limit = cell.product_gflop / min(products)
    rows: dict[str, Any] = {}
    for who, found in answers.items():
        walls = [answer["wall"] for answer in found[1:]]
        rows[who] = {
            "min_seconds": min(walls),
            "median_seconds": statistics.median(walls),
            "min_cpu_seconds": min(answer["cpu"] for answer in found[1:]),
            "median_cpu_seconds": statistics.median(answer["cpu"] for answer in found[1:]),
            "tokens_per_second": cell.n_tokens / statistics.median(walls),
            "gflop_per_second": cell.gflop / min(walls),
            "fraction_of_products": cell.gflop / min(walls) / limit,
            "peak_megabytes": found[-1]["peak"],
            "first_step_seconds": found[0]["wall"],
            "first_loss": found[0]["value"],
            "last_loss": found[-1]["value"],
            "all_wall_seconds": walls,
        }
    peers = [who for who in PEERS if who in rows]
    ratios = {
        f"{how}_{what}": min(rows[p][f"{how}_{what}"] for p in peers)
        / rows["ours"][f"{how}_{what}"]
        for how in ("min", "median")
        for what in ("seconds", "cpu_seconds")
    }
    first = abs(rows["ours"]["first_loss"] / rows["transformers"]["first_loss"] - 1)
    return {
        "candidates": rows,
        "products_gflop_per_second": limit,
        "fastest_peer_over_ours": ratios,
        "first_loss_relative_difference": first,
        "same_mathematics": first < FIRST_LOSS_BOUND[cell.dtype],
    }


def show(name: str, found: dict[str, Any]) -> None:
    limit = found["products_gflop_per_second"]
    print(f"\n{name}: {found['cell']['gflop']:.0f} GFLOP, products alone {limit:.0f} GFLOP/s")
    print(f"{'':22}  min ms  med ms  cpu ms  GFLOP/s  of products  peak MB  last loss")
    for who, row in found["candidates"].items():
        print(
            f"{who:22} {row['min_seconds'] * 1e3:7.0f} {row['median_seconds'] * 1e3:7.0f} "
            f"{row['min_cpu_seconds'] * 1e3:7.0f} {row['gflop_per_second']:8.0f} "
            f"{row['fraction_of_products']:12.2f} {row['peak_megabytes']:8.0f} "
            f"{row['last_loss']:.5f}"
        )
    ratios = {key: round(value, 3) for key, value in found["fastest_peer_over_ours"].items()}
    print(f"fastest peer / ours: {ratios}")
    print(f"first loss differs by {found['first_loss_relative_difference']:.1e}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--family", choices=SHAPES, default="gpt2")
    parser.add_argument(
        "--cells", help=f"of {', '.join(CELLS)}; absent: all large ones of --family"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--peers", type=Path, help="folder with a clone of nanoGPT")
    parser.add_argument("--emulated", action="store_true", help="bf16 also where it is emulated")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=ALL, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(CELLS[arguments.cells], arguments.serve, arguments.threads)
        return
    names = [name for name, cell in CELLS.items() if cell.family == arguments.family]
    names = [name for name in names if CELLS[name].candidates != LEAST]
    names = arguments.cells.split(",") if arguments.cells else names
    emulated = [name for name in names if CELLS[name].dtype == "bfloat16"]
    if arguments.emulated or cpu_multiplies_bf16_natively():
        emulated = []
    names = [name for name in names if name not in emulated]
    peers = [name for name in ("transformers", "litgpt") if importlib.util.find_spec(name)]
    record = describe_machine(["torch", *peers])
    record |= {"threads": arguments.threads, "rounds": arguments.rounds, "cells": {}}
    record["left_out"] = {name: "this CPU emulates bf16" for name in emulated}
    arguments.missing, arguments.path = find_missing(arguments.peers)
    for name in names:
        load = os.getloadavg()[0]
        found = measure(name, arguments) | {"load_before": load}
        record["cells"][name] = found
        show(name, found)
        if arguments.output:
            arguments.output.write_text(render(record), encoding="utf-8")
    for key in ("min_seconds", "median_seconds", "min_cpu_seconds", "median_cpu_seconds"):
        ratios = [found["fastest_peer_over_ours"][key] for found in record["cells"].values()]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        record[f"geometric_mean_{key}"] = mean
        print(f"fastest peer / ours by {key}: mean {mean:.3f}, least {min(ratios):.3f}")
    if arguments.output:
        arguments.output.write_text(render(record), encoding="utf-8")


if __name__ == "__main__":
    main()
