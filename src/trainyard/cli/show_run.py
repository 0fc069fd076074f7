"""`trainyard show` for runs, fields, checkpoints, clusters, and families of presets and recipes."""

from __future__ import annotations

import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from rich.text import Text

from trainyard.architecture import describe_parts, parameter_counts
from trainyard.cli.names import run_names
from trainyard.config.cluster import cluster_names, cluster_texts, cpu_mask, read_cluster
from trainyard.config.load import LoadedRun, all_fields, field_value, preset_names
from trainyard.config.run import Run
from trainyard.config.section import as_toml
from trainyard.errors import ConfigError
from trainyard.layout.flops import describe_parameters, model_flops_per_token
from trainyard.layout.ranks import describe_layout
from trainyard.layout.resolve import Plan, resolve
from trainyard.log import facts_table
from trainyard.units import format_large, format_number

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 96
EXTENDS = "Preset, or another run file, whose fields this file changes; at the top of the file."
RECIPES = Path("recipes")
_SCALE = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12, "": 1.0}


def render_run_summary(loaded: LoadedRun, *, with_defaults: bool = False) -> Text:
    """Describes a run: its description, size and length, then its values and their origins.

    Args:
        loaded: a run with the origins of its values.
        with_defaults: also shows fields at their defaults.

    Raises:
        ConfigError: the run cannot be resolved.
    """
    run = loaded.run
    text = Text(run.name, style="bold")
    text.append("\n" + _fill(" ".join(run.description.split())), style="not bold")
    for title, line in _facts(run, resolve(run)).items():
        text.append(f"\n{title:<11}", style="cyan not bold").append(line, style="not bold")
    text.append("\n\nfields" if with_defaults else "\n\nfields that are set")
    rows = []
    for field in all_fields():
        value, origin = field_value(run, field), loaded.origins.get(field)
        if value is not None and field != "description" and (origin or with_defaults):
            rows.append((field, as_toml(value), origin or "default"))
    field_width = max((len(field) for field, _, _ in rows), default=0)
    value_width = max((len(value) for _, value, _ in rows if len(value) < 30), default=0)
    for field, shown, origin in rows:
        text.append(f"\n  {field:<{field_width}} = {shown:<{value_width}}", style="not bold")
        text.append(f"  {origin}", style="dim not bold")
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
        "parameters": describe_parameters(model, plan.padded_vocabulary_size),
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
    topology, zero_stage = plan.topology, run.parallel.zero_stage
    text = f"{describe_layout(run, topology)}, ZeRO stage {zero_stage}, {run.precision.kind}"
    layout = {"layout": text}
    if plan.n_ranks > 1:
        n_of_rank = run.train.global_batch_size // run.train.micro_batch_size // topology.data
        layout["ranks"] = (
            f"{plan.n_ranks} at least; micro batches of each in a step: {n_of_rank} of "
            f"{run.train.micro_batch_size} sequences"
        )
    if topology.pipeline > 1:
        stages = [
            f"{first}-{end - 1}" if end - first > 1 else f"{first}" for first, end in plan.stages
        ]
        by_rank = (", ".join(stages[i :: topology.pipeline]) for i in range(topology.pipeline))
        layout["stages"] = f"blocks by pipeline rank: {' | '.join(by_rank)}"
    return layout


def render_fields(section: str = "") -> Text:
    """Describes every field of a run file and of a data file, with its default.

    Args:
        section: such as `train` or `train.length`: describes only its fields.

    Raises:
        ConfigError: there is no such section or field.
    """
    from trainyard.config import corpus
    from trainyard.config.schema import field_manuals
    from trainyard.config.section import describe_fields

    names = [name for name in all_fields() if f"{name}.".startswith(f"{section}.") or not section]
    if not names and section != "extends":
        sections = [*dict.fromkeys(field.partition(".")[0] for field in all_fields())]
        close = difflib.get_close_matches(section, [*sections, *all_fields()], n=1)
        raise ConfigError(
            f"no section or field {section!r}",
            f"did you mean {close[0]}?" if close else f"sections: {', '.join(sections)}",
        )
    run, data, text = Run(), corpus.Corpus(), Text(style="bold")
    if section:
        text.append(f"Fields of {section}, their defaults and meaning.")
    else:
        text.append("Every field of a run file, its default and its meaning.")
        _append_fields(text, {"extends": None}, {"extends": EXTENDS})
    _append_fields(text, {name: field_value(run, name) for name in names}, field_manuals())
    if section:
        return text
    text.append("\n\nEvery field of a data file, for trainyard prepare.")
    defaults = {name: field_value(data, name) for name in all_fields(corpus.Corpus)}
    _append_fields(text, defaults, field_manuals(corpus.Corpus))
    for kind in get_args(get_args(corpus.Step)[0]):
        name = f'steps, kind = "{get_args(kind.model_fields["kind"].annotation)[0]}"'
        manual = (kind.__doc__ or "").strip().splitlines()[0]
        _append_fields(text, {name: None}, {name: manual})
        defaults = {
            field: None if info.is_required() else info.default
            for field, info in kind.model_fields.items()
            if field != "kind"
        }
        _append_fields(text, defaults, describe_fields(kind), indent="  ")
    return text


def _append_fields(
    text: Text, defaults: Mapping[str, Any], manuals: Mapping[str, str], indent: str = ""
) -> None:
    for field, default in defaults.items():
        shown = "" if default is None else f" = {as_toml(default)}"
        text.append(f"\n{indent}{field}", style="cyan not bold").append(shown, style="not bold")
        text.append("\n" + _fill(manuals.get(field, ""), "    "), style="not bold")


def _fill(text: str, indent: str = "") -> str:
    """Fills a paragraph to the terminal's width, or to `WIDTH` if that is less."""
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 0)).columns)
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent)


def show_checkpoint(path: Path, console: Console) -> None:
    """Prints a checkpoint or the newest of a run, its ancestors and the changes of the run.

    Raises:
        CheckpointError: it is damaged.
    """
    from trainyard.checkpoint.format import read_manifest
    from trainyard.checkpoint.resume import find_checkpoint, format_value
    from trainyard.cli.check import describe_checkpoint
    from trainyard.training.run_folder import ancestors_of, describe_ancestry, read_history

    checkpoint = find_checkpoint(path)
    manifest = read_manifest(checkpoint)
    facts = describe_checkpoint(manifest)
    if ancestors := ancestors_of(manifest):
        facts["ancestry"] = describe_ancestry(ancestors)
    for step, changes in read_history(path) if (path / "run.toml").exists() else []:
        facts[f"from step {step:,}"] = "; ".join(
            f"{one.field}: {format_value(one.wanted)}, before {format_value(one.saved)}"
            for one in changes
        )
    console.print(facts_table(str(checkpoint), facts))


def show_cluster(names: list[str], console: Console) -> None:
    """Prints a cluster, or lists all clusters without a name.

    Raises:
        UserError: there is no such cluster, or its file is invalid.
    """
    from trainyard.config.devices import GIGA, TERA
    from trainyard.jobs.schedulers import SCHEDULERS
    from trainyard.planning.clusters import find_machine

    if not names:
        console.print("clusters: " + ", ".join(cluster_names()), highlight=False)
        return
    if len(names) > 1:
        raise ConfigError(f"{names[1]} is a second cluster", "trainyard show cluster lumi")
    cluster, machine = read_cluster(names[0]), find_machine(names[0])
    launch, device, container = cluster.launch, machine.device, cluster.launch.container
    memory = f"{machine.memory_bytes / 2**30:.0f} GiB, " if machine.memory_bytes else ""
    jobs = SCHEDULERS[launch.scheduler].describe(launch)
    if container.runtime != "none":
        jobs += f", {container.runtime} with {container.image or 'an image of yours'}"
    facts = {
        "what": cluster.description,
        "devices": f"{machine.devices_per_node} x {device.name} a node",
        "memory": f"{memory}{(device.memory_bytes_per_second or 0) / GIGA:,.0f} GB/s",
        "TFLOP/s": ", ".join(f"{kind} {n / TERA:,.4g}" for kind, n in device.peaks.items()),
        "link": f"{machine.link_bytes_per_second / GIGA:g} GB/s inside a node",
        "network": f"{machine.network_bytes_per_second / GIGA:g} GB/s a device between nodes",
        "jobs": jobs,
    }
    for local_rank, cpus in enumerate(launch.cpu_lists):
        facts[f"rank {local_rank}"] = f"CPUs {cpus}, mask {cpu_mask(cpus)}"
    console.print(facts_table(names[0], facts))
    for place, text in cluster_texts(names[0]):
        console.print(f"\n{place}", style="bold")
        console.print(text.rstrip(), markup=False, highlight=False)


def render_family(name: str) -> str:
    """Lists the presets, recipes and cluster of a family, with the commands that show them.

    Empty if neither presets nor recipes have this first name, or a file, preset or run has it.
    """
    rows = {"presets": _presets(name), "recipes": _recipes(name)}
    is_other = name in preset_names() or name in run_names() or Path(name).exists()
    if is_other or not any(rows.values()):
        return ""
    rows["cluster"] = [f"trainyard show cluster {name}"] if name in cluster_names() else []
    return _table({title: names for title, names in rows.items() if names})


def render_families() -> str:
    """Lists all presets, recipes and clusters by family."""
    families = sorted({name.partition("-")[0] for name in preset_names()})
    text = "presets\n" + _table({family: _presets(family) for family in families})
    if folders := sorted(path.parent.name for path in RECIPES.glob("*/README.md")):
        text += "\n\nrecipes\n" + _table({family: _recipes(family) for family in folders})
    text += "\n\n" + _table({"clusters": cluster_names(), "runs": run_names() or ["none"]})
    return f"{text}\n\ntrainyard show NAME shows one; trainyard show --fields describes every field"


def _presets(family: str) -> list[str]:
    return _by_size(name for name in preset_names() if f"{name}-".startswith(f"{family}-"))


def _recipes(family: str) -> list[str]:
    return _by_size(map(str, (RECIPES / family).glob("*.toml")))


def _by_size(names: Iterable[str]) -> list[str]:
    """Orders names by the sizes in them: 760m before 1.3b."""

    def sizes(name: str) -> list[float]:
        numbers = re.findall(r"(\d+(?:\.\d+)?)([kmbt]?)(?![a-z])", name.removesuffix(".toml"))
        return [float(number) * _SCALE[scale] for number, scale in numbers]

    return sorted(names, key=sizes)


def _table(rows: dict[str, list[str]]) -> str:
    width = max(40, shutil.get_terminal_size().columns)
    label = max(map(len, rows)) + 2
    return "\n".join(
        textwrap.fill(
            ", ".join(names),
            width,
            initial_indent=f"{title:<{label}}",
            subsequent_indent=" " * label,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for title, names in rows.items()
    )
