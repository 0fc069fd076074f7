"""Converts a checkpoint of Megatron-LM or Megatron-DeepSpeed to a run folder.

    Megatron-LM                                       Megatron-DeepSpeed
    latest_checkpointed_iteration.txt   "1000"        latest   "global_step1000"
    iter_0001000/                                     global_step1000/
      mp_rank_00/model_optim_rng.pt                     mp_rank_00_model_states.pt
      mp_rank_01/model_optim_rng.pt                     mp_rank_01_model_states.pt
    with pipeline stages:                             with pipeline stages:
      mp_rank_00_000/model_optim_rng.pt                 layer_01-model_00-model_states.pt
      mp_rank_00_001/model_optim_rng.pt                 layer_02-model_00-model_states.pt ...

Files form a grid of tensor ranks and consecutive pieces of the model: pipeline stages, chunks of
virtual stages, or single layers. Only weights are read; optimizer states are sharded in too many
ways, and start from zero.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trainyard.architecture import find_layer, shapes_of, stage_layers
from trainyard.config.run import Model
from trainyard.errors import CheckpointError
from trainyard.export.foreign import refuse_foreign
from trainyard.export.megatron import (
    build_model,
    our_name,
    our_row_order,
    read_arguments,
    vocabulary_size_of,
)
from trainyard.export.run_folder import load_fitting, require_new, write_run_folder
from trainyard.export.torch_file import Contents, TensorInFile, open_torch_file
from trainyard.files import open_file

logger = logging.getLogger("trainyard")

_NAME_LIMIT_BYTES = 200
_WHOLE = "copy the whole folder of one checkpoint"
_RANKS = re.compile(
    r"mp_rank_(?P<rank>[0-9]{2,4})(?:_(?P<piece>[0-9]{3,4}))?(?P<expert>_[0-9]{3,4})?"
)
_LAYERS = re.compile(
    r"layer_(?P<piece>[0-9]{2,5})(?:-model_(?P<rank>[0-9]{2,4}))?-model_states\.pt"
)
_RANKS_OF_DEEPSPEED = re.compile(r"mp_rank_(?P<rank>[0-9]{2,4})_model_states\.pt")
_OTHER_MODEL = "its arguments and its weights must belong together"
_VERSIONS = (0, 1, 2, 3)
_NO_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq")
"""Of fp8, and what follows from `rotary_base`."""


@dataclass(frozen=True)
class _Grid:
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


_Sources = dict[str, list[TensorInFile]]
"""By our names: the shards of all tensor ranks."""


def import_megatron(folder: Path, output: Path, tokenizer: str = "") -> Path:
    """Writes `output` as a run folder with the weights as its checkpoint of step 0; returns that.

    The files are pickles; no code in them is run, and no class they name is imported.

    Args:
        folder: the output of Megatron-LM or Megatron-DeepSpeed, or one checkpoint in it.
        output: the run folder to create, atomically.
        tokenizer: as for `load_vocabulary`; empty: none.

    Raises:
        CheckpointError: there is no such checkpoint, it is incomplete, damaged or hostile, or its
            model computes something that ours does not; or `output` exists.
        DataError: the tokenizer is missing, is not a byte-level BPE, or does not fit the model.
        MachineError: `output` cannot be written.
    """
    require_new(output)
    grid = _find_grid(folder)
    settings, contents = _describe(grid)
    fields, notes = read_arguments(settings.arguments, str(grid.settings))
    version = _version(settings, grid)
    sources = _name_tensors(grid, contents, fields["model.n_layers"])
    tensor = len(grid.files[0])
    n_rows_theirs = tensor * next(iter(sources["embedding.weight"][0].tensor.shape), 0)
    vocabulary_size = vocabulary_size_of(settings.arguments, n_rows_theirs, tensor)
    if vocabulary_size is None:
        vocabulary_size = n_rows_theirs
        logger.warning(
            "%s has no vocabulary size: all %d rows of its embedding, padding included, "
            "count as tokens",
            grid.settings,
            n_rows_theirs,
        )
    model = build_model(fields, vocabulary_size, str(grid.settings))
    for note in notes:
        logger.warning("%s: %s", grid.settings, note)
    if version < 2 and "model.n_key_value_heads" in fields:
        raise CheckpointError(
            f"{grid.settings} has checkpoint_version {version} and args.group_query_attention",
            "no Megatron wrote query groups before version 2.0",
        )
    _check_tensors(sources, model, n_rows_theirs, grid)
    weights = _Weights(sources, model, version)
    if model.tied_embeddings and "head.weight" in sources:
        weights.require_equal_head()
    description = f"Imported from {grid.folder.name} of {grid.folder.parent.name}."
    vocabulary = load_fitting(tokenizer, model) if tokenizer else None
    return write_run_folder(output, model, description, vocabulary, weights.make)


@dataclass(frozen=True)
class _Weights:
    sources: _Sources
    model: Model
    version: float

    def make(self, name: str) -> Tensor:
        """Assembles a parameter from the shards of all tensor ranks, in fp32."""
        sources = self.sources[name]
        layer = find_layer(self.model, name)
        parameter = layer.parameters[name]
        whole, dimension = torch.zeros(parameter.shape), parameter.dimension
        if dimension is None:
            return whole.copy_(sources[0].read())
        start = 0
        end = self.model.vocabulary_size if layer.sharding == "vocabulary" else len(whole)
        limit = end if dimension == 0 else whole.shape[dimension]
        for source in sources:
            part = source.read()
            if layer.fused[1]:
                part = our_row_order(part, layer, self.version, len(sources))
            length = max(0, min(part.shape[dimension], limit - start))
            whole.narrow(dimension, min(start, limit), length).copy_(
                part.narrow(dimension, 0, length)
            )
            start += part.shape[dimension]
        return whole

    def require_equal_head(self) -> None:
        """Checks that the last stage's tied embedding equals the first's."""
        pairs = zip(self.sources["embedding.weight"], self.sources["head.weight"], strict=True)
        for first, last in pairs:
            if not torch.equal(first.read(), last.read()):
                raise CheckpointError(
                    f"the output layer in {last.file} is not the embedding in {first.file}, "
                    "but args.untie_embeddings_and_output_weights is off",
                    _OTHER_MODEL,
                )


def _find_grid(path: Path) -> _Grid:
    """Finds the checkpoint at `path`, or the newest in it, without opening its files."""
    folder = _newest(path)
    if not folder.is_dir():
        raise CheckpointError(f"no folder {folder}", "name the folder that Megatron saved to")
    for pattern in (_RANKS, _LAYERS, _RANKS_OF_DEEPSPEED):
        if files := _find_files(folder, pattern):
            rows = _in_order(folder, files)
            if pattern is not _LAYERS and {piece for piece, _ in files} != {*range(len(rows))}:
                problem = f"{folder} lacks some of its {len(rows)} pipeline stages"
                raise CheckpointError(problem, _WHOLE)
            settings = folder / "mp_rank_00_model_states.pt" if pattern is _LAYERS else rows[0][0]
            return _Grid(folder, settings, rows, of_layers=pattern is _LAYERS)
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


def _find_files(folder: Path, pattern: re.Pattern[str]) -> dict[tuple[int, int], Path]:
    """Finds files by piece and tensor rank."""
    found: dict[tuple[int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or path.is_dir() is not (pattern is _RANKS):
            continue
        numbers = match.groupdict()
        if numbers.get("expert"):
            raise CheckpointError(
                f"{path} is from an expert rank; our models have no experts", "import a dense GPT"
            )
        place = (int(numbers.get("piece") or 0), int(numbers["rank"] or 0))
        if place in found:
            raise CheckpointError(f"{path} and {found[place]} are from the same rank", _WHOLE)
        found[place] = path
    if pattern is _RANKS:
        for place, path in found.items():
            usual, without_optimizer = path / "model_optim_rng.pt", path / "model_rng.pt"
            is_other = without_optimizer.exists() and not usual.exists()
            found[place] = without_optimizer if is_other else usual
    return found


def _in_order(folder: Path, found: dict[tuple[int, int], Path]) -> list[list[Path]]:
    """Arranges files in rows by piece and tensor rank."""
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


def _describe(grid: _Grid) -> tuple[Contents, dict[Path, Contents]]:
    """Describes the settings file and all weight files."""
    paths = list(dict.fromkeys([grid.settings, *(path for row in grid.files for path in row)]))
    contents = {path: open_torch_file(path) for path in paths}
    iterations = {
        str(found.iteration): path
        for path, found in contents.items()
        if found.iteration is not None
    }
    if len(iterations) > 1:
        places = ", ".join(f"{path} of {number}" for number, path in iterations.items())
        raise CheckpointError(f"files are from different iterations: {places}", _WHOLE)
    return contents[grid.settings], contents


def _version(settings: Contents, grid: _Grid) -> float:
    version = settings.version
    if version not in _VERSIONS:
        raise CheckpointError(
            f"{grid.settings} has checkpoint_version {version!r}; "
            f"known are {', '.join(map(str, _VERSIONS))}",
            "the order of its queries, keys and values is not known",
        )
    return float(version)


def _name_tensors(grid: _Grid, contents: Mapping[Path, Contents], n_layers: int) -> _Sources:
    """Maps every tensor to our name, with layers numbered through the whole model."""
    sources: _Sources = {}
    first_block = 0
    for paths, ranks in _pieces(grid, contents):
        names = [_our_names(rank, grid) for rank in ranks]
        if any(other.keys() != names[0].keys() for other in names):
            raise CheckpointError(f"{paths[0]} and {paths[-1]} hold different tensors", _WHOLE)
        n_blocks = 0
        for name in names[0]:
            number = re.match(r"blocks\.([0-9]+)\.", name)
            if number:
                n_blocks = max(n_blocks, int(number[1]) + 1)
                ours = f"blocks.{int(number[1]) + first_block}.{name[number.end() :]}"
            else:  # the copy of a tied embedding on the last stage
                ours = "head.weight" if name == "embedding.weight" and name in sources else name
            if ours in sources and ours != "positions.weight":
                raise CheckpointError(f"{paths[0]} repeats {name}", _OTHER_MODEL)
            sources.setdefault(ours, [of_rank[name] for of_rank in names])
        first_block += n_blocks
    if first_block != n_layers:
        problem = f"{grid.folder} holds {first_block} layers; args.num_layers is {n_layers}"
        raise CheckpointError(problem, _WHOLE)
    if "embedding.weight" not in sources:
        raise CheckpointError(f"{grid.folder} has no word embeddings", _OTHER_MODEL)
    return sources


_Piece = dict[str, TensorInFile]


def _pieces(
    grid: _Grid, contents: Mapping[Path, Contents]
) -> list[tuple[list[Path], list[_Piece]]]:
    """Lists by piece of the model, in order, the file and the tensors of each tensor rank."""
    pieces: dict[tuple[int, int], list[_Piece]] = {}
    for index, row in enumerate(grid.files):
        for rank, path in enumerate(row):
            for name, tensor in contents[path].tensors.items():
                if not name.endswith(_NO_WEIGHTS):
                    chunk = re.match(r"model([0-9]+)\.", name)
                    place = (int(chunk[1]) if chunk else 0, index)
                    pieces.setdefault(place, [{} for _ in row])[rank][name] = tensor
    return [(grid.files[place[1]], pieces[place]) for place in sorted(pieces)]


def _our_names(piece: _Piece, grid: _Grid) -> _Piece:
    found: _Piece = {}
    for name, tensor in piece.items():
        ours = our_name(grid.full_name(name))
        if ours is None or ours in found:
            which = "which our GPT lacks" if ours is None else f"a second one for {ours}"
            raise CheckpointError(
                f"{tensor.file} has the tensor {name!r}, {which}",
                "its model computes something that ours does not",
            )
        found[ours] = tensor
    return found


def _check_tensors(sources: _Sources, model: Model, n_rows: int, grid: _Grid) -> None:
    """Checks names and shapes against the model before writing."""
    tensor = len(grid.files[0])
    if model.most_tensor_ranks % tensor:
        raise CheckpointError(
            f"{grid.folder} has {tensor} tensor ranks, which do not divide "
            f"{model.most_tensor_ranks}, the most that can split its heads and features",
            _OTHER_MODEL,
        )
    wanted = shapes_of(stage_layers(model, n_rows, tensor=tensor))
    for name, shape in wanted.items():
        if name not in sources:
            raise CheckpointError(f"{grid.folder} has no tensor for {name}", _OTHER_MODEL)
        for source in sources[name]:
            if source.tensor.shape != shape:
                raise CheckpointError(
                    f"the part of {name} in {source.file} has shape {list(source.tensor.shape)}; "
                    f"its arguments say {list(shape)}",
                    _OTHER_MODEL,
                )
    copies = {"head.weight"} if model.tied_embeddings else set()
    unknown = sorted(sources.keys() - wanted.keys() - copies)
    if unknown:
        raise CheckpointError(f"{grid.folder} has an extra {unknown[0]}", _OTHER_MODEL)
