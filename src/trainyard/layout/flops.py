"""FLOP of a training step, by the named formulas in use.

A multiply-add is 2 FLOP. Per token, one forward pass through the matmuls of a GPT with width D, MLP
width F, sequence T, L blocks and padded vocabulary V takes, for the parts of GPT-3,

    L (8 D^2 + 4 D F)     projections and MLP: 2 for each value of a matrix in architecture.py,
                          of experts those that a token uses, and the router
    L 4 T D               attention scores and values, if every token sees all T
    2 D V                 output head

and the backward pass twice that. The formulas differ in how many such passes they count:

| name               | blocks                 | attention | head      | printed by                 |
|--------------------|------------------------|-----------|-----------|----------------------------|
| megatron_causal    | 3                      | 1.5       | 3         | Megatron-LM of 2025        |
| megatron           | 3                      | 3         | 3         | ALCF's fork, as [LM]       |
| megatron_deepspeed | 3; recomputing: 4      | the same  | 3/4 of it | the fork of 2023, MS-AMP   |
| deepspeed_2024     | 3; recomputing: 4      | 3 or 4    | as blocks | ALCF's fork, as [DS]       |

Only `megatron_causal` counts exactly the mathematics of a causal model, whatever the kernels do, so
it defines model FLOPs and MFU; `log.flop_formula` shows another one beside it. Figures with
recomputed work are hardware utilization, not comparable with MFU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainyard.architecture import (
    LayerSpec,
    block_groups,
    count_idle,
    expert_layers,
    head_layer,
    matmuls,
    parameter_count,
)
from trainyard.config.run import FlopFormula, Model, Recompute, Run
from trainyard.units import format_figure, format_large

MODEL_FLOPS: FlopFormula = "megatron_causal"
"""The formula of model FLOPs and MFU."""


def matmul_flops(layers: Iterable[LayerSpec]) -> int:
    """Counts the FLOP of a token's forward pass through matmuls."""
    return sum(2 * layer.values_per_token for layer in layers)


def block_flops(model: Model) -> int:
    """Counts the FLOP of a token's forward pass through the matmuls of a block."""
    return matmul_flops([*matmuls(model), *expert_layers(model)])


def active_parameter_count(model: Model, padded_vocabulary_size: int) -> int:
    """Counts the parameters that each token uses: of experts those that it is sent to."""
    return parameter_count(model, padded_vocabulary_size) - count_idle(model)


def score_flops(model: Model) -> int:
    """Counts the FLOP of a token's attention scores and values, if it sees a whole sequence."""
    return 4 * model.sequence_length * model.n_heads * model.d_head


def model_flops_per_token(model: Model, padded_vocabulary_size: int) -> float:
    """Counts the model FLOP of training on one token, which define MFU."""
    return flops_per_token(model, padded_vocabulary_size, MODEL_FLOPS)


def flops_per_token(
    model: Model,
    padded_vocabulary_size: int,
    formula: FlopFormula,
    recompute: Recompute = "none",
    share: float = 1.0,
) -> float:
    """Counts the FLOP of training on one token by `formula`.

    Args:
        model: the shape; a token's share of attention depends on its sequence length.
        padded_vocabulary_size: rows of the output head.
        formula: see the table at the top of this file.
        recompute: only affects the two DeepSpeed formulas.
        share: of the blocks that do.
    """
    groups = block_groups(model, (0, model.n_layers))
    projections = float(sum(n * block_flops(kind) for kind, n in groups))
    attention = float(model.n_layers * score_flops(model))
    head = float(matmul_flops([head_layer(model, padded_vocabulary_size)]))
    if formula == "megatron_causal":
        return 3 * (projections + attention / 2 + head)
    if formula == "megatron":
        return 3 * (projections + attention + head)
    if formula == "megatron_deepspeed":
        passes = 3 + share * (recompute == "block")
        return passes * (projections + attention + 0.75 * head)
    forward = projections + attention + head
    again = {"none": 0.0, "attention": attention, "block": forward}[recompute]
    return 3 * forward + share * again


def describe_parameters(model: Model, padded_vocabulary_size: int) -> str:
    """Describes the number of parameters, and of those that each token uses."""
    count, active = parameter_count, active_parameter_count
    whole, used = (each(model, padded_vocabulary_size) for each in (count, active))
    text = f"{whole:,} ({format_large(whole)})"
    return f"{text}; a token uses {used:,} ({format_large(used)})" if used < whole else text


def tflops_per_second_per_gpu(
    flops_per_token: float, tokens_per_second: float, n_gpus: int
) -> float:
    """Converts a job's speed to TFLOP/s per device."""
    return flops_per_token * tokens_per_second / n_gpus / 1e12


def model_flops_utilization(
    model_flops_per_token: float,
    tokens_per_second_per_gpu: float,
    peak_flops_per_second: float | None,
) -> float | None:
    """Returns MFU, the share of the peak that the model's own mathematics took (arXiv:2204.02311).

    None if the peak is unknown.
    """
    if peak_flops_per_second is None:
        return None
    return model_flops_per_token * tokens_per_second_per_gpu / peak_flops_per_second


def figures_by_formula(
    run: Run, padded_vocabulary_size: int, tokens_per_second_per_gpu: float, peak: float | None
) -> dict[str, Any]:
    """Returns TFLOP/s per device by `log.flop_formula`, and their share of the peak.

    Args:
        run: the run; two of the formulas count what it recomputes.
        padded_vocabulary_size: rows of the output head.
        tokens_per_second_per_gpu: its speed.
        peak: FLOP/s of the device for the run's precision; None if unknown, and so is the share.

    Returns:
        Nothing for `MODEL_FLOPS`: TFLOP/s and MFU are by that formula.
    """
    name = run.log.flop_formula
    if name == MODEL_FLOPS:
        return {}
    recomputes = run.parallel.recompute, run.parallel.recompute_share
    flops = flops_per_token(run.model, padded_vocabulary_size, name, *recomputes)
    return {
        "flop_formula": name,
        "formula_tflops_per_second_per_device": flops * tokens_per_second_per_gpu / 1e12,
        "formula_share_of_peak": model_flops_utilization(flops, tokens_per_second_per_gpu, peak),
    }


def describe_formula(figures: Mapping[str, Any]) -> str:
    """Describes `figures_by_formula`; empty without them."""
    if "flop_formula" not in figures:
        return ""
    tflops, share = (
        figures[key] for key in ("formula_tflops_per_second_per_device", "formula_share_of_peak")
    )
    of_peak = "" if share is None else f", {share:.2%} of the peak"
    return f"{format_figure(tflops, 4)} TFLOP/s per device by {figures['flop_formula']}{of_peak}"
