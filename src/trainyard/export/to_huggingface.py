"""Converts a checkpoint to a GPT-2 folder for Hugging Face libraries.

It reads, converts and writes one tensor at a time, so memory for the largest one suffices, for any
saved layout. Comparing logits afterwards needs both whole models.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainyard.architecture import parameter_shapes
from trainyard.checkpoint.format import OLDER_IS_KEPT, Manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_tokenizer_copy
from trainyard.checkpoint.shard import split_in_shards
from trainyard.config.run import Model
from trainyard.data.vocabulary import END_OF_DOCUMENT, GPT2, Vocabulary
from trainyard.errors import CheckpointError, MachineError
from trainyard.export.gpt2 import (
    CONFIG,
    WEIGHTS,
    WEIGHTS_INDEX,
    config_of,
    their_name,
    their_shape,
    to_theirs,
)
from trainyard.export.run_folder import require_new
from trainyard.export.stream import CheckpointWeights, outline, write_tensors
from trainyard.files import flush

logger = logging.getLogger("trainyard")

SHARD_LIMIT_BYTES = 4 * 2**30
# Different summation order; measured 9e-7 with 124M parameters.
LARGEST_DIFFERENCE_FP32 = 1e-5


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
        ConfigError: its model is not a GPT-2.
        MachineError: `output` cannot be written.
    """
    require_new(output)
    weights = CheckpointWeights.open(checkpoint)
    run = weights.manifest.build_run()
    outlines = _outline(weights, run.model, dtype)
    vocabulary = _find_vocabulary(checkpoint, weights.manifest)
    partial = output.with_name(f".{output.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_texts(partial, run.model, vocabulary, dtype)
        if card:
            (partial / "README.md").write_text(card, encoding="utf-8")
        _write_weights(partial, split_in_shards(outlines, shard_limit_bytes), weights, run.model)
        for path in partial.iterdir():
            flush(path)
        partial.rename(output)
    except OSError as error:
        raise MachineError(f"cannot write {output}: {error}", "free space on that disk") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
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
    logging.disable(logging.WARNING)  # torchao, imported below, reports kernels for other devices
    try:
        import transformers  # type: ignore[import-not-found,unused-ignore]
        from transformers import GPT2LMHeadModel
    finally:
        logging.disable(logging.NOTSET)

    transformers.utils.logging.disable_progress_bar()
    ours, run, _ = build_model_from_checkpoint(checkpoint)
    theirs = GPT2LMHeadModel.from_pretrained(folder, local_files_only=True)
    theirs.float().eval()
    shape = (2, min(n_tokens, run.model.sequence_length))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(run.model.vocabulary_size, shape, generator=generator)
    expected = ours.logits(ours(tokens))
    found: torch.Tensor = theirs(tokens).logits
    return float((found - expected).abs().max() / expected.abs().max())


def _find_vocabulary(checkpoint: Path, manifest: Manifest) -> Vocabulary | None:
    source = manifest.build_run().tokenizer.path
    if manifest.tokenizer or source == GPT2 or (source and Path(source).exists()):
        return load_tokenizer_copy(checkpoint, manifest)
    why = f"{source} was not found" if source else "the run names none"
    logger.warning("exporting without a tokenizer: %s", why)
    return None


def _write_texts(
    folder: Path, model: Model, vocabulary: Vocabulary | None, dtype: torch.dtype
) -> None:
    end = vocabulary.special_tokens[END_OF_DOCUMENT] if vocabulary else None
    config = config_of(model, end, str(dtype).removeprefix("torch."))
    _write_json(folder / CONFIG, config.model_dump())
    generation = {"_from_model_config": True, "bos_token_id": end, "eos_token_id": end}
    _write_json(folder / "generation_config.json", generation)
    if vocabulary:
        (folder / "tokenizer.json").write_text(vocabulary.render_json(), encoding="utf-8")
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_DOCUMENT)
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": model.sequence_length,
            "clean_up_tokenization_spaces": False,
            **special,
        }
        _write_json(folder / "tokenizer_config.json", settings)


def _outline(weights: CheckpointWeights, model: Model, dtype: torch.dtype) -> dict[str, Tensor]:
    """Describes the output, by our names in their shapes, after checking that all of it exists."""
    n_rows = weights.n_rows()
    if model.n_layers > len(weights.manifest.tensors):
        raise CheckpointError(
            f"{weights.path} holds {len(weights.manifest.tensors)} tensors, too few for "
            f"model.n_layers={model.n_layers} of its run",
            OLDER_IS_KEPT,
        )
    shapes = parameter_shapes(model, n_rows)
    for name, shape in shapes.items():
        weights.require(name, shape)
    return outline({name: their_shape(name, s, model) for name, s in shapes.items()}, dtype)


def _write_weights(
    folder: Path, shards: list[dict[str, Tensor]], weights: CheckpointWeights, model: Model
) -> None:
    file_of: dict[str, str] = {}
    for index, shard in enumerate(shards, start=1):
        number = f"-{index:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
        file = WEIGHTS.replace(".", f"{number}.")
        ours = {their_name(name): name for name in shard}

        def make(name: str, ours: dict[str, str] = ours) -> Tensor:
            return to_theirs(ours[name], weights.read(ours[name]), model)

        write_tensors(folder / file, {their_name(n): tensor for n, tensor in shard.items()}, make)
        file_of |= dict.fromkeys(ours, file)
    if len(shards) > 1:
        _write_json(folder / WEIGHTS_INDEX, {"metadata": {}, "weight_map": file_of})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
