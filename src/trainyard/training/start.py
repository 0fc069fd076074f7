"""Finds what a run starts from, checks that it fits, and records the ancestry.

Only a run without a checkpoint reads its start, so the start may be removed afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from trainyard.config.load import field_value
from trainyard.config.run import Run
from trainyard.errors import CheckpointError, ConfigError
from trainyard.files import read_file

if TYPE_CHECKING:
    from trainyard.checkpoint.format import Manifest

ANCESTRY = "ancestry.json"
"""In a run folder: the checkpoints it descends from."""
CONVERTED = "start"
"""In a run folder: a Hugging Face model that the run starts from, converted."""
RUNS = Path("runs")


class Ancestor(TypedDict):
    """A checkpoint that a run started from."""

    run: str
    step: int
    sha256: str
    """Checksum of the manifest, which has those of all tensors."""
    path: str
    taken: str
    """`train.start_with`."""


_ANCESTORS = TypeAdapter(list[Ancestor])


def ancestry(folder: Path) -> list[Ancestor]:
    """Reads the checkpoints that the run in `folder` descends from, oldest first; often none.

    Raises:
        CheckpointError: the record is damaged.
    """
    path = folder / ANCESTRY
    try:
        return _ANCESTORS.validate_json(read_file(path))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}", "restore it from a copy") from None


def ancestors_of(manifest: Manifest) -> list[Ancestor]:
    """Returns the checkpoints that a checkpoint descends from, oldest first.

    Raises:
        CheckpointError: the record is damaged.
    """
    try:
        return _ANCESTORS.validate_python(manifest.training.get("ancestors", []))
    except ValueError as error:
        hint = "restore it from a copy"
        raise CheckpointError(f"the manifest's ancestors: {error}", hint) from None


def describe_ancestry(ancestors: Sequence[Ancestor]) -> str:
    """Describes the chain in one line: `base@300 (weights, 0a1b2c...) -> branch@100 (...)`."""
    return " -> ".join(
        f"{each['run']}@{each['step']} ({each['taken'].replace('_', ' ')}, {each['sha256'][:12]})"
        for each in ancestors
    )


def refuse_moved_run(source: str, name: str, overrides: Sequence[str]) -> None:
    """Refuses to start a run anew in `runs/NAME` where `source` is the run, in another folder.

    Raises:
        ConfigError: the folder was moved, renamed or copied, or is that of another `runs`.
    """
    from trainyard.checkpoint.format import list_checkpoints

    path = Path(source.removesuffix("/run.toml"))
    if any(text.startswith("name=") for text in overrides):
        return
    for folder in (path, RUNS / path):
        is_begun = (folder / "run.toml").is_file() and list_checkpoints(folder / "checkpoints")
        if is_begun and folder.resolve() != (RUNS / name).resolve():
            raise ConfigError(
                f"{folder} is not where its run is trained: name={name!r}, so {RUNS / name}",
                f"start in the folder that holds its {RUNS}/; if it was renamed, add "
                f"name={folder.resolve().name}; for a new run, add another name",
            )


def is_huggingface(start: str) -> bool:
    """Returns whether `train.start_from` is a folder with a Hugging Face model."""
    return (Path(start) / "config.json").is_file()


def check_start(folder: Path, run: Run) -> list[Ancestor]:
    """Checks that a new run can start as its file says; returns its ancestry.

    Raises:
        ConfigError: the run asks for what only a run that has begun can do.
        CheckpointError: there is no such checkpoint, it is damaged, or it does not fit: all fields
            that differ are named.
    """
    from trainyard.checkpoint.format import manifest_sha256, read_manifest

    start, taken = run.train.start_from, run.train.start_with
    if run.data.from_step:
        problem = f"data.from_step={run.data.from_step}, but the run has no checkpoint"
        raise ConfigError(problem, "data.from_step=0")
    if not start and taken != "weights":
        problem = f"train.start_with={taken!r} without train.start_from"
        raise ConfigError(problem, 'train.start_from="BASE"')
    if not start:
        return []
    path = find_start(start, folder)
    if (folder / "checkpoints" / "step-00000000").exists():
        problem = f"{folder} has imported weights of its own, and train.start_from={start!r} others"
        raise CheckpointError(problem, "name=OTHER, or train.start_from=")
    manifest = read_manifest(path)
    _require_fit(manifest, run, path)
    this = Ancestor(
        run=Path(start).name if is_huggingface(start) else manifest.build_run().name,
        step=manifest.step,
        sha256=manifest_sha256(path),
        path=str(path),
        taken=taken,
    )
    return [*ancestors_of(manifest), this]


def find_start(start: str, folder: Path) -> Path:
    """Finds the checkpoint that `train.start_from` of the run in `folder` names.

    Raises:
        CheckpointError: there is none, or it belongs to the run itself.
    """
    from trainyard.checkpoint.format import list_checkpoints, step_folder_name, step_of
    from trainyard.checkpoint.resume import find_checkpoint

    if is_huggingface(start):
        return find_checkpoint(folder / CONVERTED)
    name, at, step = start.rpartition("@")
    if Path(start).exists() or not at:
        name, step = start, ""
    source = Path(name) if Path(name).is_dir() else RUNS / name
    if not source.is_dir():
        raise CheckpointError(
            f"train.start_from={start!r}: no folder {name} or {source}",
            "name a run, RUN@STEP, a checkpoint folder, or a Hugging Face folder",
        )
    if source.resolve().is_relative_to(folder.resolve()):
        raise CheckpointError(
            f"train.start_from={start!r} is in {folder}, the folder of this run", "name=OTHER"
        )
    if not step:
        return find_checkpoint(source)
    path = source / "checkpoints" / step_folder_name(int(step) if step.isdecimal() else 0)
    if not (step.isdecimal() and path.is_dir()):
        there = [str(step_of(each)) for each in reversed(list_checkpoints(path.parent))]
        raise CheckpointError(
            f"train.start_from={start!r}: {source} has no checkpoint of step {step}",
            f"its checkpoints: {', '.join(there) or 'none'}",
        )
    return path


def _require_fit(manifest: Manifest, run: Run, path: Path) -> None:
    from trainyard.checkpoint.resume import shape_changes

    parent, taken = manifest.build_run(), run.train.start_with
    if changes := shape_changes(parent, run):
        raise CheckpointError(
            f"train.start_from={run.train.start_from!r} is a model of another shape:\n"
            + "\n".join(f"  {change}" for change in changes),
            "change these back; dropout, data, schedule, layout and precision may differ",
        )
    if taken == "weights":
        return
    hint = "train.start_with='weights'"
    if manifest.step == 0 or not any(name.startswith("optimizer.") for name in manifest.tensors):
        raise CheckpointError(f"{path} has weights alone: no optimizer state to start with", hint)
    kinds = itertools.product((True, False), (1, 2))
    if any(parent.stored(*kind).states != run.stored(*kind).states for kind in kinds):
        field = (
            "optimizer.kind" if parent.optimizer.kind != run.optimizer.kind else "precision.kind"
        )
        ours, theirs = (field_value(each, field) for each in (run, parent))
        raise CheckpointError(
            f"{field}={ours!r} stores other optimizer state than {theirs!r} of {path}", hint
        )
