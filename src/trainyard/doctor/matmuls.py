"""Rates of a device: matmuls by format, fused attention, memory copies.

Values are random: zeros take less power, and so look faster than training ever is. Matmuls are
8192 x 8192 x 8192 on a GPU, where only the device limits them, and smaller on a CPU. Formats that
the device does not support are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainyard.doctor.timing import seconds_of
from trainyard.doctor.verdict import ATTENTION, MATMULS, MEMORY
from trainyard.model.attention import attention_kernel
from trainyard.planning.hardware import GIGA, TERA
from trainyard.units import format_bytes

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Size:
    """Sizes of the measured operations."""

    side: int
    """Side of the matrices."""
    sequence: int
    heads: int
    copied_bytes: int
    """Larger than any cache."""


SIZES = {"cuda": Size(8192, 4096, 64, 2**30), "cpu": Size(1024, 512, 8, 2**28)}
HEAD_WIDTH = 128


def measure_device(
    device: torch.device, budget_seconds: float, size: Size | None = None
) -> Iterator[tuple[str, float, str, str]]:
    """Measures one device; yields name, rate, unit, and the timed operations, one by one.

    Args:
        device: of this rank.
        budget_seconds: for each measurement.
        size: absent: that of the kind of device.
    """
    size = size or SIZES["cuda" if device.type == "cuda" else "cpu"]
    flops = 2 * size.side**3
    rates: dict[str, float] = {}
    for kind in (*DTYPES, "fp8"):
        with suppress(RuntimeError, NotImplementedError):  # unsupported format
            work = _product(kind, size.side, device)
            seconds, n_calls = seconds_of(work, device, budget_seconds)
            rates[kind] = flops / seconds / TERA
            how = f"{size.side}^3, median of {n_calls}"
            yield f"{MATMULS} {kind}", rates[kind], "TFLOP/s", how
    fastest = max((kind for kind in rates if kind != "fp8"), key=rates.__getitem__)
    with suppress(RuntimeError):
        seconds, n_calls = seconds_of(_attention(fastest, size, device), device, budget_seconds)
        # A causal model needs half of the scores, and two matmuls.
        flops = 2 * size.sequence**2 * size.heads * HEAD_WIDTH
        kernel = attention_kernel(HEAD_WIDTH, DTYPES[fastest], device).replace("_", " ")
        how = f"{size.heads} heads of {HEAD_WIDTH}, sequence {size.sequence}, median of {n_calls}"
        how += f", {kernel}" if device.type == "cuda" else ""
        yield f"{ATTENTION} {fastest}", flops / seconds / TERA, "TFLOP/s", how
    source = torch.ones(size.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds, n_calls = seconds_of(lambda: target.copy_(source), device, budget_seconds)
    how = f"{format_bytes(size.copied_bytes)}, read and written, median of {n_calls}"
    yield MEMORY, 2 * size.copied_bytes / seconds / GIGA, "GB/s", how


def _product(kind: str, side: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if kind != "fp8":
        a, b = a.to(DTYPES[kind]), b.to(DTYPES[kind])
        out = torch.empty_like(a)
        return lambda: torch.mm(a, b.t(), out=out)
    if device.type != "cuda":
        raise NotImplementedError("fp8 on a CPU is emulated")
    fp8 = torch.float8_e4m3fn
    if torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName:
        fp8 = torch.float8_e4m3fnuz  # the MI300's own
    a, b, one = a.to(fp8), b.to(fp8), torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _attention(kind: str, size: Size, device: torch.device) -> Callable[[], object]:
    shape = (1, size.heads, size.sequence, HEAD_WIDTH)
    q, k, v = (torch.randn(shape, device=device, dtype=DTYPES[kind]) for _ in range(3))
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=True)
