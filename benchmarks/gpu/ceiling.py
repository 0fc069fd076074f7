"""What the device itself reaches: products and attention on random data, and copies.

    python -m benchmarks.gpu.ceiling [--small]

prints JSON. Zeros and other regular data would be faster: they take less power.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

WIDTHS = {"350M": 1024, "1.3B": 2048, "2.7B": 2560, "6.7B": 4096}
VOCABULARY = 50304
REPEATS, ROUNDS = 10, 5
ATTENTION = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
RATES = (0.0, 0.0625, 0.1)  # cuDNN draws dropout in multiples of 1/16


def seconds_of(work: Callable[[], Any], on_gpu: bool) -> float:
    """Gives the median over rounds of the time of one call, after a warm-up."""
    rounds = []
    for number in range(ROUNDS + 1):
        if on_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(REPEATS):
                work()
            end.record()
            torch.cuda.synchronize()
            seconds = start.elapsed_time(end) / 1000
        else:
            began = time.perf_counter()
            for _ in range(REPEATS):
                work()
            seconds = time.perf_counter() - began
        if number:
            rounds.append(seconds / REPEATS)
    return sorted(rounds)[len(rounds) // 2]


def products(small: bool) -> dict[str, tuple[int, int, int]]:
    """Rows, columns and depth of products: those of the models, and one large."""
    if small:
        return {"large": (256, 256, 256), "tiny mlp": (256, 256, 64)}
    shapes = {"large": (8192, 8192, 8192)}
    tokens = 16384
    for name, width in WIDTHS.items():
        shapes[f"{name} qkv"] = (tokens, 3 * width, width)
        shapes[f"{name} out"] = (tokens, width, width)
        shapes[f"{name} up"] = (tokens, 4 * width, width)
        shapes[f"{name} down"] = (tokens, width, 4 * width)
        shapes[f"{name} head"] = (4096, VOCABULARY, width)
    return shapes


def multiply(kind: str, shape: tuple[int, int, int], device: torch.device) -> Callable[[], Any]:
    rows, columns, depth = shape
    a = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)
    b = torch.randn(columns, depth, device=device, dtype=torch.bfloat16)
    if kind == "bf16":
        return lambda: a @ b.t()
    rowwise = kind == "fp8 rowwise"
    a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
    shapes = ((rows, 1), (1, columns)) if rowwise else ((), ())
    scale_a, scale_b = (torch.ones(shape, device=device) for shape in shapes)
    return lambda: torch._scaled_mm(
        a8, b8.t(), scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def attend(
    kernel: str, rate: float, small: bool, device: torch.device
) -> tuple[Callable[[], Any], int]:
    """Gives causal attention, forward and backward, in bf16 and a kernel; and its FLOP."""
    heads, tokens, width = (2, 64, 32) if small else (16, 2048, 128)
    shape = (1 if small else 8, heads, tokens, width)
    made = torch.randn(4, *shape, device=device, dtype=torch.bfloat16)
    q, k, v = (each.detach().requires_grad_() for each in made[:3])

    def work() -> object:
        with sdpa_kernel(SDPBackend.__members__[kernel]):
            out = scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return torch.autograd.grad(out, (q, k, v), made[3])

    # Two products forward and five backward, of half of the scores.
    return work, 7 * shape[0] * heads * tokens**2 * width


def measure(small: bool) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    found: dict[str, Any] = {"device": name, "tflops_per_second": {}}
    found |= {"attention_tflops_per_second": {}, "failed": {}}
    for kind in ("bf16", "fp8 tensorwise", "fp8 rowwise"):
        rates: dict[str, float] = {}
        for label, shape in products(small).items():
            try:
                seconds = seconds_of(multiply(kind, shape, device), on_gpu)
            except RuntimeError as error:
                found["failed"][f"{kind} {label}"] = str(error).splitlines()[0][:300]
                continue
            rates[label] = round(2 * shape[0] * shape[1] * shape[2] / seconds / 1e12, 4)
        found["tflops_per_second"][kind] = rates
    for kernel in ATTENTION[: 1 if small else None]:
        for rate in RATES[: 1 if small else None]:
            label = f"{kernel.lower()} dropout {rate}"
            try:
                work, flop = attend(kernel, rate, small, device)
                found["attention_tflops_per_second"][label] = round(
                    flop / seconds_of(work, on_gpu) / 1e12, 4
                )
            except RuntimeError as error:
                found["failed"][label] = str(error).splitlines()[0][:300]
    n_bytes = 2**22 if small else 2**32
    source = torch.randint(0, 255, (n_bytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = seconds_of(lambda: target.copy_(source), on_gpu)
    found["copy_terabytes_per_second"] = round(2 * n_bytes / seconds / 1e12, 4)
    if on_gpu:
        found["memory_gib"] = round(torch.cuda.get_device_properties(0).total_memory / 2**30, 1)
        found["cudnn"] = torch.backends.cudnn.version()
        found["cuda"] = torch.version.cuda
    found["torch"] = torch.__version__
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true")
    print(json.dumps(measure(parser.parse_args().small)), flush=True)
    # A normal exit aborts if autograd's thread is still dropping the last graph.
    os._exit(0)
