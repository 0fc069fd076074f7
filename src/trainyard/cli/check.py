"""`trainyard check`: verifies token files, checkpoints, layouts and scaling; locates errors."""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from trainyard.cli.help import Verb
from trainyard.cli.names import Overrides, RunFile, find_run, without_ending
from trainyard.errors import CheckpointError, ConfigError, DataError, MachineError, UserError
from trainyard.topology import AXES
from trainyard.units import format_bytes, format_large, format_number

if TYPE_CHECKING:
    from trainyard.checkpoint.format import Manifest
    from trainyard.config.run import Run
    from trainyard.corpus.verify import DataReport
    from trainyard.simulate.layout_check import Result
    from trainyard.simulate.shrink import LayoutCheck

Place = TypeVar("Place", str, Path)
Progress = Callable[[int, int], None]
WIDTH = 96


def _integers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",") if word]


check = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Verify token files, checkpoints, or the layout or scaling of a run.",
)


@check.command(cls=Verb)
def layout(
    run_file: RunFile,
    overrides: Overrides = None,
    ranks: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Verify that a layout computes what a single device computes.

    Trains a small model for three steps in the layout of the run, every degree reduced to 2 (the
    ring's also to 3 and 4), with up to 8 processes on this machine's CPU, and on a single device.
    Compares losses, gradient norms, all gradients and all weights, in fp64, where only a fault can
    cause a difference, and in the run's precision. Needs no data and no GPU; takes about a minute.
    Exit code 2 if they differ.

    Example: trainyard check layout recipes/azure/175b.toml --ranks 1024

    Options:
        ranks: Number of ranks whose layout to check. Default: the fewest the run's layout needs,
            with data parallel ranks if it uses ZeRO.
    """
    from trainyard.config.load import load_run
    from trainyard.simulate.shrink import plan_layout_check

    run = load_run(run_file, overrides).run
    check = plan_layout_check(run, ranks)  # rejects impossible layouts before torch is imported
    typer.echo(describe_layout_check(run, check))
    from trainyard.simulate.layout_check import check_layouts, precisions_of

    precisions = precisions_of(run)
    start = time.monotonic()
    results = check_layouts(check, precisions)
    typer.echo(f"\n{render_results(results)}\n\n{time.monotonic() - start:.0f} s")
    refuse_differences(run, results)


def describe_layout_check(run: Run, check: LayoutCheck) -> str:
    """Describes the layouts under test, and what was reduced for the test."""
    from trainyard.layout.ranks import describe_layout

    whole = f"{run.name} on {format_number(check.topology.n_ranks, 'rank')}: "
    facts = [("run", whole + describe_layout(run, check.topology))]
    n_layouts = len(check.layouts) - check.n_rings
    tried = f"{format_number(check.n_ranks, 'process')} on this machine"
    if check.n_ranks == 1:
        tried += ": no axis is sharded; --ranks N checks the layout of N ranks"
    elif check.topology.n_ranks < check.n_ranks:
        tried += ": ZeRO shards weights, which takes two data parallel ranks"
    elif n_layouts > 1:
        tried += f", in {n_layouts} layouts that together shard every pair of axes"
    if check.n_rings:
        tried += "; then rings of 3 and 4, which shift keys more than once, in fp64"
    facts.append(("tested with", tried))
    topologies = check.topologies
    for number, (small, topology) in enumerate(zip(check.layouts, topologies, strict=True), 1):
        facts.append((f"layout {number}", describe_layout(small, topology)))
    facts += [(f"  {section}", text) for section, text in check.changes.items()]
    facts.append(("  data", "token files of random ids, a fifth of the labels skipped"))
    return "\n".join(
        textwrap.fill(text, WIDTH, initial_indent=f"{name:<12}", subsequent_indent=" " * 12)
        for name, text in facts
    )


def render_results(results: list[Result]) -> str:
    """Renders the differences of all layouts, in all precisions, as a table."""
    titles = ("loss", "norm", "gradients", "weights", "bound")
    lines = [
        "largest relative difference from the single device, over 3 steps",
        f"{'':18}" + "".join(f"{title:>11}" for title in titles),
    ]
    layouts = list(dict.fromkeys(result.layout.model_dump_json() for result in results))
    for result in results:
        number = 1 + layouts.index(result.layout.model_dump_json())
        found, verdict = result.difference, "same" if result.is_same else "DIFFERENT"
        row = f"{'-':>11}" * len(titles)
        if isinstance(found, str):
            verdict += f": {found}"
        else:
            figures = (found.loss, found.norm, found.gradient, found.weight, result.bound)
            row = "".join(f"{figure:>11.1e}" for figure in figures)
            if found.between_ranks:
                verdict += f", copies on two ranks by {found.between_ranks:.1e}"
        lines.append(f"layout {number:<3}{result.precision:<8}{row}   {verdict}")
    return "\n".join(lines)


def refuse_differences(run: Run, results: list[Result]) -> None:
    """Raises if a layout does not compute what the single device computes.

    Raises:
        MachineError: names the precisions, and how to find the axis at fault.
    """
    wrong = [result for result in results if not result.is_same]
    if not wrong:
        return
    kinds = dict.fromkeys(result.precision for result in wrong)
    whole = {"pipeline": 1, "context": 1, "tensor": 1, "data_replicate": 1, "zero_stage": 0}
    axes = [
        f"parallel.{name}={least}"
        for name, least in whole.items()
        if getattr(run.parallel, name) > least
    ]
    hint = "do not train in this layout on this machine: its torch or processor is at fault"
    if axes:
        hint += f"; to find the axis, repeat with {', or '.join(axes)}"
    kind = f"a single device computes ({', '.join(kinds)})"
    raise MachineError(f"{run.name}: the layout does not compute what {kind}", hint)


@check.command(cls=Verb)
def parametrization(
    run_file: RunFile,
    overrides: Overrides = None,
    widths: Annotated[Any, typer.Option(parser=_integers, metavar="N,..")] = "64,128,256",
    depths: Annotated[Any, typer.Option(parser=_integers, metavar="N,..")] = "2,4,8",
    rates: Annotated[Any, typer.Option(parser=_numbers, metavar="N,..")] = "",
    steps: Annotated[int, typer.Option(min=10)] = 100,
    compare: Annotated[bool, typer.Option("--compare")] = False,
    picture: Path | None = None,
) -> None:
    """Verify that complete_p keeps activations, and the best learning rate, as a model grows.

    Trains small models of the run's family for a few steps, wider and deeper, on its token files,
    or else on random tokens. Prints the size of activations, and of what steps changed, and its
    exponent: how it grows with width or depth. Exit code 2 if one does not hold. With --rates also
    trains each model at each learning rate, and prints the losses and the best rate by shape. On
    one CPU, without a GPU; takes a minute without --rates.

    Example: trainyard check parametrization web.toml --rates 1e-3,2e-3,4e-3,8e-3 --picture lr.png

    Options:
        widths: Values of d_model, at the smallest depth; the smallest is that of the base.
        depths: Values of n_layers, at the smallest width.
        rates: Learning rates to train each model at. Default: none.
        steps: Steps at each rate.
        compare: Also check the standard parametrization, beside.
        picture: Draw losses over rates: .png or .svg.
    """
    from trainyard.config.load import load_run

    run, kinds = load_run(run_file, overrides).run, ["complete_p", "standard"][: 1 + compare]
    if picture and picture.suffix not in (".png", ".svg"):
        raise ConfigError(f"--picture {picture}: pictures are .png or .svg", "name it rates.png")
    from trainyard.log import show_progress
    from trainyard.simulate.parametrization import BOUND, N_FIRST_STEPS, compare_shapes

    tables = []
    for tried, n_steps in [([], N_FIRST_STEPS), (sorted(rates), steps)][: 1 + bool(rates)]:
        with show_progress("training") as update:
            found = compare_shapes(run, (widths, depths), kinds, tried, n_steps, update)
        typer.echo("\n".join(map(str, found)))
        tables += found
    if picture and rates:
        from trainyard.report.pictures import draw_sweeps

        draw_sweeps(found, picture)
    if wrong := [t.name for t in tables if t.is_beyond and t.name.startswith("complete_p")]:
        raise MachineError(
            f"{run.name}: an exponent is beyond {BOUND} ({'; '.join(wrong)})",
            "widths from 64 on, and real text, give exact exponents; else please report it",
        )
    typer.echo(f"complete_p holds: all exponents are within {BOUND}")


@check.command(cls=Verb)
def data(
    prefixes: Annotated[list[str], typer.Argument(metavar="PREFIX")],
    tokenizer: str = "",
) -> None:
    """Verify every byte of token files.

    Checks the checksum of every block of .bin and .idx, the structure of the .idx, the counts,
    every token id and the end of every document. Lists all problems with their locations. Exit
    code 2 if any prefix has one.

    Example: trainyard check data data/web_text_document --tokenizer gpt2

    Options:
        prefixes: Token files, with or without extension.
        tokenizer: Expected tokenizer: gpt2 or a folder; also checks token ids.
    """
    from trainyard.corpus.verify import check_data
    from trainyard.data.tokenizer import load_tokenizer

    made_by = load_tokenizer(tokenizer) if tokenizer else None

    def check_one(prefix: str, progress: Progress) -> dict[str, str]:
        return _describe_data(check_data(prefix, made_by, progress), tokenizer)

    _check_each(map(without_ending, prefixes), check_one, DataError)


def _describe_data(report: DataReport, tokenizer: str) -> dict[str, str]:
    size = report.vocabulary_size
    facts = {
        "checksums": "none: without a .json the bytes cannot be verified",
        "documents": f"{report.documents:,}",
        "sequences": f"{report.sequences:,}",
        "tokens": f"{report.tokens:,}",
        "token ids": f"0 to {size - 1}" if size else "0 or more; the vocabulary is unknown",
        "document ends": "unknown: there is no .json",
        "tokenizer": f"{tokenizer}: all ids are valid",
    }
    if report.has_record:
        blocks = f"all {report.n_blocks:,} blocks match"
        ends = "every document that is not empty has one" if report.ends_checked else "not expected"
        facts["checksums"] = f"{blocks}, {format_bytes(report.n_bytes)}"
        facts |= {"document ends": ends, "tokenizer": f"made by {tokenizer}"}
    return facts if tokenizer else facts | {"tokenizer": "not compared: pass --tokenizer"}


@check.command(cls=Verb)
def checkpoint(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH")],
    all_of_them: Annotated[bool, typer.Option("--all")] = False,
) -> None:
    """Verify every byte of checkpoints.

    Checks the manifest's own checksum, the header and every value of every file, and that no tensor
    or file is missing, misplaced or extra. Lists all problems with their locations, and describes
    the contents. Checks only the newest checkpoint of a run folder. Exit code 2 if it finds a
    problem.

    Example: trainyard check checkpoint runs/demo --all

    Options:
        paths: Run folders, or step-... folders.
        all_of_them: Check every checkpoint of a run folder, not only the newest.
    """
    places = [find_run(path) for path in paths]
    from trainyard.checkpoint.verify import check_checkpoint

    def check_one(step_folder: Path, progress: Progress) -> dict[str, str]:
        report = check_checkpoint(step_folder, progress)
        n_files, size = len(report.manifest.sizes) + 1, format_bytes(report.n_bytes)
        matches = {"checksums": f"every byte of {n_files} files matches, {size}"}
        return matches | describe_checkpoint(report.manifest)

    folders = (each for path in places for each in find_step_folders(path, all_of_them=all_of_them))
    _check_each(folders, check_one, CheckpointError)


def _check_each(
    places: Iterable[Place],
    check_one: Callable[[Place, Progress], dict[str, str]],
    kind: type[UserError],
) -> None:
    """Checks several places, and prints the facts of each.

    Raises:
        UserError: of `kind`, with the problems of all.
    """
    from trainyard.log import build_console, facts_table, show_progress

    console = build_console(soft_wrap=True)
    errors: list[UserError] = []
    for place in places:
        try:
            with show_progress(f"checking {place}") as update:
                facts = check_one(place, update)
        except kind as error:
            errors.append(error)
        else:
            console.print(facts_table(f"{place}: OK", facts))
    if errors:
        raise kind("\n".join(error.problem for error in errors), errors[0].hint)


def find_step_folders(path: Path, *, all_of_them: bool) -> list[Path]:
    """Lists the step folders to check: `path` itself, or the newest or all of a run folder.

    The newest has the highest step, even if it is damaged.

    Raises:
        CheckpointError: there is none.
    """
    from trainyard.checkpoint.format import MANIFEST, list_checkpoints, step_of

    if step_of(path) is not None or (path / MANIFEST).exists():
        return [path]
    inner = path / "checkpoints"
    folders = list_checkpoints(inner if inner.is_dir() else path)
    if not folders:
        raise CheckpointError(
            f"no checkpoint in {path}",
            "give a run folder, or one of the step-... folders in its checkpoints/",
        )
    return folders if all_of_them else folders[:1]


def describe_checkpoint(manifest: Manifest) -> dict[str, str]:
    """Describes the contents of a checkpoint."""
    from trainyard.architecture import describe_parts

    run, sizes = manifest.build_run(), [file.n_bytes for file in manifest.files.values()]
    model, tensors = run.model, manifest.tensors
    n_chunks = sum(len(tensor.files) for tensor in tensors.values())
    weights = [tensor for name, tensor in tensors.items() if name.startswith("model.")]
    n_values = sum(math.prod(weight.shape) for weight in weights)
    dtypes = ", ".join(sorted({weight.dtype for weight in weights}))
    shape = [format_number(model.n_layers, "block"), f"d_model {model.d_model}"]
    shape += [f"{model.n_heads} heads", *describe_parts(model)]
    names = ("trainyard", "torch", "python")
    versions = [f"{name} {manifest.versions[name]}" for name in names if name in manifest.versions]
    copied, path = manifest.tokenizer, run.tokenizer.path
    tokenizer = f"{path}, not copied here" if path else "none"
    return {
        "run": f"{run.name}: {run.description}" if run.description else run.name,
        "step": f"{manifest.step:,}: {manifest.consumed_sequences:,} sequences, "
        f"{manifest.consumed_tokens:,} tokens",
        "tensors": f"{len(tensors):,} in {n_chunks:,} chunks, "
        f"{format_number(len(sizes), 'file')}, {format_bytes(sum(sizes))}",
        "model": ", ".join([*shape, f"sequences of {model.sequence_length}"]),
        "weights": f"{len(weights):,} tensors, {format_large(n_values)} values, {dtypes}"
        if weights
        else "none",
        "optimizer": _describe_optimizer(manifest),
        "saved by": _describe_layout(manifest.plan),
        "tokenizer": f"a copy, fingerprint {copied.fingerprint[:16]}" if copied else tokenizer,
        "versions": ", ".join(versions) or "not recorded",
        "data fingerprint": manifest.data_fingerprint or "none",
    }


def _describe_optimizer(manifest: Manifest) -> str:
    from trainyard.config.precisions import MOMENTS, MOMENTUM

    weights = [name.removeprefix("model.") for name in manifest.tensors if name[:6] == "model."]
    counts = {
        moment: sum(f"optimizer.{name}.{moment}" in manifest.tensors for name in weights)
        for moment in (*MOMENTS, MOMENTUM)
    }
    if not any(counts.values()):
        return "none: weights only, moments start from zero"
    if all(counts[moment] == len(weights) for moment in MOMENTS):
        return f"both moments of every weight ({', '.join(MOMENTS)})"
    present = {moment: n for moment, n in counts.items() if n}
    return ", ".join(f"{moment} of {n:,} of {len(weights):,}" for moment, n in present.items())


def _describe_layout(plan: Mapping[str, object]) -> str:
    topology = plan.get("topology")
    if not isinstance(topology, dict):
        return "unknown"
    sizes = {str(axis): size for axis, size in topology.items() if isinstance(size, int)}
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    n_ranks = math.prod(sizes.get(axis, 1) for axis in AXES)
    return f"{n_ranks:,} ranks, {axes}" if axes else "one rank"
