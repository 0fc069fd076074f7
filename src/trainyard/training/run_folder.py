"""Writes and checks the run folder without torch, which takes seconds to import.

The parent of several ranks does only this before it starts them; they import torch in parallel.
"""

from __future__ import annotations

import json
import os
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trainyard.config.load import load_run, render_run
from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.data.loader import data_fingerprint, data_prefixes, describe_data, find_unread
from trainyard.data.sidecar import load_sidecar
from trainyard.data.vocabulary import Vocabulary, load_vocabulary, save_vocabulary
from trainyard.errors import CheckpointError, ConfigError, MachineError
from trainyard.files import publish_text
from trainyard.launch.environment import refuse_secrets
from trainyard.training.start import ANCESTRY, check_start
from trainyard.training.stop import refuse_stopped

if TYPE_CHECKING:
    from trainyard.checkpoint.resume import Change

Resume = Literal["auto", "must", "never"]
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
FIRST_WITH_ZERO_BUBBLE = (2, 13)


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


def write_run_folder(folder: Path, run: Run, resume: Resume | Literal["overwrite"]) -> None:
    """Writes run.toml and the tokenizer for the workers, after all checks that need no torch.

    Args:
        folder: of the run.
        run: the run to train.
        resume: as for `find_checkpoint`; "overwrite" removes earlier training output.

    Raises:
        UserError: the run cannot be trained here, or differs from the one already in the folder.
    """
    refuse_what_is_not_built(run)
    refuse_stopped(folder)
    describe_data(run)  # refuses data that is missing
    # The ranks read unknown files together, and reject data that differs.
    fingerprint = "" if find_unread(run) else data_fingerprint(run)
    vocabulary = load_vocabulary(run.tokenizer.path) if run.tokenizer.path else None
    run = find_end_of_document(run)
    is_new = resume == "overwrite" or begun_run(folder) is None
    ancestors = check_start(folder, run) if is_new else []
    if resume == "overwrite":
        _remove_what_was_trained(folder)
    elif resume == "must" or (folder / "checkpoints").exists():
        _keep_earlier_run(folder, run, resume, fingerprint, vocabulary)
    folder.mkdir(parents=True, exist_ok=True)
    if vocabulary is not None:
        write_tokenizer_folder(folder, vocabulary)
    if is_new and (ancestors or (folder / ANCESTRY).exists()):
        publish_text(folder / ANCESTRY, json.dumps(ancestors, indent=2) + "\n")
    publish_text(folder / "run.toml", render_run(run))


def find_end_of_document(run: Run) -> Run:
    """Sets `model.end_of_document_id` by the tokenizer and the token files, if attention needs it.

    Raises:
        ConfigError: it is unknown, or they differ, or token files are without it.
    """
    if not run.model.attention_within_documents:
        return run
    ids = {"model": run.model.end_of_document_id}
    if run.tokenizer.path:
        ids["the tokenizer"] = load_vocabulary(run.tokenizer.path).eod_id
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


def begun_run(folder: Path) -> Run | None:
    """Returns the run of a folder that has trained."""
    run_file = folder / "run.toml"
    steps = {path.name for path in (folder / "checkpoints").glob("step-*")}
    if run_file.exists() and steps - {"step-00000000"}:  # step 0 is an imported checkpoint
        return load_run(str(run_file)).run
    return None


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


def refuse_what_is_not_built(run: Run) -> None:
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
    is_zero_bubble = run.parallel.pipeline > 1 and run.parallel.schedule == "zero_bubble"
    found = version("torch")
    major, minor = (int(number) for number in found.split(".")[:2])
    # Older versions fail to split the backward pass of our autograd functions.
    if is_zero_bubble and (major, minor) < FIRST_WITH_ZERO_BUBBLE:
        raise ConfigError(
            f"parallel.schedule='zero_bubble' needs torch 2.13; this is {found}",
            "parallel.schedule='interleaved' with parallel.chunks=2, or a newer torch",
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


def find_checkpoint(run_folder: Path, resume: Resume) -> Path | None:
    """Finds the checkpoint to resume from; None if none was ever saved.

    Raises:
        CheckpointError: `resume` requires one and there is none, or forbids one and there is; or
            none is intact.
    """
    from trainyard.checkpoint.format import list_checkpoints
    from trainyard.checkpoint.resume import newest_checkpoint, problem_of

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
    path = newest_checkpoint(folder)
    if there and path is None:
        raise CheckpointError(
            f"none of the {len(there)} checkpoints in {folder} is intact; training did not "
            "start and changed nothing:\n"
            + "\n".join(f"  {path.name}: {problem_of(path)}" for path in there),
            "restore these files from a copy, or start over under another name or with --overwrite",
        )
    return path


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


def _keep_earlier_run(
    folder: Path, run: Run, resume: Resume, data: str, vocabulary: Vocabulary | None
) -> None:
    """Checks that the run continues the one in the folder; keeps that one's run file if changed."""
    from trainyard.checkpoint.format import read_manifest
    from trainyard.checkpoint.resume import check_resumable

    checkpoint = find_checkpoint(folder, resume)
    if checkpoint is None:
        return
    manifest = read_manifest(checkpoint)
    tokenizer = vocabulary.fingerprint if vocabulary else ""
    earlier = folder / HISTORY_FOLDER / f"until-{manifest.step:08d}.toml"
    if check_resumable(manifest, run, data, tokenizer) and manifest.step > 0:
        earlier.parent.mkdir(exist_ok=True)
        publish_text(earlier, render_run(manifest.build_run()))
