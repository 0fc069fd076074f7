"""Recognizes what `trainyard import` is given, and names what it cannot read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from trainyard.errors import CheckpointError

Source = Literal["huggingface", "megatron", "megatron-args"]
_SCRIPT = r"^\S+\.(sh|bash|sbatch|slurm|pbs)(\s|$)|\s--\w"
_MEGATRON = ("latest_checkpointed_iteration.txt", "latest", "mp_rank_*", "layer_*-model_states.pt")
_FOREIGN = {
    "*.gguf": (
        "a GGUF of llama.cpp",
        "transformers converts it: AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME, "
        "quantization_config=GgufConfig(dequantize=True)).save_pretrained(NEW_FOLDER)",
    ),
    "lit_model.pth": (
        "a checkpoint of LitGPT",
        "litgpt convert_from_litgpt writes a state_dict: load it into a model of transformers, and "
        "save_pretrained",
    ),
    "consolidated*": (
        "a checkpoint in the format of Meta or Mistral",
        "take the same model's files for transformers: config.json and model.safetensors",
    ),
    "checkpoint_metadata.json": (
        "a checkpoint of nanotron",
        "its examples/llama/convert_nanotron_to_hf.py writes a folder that can be imported",
    ),
    "*.nemo": (
        "a checkpoint of NeMo 1",
        "its scripts/checkpoint_converters write folders that can be imported",
    ),
    "context/model.yaml": (
        "a checkpoint of NeMo 2",
        'nemo.collections.llm.export_ckpt(target="hf") writes a folder that can be imported',
    ),
    "metadata.json": (
        "a torch_dist checkpoint of Megatron",
        "load it with Megatron-LM and save it with --ckpt-format torch",
    ),
    "*.distcp": (
        "a distributed checkpoint of torch, as of torchtitan",
        "torchtitan's scripts/checkpoint_conversion/convert_to_hf.py writes a folder that can be "
        "imported",
    ),
    "ckpt*.pt": (
        "a checkpoint of nanoGPT",
        "its MLP computes the exact GELU and ours the tanh form, so that it cannot be converted",
    ),
}
"""By a file that only this format has: what it is, and the way to convert it."""


def refuse_foreign(path: Path) -> None:
    """Names the format of other software that a file, or a folder with such a file, has.

    Raises:
        CheckpointError: it has one of those that are known.
    """
    for pattern, (what, hint) in _FOREIGN.items():
        if path.match(pattern) or next(path.glob(pattern), None):
            raise CheckpointError(f"{path} is {what}, which cannot be imported", hint)


def recognize(source: str) -> Source:
    """Returns the format of a folder, a script or a command line.

    Raises:
        CheckpointError: it is none of those that can be imported.
    """
    if re.search(_SCRIPT, source):
        return "megatron-args"
    path = Path(source)
    if (path / "config.json").exists():
        return "huggingface"
    if any(next(path.glob(pattern), None) for pattern in _MEGATRON):
        return "megatron"
    refuse_foreign(path)
    if path.exists():
        raise CheckpointError(
            f"{path} is neither a folder with config.json nor a checkpoint of Megatron",
            "name a folder that save_pretrained wrote, or that Megatron saved to",
        )
    name = source if re.fullmatch(r"[\w.-]+/[\w.-]+", source) else "OWNER/NAME"
    raise CheckpointError(
        f"no folder {source}", f"for a model of the Hub: hf download {name} --local-dir FOLDER"
    )
