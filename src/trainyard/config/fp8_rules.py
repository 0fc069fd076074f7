"""Rules of fp8 matmuls: which layers can use them, and which settings are incompatible.

`config/rules.py` calls these, and knows the remedies.
"""

from __future__ import annotations

from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.config.run import Run

FP8_MULTIPLE = 16
"""GPUs need matmul sides that are a multiple of this in fp8; emulation follows the same rule."""


def fp8_multiple(run: Run) -> int:
    """Returns the required divisor of the sides of each rank's matrices."""
    return SCALED_COLUMNS if run.precision.formats.scales_columns else FP8_MULTIPLE


def fp8_blocks(run: Run) -> range:
    """Returns the blocks with fp8 matmuls."""
    if not run.precision.formats.multiplies_in_fp8:
        return range(0)
    n_precise = run.precision.fp8.precise_blocks
    return range(n_precise, run.model.n_layers - n_precise)


def fp8_problems(run: Run) -> dict[str, str]:
    """Finds the settings that are incompatible with fp8 matmuls."""
    formats = run.precision.formats
    if not formats.multiplies_in_fp8:
        return {}
    kind, fp8 = run.precision.kind, run.precision.fp8
    model, parallel, micro = run.model, run.parallel, run.train.micro_batch_size
    problems = {}
    if formats.reduced.is_scaled and parallel.zero_stage == 0:
        problems["fp8_zero_stage"] = (
            f"parallel.zero_stage=0 is incompatible with precision.kind={kind!r}: "
            "gradients are sent in low precision, which an all-reduce cannot sum"
        )
    problems |= _side_problems(run)
    if micro * model.sequence_length % (FP8_MULTIPLE * parallel.context):
        problems["fp8_tokens"] = (
            f"train.micro_batch_size={micro} x model.sequence_length={model.sequence_length} must "
            f"be divisible by {FP8_MULTIPLE} x parallel.context={parallel.context} when "
            f"precision.kind is {kind!r}: fp8 matmuls need multiples of {FP8_MULTIPLE}"
        )
    if 2 * fp8.precise_blocks >= model.n_layers:
        problems["fp8_blocks"] = (
            f"precision.fp8.precise_blocks={fp8.precise_blocks} at each end covers all "
            f"model.n_layers={model.n_layers}: no block would use fp8"
        )
    if fp8.all_gather and fp8.scaling == "rowwise":
        problems["fp8_gather"] = (
            "precision.fp8.all_gather=true is incompatible with precision.fp8.scaling='rowwise': "
            "a matmul and its gradient scale a weight along different dimensions"
        )
    if parallel.schedule == "zero_bubble" and parallel.pipeline > 1:
        problems["fp8_zero_bubble"] = (
            f"precision.kind={kind!r} is incompatible with parallel.schedule='zero_bubble': it "
            "splits the backward pass, and each part would compute both gradients of a matmul, "
            "which takes longer than the bubble"
        )
    return problems


def _side_problems(run: Run) -> dict[str, str]:
    """Finds the sides of each rank's matrices that are no multiple of what fp8 matmuls need."""
    model, parallel, kind = run.model, run.parallel, run.precision.kind
    multiple, why = fp8_multiple(run), f"fp8 matmuls need multiples of {FP8_MULTIPLE}"
    if run.precision.formats.scales_columns:
        why = f"{SCALED_COLUMNS} columns of a rank's shard share a scale"
    problems = {}
    side = multiple * parallel.tensor
    for field, size in {"d_model": model.d_model, "d_ff": model.d_ff}.items():
        if size % side:
            problems[f"fp8_{field}"] = (
                f"model.{field}={size} must be divisible by {multiple} x parallel.tensor="
                f"{parallel.tensor} when precision.kind is {kind!r}: {why}"
            )
    queries, keys = model.n_heads * model.d_head, model.n_key_value_heads * model.d_head
    if {queries, keys} != {model.d_model} and (queries % side or 2 * keys % side):
        problems["fp8_d_head"] = (
            f"model.d_head={model.d_head} x model.n_heads={model.n_heads}, and x 2 "
            f"model.n_key_value_heads={model.n_key_value_heads}, must be divisible by {multiple} x "
            f"parallel.tensor={parallel.tensor} when precision.kind is {kind!r}: {why}"
        )
    return problems


def state_problems(run: Run) -> dict[str, str]:
    """Finds an optimizer whose states the precision has no formats for."""
    kind, optimizer = run.precision.kind, run.optimizer.kind
    if optimizer == "adamw" or not run.precision.formats.matrices.states:
        return {}
    text = f"optimizer.kind={optimizer!r} is incompatible with precision.kind={kind!r}: "
    return {"states": text + "low-precision optimizer state supports AdamW only"}
