"""Finds the checkpoint to go on from, without torch; and which fields may change on resume.

Fields that change neither mathematics nor data are free, even if rounding changes. The length may
change down to the step reached, the schedule if the learning rate does not jump, and the data if
`data.from_step` is the checkpoint's step. All other fields would make the rest of the run another
experiment; an error names them. `config/resume.toml` lists all. A branch (`train.start_from`) may
change everything but the shape.
"""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from trainyard.checkpoint.format import (
    GIVE_A_FOLDER,
    MANIFEST,
    Manifest,
    list_checkpoints,
    read_manifest,
    step_of,
)
from trainyard.config.run import Run
from trainyard.errors import CheckpointError, NewerFormatError
from trainyard.layout.resolve import learning_rate, resolve

logger = logging.getLogger("trainyard")

_FILE = resources.files("trainyard.config") / "resume.toml"
_RULES: dict[str, Any] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
FREE: tuple[str, ...] = tuple(_RULES["free"])
"""Fields and sections that may change."""


@dataclass(frozen=True)
class Change:
    """A field whose saved and wanted values differ."""

    field: str
    saved: object
    wanted: object
    refusal: str
    """Why it must not change; empty when it may."""

    @property
    def values(self) -> str:
        """The field with both values."""
        saved, wanted = format_value(self.saved), format_value(self.wanted)
        return f"{self.field}: {saved} in the checkpoint, now {wanted}"

    def __str__(self) -> str:
        return f"{self.values}; {self.refusal}" if self.refusal else self.values


def run_changes(saved: Run, wanted: Run) -> list[Change]:
    """Lists every field that differs between two runs, and whether it may on resume."""
    before, after = _flatten(saved), _flatten(wanted)
    return [
        Change(field, before.get(field), after.get(field), refusal_of(field))
        for field in dict.fromkeys([*before, *after])
        if before.get(field) != after.get(field)
    ]


def check_resumable(
    manifest: Manifest,
    wanted: Run,
    n_steps: int,
    data_fingerprint: str,
    tokenizer_fingerprint: str,
) -> list[Change]:
    """Checks that `wanted` can resume from the checkpoint; returns the free changes.

    At step 0 there are only weights, and everything except the shape of the model may change.

    Args:
        manifest: of the checkpoint.
        wanted: the run to resume.
        n_steps: of `wanted`.
        data_fingerprint: of the token files of `wanted`; empty if not yet known.
        tokenizer_fingerprint: of its tokenizer; empty when it has none.

    Raises:
        CheckpointError: lists each field that must not change, with both values and the reason.
    """
    changes = run_changes(manifest.build_run(), wanted)
    hint = ""
    if manifest.step == 0:
        refused = [str(change) for change in shape_changes(manifest.build_run(), wanted)]
    else:
        refused = _refused(manifest, wanted, changes)
        if changes_data(manifest, wanted):
            data_fingerprint = ""
        elif manifest.data_fingerprint != data_fingerprint or "\ndata." in "\n".join(refused):
            hint = f"; data.from_step={manifest.step} changes the data from here on"
        if n_steps < manifest.step:
            refused.append(
                f"train.length={str(wanted.train.length)!r} ends at step {n_steps}, before the "
                f"checkpoint's step {manifest.step}"
            )
        if data_fingerprint and manifest.data_fingerprint != data_fingerprint:
            refused.append(
                f"data: the token files have fingerprint {manifest.data_fingerprint!r} "
                f"in the checkpoint, now {data_fingerprint!r}" + "".join(map(_count_files, changes))
            )
        saved = manifest.tokenizer.fingerprint if manifest.tokenizer else ""
        if saved and tokenizer_fingerprint and saved != tokenizer_fingerprint:
            refused.append(
                f"tokenizer.path={wanted.tokenizer.path!r}: the tokenizer has fingerprint "
                f"{saved!r} in the checkpoint, now {tokenizer_fingerprint!r}"
            )
    if refused:
        name = manifest.build_run().name
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} was made with other settings:\n"
            + "\n".join(f"  {line}" for line in refused),
            f"`trainyard train {name}` continues with those{hint}; to start over: --overwrite, or "
            f"another name, from these weights with train.start_from={name}@{manifest.step}; "
            "docs/checkpoints.md lists what may change",
        )
    return changes


def shape_changes(saved: Run, wanted: Run) -> list[Change]:
    """Lists the fields of the model that differ, although weights alone are taken.

    Rotary positions have no weights, so sequences may be of another length.
    """
    free = set(_RULES["free_at_start"])
    if wanted.model.positions == "rotary":
        free.add("model.sequence_length")
    return [
        change
        for change in run_changes(saved, wanted)
        if change.field.startswith("model.") and change.field not in free
    ]


def changes_data(manifest: Manifest, wanted: Run) -> bool:
    """Returns whether the data changes at this checkpoint."""
    saved = manifest.build_run().data.from_step
    return saved != wanted.data.from_step == manifest.step > 0


def _refused(manifest: Manifest, wanted: Run, changes: list[Change]) -> list[str]:
    """Lists the changes that are refused after the first step."""
    kept = [change for change in changes if change.refusal]
    if changes_data(manifest, wanted):
        kept = [change for change in kept if not change.field.startswith("data.")]
    others = [change for change in kept if not change.field.startswith("schedule.")]
    jump = _jump(manifest, wanted) if len(others) < len(kept) else ""
    return [*map(str, kept), jump] if jump else [*map(str, others)]


def _jump(manifest: Manifest, wanted: Run) -> str:
    """Describes how the schedules differ at the checkpoint; empty if they agree there."""
    consumed = manifest.consumed_sequences
    saved = manifest.build_run()
    before, after = (learning_rate(run, resolve(run), consumed) for run in (saved, wanted))
    if math.isclose(before, after, rel_tol=1e-6):
        return ""
    return f"learning rate at step {manifest.step}: {before:.3g} in the checkpoint, now {after:.3g}"


def refusal_of(field: str) -> str:
    """Returns why a field must not change on resume; empty if it may."""
    if _is_in(field, FREE):
        return ""
    reasons: dict[str, str] = _RULES["refused"]
    return next(reason for name, reason in reasons.items() if _is_in(field, (name,)))


def _count_files(change: Change) -> str:
    """Says how many files of a blend there were, if it has others now."""
    saved, wanted = change.saved, change.wanted
    if not (change.field.endswith(".prefixes") and isinstance(saved, tuple)):
        return ""
    n_wanted = len(wanted) if isinstance(wanted, tuple) else 0
    return f"; {change.field}: {len(saved)} files in the checkpoint, now {n_wanted}"


def _is_in(field: str, names: Iterable[str]) -> bool:
    return any(field == name or field.startswith(f"{name}.") for name in names)


def _flatten(section: BaseModel, prefix: str = "") -> dict[str, object]:
    fields: dict[str, object] = {}
    for name, value in section:
        if isinstance(value, BaseModel):
            fields |= _flatten(value, f"{prefix}{name}.")
        else:
            fields[prefix + name] = value
    return fields


def format_value(value: object) -> str:
    """Formats the value of a field; a list without brackets."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "none"
    return "absent" if value is None else str(value)


def problem_of(path: Path) -> str:
    """Returns the problem of a checkpoint's manifest or file sizes, if any."""
    try:
        read_manifest(path)
    except CheckpointError as error:
        return error.problem
    return ""


def newest_manifest(folder: Path) -> tuple[Path, Manifest] | None:
    """Finds the newest checkpoint in `folder` with correct manifest and file sizes, and reads it.

    Logs a warning for each newer one that it skips.

    Raises:
        NewerFormatError: a newer version of Trainyard wrote the newest.
    """
    for path in list_checkpoints(folder):
        try:
            return path, read_manifest(path)
        except NewerFormatError:  # training on from an older one would replace it
            raise
        except CheckpointError as error:
            logger.warning("skipping %s: %s", path.name, error.problem)
    return None


def newest_checkpoint(folder: Path) -> Path | None:
    """Finds the newest checkpoint in `folder`, as `newest_manifest` does."""
    newest = newest_manifest(folder)
    return newest[0] if newest else None


def find_checkpoint(path: Path) -> Path:
    """Finds the checkpoint that a user names: a step folder, or the newest of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    if step_of(path) is not None or (path / MANIFEST).exists():
        return path
    inner = path / "checkpoints"
    newest = newest_checkpoint(inner if inner.is_dir() else path)
    if newest is None:
        problem = f"no checkpoint in {path}" if path.is_dir() else f"no folder {path}"
        raise CheckpointError(problem, GIVE_A_FOLDER)
    return newest
