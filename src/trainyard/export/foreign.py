"""Recognizes what `trainyard import` is given, and names what it cannot read."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Literal

from trainyard.errors import CheckpointError

Source = Literal["huggingface", "megatron", "megatron-args"]
_SCRIPT = r"^\S+\.(sh|bash|sbatch|slurm|pbs)(\s|$)|\s--\w"
_MEGATRON = ("latest_checkpointed_iteration.txt", "latest", "mp_rank_*", "layer_*-model_states.pt")


def refuse_foreign(path: Path) -> None:
    """Names the format of other software that a file, or a folder with such a file, has.

    Raises:
        CheckpointError: it has one of those that are known.
    """
    table = resources.files("trainyard.config") / "foreign_formats.toml"
    for pattern, software in tomllib.loads(table.read_text(encoding="utf-8")).items():
        if path.match(pattern) or next(path.glob(pattern), None):
            raise CheckpointError(
                f"{path} is {software['what']}, which cannot be imported", software["hint"]
            )


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
