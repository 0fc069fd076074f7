"""Rules that bind fields of several sections of a run: what cannot be, said with both values."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainyard.config.run import Run


def disagreements(run: Run) -> list[str]:
    """Lists every pair of fields that cannot stand together."""
    return [*_layout_problems(run), *_batch_problems(run), *_schedule_problems(run)]


def _layout_problems(run: Run) -> list[str]:
    model, parallel = run.model, run.parallel
    problems = []
    if model.n_heads % (parallel.tensor * parallel.context):
        problems.append(
            f"model.n_heads={model.n_heads} must be divisible by "
            f"parallel.tensor={parallel.tensor} x parallel.context={parallel.context}"
        )
    if model.d_ff % parallel.tensor:
        problems.append(
            f"model.d_ff={model.d_ff} must be divisible by parallel.tensor={parallel.tensor}"
        )
    if model.n_layers < parallel.pipeline * parallel.chunks:
        problems.append(
            f"model.n_layers={model.n_layers} is fewer than "
            f"parallel.pipeline={parallel.pipeline} x parallel.chunks={parallel.chunks}"
        )
    if parallel.sequence and model.sequence_length % parallel.tensor:
        problems.append(
            f"model.sequence_length={model.sequence_length} must be divisible by "
            f"parallel.tensor={parallel.tensor} when parallel.sequence is true"
        )
    if model.sequence_length % (2 * parallel.context) and parallel.context > 1:
        problems.append(
            f"model.sequence_length={model.sequence_length} must be divisible by "
            f"2 x parallel.context={parallel.context}"
        )
    return problems


def _batch_problems(run: Run) -> list[str]:
    train = run.train
    problems = []
    sizes = {"train.global_batch_size": train.global_batch_size}
    if train.batch_ramp:
        sizes["train.batch_ramp.start"] = train.batch_ramp.start
        sizes["train.batch_ramp.increment"] = train.batch_ramp.increment
        distance = train.global_batch_size - train.batch_ramp.start
        if distance < 0 or distance % train.batch_ramp.increment:
            problems.append(
                f"train.batch_ramp goes from {train.batch_ramp.start} to global_batch_size="
                f"{train.global_batch_size}: not a whole number of increments of "
                f"{train.batch_ramp.increment}"
            )
    for name, size in sizes.items():
        if size % train.micro_batch_size:
            problems.append(
                f"{name}={size} must be divisible by "
                f"train.micro_batch_size={train.micro_batch_size}"
            )
    return problems


def _schedule_problems(run: Run) -> list[str]:
    schedule = run.schedule
    lengths = {"train.length": run.train.length, "schedule.decay": schedule.decay}
    if run.train.batch_ramp:
        lengths["train.batch_ramp.length"] = run.train.batch_ramp.length
    problems = [
        f"{name}={str(length)!r} must be more than nothing"
        for name, length in lengths.items()
        if not length.amount
    ]
    if schedule.minimum_learning_rate > run.optimizer.learning_rate:
        problems.append(
            f"schedule.minimum_learning_rate={schedule.minimum_learning_rate} is above "
            f"optimizer.learning_rate={run.optimizer.learning_rate}"
        )
    falls = schedule.kind != "constant"
    if (
        falls
        and schedule.warmup.unit == schedule.decay.unit
        and schedule.warmup.amount >= schedule.decay.amount
    ):
        problems.append(
            f"schedule.warmup={str(schedule.warmup)!r} must be shorter than "
            f"schedule.decay={str(schedule.decay)!r}"
        )
    if (
        schedule.kind == "warmup_stable_decay"
        and schedule.cooldown.unit == schedule.decay.unit
        and schedule.cooldown.amount > schedule.decay.amount
    ):
        problems.append(
            f"schedule.cooldown={str(schedule.cooldown)!r} must not be longer than "
            f"schedule.decay={str(schedule.decay)!r}"
        )
    return problems


def nearest_divisor(number: int, near: int) -> int:
    """Gives the divisor of `number` that is closest to `near`."""
    return min((d for d in range(1, number + 1) if number % d == 0), key=lambda d: abs(d - near))
