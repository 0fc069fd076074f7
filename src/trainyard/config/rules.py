"""Rules across sections of a run: each invalid combination, why, and the nearest change that works.

    model.n_heads=12 must be divisible by parallel.tensor=8 x parallel.context=1: a rank has whole
    heads; nearest that works: parallel.tensor=6

Rules that need the number of ranks are in `layout/ranks.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from trainyard.config.precisions import SCALED_COLUMNS
from trainyard.config.run import (
    CUDNN_CAPABILITIES,
    CUDNN_HEAD_MULTIPLE,
    CUDNN_LARGEST_HEAD,
    CUDNN_TOKENS,
    Run,
    default_zero_stage,
)
from trainyard.config.secrets import secret_problems
from trainyard.config.section import as_toml

Changes = dict[str, Any]
"""New values by dotted field, applied together."""
Fix = str | Changes
"""A field, whose nearest integer that works is taken; or new values."""

FP8_MULTIPLE = 16
"""GPUs need matmul sides that are a multiple of this in fp8; emulation follows the same rule."""
MOST_TRIALS = 1000
"""Integers of a field to try."""
RAMP_FIELDS = ("train.batch_ramp.start", "train.batch_ramp.increment")
NEAREST = "nearest that works: "
_BF16: Changes = {"precision.kind": "bf16"}
_1F1B: Changes = {"parallel.schedule": "1f1b"}
_ZERO_1: Changes = {"parallel.zero_stage": 1}
_ONE_CHUNK: Changes = {"parallel.chunks": 1}
_Section = TypeVar("_Section", bound=BaseModel)


class Broken(NamedTuple):
    """A rule that a run breaks."""

    rule: str
    problem: str
    fixes: tuple[Fix, ...] = ()
    """In order of preference; the first that fixes this rule and breaks no other is suggested."""


def disagreements(run: Run) -> list[str]:
    """Lists every rule that a run breaks, each with the nearest change that fixes it."""
    broken = list(_check(run))
    rules = {each.rule for each in broken}

    def suggest(one: Broken) -> str:
        allowed = rules - {one.rule}
        changes = first_fix(run, one.fixes, lambda other: broken_rules(other).keys() <= allowed)
        return f"; {NEAREST}{describe(run, changes)}" if changes else ""

    return [one.problem + suggest(one) for one in broken] + [
        *secret_problems(run.model_dump()).values()
    ]


def broken_rules(run: Run) -> dict[str, str]:
    """Maps each rule that a run breaks to its problem."""
    return {each.rule: each.problem for each in _check(run)}


def _check(run: Run) -> Iterator[Broken]:
    yield from _check_shards(run)
    yield from _check_pipeline(run)
    yield from _check_data_parallel(run)
    if run.precision.formats.multiplies_in_fp8:
        yield from _check_fp8(run)
    yield from _check_batches(run)
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
        fields |= {field: attrgetter(field)(run) for field in RAMP_FIELDS}
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
    """Keeps effective changes that do not follow by default, plus the ZeRO stage if it does."""
    new = {field: value for field, value in changes.items() if value != attrgetter(field)(run)}
    models = (run.model, change(run, changes).model)
    if all(model.d_head == model.d_model // model.n_heads for model in models):
        new.pop("model.d_head", None)
    if all(model.n_key_value_heads == model.n_heads for model in models):
        new.pop("model.n_key_value_heads", None)
    stage, pipeline = changes.get("parallel.zero_stage"), new.get("parallel.pipeline")
    implied = default_zero_stage(pipeline) if pipeline and stage is not None else stage
    return new if stage == implied else new | {"parallel.zero_stage": stage}


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
    """Lists the fields of a run that rule out cuDNN's attention, with their values."""
    model = run.model
    obstacles = {
        f"model.dropout={model.dropout}": model.dropout > 0,
        "model.attention_within_documents=true": model.attention_within_documents,
        "train.deterministic=true": run.train.deterministic,
        "parallel.context_method='ring'": _is_ring(run),
        f"precision.kind={run.precision.kind!r}": run.precision.formats.compute.n_bytes > 2,
        f"model.sequence_length={model.sequence_length}": model.sequence_length % CUDNN_TOKENS,
        f"model.d_head={model.d_head}": model.d_head % CUDNN_HEAD_MULTIPLE
        or model.d_head > CUDNN_LARGEST_HEAD,
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
    field = "n_heads" if model.n_heads == model.n_key_value_heads else "n_key_value_heads"
    is_ulysses = parallel.context_method == "ulysses"
    if model.n_key_value_heads % (tensor * context if is_ulysses else tensor):
        by_context = f" x parallel.context={context}" if is_ulysses else ""
        yield Broken(
            "heads",
            f"model.{field}={model.n_key_value_heads} must be divisible by parallel.tensor={tensor}"
            f"{by_context}: a rank has whole heads",
            ("parallel.tensor", "parallel.context", {"parallel.context_method": "ring"}, alone),
        )
    if model.d_ff % tensor:
        yield Broken(
            "d_ff",
            f"model.d_ff={model.d_ff} must be divisible by parallel.tensor={tensor}: "
            "a rank has an equal part",
            ("parallel.tensor",),
        )
    tokens = f"model.sequence_length={model.sequence_length} must be divisible by "
    if model.sequence_length % (2 * context if is_ring else context):
        yield Broken(
            "context",
            f"{tokens}{'2 x ' if is_ring else ''}parallel.context={context}: "
            f"a rank has an equal part{' of each half' if is_ring else ''}",
            ("parallel.context", "model.sequence_length", alone),
        )
    elif parallel.sequence and model.sequence_length // context % tensor:
        yield Broken(
            "sequence",
            f"{tokens}parallel.tensor={tensor} x parallel.context={context} when "
            "parallel.sequence is true: a rank has an equal part",
            ("parallel.tensor", "model.sequence_length", {"parallel.sequence": False}),
        )
    if is_ring and model.dropout:
        yield Broken(
            "ring_dropout",
            f"model.dropout={model.dropout} is incompatible with parallel.context_method='ring': "
            "no rank has whole attention weights",
            ({"parallel.context_method": "ulysses"}, {"model.dropout": 0.0}),
        )
    if run.kernels.attention == "cudnn" and (obstacles := _obstacles_to_cudnn(run)):
        yield Broken(
            "cudnn",
            f"kernels.attention='cudnn' is incompatible with {' and '.join(obstacles)}: it is not "
            "deterministic, whole and causal, without dropout, in bf16 or fp16; of multiples of "
            f"{CUDNN_TOKENS} tokens, and heads of multiples of {CUDNN_HEAD_MULTIPLE} "
            f"up to {CUDNN_LARGEST_HEAD} values",
            ({"kernels.attention": "auto"},),
        )


def _check_pipeline(run: Run) -> Iterator[Broken]:
    parallel = run.parallel
    pipeline, chunks, schedule = parallel.pipeline, parallel.chunks, parallel.schedule
    if run.model.n_layers < pipeline * chunks:
        yield Broken(
            "stages",
            f"model.n_layers={run.model.n_layers} is fewer than parallel.pipeline={pipeline} x "
            f"parallel.chunks={chunks}: a stage needs at least one block",
            ("parallel.pipeline", "parallel.chunks", {"parallel.pipeline": 1, **_ONE_CHUNK}),
        )
    if pipeline == 1:
        if chunks > 1:
            problem = f"parallel.chunks={chunks} needs parallel.pipeline above 1"
            yield Broken("chunks", problem, (_ONE_CHUNK,))
        return
    refused = f" is incompatible with parallel.schedule={schedule!r}: "
    if schedule in ("gpipe", "1f1b") and chunks > 1:
        problem = f"parallel.chunks={chunks}{refused}it has one chunk per rank"
        yield Broken("chunks", problem, (_ONE_CHUNK,))
    if schedule == "interleaved" and chunks == 1:
        problem = f"parallel.chunks=1{refused}there is nothing to interleave"
        yield Broken("chunks", problem, ({"parallel.chunks": 2}, _1F1B))
    if schedule == "zero_bubble":
        yield from _check_zero_bubble(run)


def _check_zero_bubble(run: Run) -> Iterator[Broken]:
    parallel = run.parallel
    refused = " is incompatible with parallel.schedule='zero_bubble': "
    if run.train.compile != "never":
        yield Broken(
            "zero_bubble_compile",
            f"train.compile={run.train.compile!r}{refused}compiled blocks give wrong "
            "gradients when the backward pass is split",
            ({"train.compile": "never"},),
        )
    if parallel.recompute != "none":
        yield Broken(
            "zero_bubble_recompute",
            f"parallel.recompute={parallel.recompute!r}{refused}it splits the backward pass, "
            "and each part would recompute, which takes longer than the bubble",
            ({"parallel.recompute": "none"},),
        )
    if run.precision.formats.multiplies_in_fp8:
        yield Broken(
            "zero_bubble_fp8",
            f"precision.kind={run.precision.kind!r}{refused}it splits the backward pass, and "
            "each part would compute both gradients of a matmul, which takes longer than the "
            "bubble",
            (_1F1B, _BF16),
        )
    if parallel.zero_stage == 3:
        yield Broken(
            "zero_bubble_sharding",
            f"parallel.zero_stage=3{refused}weights are freed before the second part of the "
            "backward pass, and their gradients lost",
            (_ZERO_1,),
        )


def _check_data_parallel(run: Run) -> Iterator[Broken]:
    """Checks what is sharded, and the optimizer, whose state is."""
    parallel, kind, formats = run.parallel, run.precision.kind, run.precision.formats
    if parallel.zero_stage == 2 and parallel.pipeline > 1:
        yield Broken(
            "zero_pipeline",
            f"parallel.zero_stage=2 is incompatible with parallel.pipeline={parallel.pipeline}: "
            "a pipeline keeps unsharded gradients until the end of a step, so it would be stage 1",
            (_ZERO_1,),
        )
    if parallel.data_replicate > 1 and parallel.zero_stage == 0:
        yield Broken(
            "data_replicate",
            f"parallel.data_replicate={parallel.data_replicate} is incompatible with "
            "parallel.zero_stage=0: every rank is already a replica",
            (_ZERO_1,),
        )
    if formats.reduced.is_scaled and parallel.zero_stage == 0:
        yield Broken(
            "zero_precision",
            f"parallel.zero_stage=0 is incompatible with precision.kind={kind!r}: "
            "gradients are sent in low precision, which an all-reduce cannot sum",
            (_ZERO_1,),
        )
    if run.optimizer.kind != "adamw" and formats.matrices.states:
        yield Broken(
            "states",
            f"optimizer.kind={run.optimizer.kind!r} is incompatible with precision.kind={kind!r}: "
            "low-precision optimizer state supports AdamW only",
            ({"optimizer.kind": "adamw"},),
        )


def _check_fp8(run: Run) -> Iterator[Broken]:
    kind, fp8 = run.precision.kind, run.precision.fp8
    model, parallel, micro = run.model, run.parallel, run.train.micro_batch_size
    multiple, why = fp8_multiple(run), f"fp8 matmuls need multiples of {FP8_MULTIPLE}"
    if micro * model.sequence_length % (FP8_MULTIPLE * parallel.context):
        yield Broken(
            "fp8_tokens",
            f"train.micro_batch_size={micro} x model.sequence_length={model.sequence_length} must "
            f"be divisible by {FP8_MULTIPLE} x parallel.context={parallel.context} when "
            f"precision.kind is {kind!r}: {why}",
            ("parallel.context", "model.sequence_length", _BF16),
        )
    side = multiple * parallel.tensor
    queries, keys = model.n_heads * model.d_head, model.n_key_value_heads * model.d_head
    if run.precision.formats.scales_columns:
        why = f"{SCALED_COLUMNS} columns of a rank's shard share a scale"
    sizes = {
        "d_model": (f"model.d_model={model.d_model}", model.d_model % side),
        "d_ff": (f"model.d_ff={model.d_ff}", model.d_ff % side),
        "d_head": (
            f"model.d_head={model.d_head} x model.n_heads={model.n_heads}, and x 2 "
            f"model.n_key_value_heads={model.n_key_value_heads},",
            {queries, keys} != {model.d_model} and (queries % side or 2 * keys % side),
        ),
    }
    for field, (size, rest) in sizes.items():
        if rest:
            yield Broken(
                f"fp8_{field}",
                f"{size} must be divisible by {multiple} x parallel.tensor={parallel.tensor} when "
                f"precision.kind is {kind!r}: {why}",
                ("parallel.tensor", *([] if field == "d_model" else [f"model.{field}"]), _BF16),
            )
    if not fp8_blocks(run):
        yield Broken(
            "fp8_blocks",
            f"precision.fp8.precise_blocks={fp8.precise_blocks} at each end covers all "
            f"model.n_layers={model.n_layers}: no block would use fp8",
            ({"precision.fp8.precise_blocks": 0}, _BF16),
        )
    if fp8.all_gather and fp8.scaling == "rowwise":
        yield Broken(
            "fp8_gather",
            "precision.fp8.all_gather=true is incompatible with precision.fp8.scaling='rowwise': "
            "a matmul and its gradient scale a weight along different dimensions",
            ({"precision.fp8.scaling": "tensorwise"},),
        )


def _check_batches(run: Run) -> Iterator[Broken]:
    train, ramp = run.train, run.train.batch_ramp
    distance = train.global_batch_size - ramp.start if ramp else 0
    if ramp and (distance < 0 or distance % ramp.increment):
        yield Broken(
            "ramp",
            f"train.batch_ramp goes from {ramp.start} to global_batch_size="
            f"{train.global_batch_size}: not a whole number of increments of {ramp.increment}",
            ("train.batch_ramp.increment", "train.batch_ramp.start"),
        )
    for field, size in batch_fields(run).items():
        if size % train.micro_batch_size:
            problem = f"{field}={size} must be divisible by train.micro_batch_size="
            yield Broken(field, f"{problem}{train.micro_batch_size}", ("train.micro_batch_size",))


def _check_schedule(run: Run) -> Iterator[Broken]:
    """Checks lengths and learning rates, whose fixes nobody can guess."""
    schedule, ramp = run.schedule, run.train.batch_ramp
    warmup, decay, cooldown = schedule.warmup, schedule.decay, schedule.cooldown
    lengths = {"train.length": run.train.length, "schedule.decay": decay}
    if ramp:
        lengths["train.batch_ramp.length"] = ramp.length
    for field, length in lengths.items():
        if not length.amount:
            yield Broken(field, f"{field}={str(length)!r} must be positive")
    lowest, peak = schedule.minimum_learning_rate, run.optimizer.learning_rate
    if lowest > peak:
        problem = f"schedule.minimum_learning_rate={lowest} is above optimizer.learning_rate={peak}"
        yield Broken("rates", problem)
    of_decay = f"schedule.decay={str(decay)!r}"
    if schedule.kind != "constant" and warmup.unit == decay.unit and warmup.amount >= decay.amount:
        problem = f"schedule.warmup={str(warmup)!r} must be shorter than {of_decay}"
        yield Broken("warmup", problem)
    cools = schedule.kind == "warmup_stable_decay" and cooldown.unit == decay.unit
    if cools and cooldown.amount > decay.amount:
        problem = f"schedule.cooldown={str(cooldown)!r} must not be longer than {of_decay}"
        yield Broken("cooldown", problem)
