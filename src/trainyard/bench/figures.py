"""Converts seconds to named throughput figures.

    tokens/s/GPU     tokens of the timed steps / their time / ranks
    TFLOP/s/GPU      tokens/s/GPU x model FLOP per token (`planning.flops`, "megatron_causal")
    MFU              that over the device's peak for the precision
    HFU              the same, with the matmuls that parallel.recompute repeats

HFU does not count recomputation inside attention kernels. Recomputation stops at the last value
that the backward pass needs, so the last matmul of a block or an attention layer is not repeated
(with dropout, that of a block is).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from trainyard.architecture import matmuls
from trainyard.config.run import Run
from trainyard.planning.flops import (
    MODEL_FLOPS,
    figures_by_formula,
    matmul_flops,
    model_flops_utilization,
    score_flops,
    tflops_per_second_per_gpu,
)
from trainyard.planning.hardware import find_device
from trainyard.planning.resolve import Plan

FORMULAS = {
    "tokens_per_second_per_device": "tokens of the timed steps / their time / ranks",
    "tflops_per_second_per_device": f"model FLOP a token ({MODEL_FLOPS}) x tokens/s/device / 1e12",
    "model_flops_utilization": "that / the device's peak for the precision",
    "hardware_flops_utilization": "the same with the matmuls that parallel.recompute repeats",
}


@dataclass(frozen=True)
class Spread:
    """Milliseconds of a step."""

    median: float
    p10: float
    p90: float
    mean: float


@dataclass(frozen=True)
class Figures:
    """Throughput of a candidate; None if the device's peak is unknown."""

    milliseconds_per_step: Spread
    samples_per_second: float
    tokens_per_second_per_device: float
    tflops_per_second_per_device: float
    model_flops_utilization: float | None
    hardware_flops_utilization: float | None
    by_formula: dict[str, Any] = field(default_factory=dict)
    """From `planning.flops.figures_by_formula`."""

    def as_json(self) -> dict[str, Any]:
        """Returns the figures as JSON can hold them."""
        figures = asdict(self)
        by_formula: dict[str, Any] = figures.pop("by_formula")
        return figures | by_formula


def compute_figures(
    run: Run, plan: Plan, step_seconds: Sequence[float], device_name: str
) -> Figures:
    """Computes the figures of timed steps of full batches.

    Args:
        run: what was timed.
        plan: of the ranks it was timed on.
        step_seconds: of each step, on its slowest rank.
        device_name: torch's name, or "cpu".
    """
    samples_per_second = run.train.global_batch_size * len(step_seconds) / sum(step_seconds)
    tokens_per_second = samples_per_second * run.model.sequence_length
    per_device = tokens_per_second / plan.n_ranks
    device = find_device(device_name)
    peak = device.peak_flops_per_second(run.precision.kind) if device else None
    flops = plan.model_flops_per_token
    return Figures(
        milliseconds_per_step=spread_of([1000 * seconds for seconds in step_seconds]),
        samples_per_second=samples_per_second,
        tokens_per_second_per_device=per_device,
        tflops_per_second_per_device=tflops_per_second_per_gpu(
            flops, tokens_per_second, plan.n_ranks
        ),
        model_flops_utilization=model_flops_utilization(flops, per_device, peak),
        hardware_flops_utilization=model_flops_utilization(
            flops + recomputed_flops_per_token(run), per_device, peak
        ),
        by_formula=figures_by_formula(run, plan.padded_vocabulary_size, per_device, peak),
    )


def recomputed_flops_per_token(run: Run) -> float:
    """Counts the FLOP of matmuls that the backward pass repeats, per token."""
    model, recompute = run.model, run.parallel.recompute
    if recompute == "none":
        return 0.0
    repeated = matmuls(model, "attention" if recompute == "attention" else "")
    if recompute == "attention" or not model.dropout:
        repeated = repeated[:-1]  # nothing needs its output
    # A token sees half of the others on average.
    return float(model.n_layers * (matmul_flops(repeated) + score_flops(model) // 2))


def spread_of(values: Sequence[float]) -> Spread:
    """Returns median, tenth and ninetieth percentile, and mean."""
    ordered = sorted(values)
    return Spread(
        statistics.median(ordered),
        _percentile(ordered, 0.1),
        _percentile(ordered, 0.9),
        statistics.fmean(ordered),
    )


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
