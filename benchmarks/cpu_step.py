"""Speed and memory of one training step on a CPU, beside transformers and litgpt.

    pip install --no-deps -r benchmarks/peers.txt
    python benchmarks/cpu_step.py --family llama --rounds 8 --output record.json

Each candidate trains in a process of its own, because how memory is allocated belongs to the
process; all but transformers-default keep freed memory as `trainyard train` does. All processes of
a cell live at once and take one step each in turn, so that other work on the machine falls on all
of them alike; read the ratios. A step is forward, backward, clipping and AdamW on one fixed batch,
without dropout. bf16, slow on many CPUs, gets half the rounds and fewer candidates. Where the load
is high, `--threads 1` and CPU seconds are steadier.

The same mathematics: transformers, and of Llama litgpt, start from our weights, the first loss of
transformers must equal ours, and losses after the timed steps are in the record. GELU has its tanh
form, the fastest. litgpt has no GPT-2: its GPT here has the same blocks and tied embeddings, but
rotary positions on a quarter of each head instead of learned ones, and other initial weights. Peers
train as their users do: bf16 by autocast, clip_grad_norm_, and the fused AdamW with decay on
matrices alone. `transformers-default` is what comes out of the box: fp32, eager, its own composed
GELU, AdamW without options.

GFLOP of a step = 6 x (weights in products) x tokens + 12 L B T T H K. `products` times just the
matrix products of the blocks and the head, in all three directions: the rate nothing can exceed by
much.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from measuring import describe_machine, render

from trainyard.architecture import matmuls
from trainyard.config.run import Model

Step = Callable[[], float]
PEERS = ("transformers", "transformers-compiled", "litgpt", "litgpt-compiled")
ALL = ("ours", "ours-compiled", *PEERS, "transformers-default", "products")
# Eight processes of 124M parameters do not fit in the memory of a small machine, and bf16 is slow.
FEW = ("ours", "transformers", "transformers-compiled", "litgpt", "products")
LEAST = ("ours", "transformers", "products")
FIRST_LOSS_BOUND = {"float32": 2e-6, "bfloat16": 2e-3}


GPT2 = {"mlp": "gelu"}
LLAMA = {"positions": "rotary", "norm": "rms", "mlp": "swiglu", "bias": False}
SMALL = {"n_layers": 6, "d_model": 384, "n_heads": 6, "sequence_length": 256}
SHAPES: dict[str, dict[str, dict[str, Any]]] = {
    "gpt2": {
        "10M-4k": GPT2 | SMALL | {"d_ff": 1536, "vocabulary_size": 4096},
        "10M-50k": GPT2 | SMALL | {"d_ff": 1536, "vocabulary_size": 50304},
        "124M-50k": GPT2
        | {"n_layers": 12, "d_model": 768, "n_heads": 12, "sequence_length": 512}
        | {"d_ff": 3072, "vocabulary_size": 50304},
    },
    "llama": {
        "10M-4k": LLAMA | SMALL | {"n_key_value_heads": 2, "d_ff": 1024, "vocabulary_size": 4096},
        "10M-50k": LLAMA | SMALL | {"n_key_value_heads": 2, "d_ff": 1024, "vocabulary_size": 50304},
        # SmolLM2 135M
        "135M-49k": LLAMA
        | {"n_layers": 30, "d_model": 576, "n_heads": 9, "n_key_value_heads": 3}
        | {"sequence_length": 512, "d_ff": 1536, "vocabulary_size": 49152, "rotary_base": 1e5},
    },
}
TINY = {"n_layers": 1, "d_model": 32, "n_heads": 4, "sequence_length": 16}
TINY |= {"d_ff": 64, "vocabulary_size": 96}


@dataclass(frozen=True)
class Cell:
    family: str
    fields: dict[str, Any]
    """Of `[model]`."""
    n_sequences: int
    dtype: str
    candidates: tuple[str, ...]

    @cached_property
    def model(self) -> Model:
        return Model(**self.fields, dropout=0.0)

    @property
    def n_tokens(self) -> int:
        return self.n_sequences * self.model.sequence_length

    @property
    def products(self) -> list[tuple[int, int, int]]:
        """How often each product occurs, its inputs and its outputs."""
        model = self.model
        layers = [(model.n_layers, each.n_inputs, each.n_outputs) for each in matmuls(model)]
        return [*layers, (1, model.d_model, model.vocabulary_size)]

    @property
    def product_gflop(self) -> float:
        return 6e-9 * self.n_tokens * sum(math.prod(product) for product in self.products)

    @property
    def gflop(self) -> float:
        model = self.model
        square = self.n_tokens * model.sequence_length * model.n_heads * model.d_head
        return self.product_gflop + 12e-9 * model.n_layers * square


def name_cells() -> dict[str, Cell]:
    cells = {}
    for family, shapes in SHAPES.items():
        for dtype, (name, fields) in itertools.product(("float32", "bfloat16"), shapes.items()):
            is_large = fields["n_layers"] > 6
            candidates = FEW if is_large or dtype == "bfloat16" else ALL
            cell = Cell(family, fields, 2 if is_large else 16, dtype, candidates)
            cells[f"{family}-{name}-{dtype}"] = cell
        tiny = shapes["10M-4k"] | TINY
        cells[f"{family}-tiny"] = Cell(family, tiny, 2, "float32", LEAST)
    return cells


CELLS = name_cells()


def batch(cell: Cell) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (cell.n_sequences, cell.model.sequence_length + 1)
    ids = torch.randint(0, cell.model.vocabulary_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_our_model(cell: Cell) -> Any:
    import torch

    from trainyard.model.gpt import GPT
    from trainyard.model.init import initialize

    model = GPT(cell.model, cell.model.vocabulary_size, getattr(torch, cell.dtype))
    initialize(model, seed=1)
    return model


def build_ours(cell: Cell, compiled: bool) -> Step:
    from trainyard.config.run import Optimizer
    from trainyard.model.gpt import compile_blocks
    from trainyard.optim.adamw import AdamW
    from trainyard.optim.clip import StepStats, norms_of

    model = build_our_model(cell)
    if compiled:
        compile_blocks(model)
    optimizer = AdamW(list(model.parameters()), Optimizer(learning_rate=1e-4))
    tokens, labels = batch(cell)

    def step() -> float:
        hidden = model(tokens)
        loss = model.summed_loss(hidden, labels, 1 / labels.numel())
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = norms_of(gradients).square().sum().sqrt().float()
        divisor = StepStats(loss, norm, loss.new_ones(())).divisor(1.0)
        optimizer.step(1e-4, divisor, (~norm.isfinite()).float())
        optimizer.fused.zero_grad()
        return loss.item()

    return step


def build_peer_model(cell: Cell, candidate: str) -> Any:
    from trainyard.bench.baseline_models import build_litgpt, build_transformers

    if candidate.startswith("litgpt") and cell.family == "gpt2":
        return build_similar_litgpt(cell.model)
    build = build_litgpt if candidate.startswith("litgpt") else build_transformers
    model = build(cell.model, build_our_model(cell))
    if candidate.endswith("-default") and cell.family == "gpt2":
        from transformers.activations import ACT2FN

        for block in model.get_submodule("transformer.h").children():
            block.mlp.act = ACT2FN["gelu_new"]
    return model


def build_similar_litgpt(model: Model) -> Any:
    """Builds what litgpt has that is most like our GPT-2."""
    import torch
    from litgpt import GPT, Config

    config = Config(
        block_size=model.sequence_length,
        n_layer=model.n_layers,
        n_embd=model.d_model,
        n_head=model.n_heads,
        padded_vocab_size=model.vocabulary_size,
        parallel_residual=False,
        gelu_approximate="tanh",
    )
    torch.manual_seed(1)
    theirs = GPT(config)
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    theirs.lm_head.weight = theirs.transformer.wte.weight
    return theirs


def build_peer(cell: Cell, candidate: str) -> Step:
    import torch
    import torch.nn.functional as F

    default = candidate.endswith("-default")
    lit = candidate.startswith("litgpt")
    model = build_peer_model(cell, candidate).train()
    run = torch.compile(model) if candidate.endswith("-compiled") else model
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {} if default else {"fused": True}
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), **options)
    tokens, labels = batch(cell)
    low = cell.dtype == "bfloat16" and not default
    precision = torch.autocast("cpu", torch.bfloat16) if low else contextlib.nullcontext()

    def step() -> float:
        with precision:
            out = run(tokens)
            logits = (out if lit else out.logits).flatten(0, 1)
            loss = F.cross_entropy(logits.float(), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def build_products(cell: Cell) -> Step:
    """Times one block's products and a quarter of the head's; gives seconds for the whole step."""
    import torch

    repeats, inputs, outputs = zip(*cell.products, strict=True)
    rows = [cell.n_tokens] * (len(repeats) - 1) + [cell.n_tokens // 4]
    repeats = [*repeats[:-1], 4]
    shapes = list(zip(rows, inputs, outputs, strict=True))
    dtype = getattr(torch, cell.dtype)
    sets = [[torch.randn(s).to(dtype) for s in ((m, k), (n, k), (m, n))] for m, k, n in shapes]
    outs = [[torch.empty(s, dtype=dtype) for s in ((m, n), (m, k), (n, k))] for m, k, n in shapes]

    def step() -> float:
        seconds = 0.0
        for (x, w, g), (y, dx, dw), repeat in zip(sets, outs, repeats, strict=True):
            start = time.perf_counter()
            torch.mm(x, w.t(), out=y)
            torch.mm(g, w, out=dx)
            torch.mm(g.t(), x, out=dw)
            seconds += repeat * (time.perf_counter() - start)
        return seconds

    return step


def serve(cell: Cell, candidate: str, threads: int) -> None:
    """Takes one step for each line that comes in, and says how it went."""
    import torch

    from trainyard.parallel.mesh import keep_freed_memory

    torch.set_num_threads(threads)
    if not candidate.endswith("-default"):
        keep_freed_memory()
    if candidate == "products":
        step = build_products(cell)
    elif candidate.startswith("ours"):
        step = build_ours(cell, candidate.endswith("-compiled"))
    else:
        step = build_peer(cell, candidate)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        value = step()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        status = Path("/proc/self/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) / 1024
        print(json.dumps({"wall": wall, "cpu": cpu, "value": value, "peak": peak}), flush=True)


class Candidate:
    def __init__(self, cell: str, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", name, "--cells", cell]
        command += ["--threads", str(threads)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.answers: list[dict[str, float]] = []

    def step(self) -> None:
        assert self.process.stdin and self.process.stdout
        print(file=self.process.stdin, flush=True)
        self.answers.append(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        self.process.communicate()


def measure(name: str, rounds: int, threads: int) -> dict[str, Any]:
    cell = CELLS[name]
    candidates = {who: Candidate(name, who, threads) for who in cell.candidates}
    for candidate in candidates.values():  # compiles, makes the optimizer's state, touches memory
        candidate.step()
    for number in range(rounds if cell.dtype == "float32" else max(2, rounds // 2)):
        order = list(candidates.values())
        for candidate in order[number % len(order) :] + order[: number % len(order)]:
            candidate.step()
    for candidate in candidates.values():
        candidate.close()
    answers = {who: candidate.answers for who, candidate in candidates.items()}
    return summary(cell, answers) | {"cell": asdict(cell) | {"gflop": cell.gflop}}


def summary(cell: Cell, answers: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    products = [answer["value"] for answer in answers.pop("products")[1:]]
    limit = cell.product_gflop / min(products)
    rows = {}
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
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=ALL, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(CELLS[arguments.cells], arguments.serve, arguments.threads)
        return
    names = [name for name, cell in CELLS.items() if cell.family == arguments.family]
    names = [name for name in names if CELLS[name].candidates != LEAST]
    names = arguments.cells.split(",") if arguments.cells else names
    peers = [name for name in ("transformers", "litgpt") if importlib.util.find_spec(name)]
    record = describe_machine(["torch", *peers])
    record |= {"threads": arguments.threads, "rounds": arguments.rounds, "cells": {}}
    for name in names:
        load = os.getloadavg()[0]
        found = measure(name, arguments.rounds, arguments.threads) | {"load_before": load}
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
