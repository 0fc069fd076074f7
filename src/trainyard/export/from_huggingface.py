"""Converts a Hugging Face folder to a run folder for further training.

It reads, converts and writes one tensor at a time, so memory for the largest one suffices.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from trainyard.architecture import padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint.shard import Values, read_header, read_values
from trainyard.config.run import Model
from trainyard.data.vocabulary import Vocabulary, holds_tokenizer
from trainyard.errors import CheckpointError, DataError
from trainyard.export.families import (
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    Family,
    read_config,
)
from trainyard.export.foreign import refuse_foreign
from trainyard.export.run_folder import build_run, load_fitting, require_new, write_run_folder
from trainyard.export.stream import outline
from trainyard.files import parse_json, read_file

_TEXT_LIMIT_BYTES = 64 * 2**20
_OTHER_CONFIG = "the weights belong to another config.json"

logger = logging.getLogger("trainyard")


def import_huggingface(folder: Path, output: Path, tokenizer: str = "") -> Path:
    """Writes `output` as a run folder with the weights as its checkpoint of step 0; returns that.

    The run has the model's shape and defaults elsewhere: the user fills in data, batches and
    schedule. There is no optimizer state, so moments start from zero.

    Args:
        folder: with config.json and model.safetensors, or shards with their index.
        output: the run folder to create, atomically.
        tokenizer: as for `load_vocabulary`; empty: the one in `folder`, if it can be read.

    Raises:
        CheckpointError: `folder` holds no model of a known family in safetensors, or `output`
            exists.
        DataError: `tokenizer` is missing, is not a byte-level BPE, or does not fit the model.
        MachineError: `output` cannot be written.
    """
    require_new(output)
    family, model = read_config(_read_text(folder / CONFIG), str(folder / CONFIG))
    n_rows = padded_vocabulary_size(model)
    vocabulary = load_fitting(tokenizer, model) if tokenizer else _load_own(folder, model)
    description = f"Imported from {folder.name}."
    run = build_run(output, model, description, has_tokenizer=vocabulary is not None)
    stored = _find_tensors(folder, family, model, n_rows)

    def make(name: str) -> Tensor:
        parts = [_read_tensor(values).float() for values in stored[name]]
        return family.from_theirs(name, parts, model, n_rows)

    outlines = outline(parameter_shapes(model, n_rows), torch.float32)
    return write_run_folder(output, run, vocabulary, outlines, make)


def _load_own(folder: Path, model: Model) -> Vocabulary | None:
    """Loads the tokenizer in a folder; without it the weights are of use too."""
    try:
        return load_fitting(folder, model) if holds_tokenizer(folder) else None
    except DataError as error:
        logger.warning(
            "importing without the tokenizer: %s; --tokenizer names another", error.problem
        )
        return None


def _read_tensor(values: Values) -> Tensor:
    tensor = torch.empty(values.shape, dtype=values.dtype)
    read_values(values, into=tensor)
    return tensor


def _find_weights(folder: Path) -> dict[str, Values]:
    """Maps each of their tensor names, with its prefix, to the place of its values."""
    if (folder / WEIGHTS).is_file():  # before the index, as transformers reads them
        names = [WEIGHTS]
    elif (folder / WEIGHTS_INDEX).is_file():
        names = _shard_names(folder / WEIGHTS_INDEX)
    else:
        refuse_foreign(folder)
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        found = f"only {', '.join(pickles)}, and pickles can run code" if pickles else "no weights"
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; it has {found}",
            "if you trust it, convert it: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
        )
    weights: dict[str, Values] = {}
    for name in names:
        header = read_header(folder / name)
        if twice := sorted(weights.keys() & header.keys()):
            raise CheckpointError(
                f"tensor {twice[0]!r} is in {folder / name} and in {weights[twice[0]].path.name}",
                "the files are of two models: download or save the folder again",
            )
        weights |= header
    if whole := [name for name, each in weights.items() if not each.dtype.is_floating_point]:
        raise CheckpointError(
            f"tensor {whole[0]!r} in {folder} is quantized, to {weights[whole[0]].dtype}",
            "take a folder of this model that is not quantized",
        )
    return weights


def _find_tensors(
    folder: Path, family: Family, model: Model, n_rows: int
) -> dict[str, list[Values]]:
    """Maps our names to the parts of them, after checking that all exist in the right shape."""
    theirs = _find_weights(folder)
    if model.n_layers > len(theirs):
        raise CheckpointError(
            f"{folder / CONFIG} has {model.n_layers} layers, but there are {len(theirs)} tensors",
            _OTHER_CONFIG,
        )
    if not any(name.startswith(family.prefix) for name in theirs):
        theirs = {
            name if name == family.head else family.prefix + name: values
            for name, values in theirs.items()
        }
    found = {}
    for name, shape in parameter_shapes(model, n_rows).items():
        wanted = family.their_shapes(name, shape, model)
        for their, their_shape in wanted.items():
            if their not in theirs:
                raise CheckpointError(f"{folder} has no tensor {their!r}", _OTHER_CONFIG)
            has = theirs[their].shape
            if has != their_shape:
                raise CheckpointError(
                    f"tensor {their!r} in {folder} has shape {list(has)}; "
                    f"its config.json says {list(their_shape)}",
                    _OTHER_CONFIG,
                )
        found[name] = [theirs.pop(their) for their in wanted]
    if model.tied_embeddings and family.head in theirs:
        _require_equal_head(folder, family, theirs, found["embedding.weight"][0])
    _refuse_the_rest(folder, family, theirs)
    return found


def _require_equal_head(
    folder: Path, family: Family, theirs: dict[str, Values], embedding: Values
) -> None:
    head = theirs.pop(family.head)
    same = head.shape == embedding.shape
    if not (same and torch.equal(_read_tensor(head), _read_tensor(embedding))):
        raise CheckpointError(
            f"{family.head!r} in {folder} is not the embedding, but its config.json ties them",
            "tie_word_embeddings: false in that file keeps both",
        )


def _refuse_the_rest(folder: Path, family: Family, names: Iterable[str]) -> None:
    unknown = sorted(name for name in names if not re.fullmatch(family.no_weight, name))
    if unknown:
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that no {family.architecture} has: "
            f"{', '.join(unknown[:3])}",
            "merge adapters into the weights before importing",
        )


def _shard_names(path: Path) -> list[str]:
    try:
        names = sorted(set(parse_json(_read_text(path))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is malformed: {error!r}", "download it again") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.isprintable():
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
            "name a folder that save_pretrained wrote",
        ) from None
