"""`trainyard show RUN`: what a run file says."""

from __future__ import annotations

import json
import shutil
import textwrap
from typing import Any

from rich.text import Text

from trainyard.architecture import describe_parts, parameter_counts
from trainyard.config.load import LoadedRun, all_fields, field_value
from trainyard.config.run import Run
from trainyard.planning.flops import model_flops_per_token
from trainyard.planning.resolve import Plan, resolve
from trainyard.units import Length, format_large, format_number

WIDTH = 96


def fill(text: str, indent: str = "") -> str:
    """Fills a paragraph to the terminal's width, or to `WIDTH` if that is less."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def render_run_summary(loaded: LoadedRun, all_fields: bool = False) -> Text:
    """Describes a run: its description, size and length, then its values and their origins.

    Args:
        loaded: a run with the origins of its values.
        all_fields: also shows fields at their defaults.

    Raises:
        ConfigError: the run cannot be resolved.
    """
    run = loaded.run
    text = Text(run.name, style="bold")
    text.append("\n" + fill(" ".join(run.description.split())), style="not bold")
    plan = resolve(run)
    for title, line in _facts(run, plan).items():
        text.append(f"\n{title:<11}", style="cyan not bold").append(line, style="not bold")
    text.append("\n\nfields" if all_fields else "\n\nfields that are set")
    text.append_text(_render_values(loaded, all_fields))
    return text


def _facts(run: Run, plan: Plan) -> dict[str, str]:
    model, train = run.model, run.train
    counts = parameter_counts(model, plan.padded_vocabulary_size)
    other_parts = describe_parts(model)
    parts = ", ".join(f"{part} {n:,}" for part, n in counts.items())
    batch_tokens = train.global_batch_size * model.sequence_length
    ramp = train.batch_ramp
    growth = f", growing from {ramp.start:,} over {ramp.length}" if ramp else ""
    per_token = model_flops_per_token(model, plan.padded_vocabulary_size)
    return {
        "model": f"{format_number(model.n_layers, 'block')} of width {model.d_model:,}, "
        f"{format_number(model.n_heads, 'head')} of {model.d_head}, "
        f"sequences of {model.sequence_length:,} tokens",
        **({"parts": ", ".join(other_parts)} if other_parts else {}),
        "parameters": f"{plan.n_parameters:,} ({format_large(plan.n_parameters)})",
        "": parts.replace("_", " "),
        "vocabulary": f"{model.vocabulary_size:,} tokens, padded to "
        f"{plan.padded_vocabulary_size:,} rows",
        "compute": f"{per_token:.3e} model FLOP a token (megatron_causal), "
        f"{per_token * plan.n_tokens:.3e} in all",
        "batch": f"{train.global_batch_size:,} sequences = {batch_tokens:,} tokens{growth}",
        "length": f"{plan.n_steps:,} steps = {plan.n_sequences:,} sequences = "
        f"{plan.n_tokens:,} tokens ({format_large(plan.n_tokens)})",
        **_layout(run, plan),
    }


def _layout(run: Run, plan: Plan) -> dict[str, str]:
    """Describes the smallest layout; any more ranks are data parallel."""
    parallel, topology = run.parallel, plan.topology
    sharding = f"ZeRO stage {parallel.zero_stage}"
    if topology.replicate > 1:
        sharding += f" in {topology.replicate} replicas"
    axes = {
        "data": topology.data,
        "tensor": topology.tensor,
        "pipeline": topology.pipeline,
        "context": topology.context,
    }
    product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1) or "one rank"
    found = {"layout": f"{product}, {sharding}, {run.precision.kind}"}
    if plan.n_ranks == 1:
        return found
    per_step = run.train.global_batch_size // run.train.micro_batch_size // topology.data
    found["ranks"] = (
        f"{plan.n_ranks} at least; micro batches of each in a step: {per_step} of "
        f"{run.train.micro_batch_size} sequences"
    )
    if topology.pipeline > 1:
        stages = [
            f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in plan.stages
        ]
        by_rank = [
            ", ".join(stages[rank :: topology.pipeline]) for rank in range(topology.pipeline)
        ]
        found["stages"] = f"{parallel.schedule}, blocks by pipeline rank: {' | '.join(by_rank)}"
    return found


def _render_values(loaded: LoadedRun, with_defaults: bool) -> Text:
    rows = []
    for field in all_fields():
        value = field_value(loaded.run, field)
        origin = loaded.origins.get(field)
        if value is not None and field != "description" and (origin or with_defaults):
            rows.append((field, as_toml(value), origin or "default"))
    field_width = max((len(field) for field, _, _ in rows), default=0)
    value_width = max((len(value) for _, value, _ in rows if len(value) < 30), default=0)
    text = Text()
    for field, value, origin in rows:
        text.append(f"\n  {field:<{field_width}} = {value:<{value_width}}", style="not bold")
        text.append(f"  {origin}", style="dim not bold")
    return text


def as_toml(value: Any) -> str:
    """Formats a value as in a run file; shortens long lists to their first entry."""
    if isinstance(value, Length):
        return f'"{value}"'
    if isinstance(value, tuple):
        shown = [as_toml(entry) for entry in value]
        if len(shown) > 3:
            shown = [shown[0], f"... {len(shown) - 1} more"]
        return f"[{', '.join(shown)}]"
    return "inf" if value == float("inf") else json.dumps(value)
