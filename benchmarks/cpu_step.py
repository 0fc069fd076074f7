"""Speed and memory of one training step on a CPU, beside transformers and litgpt.

    pip install -r benchmarks/peers.txt
    python benchmarks/cpu_step.py --rounds 8 --output record.json

Each candidate trains in a process of its own, because how memory is allocated belongs to the
process. All processes of a cell live at once and take one step each in turn, so that other work on
the machine falls on all of them alike; read the ratios. A step is forward, backward, clipping and
AdamW on one fixed batch, without dropout. bf16, slow on many CPUs, gets half the rounds
and fewer candidates. Where the load is high, `--threads 1` and CPU seconds are steadier.

The same mathematics: transformers starts from our weights, its first loss must equal ours, and
losses after the timed steps are in the record. It gets F.gelu's tanh form, its fastest. litgpt has
no GPT-2: its GPT here has the same blocks and tied embeddings, but rotary positions on a quarter of
each head instead of learned ones, and other initial weights. Peers train as their users do: bf16 by
autocast, clip_grad_norm_, and the fused AdamW with decay on matrices alone. `transformers-default`
is what comes out of the box: fp32, eager, its own composed GELU, AdamW without options.

GFLOP of a step = 6 x (weights in products) x tokens + 12 L B T T D. `products` times just the
matrix products of the blocks and the head, in all three directions: the rate nothing can exceed by
much.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

Step = Callable[[], float]
PEERS = ("transformers", "transformers-compiled", "litgpt", "litgpt-compiled")
ALL = ("ours", "ours-compiled", *PEERS, "transformers-default", "products")
# Eight processes of 124M parameters do not fit in the memory of a small machine, and bf16 is slow.
FEW = ("ours", "transformers", "transformers-compiled", "litgpt", "products")
FIRST_LOSS_BOUND = {"float32": 2e-6, "bfloat16": 2e-3}


@dataclass(frozen=True)
class Cell:
    n_layers: int
    d_model: int
    n_heads: int
    n_tokens: int
    n_sequences: int
    vocabulary_size: int
    dtype: str
    candidates: tuple[str, ...]

    @property
    def gflop(self) -> float:
        tokens = self.n_tokens * self.n_sequences
        weights = 12 * self.n_layers * self.d_model**2 + self.vocabulary_size * self.d_model
        attention = 12 * self.n_layers * tokens * self.n_tokens * self.d_model
        return (6 * weights * tokens + attention) / 1e9


CELLS = {
    f"{name}-{dtype}": Cell(*shape, dtype, candidates if dtype == "float32" else FEW)
    for dtype in ("float32", "bfloat16")
    for name, shape, candidates in (
        ("10M-4k", (6, 384, 6, 256, 16, 4096), ALL),
        ("10M-50k", (6, 384, 6, 256, 16, 50304), ALL),
        ("124M-50k", (12, 768, 12, 512, 2, 50304), FEW),
    )
}


def batch(cell: Cell) -> tuple[Any, Any]:
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = (cell.n_sequences, cell.n_tokens + 1)
    ids = torch.randint(0, cell.vocabulary_size, shape, generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def build_our_model(cell: Cell) -> Any:
    import torch

    from trainyard.config.run import Model
    from trainyard.model.gpt import GPT
    from trainyard.model.init import initialize

    shape = Model(
        n_layers=cell.n_layers,
        d_model=cell.d_model,
        n_heads=cell.n_heads,
        d_ff=4 * cell.d_model,
        sequence_length=cell.n_tokens,
        vocabulary_size=cell.vocabulary_size,
        dropout=0.0,
    )
    model = GPT(shape, cell.vocabulary_size, getattr(torch, cell.dtype))
    initialize(model, seed=1)
    return model


def build_ours(cell: Cell, compiled: bool) -> Step:
    from trainyard.config.run import Optimizer
    from trainyard.model.gpt import compile_blocks
    from trainyard.model.loss import summed_cross_entropy
    from trainyard.optim.adamw import AdamW
    from trainyard.optim.clip import StepStats, norms_of
    from trainyard.parallel.mesh import keep_freed_memory

    keep_freed_memory()
    model = build_our_model(cell)
    if compiled:
        compile_blocks(model)
    optimizer = AdamW(list(model.parameters()), Optimizer(learning_rate=1e-4))
    tokens, labels = batch(cell)

    def step() -> float:
        hidden = model(tokens)
        loss = summed_cross_entropy(
            hidden, model.head_weight, labels, cell.vocabulary_size, scale=1 / labels.numel()
        )
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = norms_of(gradients).square().sum().sqrt().float()
        divisor = StepStats(loss, norm, loss.new_ones(())).divisor(1.0)
        optimizer.step(1e-4, divisor, (~norm.isfinite()).float())
        optimizer.fused.zero_grad()
        return loss.item()

    return step


def build_transformers(cell: Cell, default: bool) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=cell.vocabulary_size,
        n_positions=cell.n_tokens,
        n_embd=cell.d_model,
        n_layer=cell.n_layers,
        n_head=cell.n_heads,
        activation_function="gelu_new" if default else "gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    d_head = cell.d_model // cell.n_heads
    ours = build_our_model(cell).state_dict()
    theirs = model.state_dict()
    names = {"attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.qkv": "attn.c_attn"}
    names |= {"attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}
    with torch.no_grad():
        theirs["transformer.wte.weight"].copy_(ours["embedding.weight"])
        theirs["transformer.wpe.weight"].copy_(ours["positions.weight"])
        for kind in ("weight", "bias"):
            theirs[f"transformer.ln_f.{kind}"].copy_(ours[f"final_norm.{kind}"])
            for index in range(cell.n_layers):
                for mine, other in names.items():
                    value = ours[f"blocks.{index}.{mine}.{kind}"]
                    if mine == "attention.qkv":  # (H, 3, K) rows to (3, H, K)
                        value = value.view(cell.n_heads, 3, d_head, -1).transpose(0, 1)
                        value = value.reshape(3 * cell.d_model, -1).squeeze(-1)
                    if value.ndim == 2:
                        value = value.t()
                    theirs[f"transformer.h.{index}.{other}.{kind}"].copy_(value)
    return model


def build_litgpt(cell: Cell) -> Any:
    import torch
    from litgpt import GPT, Config

    config = Config(
        block_size=cell.n_tokens,
        n_layer=cell.n_layers,
        n_embd=cell.d_model,
        n_head=cell.n_heads,
        padded_vocab_size=cell.vocabulary_size,
        parallel_residual=False,
        gelu_approximate="tanh",
    )
    torch.manual_seed(1)
    model = GPT(config).train()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.02)
    model.lm_head.weight = model.transformer.wte.weight
    return model


def build_peer(cell: Cell, candidate: str) -> Step:
    import torch
    import torch.nn.functional as F

    default = candidate.endswith("-default")
    lit = candidate.startswith("litgpt")
    model = build_litgpt(cell) if lit else build_transformers(cell, default)
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

    tokens, width = cell.n_sequences * cell.n_tokens, cell.d_model
    head_rows = tokens // 4
    shapes = [(tokens, width, 3 * width), (tokens, width, width), (tokens, width, 4 * width)]
    shapes += [(tokens, 4 * width, width), (head_rows, width, cell.vocabulary_size)]
    repeats = [cell.n_layers] * 4 + [4]
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

    torch.set_num_threads(threads)
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
    tokens = cell.n_tokens * cell.n_sequences
    product_gflop = cell.gflop - 12 * cell.n_layers * tokens * cell.n_tokens * cell.d_model / 1e9
    limit = product_gflop / min(products)
    rows = {}
    for who, found in answers.items():
        walls = [answer["wall"] for answer in found[1:]]
        rows[who] = {
            "min_seconds": min(walls),
            "median_seconds": statistics.median(walls),
            "min_cpu_seconds": min(answer["cpu"] for answer in found[1:]),
            "median_cpu_seconds": statistics.median(answer["cpu"] for answer in found[1:]),
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
    parser.add_argument("--cells", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", choices=ALL, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(CELLS[arguments.cells], arguments.serve, arguments.threads)
        return
    record: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers", "litgpt")},
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "cells": {},
    }
    for name in arguments.cells.split(","):
        load = os.getloadavg()[0]
        found = measure(name, arguments.rounds, arguments.threads) | {"load_before": load}
        record["cells"][name] = found
        show(name, found)
        if arguments.output:
            arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for key in ("min_seconds", "median_seconds", "min_cpu_seconds", "median_cpu_seconds"):
        ratios = [found["fastest_peer_over_ours"][key] for found in record["cells"].values()]
        mean = math.exp(statistics.fmean(math.log(ratio) for ratio in ratios))
        record[f"geometric_mean_{key}"] = mean
        print(f"fastest peer / ours by {key}: mean {mean:.3f}, least {min(ratios):.3f}")
    if arguments.output:
        arguments.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
