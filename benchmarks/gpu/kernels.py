"""Where the time of a step goes, from the trace that `trainyard bench --profile` leaves.

Kernels fall into groups by their names. Of a CPU, which has no kernels, operators do.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

STEPS = 2  # trainyard.bench.job.PROFILED_STEPS
# The first that fits counts: kernels of attention are products too.
GROUPS = {
    "communication": r"nccl|gloo:|c10d::",
    "attention": r"flash|fmha|sdpa|attention|cudnn_generated",
    "products": r"gemm|nvjet|cutlass|xmma|scaled_mm|splitk|\bmm\b|addmm|bmm|linear|matmul",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm|norm_two|NormTwoOps|linalg_vector_norm",
    "loss": r"softmax|nll|gather|scatter|expm1|exp_kernel",
    "copies and casts": r"memcpy|memset|copy|_to_copy|\bzero_|fill",
}
REST = "norms and elementwise"


def group_of(name: str) -> str:
    """Names the group of a kernel or an operator."""
    for group, pattern in GROUPS.items():
        if re.search(pattern, name, re.IGNORECASE):
            return group
    return REST


def read_kernels(trace: Path) -> list[tuple[str, float, float]]:
    """Reads name, start and duration in microseconds of what ran on the device."""
    events = json.loads(trace.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [
        (event["name"], float(event["ts"]), float(event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in kinds
    ]


def add_up(kernels: Iterable[tuple[str, float, float]], step_milliseconds: float) -> dict[str, Any]:
    """Splits a step: groups of kernels, and the time in which the device did nothing.

    Args:
        kernels: of `STEPS` steps under the profiler.
        step_milliseconds: of a step without it, which slows the host, not the kernels.
    """
    groups: defaultdict[str, float] = defaultdict(float)
    names: defaultdict[str, float] = defaultdict(float)
    busy, end = 0.0, 0.0
    for name, start, duration in sorted(kernels, key=lambda kernel: kernel[1]):
        groups[group_of(name)] += duration
        names[name] += duration
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
    per_step = {group: us / 1000 / STEPS for group, us in groups.items()}
    per_step["idle"] = max(0.0, step_milliseconds - busy / 1000 / STEPS)
    top = sorted(names.items(), key=lambda item: -item[1])[:25]
    return {
        "milliseconds_per_step": per_step,
        "shares": {group: ms / step_milliseconds for group, ms in per_step.items()},
        "top": [
            {"name": name[:200], "group": group_of(name), "ms_per_step": us / 1000 / STEPS}
            for name, us in top
        ],
    }


def add_up_operators(operators: list[dict[str, Any]], step_milliseconds: float) -> dict[str, Any]:
    """The same from the operators in a bench's record, one after the other: the rehearsal."""
    kernels, at = [], 0.0
    for each in operators:
        duration = each["milliseconds_per_step"] * 1000 * STEPS
        kernels.append((each["name"], at, duration))
        at += duration
    return add_up(kernels, step_milliseconds)
