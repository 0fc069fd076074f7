"""`trainyard check checkpoint`: every byte of a checkpoint against its checksums."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trainyard.errors import CheckpointError

if TYPE_CHECKING:
    from trainyard.checkpoint.format import Manifest
    from trainyard.checkpoint.verify import CheckpointReport


def checkpoint(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Run folders, or step-... folders.")
    ],
    all_of_them: Annotated[
        bool,
        typer.Option("--all", help="Check every checkpoint of a run folder, not only the newest."),
    ] = False,
) -> None:
    """Verify every byte of checkpoints against their checksums, and describe the contents.

    Checks the manifest's own checksum, the header and every value of every file, and that no tensor
    or file is missing, misplaced or extra. Lists all problems with their locations. Checks only the
    newest checkpoint of a run folder. Exit code 2 if it finds a problem.

    Example: trainyard check checkpoint runs/demo --all
    """
    from rich.console import Console

    from trainyard.checkpoint.verify import check_checkpoint
    from trainyard.cli.show_data import facts_table
    from trainyard.log import show_progress

    console = Console(soft_wrap=True)
    errors: list[CheckpointError] = []
    for path in paths:
        for step_folder in find_step_folders(path, all_of_them=all_of_them):
            try:
                with show_progress(f"checking {step_folder}") as update:
                    report = check_checkpoint(step_folder, update)
            except CheckpointError as error:
                errors.append(error)
            else:
                console.print(facts_table(f"{step_folder}: OK", describe_report(report)))
    if errors:
        raise CheckpointError("\n".join(error.problem for error in errors), errors[0].hint)


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
    found = list_checkpoints(inner if inner.is_dir() else path)
    if not found:
        raise CheckpointError(
            f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}",
            "give a run folder, or one of the step-... folders in its checkpoints/",
        )
    return found if all_of_them else found[:1]


def describe_report(report: CheckpointReport) -> dict[str, str]:
    """Describes the contents of a valid checkpoint."""
    from trainyard.units import format_bytes

    manifest = report.manifest
    n_files = len(manifest.sizes) + 1
    return {
        "step": f"{manifest.step:,}: {manifest.consumed_sequences:,} sequences, "
        f"{manifest.consumed_tokens:,} tokens",
        "checksums": f"every byte of {n_files} files matches, {format_bytes(report.n_bytes)}",
        "tensors": f"{len(manifest.tensors):,} in "
        f"{sum(len(tensor.chunks) for tensor in manifest.tensors.values()):,} chunks",
        "model": _describe_model(manifest),
        "optimizer": _describe_optimizer(manifest),
        "saved by": _describe_layout(manifest.plan),
        "versions": ", ".join(f"{name} {value}" for name, value in manifest.versions.items()),
        "data fingerprint": manifest.data_fingerprint or "none",
    }


def _describe_model(manifest: Manifest) -> str:
    from trainyard.units import format_large

    shapes = [t.shape for name, t in manifest.tensors.items() if name.startswith("model.")]
    if not shapes:
        return "none"
    n_values = sum(math.prod(shape) for shape in shapes)
    dtypes = {t.dtype for name, t in manifest.tensors.items() if name.startswith("model.")}
    return f"{len(shapes):,} tensors, {format_large(n_values)} values, {', '.join(sorted(dtypes))}"


def _describe_optimizer(manifest: Manifest) -> str:
    from trainyard.config.precisions import STATES

    weights = [name.removeprefix("model.") for name in manifest.tensors if name[:6] == "model."]
    counts = {
        moment: sum(f"optimizer.{name}.{moment}" in manifest.tensors for name in weights)
        for moment in STATES
    }
    if not any(counts.values()):
        return "none: weights only, moments start from zero"
    if all(count == len(weights) for count in counts.values()):
        return f"both moments of every weight ({', '.join(STATES)})"
    return ", ".join(f"{moment} of {n:,} of {len(weights):,}" for moment, n in counts.items())


def _describe_layout(plan: Mapping[str, object]) -> str:
    topology = plan.get("topology")
    if not isinstance(topology, dict):
        return "unknown: its plan names no layout"
    sizes = {str(axis): size for axis, size in topology.items() if isinstance(size, int)}
    axes = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    n_ranks = math.prod(sizes.values())
    return f"{n_ranks:,} ranks, {axes}" if axes else "one rank"
