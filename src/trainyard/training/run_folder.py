"""Writes and checks the run folder, and what a run starts from, without torch.

The parent of several ranks does only this before it starts them; they import torch, which takes
seconds, in parallel. Only a run without a checkpoint reads its start, so the start may be removed
afterwards.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from trainyard.config.load import field_value, load_run, render_run
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.data.indexed import IndexedDataset
from trainyard.data.loader import data_fingerprint, data_prefixes, describe_data, find_unread
from trainyard.data.sidecar import load_sidecar
from trainyard.data.vocabulary import Vocabulary, load_vocabulary, save_vocabulary
from trainyard.errors import CheckpointError, ConfigError, MachineError
from trainyard.files import publish_text, read_file
from trainyard.launch.environment import refuse_secrets
from trainyard.layout.resolve import Plan, resolve
from trainyard.training.stop import refuse_stopped

if TYPE_CHECKING:
    from trainyard.checkpoint.format import Manifest
    from trainyard.checkpoint.resume import Change

Resume = Literal["auto", "must", "never"]
RUNS = Path("runs")
ANCESTRY = "ancestry.json"
"""In a run folder: the checkpoints it descends from."""
CONVERTED = "start"
"""In a run folder: a Hugging Face model that the run starts from, converted."""
TOKENIZER_FOLDER = "tokenizer"
"""In a run folder: the copy of the run's tokenizer, which all ranks read."""
WANDB_ID = "wandb-id"
"""In a run folder: the id of its run at Weights & Biases."""
HISTORY_FOLDER = "history"
"""In a run folder: the earlier runs it trained, `until-00001500.toml` up to step 1500."""
FOLDERS = ("checkpoints", "logs", "tensorboard", TOKENIZER_FOLDER, HISTORY_FOLDER)
FILES = (
    *("run.toml", "lock", "metrics.jsonl", "plan.json", "versions.json", "outcome.json"),
    *("evaluation.json", "report.html", "logs/restarts.json", ANCESTRY, WANDB_ID),
)


class RunFiles:
    """What a run reads besides its run file: each once, when it is first needed.

    Args:
        folder: of the run.
        run: names its data and tokenizer.
        tokenizer: a copy of the tokenizer, to read in its place.
    """

    def __init__(self, folder: Path, run: Run, tokenizer: Path | None = None) -> None:
        self._folder, self._run, self._tokenizer = folder, run, tokenizer
        self._newest: tuple[Path, Manifest] | None = None

    @cached_property
    def vocabulary(self) -> Vocabulary | None:
        """The tokenizer's vocabulary, if the run has one."""
        source = self._run.tokenizer.path
        return load_vocabulary(self._tokenizer or source) if source else None

    @cached_property
    def data_checksum(self) -> str:
        """Checksum of the records and sizes of the token files, which must exist."""
        return describe_data(self._run)

    def find_checkpoint(self, resume: Resume) -> tuple[Path, Manifest] | None:
        """Finds the checkpoint to resume from, and reads its manifest; None if none was saved.

        Raises:
            CheckpointError: `resume` requires one and there is none, or forbids one and there is;
                or none is intact.
        """
        self._newest = self._newest or _find_checkpoint(self._folder, resume)
        return self._newest

    def take_manifest(self, path: Path | None) -> Manifest | None:
        """Returns what `find_checkpoint` read, if it was this checkpoint, and forgets it anyway.

        The manifest of a thousand ranks takes gigabytes.
        """
        newest, self._newest = self._newest, None
        return newest[1] if newest and newest[0] == path else None


@dataclass(frozen=True)
class OpenRun:
    """A run, its plan, its folder, and what it reads."""

    folder: Path
    run: Run
    plan: Plan
    files: RunFiles

    def refuse_missing_inputs(self) -> str:
        """Refuses a run whose data, tokenizer or packages are missing; returns the data's checksum.

        Raises:
            UserError: names the first.
        """
        refuse_unsupported(self.run)
        if self.files.vocabulary is not None:
            refuse_larger_vocabulary(self.run, len(self.files.vocabulary.tokens))
        for prefix in data_prefixes(self.run):
            IndexedDataset(prefix)
        return self.files.data_checksum


def open_run(folder: Path, n_ranks: int | None = None, run: Run | None = None) -> OpenRun:
    """Opens a run for `n_ranks`, by default the fewest that it allows.

    Args:
        folder: of the run.
        n_ranks: all processes.
        run: the run to train there; absent: the one in the folder, with its copy of the tokenizer.

    Raises:
        ConfigError: the run is not valid, or impossible on these ranks.
    """
    copy = None
    if run is None:
        run, copy = load_run(str(folder / "run.toml")).run, folder / TOKENIZER_FOLDER
    return OpenRun(folder, run, resolve(run, n_ranks), RunFiles(folder, run, copy))


def check_entries(folder: Path) -> None:
    """Refuses a run folder with something else where training writes: a pipe would block it.

    Raises:
        MachineError: names the first.
    """
    folders, files = [folder, *(folder / name for name in FOLDERS)], [folder / f for f in FILES]
    files += folder.glob("logs/rank-*.log")
    for paths, is_right, kind in ((folders, Path.is_dir, "folder"), (files, Path.is_file, "file")):
        for path in paths:
            if os.path.lexists(path) and not is_right(path):
                what = "a broken link" if not path.exists() else f"not a {kind}"
                raise MachineError(
                    f"{path} is {what}, where training writes a {kind}",
                    "move it away, or give this run another name",
                )


def write_run_folder(opened: OpenRun, resume: Resume | Literal["overwrite"]) -> OpenRun:
    """Writes run.toml and the tokenizer for the workers, after all checks that need no torch.

    Args:
        opened: the run to train.
        resume: as for `find_checkpoint`; "overwrite" removes earlier training output.

    Returns:
        the run as written, for a worker in this process.

    Raises:
        UserError: the run cannot be trained here, or differs from the one already in the folder.
    """
    folder = opened.folder
    opened.refuse_missing_inputs()
    refuse_stopped(folder)
    # The ranks read unknown files together, and reject data that differs.
    fingerprint = "" if find_unread(opened.run) else data_fingerprint(opened.run)
    opened = replace(opened, run=find_end_of_document(opened.run, opened.files))
    is_new = resume == "overwrite" or not has_begun(folder)
    ancestors = check_start(folder, opened.run) if is_new else []
    if resume == "overwrite":
        _remove_what_was_trained(folder)
    elif resume == "must" or (folder / "checkpoints").exists():
        _keep_earlier_run(opened, resume, fingerprint)
    folder.mkdir(parents=True, exist_ok=True)
    if opened.files.vocabulary is not None:
        write_tokenizer_folder(folder, opened.files.vocabulary)
    if is_new and (ancestors or (folder / ANCESTRY).exists()):
        publish_text(folder / ANCESTRY, json.dumps(ancestors, indent=2) + "\n")
    publish_text(folder / "run.toml", render_run(opened.run))
    return opened


def find_end_of_document(run: Run, files: RunFiles) -> Run:
    """Sets `model.end_of_document_id` by the tokenizer and the token files, if attention needs it.

    Raises:
        ConfigError: it is unknown, or they differ, or token files are without it.
    """
    if not run.model.attention_within_documents:
        return run
    ids = {"model": run.model.end_of_document_id}
    if files.vocabulary is not None:
        ids["the tokenizer"] = files.vocabulary.eod_id
    for prefix in data_prefixes(run):
        if not Path(f"{prefix}.json").exists():  # made by Megatron-LM: tokenizer unknown
            continue
        sidecar = load_sidecar(prefix)
        if not sidecar.append_eod:
            raise ConfigError(
                f"model.attention_within_documents=true, but documents in {prefix} have no last "
                "token that ends them",
                "prepare the text with append_eod = true",
            )
        ids[prefix] = sidecar.tokenizer.eod_id
    known = {place: each for place, each in ids.items() if each is not None}
    if not known:
        raise ConfigError(
            "model.attention_within_documents=true needs the token that ends a document, and "
            "neither a tokenizer nor a record of the token files names it",
            "model.end_of_document_id=50256 for GPT-2's tokens; or tokenizer.path",
        )
    if len({*known.values()}) > 1:
        raise ConfigError(
            "documents end with different tokens: "
            + ", ".join(f"{each} by {place}" for place, each in known.items()),
            "leave out model.end_of_document_id, and use token files of one tokenizer",
        )
    return change(run, {"model.end_of_document_id": next(iter(known.values()))})


def has_begun(folder: Path) -> bool:
    """Returns whether the run of a folder has trained."""
    steps = {path.name for path in (folder / "checkpoints").glob("step-*")}
    # Step 0 is an imported checkpoint.
    return (folder / "run.toml").exists() and bool(steps - {"step-00000000"})


def begun_run(folder: Path) -> Run | None:
    """Returns the run of a folder that has trained."""
    return load_run(str(folder / "run.toml")).run if has_begun(folder) else None


def read_history(folder: Path) -> list[tuple[int, list[Change]]]:
    """Lists each step at which what the run was asked for changed, and the changes.

    Raises:
        ConfigError: a file of the history is not valid.
    """
    from trainyard.checkpoint.resume import run_changes

    earlier = sorted((folder / HISTORY_FOLDER).glob("until-*.toml"))
    runs = [load_run(str(path)).run for path in [*earlier, folder / "run.toml"]]
    steps = [int(path.stem.removeprefix("until-")) for path in earlier]
    return [(step, run_changes(*pair)) for step, pair in zip(steps, pairwise(runs), strict=True)]


def write_tokenizer_folder(folder: Path, vocabulary: Vocabulary) -> None:
    """Copies the tokenizer into a run folder."""
    (folder / TOKENIZER_FOLDER).mkdir(exist_ok=True)
    save_vocabulary(vocabulary, folder / TOKENIZER_FOLDER / "tokenizer.json")


def refuse_unsupported(run: Run) -> None:
    """Rejects runs that this installation can describe but not train.

    Raises:
        ConfigError: names the field.
        MachineError: the run needs a GPU and there is none.
    """
    refuse_secrets(run.model_dump())
    if run.precision.formats.multiplies_in_fp8:
        from trainyard.precision.float8 import refuse_device

        refuse_device(run)
    if run.log.wandb_project and find_spec("wandb") is None:
        raise ConfigError(
            f"log.wandb_project={run.log.wandb_project!r} needs the package wandb",
            "pip install wandb, or leave log.wandb_project empty",
        )


def refuse_larger_vocabulary(run: Run, n_tokens: int) -> None:
    """Raises a ConfigError if the tokenizer has more tokens than the model."""
    if n_tokens > run.model.vocabulary_size:
        raise ConfigError(
            f"tokenizer.path={run.tokenizer.path!r} has {n_tokens} tokens, "
            f"model.vocabulary_size={run.model.vocabulary_size} is smaller",
            f"model.vocabulary_size={n_tokens}",
        )


def checkpoint_folder(run_folder: Path) -> Path:
    """Returns the folder of a run's checkpoints."""
    return run_folder / "checkpoints"


def _find_checkpoint(run_folder: Path, resume: Resume) -> tuple[Path, Manifest] | None:
    from trainyard.checkpoint.format import list_checkpoints
    from trainyard.checkpoint.resume import newest_manifest, problem_of

    folder = checkpoint_folder(run_folder)
    there = list_checkpoints(folder)
    if not there and resume == "must":
        raise CheckpointError(
            f"no checkpoint in {folder}; --resume must requires one",
            "--resume auto starts from the beginning",
        )
    if there and resume == "never":
        raise CheckpointError(
            f"{there[0]} exists, and --resume never would mix two runs in one folder",
            "give the run another name, or pass --overwrite to remove its checkpoints and metrics",
        )
    newest = newest_manifest(folder)
    if there and newest is None:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {folder} is intact; training did not "
            "start and changed nothing:\n"
            + "\n".join(f"  {path.name}: {problem_of(path)}" for path in there),
            "restore these files from a copy, or start over under another name or with --overwrite",
        )
    return newest


def _remove_what_was_trained(folder: Path) -> None:
    from trainyard.checkpoint.format import list_checkpoints
    from trainyard.checkpoint.save import remove_checkpoint, remove_partials

    for path in list_checkpoints(checkpoint_folder(folder)):
        remove_checkpoint(path)
    remove_partials(checkpoint_folder(folder))
    for name in ("metrics.jsonl", "outcome.json", "evaluation.json", "report.html", WANDB_ID):
        (folder / name).unlink(missing_ok=True)
    for name in ("tensorboard", HISTORY_FOLDER):
        shutil.rmtree(folder / name, ignore_errors=True)


def _keep_earlier_run(opened: OpenRun, resume: Resume, data: str) -> None:
    """Checks that the run continues the one in the folder; keeps that one's run file if changed."""
    from trainyard.checkpoint.resume import check_resumable

    newest = opened.files.find_checkpoint(resume)
    if newest is None:
        return
    _, manifest = newest
    vocabulary = opened.files.vocabulary
    tokenizer = vocabulary.fingerprint if vocabulary else ""
    earlier = opened.folder / HISTORY_FOLDER / f"until-{manifest.step:08d}.toml"
    changes = check_resumable(manifest, opened.run, opened.plan.n_steps, data, tokenizer)
    if changes and manifest.step > 0:
        earlier.parent.mkdir(exist_ok=True)
        publish_text(earlier, render_run(manifest.build_run()))


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
