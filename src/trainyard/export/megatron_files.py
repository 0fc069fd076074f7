"""Finds and orders the files of a Megatron checkpoint, without opening pickles."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainyard.errors import CheckpointError
from trainyard.export.foreign import refuse_foreign
from trainyard.files import open_file

_NAME_LIMIT_BYTES = 200
_WHOLE = "copy the whole folder of one checkpoint"


@dataclass(frozen=True)
class Grid:
    """The files of a checkpoint: a row per piece of the model, with one file per rank."""

    folder: Path
    settings: Path
    """The file with the arguments."""
    files: list[list[Path]]
    of_layers: bool = False
    """Whether each file holds one layer, without its number in tensor names."""

    def full_name(self, name: str) -> str:
        """Returns a tensor's name with the place in the model that its file has."""
        if not self.of_layers:
            return name
        if name in ("weight", "bias"):
            return f"final_norm.{name}"
        if name in ("lm_head.weight", "final_linear.weight"):
            return "output_layer.weight"
        is_embedding = name.startswith(("word_embeddings.", "position_embeddings."))
        return name if is_embedding else f"layers.0.{name}"


def find_grid(path: Path) -> Grid:
    """Finds the checkpoint at `path`, or the newest in it.

    Raises:
        CheckpointError: there is none, it is incomplete, or has an unsupported layout.
    """
    folder = _newest(path)
    if not folder.is_dir():
        raise CheckpointError(f"no folder {folder}", "name the folder that Megatron saved to")
    for find in (_legacy, _layers, _deepspeed):
        grid = find(folder)
        if grid is not None:
            return grid
    refuse_foreign(folder)
    if any(folder.glob("zero_pp_rank_*_model_states.pt")):
        raise CheckpointError(
            f"{folder} was saved with ZeRO stage 3, which shards weights differently",
            "save it with zero_optimization.stage3_gather_16bit_weights_on_model_save, or stage 1",
        )
    raise CheckpointError(
        f"{folder} has neither mp_rank_00/model_optim_rng.pt nor mp_rank_00_model_states.pt",
        "name the folder that Megatron-LM or Megatron-DeepSpeed saved to",
    )


def _newest(path: Path) -> Path:
    for tracker in ("latest_checkpointed_iteration.txt", "latest"):
        try:
            with open_file(path / tracker) as file:
                text = file.read(_NAME_LIMIT_BYTES).decode("utf-8", "replace").strip()
        except OSError:
            continue
        name = f"iter_{int(text):07d}" if re.fullmatch(r"[0-9]{1,12}", text) else text
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise CheckpointError(
                f"{path / tracker} reads {text!r}, which is neither an iteration nor a folder",
                "name the folder of the checkpoint itself",
            )
        if (path / name).is_dir() or tracker == "latest":
            return path / name
        if not (path / "latest").exists():  # Megatron-DeepSpeed writes both
            return path / name
    return path


def _legacy(folder: Path) -> Grid | None:
    found: dict[tuple[int, int], Path] = {}
    for path in folder.glob("mp_rank_*"):
        match = re.fullmatch(r"mp_rank_([0-9]{2,4})(?:_([0-9]{3,4}))?(_[0-9]{3,4})?", path.name)
        if match is None or not path.is_dir():
            continue
        if match[3]:
            raise CheckpointError(
                f"{path} is from an expert rank; our models have no experts", "import a dense GPT"
            )
        names = ("model_optim_rng.pt", "model_rng.pt")
        file = next((path / name for name in names if (path / name).exists()), path / names[0])
        place = (int(match[2] or 0), int(match[1]))
        if place in found:
            raise CheckpointError(
                f"{path} and {found[place].parent} are from the same rank", _WHOLE
            )
        found[place] = file
    if not found:
        return None
    files = _in_order(folder, found)
    if sorted({piece for piece, _ in found}) != list(range(len(files))):
        raise CheckpointError(f"{folder} lacks some of its {len(files)} pipeline stages", _WHOLE)
    return Grid(folder, files[0][0], files)


def _layers(folder: Path) -> Grid | None:
    found: dict[tuple[int, int], Path] = {}
    for path in folder.glob("layer_*-model_states.pt"):
        match = re.fullmatch(
            r"layer_([0-9]{2,5})(?:-model_([0-9]{2,4}))?-model_states\.pt", path.name
        )
        if match:
            found[int(match[1]), int(match[2] or 0)] = path
    if not found:
        return None
    settings = folder / "mp_rank_00_model_states.pt"
    return Grid(folder, settings, _in_order(folder, found), of_layers=True)


def _deepspeed(folder: Path) -> Grid | None:
    found = {
        (0, int(match[1])): path
        for path in folder.glob("mp_rank_*_model_states.pt")
        if (match := re.fullmatch(r"mp_rank_([0-9]{2,4})_model_states\.pt", path.name))
    }
    if not found:
        return None
    files = _in_order(folder, found)
    return Grid(folder, files[0][0], files)


def _in_order(folder: Path, found: dict[tuple[int, int], Path]) -> list[list[Path]]:
    """Arranges files in rows by piece and tensor rank.

    Raises:
        CheckpointError: one is missing.
    """
    pieces = sorted({piece for piece, _ in found})
    n_ranks = max(rank for _, rank in found) + 1
    for piece in pieces:
        for rank in range(n_ranks):
            if (piece, rank) not in found:
                raise CheckpointError(
                    f"{folder} has no file of tensor rank {rank}, "
                    f"{'pipeline stage or layer'} {piece}, but of {len(found)} others",
                    _WHOLE,
                )
    return [[found[piece, rank] for rank in range(n_ranks)] for piece in pieces]
