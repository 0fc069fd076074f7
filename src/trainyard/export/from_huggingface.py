"""Converts a Hugging Face GPT-2 folder to a run folder for further training.

It reads, converts and writes one tensor at a time, so memory for the largest one suffices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainyard.architecture import padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint.shard import Values, read_header, read_values
from trainyard.config.run import Model
from trainyard.data.vocabulary import holds_tokenizer
from trainyard.errors import CheckpointError
from trainyard.export.gpt2 import (
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    from_theirs,
    model_of,
    their_name,
    their_shape,
)
from trainyard.export.run_folder import build_run, load_fitting, require_new, write_run_folder
from trainyard.export.stream import outline
from trainyard.files import parse_json, read_file

_TEXT_LIMIT_BYTES = 64 * 2**20
# Causal masks that old versions stored with the weights.
_NO_WEIGHT = re.compile(r"transformer\.h\.[0-9]+\.attn\.(masked_)?bias")


def import_huggingface(folder: Path, output: Path, tokenizer: str = "") -> Path:
    """Writes `output` as a run folder with the weights as its checkpoint of step 0; returns that.

    The run has the model's shape and defaults elsewhere: the user fills in data, batches and
    schedule. There is no optimizer state, so moments start from zero.

    Args:
        folder: with config.json and model.safetensors, or shards with their index.
        output: the run folder to create, atomically.
        tokenizer: as for `load_vocabulary`; empty: the one in `folder`, if any.

    Raises:
        CheckpointError: `folder` is not a GPT-2 in safetensors, or `output` exists.
        DataError: the tokenizer is missing, is not a byte-level BPE, or does not fit the model.
        MachineError: `output` cannot be written.
    """
    require_new(output)
    model = model_of(_read_text(folder / CONFIG), str(folder / CONFIG))
    n_rows = padded_vocabulary_size(model)
    source = tokenizer or (folder if holds_tokenizer(folder) else None)
    vocabulary = load_fitting(source, model) if source else None
    description = f"Imported from {folder.name}."
    run = build_run(output, model, description, has_tokenizer=vocabulary is not None)
    theirs = _find_weights(folder)
    stored = _find_tensors(folder, theirs, model, n_rows)

    def make(name: str) -> Tensor:
        place = theirs[stored[name]]
        tensor = torch.empty(place.shape, dtype=place.dtype)
        read_values(place, into=tensor)
        return from_theirs(name, tensor.float(), model, n_rows)

    outlines = outline(parameter_shapes(model, n_rows), torch.float32)
    return write_run_folder(output, run, vocabulary, outlines, make)


def _find_weights(folder: Path) -> dict[str, Values]:
    """Maps each of their tensor names, with its prefix, to the place of its values."""
    if (folder / WEIGHTS_INDEX).is_file():
        names = _shard_names(folder / WEIGHTS_INDEX)
    elif (folder / WEIGHTS).is_file():
        names = [WEIGHTS]
    else:
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {', '.join(pickles)}, and pickles can run code" if pickles else "no weights"
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; it has {found}",
            "if you trust it, convert it: "
            "GPT2LMHeadModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
        )
    weights: dict[str, Values] = {}
    for name in names:
        weights |= read_header(folder / name)
    return weights


def _find_tensors(
    folder: Path, theirs: Mapping[str, Values], model: Model, n_rows: int
) -> dict[str, str]:
    """Maps our names to theirs, as stored, after checking that all exist in the right shape."""
    prefix = "" if any(name.startswith("transformer.") for name in theirs) else "transformer."
    if model.n_layers > len(theirs):
        raise CheckpointError(
            f"{folder / CONFIG} says n_layer={model.n_layers}, but there are {len(theirs)} tensors",
            "the weights belong to another config.json",
        )
    found = {}
    for name, shape in parameter_shapes(model, n_rows).items():
        their = their_name(name)
        stored = their if their in theirs else their.removeprefix(prefix)
        if stored not in theirs:
            raise CheckpointError(
                f"{folder} has no tensor {their!r}", "the weights belong to another config.json"
            )
        wanted = their_shape(name, shape, model)
        has = theirs[stored].shape
        if has != wanted:
            raise CheckpointError(
                f"tensor {their!r} in {folder} has shape {list(has)}; "
                f"its config.json says {list(wanted)}",
                "the weights belong to another config.json",
            )
        found[name] = stored
    unused = theirs.keys() - set(found.values())
    _refuse_the_rest(folder, {prefix + name for name in unused}, model)
    return found


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
        names = sorted(set(parse_json(_read_text(path))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}", "download it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"{path} names {name!r}; only files beside it can be read", "download it again"
            )
    return names


def _read_text(path: Path) -> bytes:
    try:
        return read_file(path, _TEXT_LIMIT_BYTES)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}",
            "name a folder that save_pretrained wrote, or pass --from megatron",
        ) from None
