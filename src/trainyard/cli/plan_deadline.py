"""`trainyard plan RUN --deadline "1 week"`: the largest model or the fewest devices, as a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from trainyard.api.plan_table import describe_devices
from trainyard.architecture import padded_vocabulary_size, parameter_count
from trainyard.cli.plan_search import describe_candidate
from trainyard.config import rules
from trainyard.config.load import LoadedRun, field_value, preset_names
from trainyard.errors import ConfigError, MachineError
from trainyard.log import print_lines
from trainyard.planning.deadline import (
    CHANGED_FIELDS,
    Trainer,
    TrainingEstimate,
    fewest_devices,
    largest_model,
)
from trainyard.planning.hardware import find_extremes
from trainyard.units import Length, format_large, format_seconds, parse_duration, with_article

if TYPE_CHECKING:
    from rich.text import Text


@dataclass(frozen=True)
class DeadlineRow:
    """A line of the table."""

    trained: TrainingEstimate
    remark: str
    """Such as "the largest" or "too long"."""


def print_deadline(
    loaded: LoadedRun, trainer: Trainer, n_devices: int | None, deadline: str, *, as_json: bool
) -> None:
    """Prints the largest model for `n_devices` or, if None, the fewest devices for the run.

    Raises:
        ConfigError: the deadline is malformed.
        MachineError: no candidate trains in time.
    """
    run = loaded.run
    try:
        seconds = parse_duration(deadline)
    except ValueError as error:
        raise ConfigError(f"--deadline {error}", '--deadline "1 week"') from None
    if n_devices is None:
        found, answer, other = fewest_devices(run, trainer, seconds), "the fewest", "too few"
        found.reverse()
    else:
        origin = loaded.origins.get("train.length", "")
        keeps = bool(origin) and origin not in preset_names()
        found = largest_model(run, trainer, n_devices, seconds, keeps_length=keeps)
        answer, other = "the largest", "too long"
    first = found[0]
    if not first.seconds <= seconds:
        raise _nothing_makes_it(run.name, trainer, first, n_devices, deadline)
    rows = [DeadlineRow(first, answer)]
    rows += [DeadlineRow(each, other if each.cost else "does not fit") for each in found[1:]]
    if as_json:
        typer.echo(json.dumps([_as_json(row, loaded) for row in rows], indent=2))
    else:
        print_lines(_render(loaded, trainer, rows, deadline))


def _nothing_makes_it(
    name: str, trainer: Trainer, tried: TrainingEstimate, n_devices: int | None, deadline: str
) -> MachineError:
    on = describe_devices(trainer.machine, tried.n_devices)
    fits = math.isfinite(tried.seconds)
    takes = f"takes {format_seconds(tried.seconds)}" if fits else "does not fit"
    if n_devices is None:
        return MachineError(
            f"{name} does not train within {deadline}: on {on}, the most tried, it {takes}",
            "try a longer deadline, a shorter train.length or a larger train.global_batch_size",
        )
    size = format_large(_parameters(tried))
    return MachineError(
        f"no model trains within {deadline} on {on}: the smallest, of {size} parameters, {takes}",
        "try a longer deadline, more devices or fewer tokens, such as train.length='1B tokens'",
    )


def _render(
    loaded: LoadedRun, trainer: Trainer, rows: Sequence[DeadlineRow], deadline: str
) -> Text:
    from rich.text import Text

    text = Text(loaded.run.name, style="bold")
    text.append(f" within {deadline} on devices of {trainer.machine.name}", style="not bold")
    if find_extremes(trainer.machine):
        device = with_article(trainer.machine.device.name)
        text.append(f", at the slow end for {device}: not measured", style="not bold")
    lines = [("", "model", "tokens", "devices", "whole run", "price", "layout")]
    for row in rows:
        trained, model, cost = row.trained, row.trained.run.model, row.trained.cost
        candidate = trained.candidate
        lines.append(
            (
                row.remark,
                f"{format_large(_parameters(trained))} ({model.n_layers} x {model.d_model})",
                format_large(candidate.plan.n_tokens) if candidate else "",
                f"{trained.n_devices:,}",
                format_seconds(cost.seconds) if cost and math.isfinite(cost.seconds) else "",
                f"{cost.price:,.0f}" if cost and cost.price is not None else "",
                describe_candidate(candidate) if candidate else "",
            )
        )
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    for number, line in enumerate(zip(*columns, strict=True)):
        cells = (f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))
        style = "not bold" if number else "cyan not bold"
        text.append(f"\n{'  '.join(cells)}".rstrip(), style=style)
    text.append(f"\narguments for {rows[0].remark}: ", style="cyan not bold")
    given = f"--gpus {rows[0].trained.n_devices} {_changes(rows[0], loaded)}"
    text.append(given.rstrip(), style="not bold")
    return text


def _changes(row: DeadlineRow, loaded: LoadedRun) -> str:
    """Formats the differences from the run as overrides."""
    fields = {name: field_value(row.trained.run, name) for name in CHANGED_FIELDS}
    texts = {
        name: "none" if value is None else str(value) if isinstance(value, Length) else value
        for name, value in fields.items()
        if value != field_value(loaded.run, name)
    }
    return rules.describe(loaded.run, texts, " ")


def _parameters(trained: TrainingEstimate) -> int:
    model = trained.run.model
    return parameter_count(model, padded_vocabulary_size(model))


def _as_json(row: DeadlineRow, loaded: LoadedRun) -> dict[str, Any]:
    trained = row.trained
    cost, candidate = trained.cost, trained.candidate
    return {
        "remark": row.remark,
        "parameters": _parameters(trained),
        "tokens": candidate.plan.n_tokens if candidate else None,
        "n_devices": trained.n_devices,
        "seconds": trained.seconds if math.isfinite(trained.seconds) else None,
        "device_hours": cost.device_hours if cost else None,
        "price": cost.price if cost else None,
        "changes": _changes(row, loaded),
    }
