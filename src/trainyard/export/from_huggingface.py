"""From a Hugging Face GPT-2 folder to a run folder that training can go on from."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainyard.checkpoint.format import Facts
from trainyard.checkpoint.save import save_checkpoint
from trainyard.config.load import render_run
from trainyard.config.run import Model, Run, Tokenizer
from trainyard.data.vocabulary import load_vocabulary, save_vocabulary
from trainyard.errors import CheckpointError, MachineError
from trainyard.export.gpt2 import (
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    from_theirs,
    model_of,
    their_name,
    their_shape,
)
from trainyard.plan.size import padded_vocabulary_size, parameter_shapes

TOKENIZER_FOLDER = "tokenizer"
_TEXT_LIMIT_BYTES = 64 * 2**20
# Causal masks that old versions stored beside the weights.
_NO_WEIGHT = re.compile(r"transformer\.h\.[0-9]+\.attn\.(masked_)?bias")


def import_huggingface(folder: Path, output: Path) -> Path:
    """Writes `output` as a run folder with the weights as its checkpoint of step 0; returns that.

    The run has the model's shape and defaults elsewhere: data, batches and schedule are for the
    user to fill in. There is no optimizer state, so moments start from zero.

    Args:
        folder: with config.json and model.safetensors, or shards with their index.
        output: the run folder to make; it appears complete or not at all.

    Raises:
        CheckpointError: `folder` is not a GPT-2 of safetensors, or `output` exists.
        DataError: it has a tokenizer that is not a byte-level BPE.
        MachineError: `output` cannot be written.
    """
    if output.exists():
        raise CheckpointError(f"{output} exists already", "name another --output, or remove it")
    model = model_of(_read_text(folder / CONFIG), str(folder / CONFIG))
    n_rows = padded_vocabulary_size(model)
    run = _build_run(folder, output, model)
    vocabulary = load_vocabulary(folder) if run.tokenizer.path else None
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        with ExitStack() as files:
            tensors = _convert(folder, _open_weights(folder, files), model, n_rows)
            facts = Facts(
                step=0, consumed_sequences=0, consumed_tokens=0, run=run.model_dump(mode="json")
            )
            checkpoint = save_checkpoint(partial / "checkpoints", facts, tensors)
        (partial / "run.toml").write_text(render_run(run), encoding="utf-8")
        if vocabulary:
            (partial / TOKENIZER_FOLDER).mkdir()
            save_vocabulary(vocabulary, partial / TOKENIZER_FOLDER / "tokenizer.json")
        partial.rename(output)
    except OSError as error:
        raise MachineError(f"cannot write {output}: {error}", "free space on that disk") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return output / checkpoint.relative_to(partial)


def _build_run(folder: Path, output: Path, model: Model) -> Run:
    name = re.sub(r"[^A-Za-z0-9._-]", "-", output.name).lstrip("._-")[:100] or "imported"
    has_tokenizer = any(
        all((folder / file).is_file() for file in files)
        for files in (("tokenizer.json",), ("vocab.json", "merges.txt"))
    )
    tokenizer = Tokenizer(path=str(output / TOKENIZER_FOLDER) if has_tokenizer else "")
    return Run(
        name=name, description=f"Imported from {folder.name}.", model=model, tokenizer=tokenizer
    )


def _open_weights(folder: Path, files: ExitStack) -> dict[str, Any]:
    """Maps each of their tensor names, with its prefix, to the open file that has it."""
    if (folder / WEIGHTS_INDEX).is_file():
        names = _shard_names(folder / WEIGHTS_INDEX)
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {', '.join(pickles)}, and pickles can run code" if pickles else "no weights"
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; it has {found}",
            "where you trust it, convert it: "
            "GPT2LMHeadModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
        )
    opened: dict[str, Any] = {}
    for name in names:
        try:
            file = files.enter_context(safe_open(folder / name, framework="pt"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{folder / name} cannot be read as safetensors: {error}", "download it again"
            ) from None
        opened |= dict.fromkeys(file.keys(), file)
    return opened


def _convert(
    folder: Path, theirs: Mapping[str, Any], model: Model, n_rows: int
) -> dict[str, Tensor]:
    prefix = "" if any(name.startswith("transformer.") for name in theirs) else "transformer."
    if model.n_layers > len(theirs):
        raise CheckpointError(
            f"{folder / CONFIG} says n_layer={model.n_layers}, but there are {len(theirs)} tensors",
            "the weights belong to another config.json",
        )
    tensors = {}
    used = set()
    for name, shape in parameter_shapes(model, n_rows).items():
        their = their_name(name)
        stored = their if their in theirs else their.removeprefix(prefix)
        used.add(stored)
        wanted = list(their_shape(name, shape, model))
        if stored not in theirs:
            raise CheckpointError(
                f"{folder} has no tensor {their!r}", "the weights belong to another config.json"
            )
        found = theirs[stored].get_slice(stored).get_shape()
        if found != wanted:
            raise CheckpointError(
                f"tensor {their!r} in {folder} has shape {found}; its config.json says {wanted}",
                "the weights belong to another config.json",
            )
        tensor = theirs[stored].get_tensor(stored).float()
        tensors[f"model.{name}"] = from_theirs(name, tensor, model, n_rows)
    _refuse_the_rest(folder, {prefix + name for name in theirs.keys() - used}, model)
    return tensors


def _refuse_the_rest(folder: Path, names: set[str], model: Model) -> None:
    tied = {"lm_head.weight", "transformer.lm_head.weight"} if model.tied_embeddings else set()
    unknown = sorted(name for name in names - tied if not _NO_WEIGHT.fullmatch(name))
    if unknown:
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that no GPT-2 has: {', '.join(unknown[:3])}",
            "merge adapters into the weights before importing",
        )


def _shard_names(path: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(_read_text(path))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}", "download it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{path} names {name!r}; only files beside it can be read", "download it again"
            )
    return names


def _read_text(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            text = file.read(_TEXT_LIMIT_BYTES + 1)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}", "name a folder that save_pretrained wrote"
        ) from None
    if len(text) > _TEXT_LIMIT_BYTES:
        raise CheckpointError(f"{path} is above {_TEXT_LIMIT_BYTES} bytes", "download it again")
    return text
