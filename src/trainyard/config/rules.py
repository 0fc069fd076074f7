"""Rules across sections of a run: invalid combinations, the reasons, and the nearest fixes.

Each rule has a one-sentence message with both values. It then tries possible changes, nearest
values first, and suggests the first one that breaks no other rule:

    model.n_heads=12 must be divisible by parallel.tensor=8 x parallel.context=1: a rank has whole
    heads; nearest that works: parallel.tensor=6

Rules that need the number of ranks are in `planning/layout.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, TypeVar

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

Changes = dict[str, Any]
"""New values by dotted field, applied together."""

FP8_MULTIPLE = 16
"""GPUs need matmul sides that are a multiple of this in fp8; emulation follows the same rule."""
MOST_TRIALS = 1000
"""Changes to try on a way."""
_SCHEDULES = ("parallel.schedule", ["1f1b", "interleaved", "gpipe"])
_PLAIN = ("precision.kind", ["bf16"])
_ZERO_1 = ("parallel.zero_stage", [1])
FIXED_BY_VALUES: dict[str, list[tuple[str, list[Any]]]] = {
    "cudnn": [("kernels.attention", ["auto"])],
    "ring_dropout": [("parallel.context_method", ["ulysses"]), ("model.dropout", [0.0])],
    "chunks": [("parallel.chunks", [1, 2]), _SCHEDULES],
    "zero_bubble_compile": [("train.compile", ["never"]), _SCHEDULES],
    "zero_bubble_recompute": [("parallel.recompute", ["none"]), _SCHEDULES],
    "zero_bubble_sharding": [_ZERO_1, _SCHEDULES],
    "zero_pipeline": [_ZERO_1],
    "data_replicate": [_ZERO_1, ("parallel.data_replicate", [1])],
    "fp8_gather": [
        ("precision.fp8.scaling", ["tensorwise"]),
        ("precision.fp8.all_gather", [False]),
    ],
    "fp8_zero_bubble": [_SCHEDULES, _PLAIN],
    "states": [("optimizer.kind", ["adamw"]), ("precision.kind", ["fp8", "bf16"])],
    "fp8_zero_stage": [_ZERO_1, ("precision.kind", ["fp8", "bf16"])],
}
"""Rules that a value of one field fixes: each field with its values, nearest first."""
NEAREST = "nearest that works: "
_Section = TypeVar("_Section", bound=BaseModel)


def disagreements(run: Run) -> list[str]:
    """Lists every rule that a run breaks, each with the nearest changes that fix it."""
    found = broken_rules(run)
    return [text + _remedies(run, rule, found) for rule, text in found.items()]


def broken_rules(run: Run) -> dict[str, str]:
    """Maps each rule that a run breaks to its problem."""
    return {
        **_cut_problems(run),
        **_pipeline_problems(run),
        **_sharding_problems(run),
        **_kernel_problems(run),
        **fp8_problems(run),
        **state_problems(run),
        **_batch_problems(run),
        **_length_problems(run),
        **secret_problems(run.model_dump()),
    }


def batch_fields(run: Run) -> dict[str, int]:
    """Maps every field that sets a batch size to its value."""
    fields = {"train.global_batch_size": run.train.global_batch_size}
    ramp = run.train.batch_ramp
    if ramp and ramp.start != run.train.global_batch_size:
        names = ("start", "increment")
        fields |= {f"train.batch_ramp.{name}": getattr(ramp, name) for name in names}
    return fields


def change(section: _Section, changes: Changes) -> _Section:
    """Returns a copy with other values, without validating them."""
    for field, value in changes.items():
        head, _, rest = field.partition(".")
        if rest:
            value = change(getattr(section, head), {rest: value})
        section = section.model_copy(update={head: value})
    return section


def nearest(values: Iterable[int], near: int) -> list[int]:
    """Sorts numbers by distance to a number; of equal distances, the smaller first."""
    return sorted(values, key=lambda value: (abs(value - near), value))


def divisors(number: int) -> list[int]:
    """Lists the divisors of `number`."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest_multiples(factor: int, near: int, n_beyond: int = 1) -> Iterator[int]:
    """Lists multiples of `factor` by their distance to a number: down to 1 x, up to `n_beyond`."""
    below, rest = divmod(near, factor)
    for distance in range(max(below, n_beyond)):
        pair = [below - distance, below + 1 + distance]
        for multiple in pair if rest <= factor - rest else reversed(pair):
            if multiple > 0:
                yield multiple * factor


def _cut_problems(run: Run) -> dict[str, str]:
    """Checks that tensor and context parallelism can shard the model evenly."""
    model, parallel = run.model, run.parallel
    tensor, context, method = parallel.tensor, parallel.context, parallel.context_method
    problems = {}
    # Groups of heads share keys and values; without groups, both fields are equal.
    field = "n_heads" if model.n_heads == model.n_key_value_heads else "n_key_value_heads"
    is_ulysses, by_context = method == "ulysses", f" x parallel.context={context}"
    if model.n_key_value_heads % (tensor * context if is_ulysses else tensor):
        problems["heads"] = (
            f"model.{field}={model.n_key_value_heads} must be divisible by parallel.tensor={tensor}"
            f"{by_context if is_ulysses else ''}: a rank has whole heads"
        )
    if model.d_ff % tensor:
        problems["d_ff"] = (
            f"model.d_ff={model.d_ff} must be divisible by parallel.tensor={tensor}: "
            "a rank has an equal part"
        )
    is_ring = method == "ring" and context > 1
    if model.sequence_length % (2 * context if is_ring else context):
        problems["context"] = (
            f"model.sequence_length={model.sequence_length} must be divisible by "
            f"{'2 x ' if is_ring else ''}parallel.context={context}: "
            f"a rank has an equal part{' of each half' if is_ring else ''}"
        )
    elif parallel.sequence and model.sequence_length // context % tensor:
        problems["sequence"] = (
            f"model.sequence_length={model.sequence_length} must be divisible by parallel.tensor="
            f"{tensor} x parallel.context={context} when parallel.sequence is true: "
            "a rank has an equal part"
        )
    if is_ring and model.dropout:
        problems["ring_dropout"] = (
            f"model.dropout={model.dropout} is incompatible with parallel.context_method='ring': "
            "no rank has whole attention weights"
        )
    return problems


def _pipeline_problems(run: Run) -> dict[str, str]:
    """Checks pipeline stages and schedules."""
    parallel = run.parallel
    pipeline, chunks, schedule = parallel.pipeline, parallel.chunks, parallel.schedule
    problems = {}
    if run.model.n_layers < pipeline * chunks:
        problems["stages"] = (
            f"model.n_layers={run.model.n_layers} is fewer than parallel.pipeline={pipeline} x "
            f"parallel.chunks={chunks}: a stage needs at least one block"
        )
    if pipeline == 1:
        if chunks > 1:
            problems["chunks"] = f"parallel.chunks={chunks} needs parallel.pipeline above 1"
        return problems
    if schedule in ("gpipe", "1f1b") and chunks > 1:
        problems["chunks"] = (
            f"parallel.chunks={chunks} is incompatible with parallel.schedule={schedule!r}: "
            "it has one chunk per rank"
        )
    if schedule == "interleaved" and chunks == 1:
        problems["chunks"] = (
            "parallel.chunks=1 is incompatible with parallel.schedule='interleaved': "
            "there is nothing to interleave"
        )
    if schedule == "zero_bubble" and run.train.compile != "never":
        problems["zero_bubble_compile"] = (
            f"train.compile={run.train.compile!r} is incompatible with "
            "parallel.schedule='zero_bubble': compiled blocks give wrong gradients "
            "when the backward pass is split"
        )
    if schedule == "zero_bubble" and parallel.recompute != "none":
        problems["zero_bubble_recompute"] = (
            f"parallel.recompute={parallel.recompute!r} is incompatible with "
            "parallel.schedule='zero_bubble': it splits the backward pass, and each part would "
            "recompute, which takes longer than the bubble"
        )
    return problems


def _sharding_problems(run: Run) -> dict[str, str]:
    parallel = run.parallel
    problems = {}
    if parallel.zero_stage == 2 and parallel.pipeline > 1:
        problems["zero_pipeline"] = (
            f"parallel.zero_stage=2 is incompatible with parallel.pipeline={parallel.pipeline}: "
            "a pipeline keeps unsharded gradients until the end of a step, so it would be stage 1"
        )
    splits_backward = parallel.schedule == "zero_bubble" and parallel.pipeline > 1
    if parallel.zero_stage == 3 and splits_backward:
        problems["zero_bubble_sharding"] = (
            "parallel.zero_stage=3 is incompatible with parallel.schedule='zero_bubble': weights "
            "are freed before the second part of the backward pass, and their gradients lost"
        )
    if parallel.data_replicate > 1 and parallel.zero_stage == 0:
        problems["data_replicate"] = (
            f"parallel.data_replicate={parallel.data_replicate} is incompatible with "
            "parallel.zero_stage=0: every rank is already a replica"
        )
    return problems


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


def _kernel_problems(run: Run) -> dict[str, str]:
    if run.kernels.attention != "cudnn" or not (obstacles := _obstacles_to_cudnn(run)):
        return {}
    return {
        "cudnn": f"kernels.attention='cudnn' is incompatible with {' and '.join(obstacles)}: it "
        "is not deterministic, whole and causal, without dropout, in bf16 or fp16; of multiples of "
        f"{CUDNN_TOKENS} tokens, and heads of multiples of {CUDNN_HEAD_MULTIPLE} "
        f"up to {CUDNN_LARGEST_HEAD} values"
    }


def _obstacles_to_cudnn(run: Run) -> list[str]:
    """Lists the fields of a run that rule out cuDNN's attention, with their values."""
    model, parallel = run.model, run.parallel
    is_ring = parallel.context_method == "ring" and parallel.context > 1
    multiple, largest = CUDNN_HEAD_MULTIPLE, CUDNN_LARGEST_HEAD
    obstacles = {
        f"model.dropout={model.dropout}": model.dropout > 0,
        "model.attention_within_documents=true": model.attention_within_documents,
        "train.deterministic=true": run.train.deterministic,
        "parallel.context_method='ring'": is_ring,
        f"precision.kind={run.precision.kind!r}": run.precision.formats.compute.n_bytes > 2,
        f"model.sequence_length={model.sequence_length}": model.sequence_length % CUDNN_TOKENS,
        f"model.d_head={model.d_head}": model.d_head % multiple or model.d_head > largest,
    }
    return [field for field, rules_out in obstacles.items() if rules_out]


def _batch_problems(run: Run) -> dict[str, str]:
    train, ramp = run.train, run.train.batch_ramp
    problems = {}
    if ramp:
        distance = train.global_batch_size - ramp.start
        if distance < 0 or distance % ramp.increment:
            problems["ramp"] = (
                f"train.batch_ramp goes from {ramp.start} to global_batch_size="
                f"{train.global_batch_size}: not a whole number of increments of "
                f"{ramp.increment}"
            )
    for field, size in batch_fields(run).items():
        if size % train.micro_batch_size:
            problems[field] = (
                f"{field}={size} must be divisible by "
                f"train.micro_batch_size={train.micro_batch_size}"
            )
    return problems


def _length_problems(run: Run) -> dict[str, str]:
    schedule = run.schedule
    lengths = {"train.length": run.train.length, "schedule.decay": schedule.decay}
    if run.train.batch_ramp:
        lengths["train.batch_ramp.length"] = run.train.batch_ramp.length
    problems = {
        field: f"{field}={str(length)!r} must be positive"
        for field, length in lengths.items()
        if not length.amount
    }
    if schedule.minimum_learning_rate > run.optimizer.learning_rate:
        problems["rates"] = (
            f"schedule.minimum_learning_rate={schedule.minimum_learning_rate} is above "
            f"optimizer.learning_rate={run.optimizer.learning_rate}"
        )
    warmup, decay, cooldown = schedule.warmup, schedule.decay, schedule.cooldown
    if schedule.kind != "constant" and warmup.unit == decay.unit and warmup.amount >= decay.amount:
        problems["warmup"] = (
            f"schedule.warmup={str(warmup)!r} must be shorter than schedule.decay={str(decay)!r}"
        )
    cools = schedule.kind == "warmup_stable_decay" and cooldown.unit == decay.unit
    if cools and cooldown.amount > decay.amount:
        problems["cooldown"] = (
            f"schedule.cooldown={str(cooldown)!r} must not be longer than "
            f"schedule.decay={str(decay)!r}"
        )
    return problems


def _remedies(run: Run, rule: str, found: dict[str, str]) -> str:
    """Lists, for each way to fix a rule, the change that fixes most others and breaks none."""

    def fix(way: Iterable[Changes]) -> str:
        trials = (
            (c, broken_rules(change(run, c)).keys()) for c in itertools.islice(way, MOST_TRIALS)
        )
        fixing = ((c, len(rest)) for c, rest in trials if rest <= found.keys() - {rule})
        changes, _ = min(fixing, key=lambda pair: pair[1], default=({}, 0))
        return describe(run, changes)

    fixes = list(filter(None, map(fix, _ways(run, rule))))
    return f"; {NEAREST}{', or '.join(fixes)}" if fixes else ""


def first_working(run: Run, way: Iterable[Changes], works: Callable[[Run], bool]) -> Changes:
    """Returns the first changes on a way that work; empty if none do."""
    return next((changes for changes in way if works(change(run, changes))), {})


def describe(run: Run, changes: Changes, joint: str = " with ") -> str:
    """Formats the differences as overrides: "parallel.tensor=4"."""
    return joint.join(f"{f}={_as_toml(value)}" for f, value in differences(run, changes).items())


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


def _as_toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def _ways(run: Run, rule: str) -> list[Iterable[Changes]]:
    """Lists the ways to fix a broken rule, each as changes to try, nearest first."""
    if rule in FIXED_BY_VALUES:
        return [_one_of(*each) for each in FIXED_BY_VALUES[rule]]
    if rule in ("heads", "d_ff", "context", "sequence"):
        return _ways_to_cut(run, rule)
    if rule == "stages":
        n_layers, parallel = run.model.n_layers, run.parallel
        pipelines = {1, n_layers // 2, n_layers // parallel.chunks, parallel.pipeline} - {0}
        chunks = {1, 2, n_layers // parallel.pipeline, parallel.chunks} - {0}
        return [_pairs(run, {"parallel.pipeline": pipelines, "parallel.chunks": chunks})]
    return _ways_to_fp8(run, rule) if rule.startswith("fp8_") else _ways_to_batch(run, rule)


def _ways_to_cut(run: Run, rule: str) -> list[Iterable[Changes]]:
    model, parallel = run.model, run.parallel
    candidates = {
        "parallel.tensor": divisors(model.most_tensor_ranks),
        "parallel.context": divisors(model.sequence_length),
    }
    n_parts = parallel.context * (parallel.tensor if parallel.sequence else 1)
    if parallel.context_method == "ring":
        n_parts = math.lcm(n_parts, 2 * parallel.context)
    lengths = nearest_multiples(n_parts, model.sequence_length)
    ways: list[Iterable[Changes]] = [_pairs(run, candidates)]
    if rule in ("heads", "context") and parallel.context > 1:
        ways.append(_one_of("parallel.context_method", ["ulysses", "ring"]))
    if rule in ("context", "sequence"):
        ways.append(_one_of("model.sequence_length", lengths))
    return ways


def _ways_to_fp8(run: Run, rule: str) -> list[Iterable[Changes]]:
    model, parallel = run.model, run.parallel
    if rule == "fp8_blocks":
        fewer = _one_of("precision.fp8.precise_blocks", [(model.n_layers - 1) // 2])
        return [fewer, _one_of(*_PLAIN)]
    axis = "context" if rule == "fp8_tokens" else "tensor"
    degree = getattr(parallel, axis)
    factor = fp8_multiple(run) * degree
    if rule == "fp8_tokens":
        factor = FP8_MULTIPLE * degree
        field, factor = "sequence_length", factor // math.gcd(factor, run.train.micro_batch_size)
    else:
        field = rule.removeprefix("fp8_")
        factor = math.lcm(factor, model.n_heads if field == "d_model" else 1)
    sizes = nearest_multiples(factor, getattr(model, field))
    fewer = _one_of(f"parallel.{axis}", nearest(divisors(degree), degree))
    other = _one_of(f"model.{field}", sizes)
    if field == "d_model" and model.d_head * model.n_heads == model.d_model:
        other = ({"model.d_model": n, "model.d_head": n // model.n_heads} for n in sizes)
    return [fewer, other, _one_of(*_PLAIN)]


def _ways_to_batch(run: Run, rule: str) -> list[Iterable[Changes]]:
    train, ramp = run.train, run.train.batch_ramp
    if rule == "ramp" and ramp:
        distance = train.global_batch_size - ramp.start
        increments = nearest(divisors(distance) if distance > 0 else [], ramp.increment)
        # A ramp of one stage is not a ramp.
        starts = range(train.global_batch_size, 0, -ramp.increment)
        return [
            _one_of("train.batch_ramp.increment", increments),
            _one_of("train.batch_ramp.start", nearest(starts, ramp.start)),
        ]
    fields = batch_fields(run)
    if rule not in fields:
        return []
    sizes = nearest(divisors(math.gcd(*fields.values())), train.micro_batch_size)
    return [
        _one_of("train.micro_batch_size", sizes),
        _one_of(rule, nearest_multiples(train.micro_batch_size, fields[rule])),
    ]


def _one_of(field: str, values: Iterable[Any]) -> Iterator[Changes]:
    return ({field: value} for value in values)


def _pairs(run: Run, candidates: Mapping[str, Iterable[int]]) -> list[Changes]:
    """Combines field values: changes of one field first, then of more, each nearest first."""
    old = {field: attrgetter(field)(run) for field in candidates}

    def distance(changes: Changes) -> tuple[int, int]:
        distances = [abs(value - old[field]) for field, value in changes.items()]
        return sum(map(bool, distances)), sum(distances)

    combined = itertools.product(*candidates.values())
    return sorted((dict(zip(old, values, strict=True)) for values in combined), key=distance)


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
