"""Converts checkpoints to folders for Hugging Face libraries, and such folders to run folders.

Both read, convert and write one tensor at a time, so memory for the largest one suffices, for any
saved layout. Comparing logits after an export needs both whole models.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.architecture import Shape, find_layer, padded_vocabulary_size, parameter_shapes
from trainyard.checkpoint.format import OLDER_IS_KEPT, Manifest, read_manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_into, load_tokenizer_copy
from trainyard.checkpoint.shard import DTYPES, Values, read_header, read_values, split_in_shards
from trainyard.config.run import Model
from trainyard.data.vocabulary import GPT2, Vocabulary, holds_tokenizer
from trainyard.errors import CheckpointError, DataError
from trainyard.evaluation.generate import Sampling
from trainyard.export.families import (
    BUFFERS,
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    Family,
    find_family,
    read_config,
)
from trainyard.export.foreign import refuse_foreign
from trainyard.export.run_folder import (
    Make,
    load_fitting,
    new_folder,
    outline,
    require_new,
    write_run_folder,
    write_tensors,
)
from trainyard.files import flush, parse_json, read_file
from trainyard.precision.float8 import quiet_import

logger = logging.getLogger("trainyard")

SHARD_LIMIT_BYTES = 4 * 2**30
# Different summation order; measured 9e-7 with 124M parameters.
LARGEST_DIFFERENCE_FP32 = 1e-5
_TEXT_LIMIT_BYTES = 64 * 2**20
_OTHER_CONFIG = "the weights belong to another config.json"


def export_huggingface(
    checkpoint: Path,
    output: Path,
    dtype: torch.dtype = torch.float32,
    shard_limit_bytes: int = SHARD_LIMIT_BYTES,
    card: str = "",
) -> list[str]:
    """Writes config.json, safetensors weights and the tokenizer; returns the names of the files.

    Args:
        checkpoint: a checkpoint folder.
        output: the folder to create, atomically.
        dtype: of the weights; below fp32 they are rounded.
        shard_limit_bytes: larger weights are split into files with an index.
        card: README.md; empty: none.

    Raises:
        CheckpointError: the checkpoint is damaged, or `output` exists.
        ConfigError: no architecture of Hugging Face computes its model.
        MachineError: `output` cannot be written.
    """
    require_new(output)
    manifest = read_manifest(checkpoint)
    run = manifest.build_run()
    family = find_family(run.model)
    if run.model.attention_within_documents:
        logger.warning(
            "%s cannot say model.attention_within_documents=true: transformers computes the same "
            "for one document at a time only",
            CONFIG,
        )
    parts = _find_parts(checkpoint, manifest, family, run.model)
    ours = {theirs: name for name, shapes in parts.items() for theirs in shapes}

    @lru_cache(maxsize=1)  # it keeps the parts of one of our parameters
    def convert(name: str) -> dict[str, Tensor]:
        stored = manifest.tensors[f"model.{name}"]
        tensor = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        size = run.model.vocabulary_size
        load_into(checkpoint, {f"model.{name}": tensor}, size, manifest=manifest)
        share = find_layer(run.model, name).multipliers.output
        tensor = tensor if share == 1 else tensor * share
        return family.to_theirs(name, tensor, run.model)

    vocabulary = _find_vocabulary(checkpoint, manifest)
    config = family.config_of(run.model) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with new_folder(output) as partial:
        _write_texts(partial, config, vocabulary, run.model.sequence_length)
        if card:
            (partial / "README.md").write_text(card, encoding="utf-8")
        shapes = {name: shape for of_parts in parts.values() for name, shape in of_parts.items()}
        shards = split_in_shards(outline(shapes, dtype), shard_limit_bytes)
        _write_weights(partial, shards, lambda theirs: convert(ours[theirs])[theirs])
        for path in partial.iterdir():
            flush(path)
    return sorted(path.name for path in output.iterdir())


def require_equal_logits(checkpoint: Path, folder: Path, dtype: torch.dtype) -> float:
    """Compares an exported folder with its checkpoint; returns the largest relative difference.

    Raises:
        RuntimeError: fp32 weights produce different logits, which is a bug in the export.
    """
    difference = compare_logits(checkpoint, folder)
    if dtype == torch.float32 and not difference <= LARGEST_DIFFERENCE_FP32:
        raise RuntimeError(
            f"the logits of {folder} and {checkpoint} differ by {difference:.1e}, "
            f"more than {LARGEST_DIFFERENCE_FP32:.1e} of the largest"
        )
    return difference


@torch.no_grad()
def compare_logits(checkpoint: Path, folder: Path, n_tokens: int = 128) -> float:
    """Runs both models on the same random tokens; needs transformers.

    Returns:
        the largest difference between two logits, relative to the largest logit.
    """
    with quiet_import():  # of torchao, by the class of the model
        import transformers  # type: ignore[import-not-found,unused-ignore]

        transformers.utils.logging.disable_progress_bar()
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    ours, run, _ = build_model_from_checkpoint(checkpoint)
    theirs.float().eval()
    ours.end_id = None  # one document
    shape = (2, min(n_tokens, run.model.sequence_length))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.model.vocabulary_size, shape, generator=generator)
    expected = ours.logits(ours(tokens))
    if not expected.isfinite().all():
        raise CheckpointError(f"the logits of {checkpoint} are not finite", OLDER_IS_KEPT)
    logits: torch.Tensor = theirs(tokens).logits
    return float((logits - expected).abs().max() / expected.abs().max())


def _find_vocabulary(checkpoint: Path, manifest: Manifest) -> Vocabulary | None:
    source = manifest.build_run().tokenizer.path
    if manifest.tokenizer or source == GPT2 or (source and Path(source).exists()):
        return load_tokenizer_copy(checkpoint, manifest)
    why = f"{source} was not found" if source else "the run names none"
    logger.warning("exporting without a tokenizer: %s", why)
    return None


def _write_texts(
    folder: Path, config: dict[str, Any], vocabulary: Vocabulary | None, sequence_length: int
) -> None:
    end = vocabulary.eod_id if vocabulary else None
    ids = {"bos_token_id": end, "eos_token_id": end}
    _write_json(folder / CONFIG, config | ids)
    usual = Sampling()
    sampling = {"temperature": usual.temperature, "top_k": usual.top_k, "top_p": usual.top_p}
    _write_json(folder / "generation_config.json", {"do_sample": True, **sampling, **ids})
    if vocabulary:
        (folder / "tokenizer.json").write_text(vocabulary.render_json(), encoding="utf-8")
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), vocabulary.end_of_document)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": sequence_length,
            "clean_up_tokenization_spaces": False,
            **special,
        }
        _write_json(folder / "tokenizer_config.json", settings)


def _find_parts(
    path: Path, manifest: Manifest, family: Family, model: Model
) -> dict[str, dict[str, Shape]]:
    """Maps our names to the parts to write and their shapes, after checking that all exist."""
    stored = {name: tensor.shape for name, tensor in manifest.tensors.items()}
    n_rows = next(iter(stored.get("model.embedding.weight", ())), 0)
    shapes = parameter_shapes(model, n_rows)
    wanted = {f"model.{name}": shape for name, shape in shapes.items()}
    _check_shapes(path, stored, wanted, ("its run needs", OLDER_IS_KEPT))
    return {name: family.their_shapes(name, shape, model) for name, shape in shapes.items()}


def _check_shapes(
    place: Path, stored: Mapping[str, Shape], wanted: Mapping[str, Shape], why: tuple[str, str]
) -> None:
    """Checks that all wanted tensors are stored, in their shapes; `why` and hint are for errors."""
    for name, shape in wanted.items():
        found = stored.get(name)
        if found != shape:
            problem = "is missing" if found is None else f"has shape {list(found)}"
            text = f"tensor {name!r} in {place} {problem}; {why[0]} {list(shape)}"
            raise CheckpointError(text, why[1])


def _write_weights(folder: Path, shards: list[dict[str, Tensor]], make: Make) -> None:
    file_of: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        number = f"-{index:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = WEIGHTS.replace(".", f"{number}.")
        write_tensors(folder / file, shard, make)
        file_of |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        _write_json(folder / WEIGHTS_INDEX, {"metadata": {}, "weight_map": file_of})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


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
    stored = _find_tensors(folder, family, model, n_rows)

    def make(name: str) -> Tensor:
        parts = [_read_tensor(values).float() for values in stored[name]]
        return family.from_theirs(name, parts, model, n_rows)

    return write_run_folder(output, model, f"Imported from {folder.name}.", vocabulary, make)


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
        others = f"only {', '.join(pickles)}, and pickles can run code" if pickles else "no weights"
        raise CheckpointError(
            f"{folder} has no {WEIGHTS}; it has {others}",
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
    if whole := [name for name, values in weights.items() if not values.dtype.is_floating_point]:
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
    if not any(name.startswith(family.prefix) for name in theirs):
        theirs = {
            name if name == family.head else family.prefix + name: values
            for name, values in theirs.items()
        }
    stored = {name: values.shape for name, values in theirs.items()}
    sources = {}
    for name, shape in parameter_shapes(model, n_rows).items():
        wanted = family.their_shapes(name, shape, model)
        _check_shapes(folder, stored, wanted, (f"its {CONFIG} says", _OTHER_CONFIG))
        sources[name] = [theirs.pop(their) for their in wanted]
    if model.tied_embeddings and family.head in theirs:
        _require_equal_head(folder, family, theirs, sources["embedding.weight"][0])
    if unknown := sorted(name for name in theirs if not BUFFERS.fullmatch(name)):
        raise CheckpointError(
            f"{folder} has {len(unknown)} tensors that no {family.architecture} has: "
            f"{', '.join(unknown[:3])}",
            "merge adapters into the weights before importing",
        )
    return sources


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
