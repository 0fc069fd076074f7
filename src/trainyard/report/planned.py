"""Planned and measured figures of a run, side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainyard.architecture import block_layers, shapes_of
from trainyard.config.run import Run
from trainyard.files import SETTINGS_LIMIT_BYTES, parse_json, read_file
from trainyard.planning.saving import checkpoint_bytes
from trainyard.report.history import is_finite
from trainyard.report.summary import UNKNOWN, ReportedRun, large, memory, show
from trainyard.units import format_seconds


def compare_with_plan(reported: ReportedRun) -> dict[str, tuple[str, str]]:
    """Returns the planned and the measured value by quantity."""
    plan, train, run = reported.plan, reported.metrics.train, reported.run
    n_parameters, n_tokens = _number(plan, "n_parameters"), _number(plan, "n_tokens")
    per_token, tokens = _number(plan, "model_flops_per_token"), train.last("tokens")
    tflops = train.median("tflops_per_second_per_device")
    utilization = train.median("model_flops_utilization")
    peak = tflops / utilization if tflops and utilization else None
    rate = train.median("tokens_per_second_per_device")
    n_ranks = _number(plan, "n_ranks")
    all_tokens_per_second = rate * n_ranks if rate and n_ranks else None
    in_all = n_tokens / all_tokens_per_second if n_tokens and all_tokens_per_second else None
    state = least_state_bytes(run, plan)
    whole = ("{:,.0f}", UNKNOWN)
    return {
        "Parameters": (show(n_parameters, whole[0]), _in_checkpoint(reported)),
        "Steps": (show(plan.get("n_steps"), whole[0]), show(train.last("step"), whole[0])),
        "Tokens": (show(n_tokens, whole[0]), show(tokens, whole[0])),
        "Model FLOP": (
            show(per_token and n_tokens and per_token * n_tokens, "{:.2e}"),
            show(per_token and tokens and per_token * tokens, "{:.2e}"),
        ),
        "Time": (
            UNKNOWN if in_all is None else f"{format_seconds(in_all)} at the measured rate",
            format_seconds(reported.metrics.seconds) + ", with evaluation and saving",
        ),
        "Devices": (show(n_ranks, whole[0]), reported.metrics.device or UNKNOWN),
        "TFLOP/s per device": (
            UNKNOWN if peak is None else f"{peak:,.4g} peak",
            UNKNOWN if tflops is None else f"{tflops:,.4g}, median",
        ),
        "Tokens/s per device": (UNKNOWN, "" if rate is None else f"{large(rate)}, median"),
        "Memory per device": (
            UNKNOWN if state is None else f"{memory(state)} and activations",
            f"{memory(train.last('memory_bytes'))}, peak",
        ),
        "Checkpoint": (
            memory(n_parameters and checkpoint_bytes(run, int(n_parameters))),
            memory(reported.metrics.median_of_saves("bytes")),
        ),
    }


def least_state_bytes(run: Run, plan: dict[str, Any]) -> float | None:
    """Returns the bytes of weights, gradients and both moments on each device.

    The bytes of activations, of copies in other formats and of buffers come on top. None where the
    plan does not say enough.
    """
    n_parameters, topology = _number(plan, "n_parameters"), plan.get("topology")
    if n_parameters is None or not isinstance(topology, dict):
        return None
    sizes = [_number(topology, axis) or 0.0 for axis in ("tensor", "pipeline", "shard", "context")]
    if min(sizes) < 1:
        return None
    tensor, pipeline, shard, context = sizes
    n_shards, stage = shard * context, run.parallel.zero_stage

    def divisor(least_stage: int) -> float:
        return n_shards if stage >= least_stage else 1.0

    parts = [
        (True, len(shape), run.model.n_layers * math.prod(shape))
        for shape in shapes_of(block_layers(run.model)).values()
    ]
    parts.append((False, 2, int(n_parameters) - sum(n for *_, n in parts)))
    n_bytes = 0.0
    for in_block, n_dimensions, n_values in parts:
        stored = run.stored(in_block, n_dimensions)
        # A converted gradient is complete, and so only of the rank's own values.
        n_bytes += stored.state_bytes(n_values) / divisor(1)
        n_bytes += stored.gradient.bytes_of(n_values) / divisor(
            1 if stored.converts_gradient else 2
        )
        n_bytes += stored.weight.bytes_of(n_values) / divisor(3)
    return n_bytes / (tensor * pipeline)


def _in_checkpoint(reported: ReportedRun) -> str:
    """Counts the weights in the newest checkpoint with a readable manifest."""
    for path in sorted(reported.folder.glob("checkpoints/step-*/manifest.json"), reverse=True):
        n_weights = sum(_weights(path))
        if n_weights:
            return f"{n_weights:,} in {path.parent.name}"
    return UNKNOWN


def _weights(manifest: Path) -> Iterator[int]:
    try:
        tensors = parse_json(read_file(manifest, SETTINGS_LIMIT_BYTES))["tensors"]
        for name, tensor in tensors.items():
            if name.startswith("model."):
                yield math.prod(int(size) for size in tensor["shape"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return  # `trainyard check checkpoint` reports the problem


def _number(plan: dict[str, Any], key: str) -> float | None:
    value = plan.get(key)
    return value if is_finite(value) else None
