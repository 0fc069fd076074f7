"""Rules across sections of a run: each invalid combination, why, and the nearest change that works.

    model.n_heads=12 must be divisible by parallel.tensor=8: a rank has whole
    heads; nearest that works: parallel.tensor=6

Rules that need the number of ranks are in `layout/ranks.py`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import BaseModel

from trainyard.config.precisions import BF16, SCALED_COLUMNS
from trainyard.config.run import CUDNN_TOKENS, Run
from trainyard.config.secrets import secret_problems
from trainyard.config.section import as_toml

Changes = dict[str, Any]
"""New values by dotted field, applied together."""
Fix = str | Changes
"""A field, whose nearest integer that works is taken; or new values."""

CUDNN_HEAD_MULTIPLE, CUDNN_LARGEST_HEAD = 8, 128
"""Sizes of heads that cuDNN's attention takes, forward and backward."""
CUDNN_CAPABILITIES = (9, 10)
"""Major compute capabilities where it is expected to be faster than flash attention."""
FP8_MULTIPLE = 16
"""GPUs need matmul sides that are a multiple of this in fp8; emulation follows the same rule."""
MOST_TRIALS = 1000
"""Integers of a field to try."""
NEAREST = "nearest that works: "
_BF16: Changes = {"precision.kind": "bf16"}
_1F1B: Changes = {"parallel.schedule": "1f1b"}
_ZERO_1: Changes = {"parallel.zero_stage": 1}
_ONE_CHUNK: Changes = {"parallel.chunks": 1}
_FIELD = re.compile(rf"\b(?:{'|'.join(Run.model_fields)})(?:\.[a-z_0-9]+)+")
_Section = TypeVar("_Section", bound=BaseModel)


Broken = tuple[str, list[Fix]]
"""A rule that a run breaks, and fixes in order of preference.

The rule names fields, whose values are filled in where it is shown. The first fix that repairs it
and breaks no other rule is suggested.
"""


def disagreements(run: Run) -> list[str]:
    """Lists every rule that a run breaks, each with the nearest change that fixes it."""
    broken = {**dict(_check(run)), **dict(_check_batches(run))}

    def describe_broken(rule: str) -> str:
        allowed = broken.keys() - {rule}
        changes = first_fix(run, broken[rule], lambda other: broken_rules(other).keys() <= allowed)
        return fill(rule, run) + (f"; {NEAREST}{describe(run, changes)}" if changes else "")

    return [*map(describe_broken, broken), *secret_problems(run.model_dump()).values()]


def broken_rules(run: Run, *, batches: bool = True) -> dict[str, str]:
    """Maps each rule that a run breaks to its problem; `batches`: also those on batch sizes."""
    checks = itertools.chain(_check(run), _check_batches(run) if batches else ())
    return {rule: fill(rule, run) for rule, _ in checks}


def fill(rule: str, run: Run) -> str:
    """Puts the value of each field that a rule names behind its name."""
    return _FIELD.sub(lambda f: f"{f[0]}={as_toml(attrgetter(f[0])(run))}", rule).replace('"', "'")


def _check(run: Run) -> Iterator[Broken]:
    yield from _check_shards(run)
    yield from _check_experts(run)
    yield from _check_pipeline(run)
    yield from _check_data_parallel(run)
    if run.precision.formats.multiplies_in_fp8:
        yield from _check_fp8(run)
    yield from _check_schedule(run)


def first_fix(run: Run, fixes: Iterable[Fix], works: Callable[[Run], bool]) -> Changes:
    """Returns the first changes that work; empty if none do."""
    trials = (
        [fix] if isinstance(fix, dict) else ({fix: value} for value in _integers_near(run, fix))
        for fix in fixes
    )
    for changes in itertools.chain.from_iterable(trials):
        if works(change(run, changes)):
            return changes
    return {}


def _integers_near(run: Run, field: str) -> Iterator[int]:
    """Lists positive integers by their distance to a field's value, the smaller first."""
    value = attrgetter(field)(run)
    for distance in range(1, MOST_TRIALS // 2):
        if value > distance:
            yield value - distance
        yield value + distance


def batch_fields(run: Run) -> dict[str, int]:
    """Maps every field that sets a batch size to its value."""
    fields = {"train.global_batch_size": run.train.global_batch_size}
    ramp = run.train.batch_ramp
    if ramp and ramp.start != run.train.global_batch_size:
        fields["train.batch_ramp.start"] = ramp.start
        fields["train.batch_ramp.increment"] = ramp.increment
    return fields


def change(section: _Section, changes: Changes) -> _Section:
    """Returns a copy with other values, without validating them."""
    for field, value in changes.items():
        head, _, rest = field.partition(".")
        if rest:
            value = change(getattr(section, head), {rest: value})
        section = section.model_copy(update={head: value})
    return section


def describe(run: Run, changes: Changes, joint: str = " with ") -> str:
    """Formats the differences as overrides: "parallel.tensor=4"."""
    return joint.join(f"{f}={as_toml(value)}" for f, value in differences(run, changes).items())


def differences(run: Run, changes: Changes) -> Changes:
    """Keeps effective changes that do not follow by default."""
    new = {field: value for field, value in changes.items() if value != attrgetter(field)(run)}
    models = (run.model, change(run, changes).model)
    if all(model.d_head == model.d_model // model.n_heads for model in models):
        new.pop("model.d_head", None)
    if all(model.n_key_value_heads == model.n_heads for model in models):
        new.pop("model.n_key_value_heads", None)
    return new


def divisors(number: int) -> list[int]:
    """Lists the divisors of `number`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def takes_cudnn(run: Run, capability: tuple[int, int] | None) -> bool:
    """Returns whether a run computes attention by cuDNN on a GPU; else by torch's own kernels.

    Args:
        run: the run.
        capability: compute capability of the GPU; None if it is not NVIDIA's or unknown.
    """
    if run.kernels.attention != "auto":
        return run.kernels.attention == "cudnn"
    is_faster = capability is not None and capability[0] in CUDNN_CAPABILITIES
    return is_faster and not _obstacles_to_cudnn(run)


def _obstacles_to_cudnn(run: Run) -> list[str]:
    """Lists the fields of a run that rule out cuDNN's attention."""
    model = run.model
    obstacles = {
        "model.dropout": model.dropout > 0,
        "model.attention_within_documents": model.attention_within_documents,
        "train.deterministic": run.train.deterministic,
        "parallel.context_method": _is_ring(run),
        "precision.kind": run.precision.formats.compute.n_bytes > 2,
        "model.sequence_length": model.sequence_length % CUDNN_TOKENS,
        "model.d_head": model.d_head % CUDNN_HEAD_MULTIPLE or model.d_head > CUDNN_LARGEST_HEAD,
    }
    return [field for field, rules_out in obstacles.items() if rules_out]


def fp8_multiple(run: Run) -> int:
    """Returns the required divisor of the sides of each rank's matrices."""
    return SCALED_COLUMNS if run.precision.formats.scales_columns else FP8_MULTIPLE


def fp8_blocks(run: Run) -> range:
    """Returns the blocks with fp8 matmuls."""
    if not run.precision.formats.multiplies_in_fp8:
        return range(0)
    n_precise = run.precision.fp8.precise_blocks
    return range(n_precise, run.model.n_layers - n_precise)


def _is_ring(run: Run) -> bool:
    return run.parallel.context_method == "ring" and run.parallel.context > 1


def _check_shards(run: Run) -> Iterator[Broken]:
    """Checks that tensor and context parallelism can shard the model evenly."""
    model, parallel = run.model, run.parallel
    tensor, context, is_ring = parallel.tensor, parallel.context, _is_ring(run)
    alone: Changes = {"parallel.tensor": 1, "parallel.context": 1}
    # Groups of heads share keys and values; without groups, both fields are equal.
    heads = "n_heads" if model.n_heads == model.n_key_value_heads else "n_key_value_heads"
    is_split = parallel.context_method == "ulysses" and context > 1
    if model.n_key_value_heads % (tensor * context) if is_split else not model.shards_heads(tensor):
        ranks = f"parallel.tensor{' x parallel.context' if is_split else ''}"
        ring: Changes = {"parallel.context_method": "ring"}
        may_share = not is_split and heads != "n_heads" and model.query_key_norm != "all"
        shares = ", or shares one of keys with equal parts of model.n_heads" * may_share
        yield (
            f"model.{heads} must be divisible by {ranks}: a rank has whole heads{shares}",
            ["parallel.tensor", "parallel.context", ring, alone],
        )
    has_dense = not model.n_experts or model.n_dense_blocks > 0
    if has_dense and model.d_ff % tensor:
        rule = "model.d_ff must be divisible by parallel.tensor: a rank has an equal part"
        yield rule, ["parallel.tensor"]
    tokens = "model.sequence_length must be divisible by"
    if model.sequence_length % (2 * context if is_ring else context):
        rule = f"{tokens} parallel.context: a rank has an equal part"
        if is_ring:
            rule = f"{tokens} 2 x parallel.context: a rank has an equal part of each half"
        yield rule, ["parallel.context", "model.sequence_length", alone]
    elif parallel.sequence and model.sequence_length // context % tensor:
        yield (
            f"{tokens} parallel.tensor x parallel.context when parallel.sequence: "
            "a rank has an equal part",
            ["parallel.tensor", "model.sequence_length", {"parallel.sequence": False}],
        )
    if is_ring and model.dropout:
        yield (
            "model.dropout is incompatible with parallel.context_method: no rank has whole "
            "attention weights",
            [{"parallel.context_method": "ulysses"}, {"model.dropout": 0.0}],
        )
    if run.kernels.attention == "cudnn" and (obstacles := _obstacles_to_cudnn(run)):
        yield (
            f"kernels.attention is incompatible with {' and '.join(obstacles)}: it is not "
            "deterministic, whole and causal, without dropout, in bf16 or fp16; of multiples of "
            f"{CUDNN_TOKENS} tokens, and heads of multiples of {CUDNN_HEAD_MULTIPLE} "
            f"up to {CUDNN_LARGEST_HEAD} values",
            [{"kernels.attention": "auto"}],
        )


def _check_experts(run: Run) -> Iterator[Broken]:
    model, parallel = run.model, run.parallel
    if not model.n_experts:
        if parallel.expert > 1:
            yield (
                "parallel.expert is incompatible with model.n_experts: there are none to share",
                [{"parallel.expert": 1}],
            )
        return
    if model.n_experts % parallel.expert:
        rule = "model.n_experts must be divisible by parallel.expert: a rank has whole experts"
        yield rule, ["parallel.expert"]
    if model.d_expert % parallel.tensor:
        rule = "model.d_expert must be divisible by parallel.tensor: a rank has an equal part"
        yield rule, ["parallel.tensor"]
    if run.precision.formats.multiplies_in_fp8:
        yield (
            "precision.kind is incompatible with model.n_experts: experts multiply in bf16, fp16 "
            "or fp32",
            [_BF16],
        )


def _check_pipeline(run: Run) -> Iterator[Broken]:
    parallel, chunks = run.parallel, run.parallel.chunks
    schedule = parallel.schedule if parallel.pipeline > 1 else ""
    if run.model.n_layers < parallel.pipeline * chunks:
        yield (
            "model.n_layers is fewer than parallel.pipeline x parallel.chunks: a stage needs at "
            "least one block",
            ["parallel.pipeline", "parallel.chunks", {"parallel.pipeline": 1, **_ONE_CHUNK}],
        )
    if chunks > 1 and not schedule:
        yield "parallel.chunks is incompatible with parallel.pipeline: no pipeline", [_ONE_CHUNK]
    refused = "is incompatible with parallel.schedule:"
    if chunks > 1 and schedule in ("gpipe", "1f1b"):
        yield f"parallel.chunks {refused} it has one chunk per rank", [_ONE_CHUNK]
    if chunks == 1 and schedule == "interleaved":
        rule = f"parallel.chunks {refused} there is nothing to interleave"
        yield rule, [{"parallel.chunks": 2}, _1F1B]
    if schedule != "zero_bubble":
        return
    if run.precision.formats.multiplies_in_fp8:
        yield (
            f"precision.kind {refused} its matmuls compute both gradients at once, and leave none "
            "for the bubble",
            [_1F1B, _BF16],
        )
    if parallel.shards_gradients:
        yield (
            f"parallel.zero_stage {refused} gradients are reduced before the second part of the "
            "backward pass",
            [_ZERO_1],
        )


def _check_data_parallel(run: Run) -> Iterator[Broken]:
    """Checks what is sharded or recomputed, and the optimizer, whose state is sharded."""
    parallel, formats = run.parallel, run.precision.formats
    if parallel.recompute == "none" and parallel.recompute_share < 1:
        rule = "parallel.recompute_share is incompatible with parallel.recompute: no block does"
        yield rule, [{"parallel.recompute": "block"}]
    if parallel.data_replicate > 1 and parallel.zero_stage == 0:
        yield (
            "parallel.data_replicate is incompatible with parallel.zero_stage: every rank is "
            "already a replica",
            [_ZERO_1],
        )
    if formats.reduced.is_scaled and parallel.zero_stage == 0:
        yield (
            "parallel.zero_stage is incompatible with precision.kind: gradients are sent in low "
            "precision, which an all-reduce cannot sum",
            [_ZERO_1],
        )
    if parallel.reduce_format == "bf16":
        yield from _check_reduction(run)
    if run.optimizer.kind != "adamw" and formats.matrices.states:
        yield (
            "optimizer.kind is incompatible with precision.kind: low-precision optimizer state "
            "supports AdamW only",
            [{"optimizer.kind": "adamw"}],
        )


def _check_reduction(run: Run) -> Iterator[Broken]:
    formats, refused = run.precision.formats, "parallel.reduce_format is incompatible with"
    in_fp32: Changes = {"parallel.reduce_format": "fp32"}
    if formats.compute != BF16:
        yield f"{refused} precision.kind: its gradients are more precise", [in_fp32]
    if formats.reduced.is_scaled:
        yield f"{refused} precision.kind: it sends gradients of blocks in 8 bits", [in_fp32]
    if run.parallel.zero_stage == 0:
        yield f"{refused} parallel.zero_stage: its all-reduce is in fp32", [_ZERO_1, in_fp32]


def _check_fp8(run: Run) -> Iterator[Broken]:
    model, parallel, fp8 = run.model, run.parallel, run.precision.fp8
    why = f"fp8 matmuls need multiples of {FP8_MULTIPLE}"
    tokens = run.train.micro_batch_size * model.sequence_length
    if tokens % (FP8_MULTIPLE * parallel.context):
        yield (
            "train.micro_batch_size x model.sequence_length must be divisible by "
            f"{FP8_MULTIPLE} x parallel.context when precision.kind: {why}",
            ["parallel.context", "model.sequence_length", _BF16],
        )
    multiple = fp8_multiple(run)
    if run.precision.formats.scales_columns:
        why = f"{SCALED_COLUMNS} columns of a rank's shard share a scale"
    queries, keys = model.n_heads * model.d_head, model.n_key_value_heads * model.d_head
    heads = "model.d_head x model.n_heads, and x 2 model.n_key_value_heads,"
    attention = [queries, 2 * keys] if {queries, keys} != {model.d_model} else []
    sizes: list[tuple[str, list[int], list[Fix]]] = [
        ("model.d_model", [model.d_model], []),
        ("model.d_ff", [model.d_ff], ["model.d_ff"]),
        (heads, attention, ["model.d_head"]),
    ]
    for size, values, fixes in sizes:
        if any(value % (multiple * parallel.tensor) for value in values):
            yield (
                f"{size} must be divisible by {multiple} x parallel.tensor when precision.kind: "
                f"{why}",
                ["parallel.tensor", *fixes, _BF16],
            )
    if not fp8_blocks(run):
        yield (
            "precision.fp8.precise_blocks at each end covers all model.n_layers: no block would "
            "use fp8",
            [{"precision.fp8.precise_blocks": 0}, _BF16],
        )
    if fp8.all_gather and fp8.scaling == "rowwise":
        yield (
            "precision.fp8.all_gather is incompatible with precision.fp8.scaling: a matmul and "
            "its gradient scale a weight along different dimensions",
            [{"precision.fp8.scaling": "tensorwise"}],
        )


def _check_batches(run: Run) -> Iterator[Broken]:
    train, ramp = run.train, run.train.batch_ramp
    distance = train.global_batch_size - ramp.start if ramp else 0
    if ramp and (distance < 0 or distance % ramp.increment):
        yield (
            "from train.batch_ramp.start to train.global_batch_size is not a whole number of "
            "train.batch_ramp.increment",
            ["train.batch_ramp.increment", "train.batch_ramp.start"],
        )
    for field, size in batch_fields(run).items():
        if size % train.micro_batch_size:
            rule = f"{field} must be divisible by train.micro_batch_size"
            yield rule, ["train.micro_batch_size"]


def _check_schedule(run: Run) -> Iterator[Broken]:
    """Checks lengths and learning rates, whose fixes nobody can guess."""
    schedule, ramp = run.schedule, run.train.batch_ramp
    warmup, decay, cooldown = schedule.warmup, schedule.decay, schedule.cooldown
    lengths = {"train.length": run.train.length, "schedule.decay": decay}
    if ramp:
        lengths["train.batch_ramp.length"] = ramp.length
    for field, length in lengths.items():
        if not length.amount:
            yield f"{field} must be positive", []
    if schedule.kind == "points" or schedule.points.points:
        yield from _check_points(run)
    elif schedule.minimum_learning_rate > run.optimizer.learning_rate:
        yield "schedule.minimum_learning_rate is above optimizer.learning_rate", []
    decays = schedule.kind not in ("constant", "points")
    if decays and warmup.unit == decay.unit and warmup.amount >= decay.amount:
        yield "schedule.warmup must be shorter than schedule.decay", []
    cools = schedule.kind == "warmup_stable_decay" and cooldown.unit == decay.unit
    if cools and cooldown.amount > decay.amount:
        yield "schedule.cooldown must not be longer than schedule.decay", []


def _check_points(run: Run) -> Iterator[Broken]:
    points = run.schedule.points.points
    if run.schedule.kind != "points":
        rule = "schedule.points is incompatible with schedule.kind: it is a schedule of its own"
        yield rule, [{"schedule.kind": "points"}]
    elif not points:
        yield "schedule.points is empty, which schedule.kind needs", [{"schedule.kind": "cosine"}]
    for (before, _), (after, _) in itertools.pairwise(points):
        if before.unit == after.unit and before.amount > after.amount:
            yield f"schedule.points is not in order: {before} is before {after}", []
