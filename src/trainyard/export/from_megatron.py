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

Names of tensors, their parts on one of t tensor ranks, and ours:

    ours                         theirs, on one of t tensor ranks                       cut
    embedding.weight   (V, D)    embedding.word_embeddings.weight            (V'/t, D)  rows
    positions.weight   (T, D)    embedding.position_embeddings.weight        (T, D)     no
    blocks.0.attention.qkv.weight   layers.0.self_attention.query_key_value  (3D/t, D)  rows
    blocks.0.attention.query_norm.weight   layers.0.self_attention.q_layernorm  (K)     no
    blocks.0.attention.out.weight   layers.0.self_attention.dense            (D, D/t)   columns
    blocks.0.mlp.up.weight          layers.0.mlp.dense_h_to_4h               (F/t, D)   rows
    blocks.0.mlp.down.weight        layers.0.mlp.dense_4h_to_h               (D, F/t)   columns
    head.weight        (V, D)    output_layer.weight, when untied            (V'/t, D)  rows

V' is the padded vocabulary. Layers are numbered from 0 on each pipeline stage. Names changed over
the years, as did the order of rows of queries, keys and values on a tensor rank, with H/t heads of
K features each:

    checkpoint_version 0      (3, H/t, K)
                       1.0    (H/t, K, 3)
                       2.0 on (H/t, 3, K), as ours; of groups (S/t, H/S + 2, K), as ours

SwiGLU has (2, F/t) rows on a tensor rank, all its gates and then its values; ours are (F/t, 2).
"""

from __future__ import annotations

import itertools
import logging
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trainyard.architecture import LayerSpec, find_layer, shapes_of, stage_layers
from trainyard.checkpoint.format import first_problem
from trainyard.config.run import Model
from trainyard.errors import CheckpointError, ConfigError
from trainyard.export.foreign import refuse_foreign
from trainyard.export.megatron_flags import Conversion, classify, flag_table, nest, refusal
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
"""State of fp8, and what follows from `rotary_base`."""
_WRAPPERS = re.compile(
    r"((model[0-9]*|module|language_model|embedding|encoder|transformer|decoder)\.)*"
)
_LAYER = re.compile(r"layers\.([0-9]{1,6})\.(.+)[._](weight|bias)")
_OTHER = re.compile(r"([a-z_]+)\.(weight|bias)")
_GPT2_VOCABULARY_SIZE = 50257

_ENUMERATION = re.compile(r"PositionEmbeddingType(\(2\)|\.absolute)")


@cache
def name_tables() -> dict[str, Any]:
    """Reads the names of tensors and of saved arguments."""
    path = resources.files("trainyard.config") / "megatron_names.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


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


_Piece = dict[str, TensorInFile]
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
        notes = [
            f"it has no vocabulary size: all {n_rows_theirs} rows of its embedding, padding "
            "included, count as tokens",
            *notes,
        ]
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
        if rows := _find_rows(folder, pattern):
            settings = folder / "mp_rank_00_model_states.pt" if pattern is _LAYERS else rows[0][0]
            return _Grid(folder, settings, rows, of_layers=pattern is _LAYERS)
    refuse_foreign(folder)
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


def _find_rows(folder: Path, pattern: re.Pattern[str]) -> list[list[Path]]:
    """Finds files, in rows by piece of the model and tensor rank; none if there are none."""
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
        key = (int(numbers.get("piece") or 0), int(numbers["rank"] or 0))
        if key in found:
            raise CheckpointError(f"{path} and {found[key]} are from the same rank", _WHOLE)
        if pattern is _RANKS:
            usual, without_optimizer = path / "model_optim_rng.pt", path / "model_rng.pt"
            is_other = without_optimizer.exists() and not usual.exists()
            path = without_optimizer if is_other else usual
        found[key] = path
    pieces = sorted({piece for piece, _ in found})
    ranks = range(1 + max((rank for _, rank in found), default=-1))
    for piece, rank in itertools.product(pieces, ranks):
        if (piece, rank) not in found:
            raise CheckpointError(
                f"{folder} has no file of tensor rank {rank}, pipeline stage or layer {piece}, "
                f"but of {len(found)} others",
                _WHOLE,
            )
    if pattern is not _LAYERS and pieces != [*range(len(pieces))]:
        problem = f"{folder} lacks some of its {len(pieces)} pipeline stages"
        raise CheckpointError(problem, _WHOLE)
    return [[found[piece, rank] for rank in ranks] for piece in pieces]


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
        if any(other.keys() != ranks[0].keys() for other in ranks):
            raise CheckpointError(f"{paths[0]} and {paths[-1]} hold different tensors", _WHOLE)
        n_blocks = 0
        for name in ranks[0]:
            ours = name
            if number := re.match(r"blocks\.([0-9]+)\.", name):
                n_blocks = max(n_blocks, int(number[1]) + 1)
                ours = f"blocks.{int(number[1]) + first_block}.{name[number.end() :]}"
            elif name == "embedding.weight" and name in sources:
                ours = "head.weight"  # the copy of a tied embedding on the last stage
            if ours in sources and ours != "positions.weight":
                raise CheckpointError(f"{paths[0]} repeats {name}", _OTHER_MODEL)
            sources.setdefault(ours, [piece[name] for piece in ranks])
        first_block += n_blocks
    if first_block != n_layers:
        problem = f"{grid.folder} holds {first_block} layers; args.num_layers is {n_layers}"
        raise CheckpointError(problem, _WHOLE)
    if "embedding.weight" not in sources:
        raise CheckpointError(f"{grid.folder} has no word embeddings", _OTHER_MODEL)
    return sources


def _pieces(
    grid: _Grid, contents: Mapping[Path, Contents]
) -> list[tuple[list[Path], list[_Piece]]]:
    """Lists the pieces of the model, in order: the file and the tensors of each tensor rank."""
    pieces: dict[tuple[int, int], list[_Piece]] = {}
    for index, row in enumerate(grid.files):
        for rank, path in enumerate(row):
            for name, tensor in contents[path].tensors.items():
                if name.endswith(_NO_WEIGHTS):
                    continue
                chunk = re.match(r"model([0-9]+)\.", name)
                key = (int(chunk[1]) if chunk else 0, index)
                piece = pieces.setdefault(key, [{} for _ in row])[rank]
                ours = our_name(grid.full_name(name))
                if ours is None or ours in piece:
                    which = "which our GPT lacks" if ours is None else f"a second one for {ours}"
                    raise CheckpointError(
                        f"{tensor.file} has the tensor {name!r}, {which}",
                        "its model computes something that ours does not",
                    )
                piece[ours] = tensor
    return [(grid.files[key[1]], pieces[key]) for key in sorted(pieces)]


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


def flag_of(argument: str) -> str:
    """Returns the flag as which a saved argument is read; empty if it is not read."""
    tables = name_tables()
    if argument in tables["flags"]:
        return str(tables["flags"][argument])
    flag = argument.replace("_", "-")
    kind, target = classify(flag)
    is_read = kind in ("field", "rule") and target.startswith("model.")
    return flag if is_read and argument not in tables["not_read"] else ""


def read_arguments(given: Mapping[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """Reads `args` of a checkpoint as fields of the model, and notes for the user.

    Raises:
        CheckpointError: they do not describe a model, or one that ours cannot match.
    """
    try:
        flags = {
            flag_of(name): words
            for name, value in given.items()
            if (words := _words(name, value)) is not None
        }
        _check_together(given)
        flags["attention-dropout"] = flags.setdefault("hidden-dropout", ["0.1"])
        conversion = Conversion(flags, {})
        fields = conversion.read_model()
    except ConfigError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {error.problem}", error.hint
        ) from None
    if "model.positions" not in fields:
        fields.pop("model.rotary_base", None)
    dropout, of_attention = fields["model.dropout"], given.get("attention_dropout")
    if of_attention not in (None, dropout):
        conversion.notes.append(
            f"attention_dropout is {of_attention}; model.dropout is hidden_dropout, {dropout}"
        )
    return fields, conversion.notes


def _words(name: str, value: Any) -> list[str] | None:
    """Returns the words after the flag of a saved argument; None if the flag is absent."""
    flag = flag_of(name)
    reason = "" if flag else refusal(name, value)
    text = _ENUMERATION.sub("absolute", str(value))
    accepted = flag_table()["value"].get(flag)
    is_switch = isinstance(flag_table()["set"].get(flag), bool | str)
    is_switch |= name in name_tables()["switches"]
    if is_switch and value not in (None, False, True):
        reason = "it is on or off"
    elif accepted and value is not None and text not in accepted:
        reason = f"supported: {', '.join(accepted)}"
    if reason:
        problem = f"args.{name}: {reason} (got {value!r:.200})"
        raise ConfigError(problem, "docs/megatron-flags.md lists all arguments")
    if is_switch:
        value = value == 0 if name.startswith("add_") else bool(value)
    return None if value is None or value is False else [] if value is True else [text]


def _check_together(given: Mapping[str, Any]) -> None:
    """Checks arguments that depend on others, beside those of `Conversion`."""
    experts, heads = given.get("num_experts"), given.get("num_attention_heads")
    bases = [given[name] for name in ("rotary_base", "rope_theta") if given.get(name)]
    has_other_gelu = not given.get("bias_gelu_fusion", True) and not given.get("openai_gelu")
    counts = experts if isinstance(experts, list) else [experts]
    key_heads = given.get("num_key_value_heads")
    problems = {
        "group_query_attention without num_query_groups": given.get("group_query_attention")
        and not given.get("num_query_groups"),
        "bias_gelu_fusion and openai_gelu are off, so its GELU is exact; ours is the tanh "
        "approximation, as with either option": has_other_gelu and not given.get("swiglu"),
        f"rotary_base and rope_theta are {bases}": bases[1:] not in ([], bases[:1]),
        f"num_key_value_heads={key_heads} are not {heads}": key_heads not in (None, heads),
        f"num_experts={experts}; our models have no experts": any(
            count not in (None, 0, 1) for count in counts
        ),
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ConfigError(f"args.{problem}", "such a model cannot be imported")


def build_model(fields: Mapping[str, Any], vocabulary_size: int, place: str) -> Model:
    """Builds the model section of a run.

    Raises:
        CheckpointError: the values are invalid.
    """
    tables = nest({**fields, "model.vocabulary_size": vocabulary_size})
    try:
        return Model(**tables["model"])
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {first_problem(error)}",
            "its arguments and its weights must belong together",
        ) from None


def vocabulary_size_of(arguments: Mapping[str, Any], n_rows: int, tensor: int) -> int | None:
    """Finds the number of embedding rows with tokens; None if unknown.

    Args:
        arguments: theirs.
        n_rows: of the whole embedding.
        tensor: tensor ranks that it was padded for.
    """
    size, tokenizer = arguments.get("vocab_size"), arguments.get("tokenizer_type")
    multiple = arguments.get("make_vocab_size_divisible_by", 128)
    if size is None and tokenizer == "GPT2BPETokenizer":
        size = _GPT2_VOCABULARY_SIZE
    if not isinstance(size, int) or not isinstance(multiple, int):
        return None
    size += tokenizer == "NullTokenizer"  # that tokenizer adds an end-of-document token
    return size if n_rows - multiple * tensor < size <= n_rows else None


def our_name(name: str) -> str | None:
    """Translates a parameter's name, `layers.0.mlp.dense_h_to_4h.bias` is `blocks.0.mlp.up.bias`.

    Keeps the layer number. None if our models lack the parameter.
    """
    tables = name_tables()
    name = name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # it matches ""
    if match := _LAYER.fullmatch(name):
        number, part, kind = match.groups()
        ours = {**tables["block"], **tables["block_of_core"]}.get(part)
        return f"blocks.{int(number)}.{ours}.{kind}" if ours else None
    match = _OTHER.fullmatch(name)
    ours = tables["outside"].get(match[1]) if match else None
    return f"{ours}.{match[2]}" if match and ours else None


def our_row_order(part: Tensor, layer: LayerSpec, version: float, tensor: int) -> Tensor:
    """Reorders the rows of a fused layer, from one of some tensor ranks, as ours are.

    Args:
        part: weight or bias.
        layer: ours, whole.
        version: the checkpoint_version.
        tensor: ranks.
    """
    n_groups, rows = layer.fused
    sizes = n_groups // tensor, rows[0]
    if version == 0 or layer.name.endswith("mlp.up"):
        return part.reshape(len(rows), *sizes, -1).transpose(0, 1).reshape(part.shape)
    if version == 1:
        return part.reshape(*sizes, len(rows), -1).transpose(1, 2).reshape(part.shape)
    return part
