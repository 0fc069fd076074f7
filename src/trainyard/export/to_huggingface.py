"""Converts a checkpoint to a folder for Hugging Face libraries.

It reads, converts and writes one tensor at a time, so memory for the largest one suffices, for any
saved layout. Comparing logits afterwards needs both whole models.
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

from trainyard.architecture import Shape, parameter_shapes
from trainyard.checkpoint.format import OLDER_IS_KEPT, Manifest
from trainyard.checkpoint.load import build_model_from_checkpoint, load_tokenizer_copy
from trainyard.checkpoint.shard import split_in_shards
from trainyard.config.run import Model
from trainyard.data.vocabulary import GPT2, Vocabulary
from trainyard.errors import CheckpointError
from trainyard.evaluation.generate import Sampling
from trainyard.export.families import CONFIG, WEIGHTS, WEIGHTS_INDEX, Family, find_family
from trainyard.export.run_folder import new_folder, require_new
from trainyard.export.stream import CheckpointWeights, Make, outline, write_tensors
from trainyard.files import flush
from trainyard.precision.float8 import quiet_import

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
        ConfigError: no architecture of Hugging Face computes its model.
        MachineError: `output` cannot be written.
    """
    require_new(output)
    weights = CheckpointWeights.open(checkpoint)
    run = weights.manifest.build_run()
    family = find_family(run.model)
    if run.model.attention_within_documents:
        logger.warning(
            "%s cannot say model.attention_within_documents=true: transformers computes the same "
            "for one document at a time only",
            CONFIG,
        )
    parts = _find_parts(weights, family, run.model)
    vocabulary = _find_vocabulary(checkpoint, weights.manifest)
    config = family.config_of(run.model) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    with new_folder(output) as partial:
        _write_texts(partial, config, vocabulary, run.model.sequence_length)
        if card:
            (partial / "README.md").write_text(card, encoding="utf-8")
        shapes = {name: shape for each in parts.values() for name, shape in each.items()}
        shards = split_in_shards(outline(shapes, dtype), shard_limit_bytes)
        _write_weights(partial, shards, _converter(weights, family, run.model, parts))
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
    weights: CheckpointWeights, family: Family, model: Model
) -> dict[str, dict[str, Shape]]:
    """Maps our names to the parts to write and their shapes, after checking that all exist."""
    if model.n_layers > len(weights.manifest.tensors):
        raise CheckpointError(
            f"{weights.path} holds {len(weights.manifest.tensors)} tensors, too few for "
            f"model.n_layers={model.n_layers} of its run",
            OLDER_IS_KEPT,
        )
    shapes = parameter_shapes(model, weights.n_rows())
    for name, shape in shapes.items():
        weights.require(name, shape)
    return {name: family.their_shapes(name, shape, model) for name, shape in shapes.items()}


def _converter(
    weights: CheckpointWeights,
    family: Family,
    model: Model,
    parts: Mapping[str, Mapping[str, Shape]],
) -> Make:
    """Returns what reads a part; it keeps the parts of one of our parameters."""
    ours = {theirs: name for name, each in parts.items() for theirs in each}

    @lru_cache(maxsize=1)
    def convert(name: str) -> dict[str, Tensor]:
        return family.to_theirs(name, weights.read(name), model)

    return lambda theirs: convert(ours[theirs])[theirs]


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
