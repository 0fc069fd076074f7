"""The device itself: facts, matmuls, attention, elementwise kernels, copies; what each decides.

Data is random: zeros take less power, and would be faster.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.item import Row, Session
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

REPEATS, ROUNDS = 5, 3
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
PACKAGES = ("triton", "torchao", "transformers", "litgpt", "numpy", "pydantic")
TOKENS, WIDTH = 16384, 2048  # a micro batch of 8 sequences, gpt3-1.3b
SHAPES = {
    "8192^3": (8192, 8192, 8192),
    "qkv": (TOKENS, 3 * WIDTH, WIDTH),
    "out": (TOKENS, WIDTH, WIDTH),
    "up": (TOKENS, 4 * WIDTH, WIDTH),
    "down": (TOKENS, WIDTH, 4 * WIDTH),
    "head": (4096, 50304, WIDTH),
}
"""Rows, columns and depth of products."""
SMALLER = 8
"""On the fake GPU each size is divided by this."""


def describe(session: Session) -> Iterator[Row]:
    """Gives name, versions, clocks and power; compares a sum in fp32 with one in fp64."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    properties = torch.cuda.get_device_properties(0)
    yield {"row": "device", "found": torch.cuda.get_device_name(), **versions}
    yield {"row": "memory", "found": properties.total_memory / 2**30, "unit": "GiB"}
    yield {"row": "cuDNN", "found": str(torch.backends.cudnn.version()), "cuda": torch.version.cuda}
    query = (
        "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu,driver_version"
    )
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        said = f"no nvidia-smi: {error.__class__.__name__}"
    yield {"row": "clocks, power", "found": said}
    a, b = _draw(512, 4096), _draw(4096, 512)
    total = torch.randn(512, 512, device="cuda")
    exact = total.double() + a.double() @ b.double()
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    off = ((total.double() - exact).norm() / exact.norm()).item()
    row: Row = {"row": "addmm into fp32, error against fp64", "found": off, "estimate": 1e-6}
    yield session.judge(row, is_right=off < 1e-4)


def multiply(session: Session) -> Iterator[Row]:
    """Times products, alone and in pairs of which one is to be chosen."""
    seconds: dict[str, float] = {}
    for name, shape in _shapes(session).items():
        seconds[name] = time_of(_product(shape))
        estimate = {"8192^3": 750.0, "head": 650.0}.get(name, 680.0)
        yield _rate(f"bf16 {name}", shape, seconds[name], estimate)
    for name in ("8192^3", "down"):
        shape = _shapes(session)[name]
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        try:
            reduced = time_of(_product(shape))
        finally:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        yield {
            "row": f"reduced precision, {name}: times as fast",
            "found": seconds[name] / reduced,
            "estimate": 1.01,
            "decides": "kernels.reduced_precision: true where above 1.02 in a whole step",
        }
    yield from _add_up(session)
    for scaling, estimate in (("tensorwise", 1300.0), ("rowwise", 1000.0)):
        for name in ("8192^3", "up"):
            shape = _shapes(session)[name]
            yield _rate(
                f"fp8 {scaling} {name}", shape, time_of(_scaled(shape, scaling)), estimate
            ) | {"decides": "default of precision.fp8.scaling"}


def _add_up(session: Session) -> Iterator[Row]:
    """A weight's gradient added by the matmul, against a matmul and an addition."""
    tokens, columns, depth = _shapes(session)["up"]
    gradient, x = _draw(tokens, columns), _draw(tokens, depth)
    total = torch.zeros(columns, depth, device="cuda")

    def added() -> Tensor:
        return torch.addmm(total, gradient.t(), x, out_dtype=torch.float32, out=total)

    ratio = time_of(lambda: total.add_(gradient.t() @ x)) / time_of(added)
    yield {
        "row": "addmm into fp32 over mm and add",
        "found": ratio,
        "unit": "times",
        "estimate": 1.15,
        "decides": "weight gradients stay sums of the matmul where above 1",
    }


def attend(session: Session) -> Iterator[Row]:
    """Times causal attention, forward and backward: kernels, heads, dropout, documents."""
    cases = {
        "heads of 128": (8, 16, 16, 2048, 128, 0.0),
        "heads of 64": (16, 16, 16, 2048, 64, 0.0),
        "grouped, 8k": (2, 32, 8, 8192, 64, 0.0),
        "dropout 0.1": (8, 16, 16, 2048, 128, 0.1),
    }
    decides = "kernels.attention: auto takes cuDNN where above 1"
    for name, (batch, heads, groups, tokens, width, rate) in cases.items():
        tokens = tokens // SMALLER if session.fake else tokens
        found: dict[str, float] = {}
        kernels = ("flash",) if rate else ("flash", "cudnn")
        for kernel in kernels:
            q = _draw(batch, heads, tokens, width).requires_grad_()
            k, v = (_draw(batch, groups, tokens, width).requires_grad_() for _ in range(2))
            upstream = _draw(batch, heads, tokens, width)
            work = _attention(kernel, (q, k, v), upstream, rate)
            flop = 7 * batch * heads * tokens**2 * width  # of half of the scores
            try:
                found[kernel] = time_of(work)
            except RuntimeError as error:
                yield {"row": f"{kernel}, {name}", "found": str(error)[:200], "unit": ""}
                continue
            rate_found = flop / found[kernel] / 1e12
            estimate = 310.0 if kernel == "flash" else 550.0
            row = {"row": f"{kernel}, {name}", "found": rate_found, "unit": "TFLOP/s"}
            yield row | {"estimate": estimate}
        if len(found) > 1:
            ratio = found["flash"] / found["cudnn"]
            row = {"row": f"cudnn over flash, {name}", "found": ratio, "unit": "times"}
            yield row | {"estimate": 1.8, "decides": decides}
    yield from _attend_in_documents(session)


def _attend_in_documents(session: Session) -> Iterator[Row]:
    batch, heads, tokens, width = 8, 16, 2048 // (SMALLER if session.fake else 1), 128
    q, k, v = (_draw(batch * tokens, heads, width).requires_grad_() for _ in range(3))
    upstream = _draw(batch * tokens, heads, width)
    for documents in (1, 8, 64):
        length = tokens // documents
        ends = torch.arange(0, batch * tokens + 1, length, dtype=torch.int32, device="cuda")

        def work(ends: Tensor = ends, length: int = length) -> object:
            out = torch.ops.aten._flash_attention_forward(
                q, k, v, ends, ends, length, length, 0.0, True, False
            )[0]
            return torch.autograd.grad(out, (q, k, v), upstream)

        yield {
            "row": f"{documents} documents a sequence",
            "found": 1000 * time_of(work),
            "unit": "ms",
            "decides": "price of documents; compact lengths pay where 64 is below half of 1",
        }


def change(session: Session) -> Iterator[Row]:
    """Times SwiGLU in both layouts, dropout, and copies, by the bandwidth they reach."""
    tokens = TOKENS // (SMALLER if session.fake else 1)
    outputs, upstream = _draw(tokens, 2 * 5504), _draw(tokens, 5504)
    pairs = torch.compile(lambda x: _swiglu(*x.view(*x.shape[:-1], -1, 2).unbind(-1)))
    halves = torch.compile(lambda x: _swiglu(*x.chunk(2, -1)))
    seconds = {}
    for name, function in (("pairs", pairs), ("halves", halves)):
        x = outputs.clone().requires_grad_()
        seconds[name] = time_of(_gradients(function, x, upstream))
        n_bytes = 2 * (8 * upstream.numel())
        rate = {"found": n_bytes / seconds[name] / 1e12, "unit": "TB/s", "estimate": 2.5}
        yield {"row": f"SwiGLU in {name}, both passes"} | rate
    yield {
        "row": "halves over pairs",
        "found": seconds["pairs"] / seconds["halves"],
        "unit": "times",
        "estimate": 1.5,
        "decides": "kernels.swiglu_halves: true where above 1.02",
    }
    from trainyard.model.dropout import Dropout

    layer = Dropout(0.1, 1)
    seeds = torch.arange(8, device="cuda")
    positions = torch.arange(tokens // 8, device="cuda")
    drop = torch.compile(layer)
    x = _draw(8, tokens // 8, WIDTH).requires_grad_()
    found = time_of(_gradients(lambda x: drop(x, seeds, positions), x, torch.ones_like(x)))
    rate = {"found": 8 * x.numel() / found / 1e12, "unit": "TB/s", "estimate": 2.5}
    yield {"row": "dropout, both passes"} | rate
    source = torch.randint(0, 255, (2**32 // (64 if session.fake else 1),), device="cuda").to(
        torch.uint8
    )
    target = torch.empty_like(source)
    found = 2 * source.numel() / time_of(lambda: target.copy_(source)) / 1e12
    yield {
        "row": "copy",
        "found": found,
        "unit": "TB/s",
        "estimate": 3.0,
        "decides": "memory share of plan",
    }


def time_of(work: Callable[[], object]) -> float:
    """Returns the median over rounds of the seconds of one call, after a warm-up."""
    rounds: list[float] = []
    for number in range(ROUNDS + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(REPEATS):
            work()
        end.record()
        torch.cuda.synchronize()
        if number:
            rounds.append(max(start.elapsed_time(end), 1e-6) / 1000 / REPEATS)
    return sorted(rounds)[len(rounds) // 2]


def _draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=BF16)


def _shapes(session: Session) -> dict[str, tuple[int, ...]]:
    by = SMALLER if session.fake else 1
    return {name: tuple(size // by for size in shape) for name, shape in SHAPES.items()}


def _rate(name: str, shape: tuple[int, ...], seconds: float, estimate: float) -> Row:
    rows, columns, depth = shape
    found = 2 * rows * columns * depth / seconds / 1e12
    return {"row": name, "found": found, "unit": "TFLOP/s", "estimate": estimate}


def _product(shape: tuple[int, ...]) -> Callable[[], Tensor]:
    a, b = _draw(shape[0], shape[2]), _draw(shape[1], shape[2])
    return lambda: a @ b.t()


def _scaled(shape: tuple[int, ...], scaling: str) -> Callable[[], Tensor]:
    a, b = _draw(shape[0], shape[2]).to(FP8), _draw(shape[1], shape[2]).to(FP8)
    by_rows = scaling == "rowwise"
    shapes = ((shape[0], 1), (1, shape[1])) if by_rows else ((), ())
    of_a, of_b = (torch.ones(each, device="cuda") for each in shapes)
    return lambda: torch._scaled_mm(a, b.t(), of_a, of_b, out_dtype=BF16, use_fast_accum=True)


def _attention(
    kernel: str, inputs: tuple[Tensor, ...], upstream: Tensor, rate: float
) -> Callable[[], object]:
    backend: Any = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}[
        kernel
    ]
    q, k, v = inputs

    def work() -> object:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(
                q, k, v, dropout_p=rate, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        return torch.autograd.grad(out, inputs, upstream)

    return work


def _gradients(
    function: Callable[[Tensor], Tensor], x: Tensor, upstream: Tensor
) -> Callable[[], object]:
    return lambda: torch.autograd.grad(function(x), x, upstream)


def _swiglu(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value
