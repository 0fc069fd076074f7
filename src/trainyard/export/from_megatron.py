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
virtual stages, or single layers. Expert ranks add a last number, mp_rank_00_000_001, or, without
stages, mp_rank_00_001; beside their own experts they repeat the rest. Only weights are read;
optimizer states are sharded in too many ways, and start from zero.

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

Expert i of the n on expert rank e is our expert e n + i. Of each:

    blocks.0.mlp.experts.up.weight[i]    layers.0.mlp.experts.linear_fc1.weight1  (2F/t, D)
    blocks.0.mlp.experts.down.weight[i]  layers.0.mlp.experts.linear_fc2.weight1  (D, F/t)
      or                                 layers.0.mlp.experts.local_experts.1.linear_fc1.weight
"""

from __future__ import annotations

import itertools
import logging
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from trainyard.architecture import LayerSpec, Shape, find_layer, parameters_of, stage_layers
from trainyard.checkpoint.format import first_problem
from trainyard.config.run import Model
from trainyard.errors import CheckpointError, ConfigError
from trainyard.export.foreign import classify, flag_table, refusal, refuse_foreign
from trainyard.export.megatron_flags import Conversion, nest
from trainyard.export.run_folder import load_fitting, require_new, write_run_folder
from trainyard.export.torch_file import Contents, TensorInFile, open_torch_file
from trainyard.files import open_file

logger = logging.getLogger("trainyard")

_NAME_LIMIT_BYTES = 200
_WHOLE = "copy the whole folder of one checkpoint"
_RANKS = re.compile(
    r"mp_rank_(?P<rank>[0-9]{2,4})(?:_(?P<piece>[0-9]{3,4}))?(?:_(?P<expert>[0-9]{3,4}))?"
)
_LAYERS = re.compile(
    r"layer_(?P<piece>[0-9]{2,5})(?:-model_(?P<rank>[0-9]{2,4}))?-model_states\.pt"
)
_RANKS_OF_DEEPSPEED = re.compile(r"mp_rank_(?P<rank>[0-9]{2,4})_model_states\.pt")
_OTHER_MODEL = "its arguments and its weights must belong together"
_VERSIONS = (0, 1, 2, 3)
_NO_WEIGHTS = ("_extra_state", "rotary_pos_emb.inv_freq", ".local_tokens_per_expert")
"""State of fp8, what follows from `rotary_base`, and a count of the last step."""
_WRAPPERS = re.compile(
    r"((model[0-9]*|module|language_model|embedding|encoder|transformer|decoder)\.)*"
)
_LAYER = re.compile(r"layers\.([0-9]{1,6})\.(.+?)[._](weight|bias|expert_bias)([0-9]{0,6})")
_LOCAL_EXPERT = re.compile(r"\.local_experts\.([0-9]{1,6})\.(.+\.(?:weight|bias))$")
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
    """The files of a checkpoint: a row per piece of the model, with one file per rank.

    The tensor ranks of each expert rank are neighbours in a row.
    """

    folder: Path
    settings: Path
    """The file with the arguments."""
    files: list[list[Path]]
    of_layers: bool = False
    """Whether each file holds one layer, without its number in tensor names."""
    n_expert_ranks: int = 1

    @property
    def tensor(self) -> int:
        """Number of tensor ranks."""
        return len(self.files[0]) // self.n_expert_ranks

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
    grid = _tell_expert_ranks(grid, settings.arguments)
    fields, notes = read_arguments(settings.arguments, str(grid.settings))
    version = _version(settings, grid)
    sources = _name_tensors(grid, contents, fields)
    tensor = grid.tensor
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
        layer = find_layer(self.model, name)
        parameter = layer.parameters[name]
        whole = torch.zeros(parameter.shape)
        if parameter.dimension is None:
            return whole.copy_(self.sources[name][0].read())
        if parameter.of_experts:
            for number, expert in enumerate(whole):
                shards = self.sources[f"{name}.{number}"]
                self._fill(expert, shards, layer, parameter.dimension - 1)
        else:
            self._fill(whole, self.sources[name], layer, parameter.dimension)
        return whole

    def _fill(
        self, whole: Tensor, sources: list[TensorInFile], layer: LayerSpec, dimension: int
    ) -> None:
        """Copies the shards of all tensor ranks side by side along a dimension, in our order."""
        start = 0
        is_padded = layer.sharding == "vocabulary"
        limit = self.model.vocabulary_size if is_padded else whole.shape[dimension]
        for source in sources:
            part = source.read()
            if layer.fused[1]:
                part = our_row_order(part, layer, self.version, len(sources))
            part = part.reshape(*whole.shape[:dimension], -1, *whole.shape[dimension + 1 :])
            length = max(0, min(part.shape[dimension], limit - start))
            whole.narrow(dimension, min(start, limit), length).copy_(
                part.narrow(dimension, 0, length)
            )
            start += part.shape[dimension]

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
        rows, n_expert_ranks = _find_rows(folder, pattern)
        if rows:
            of_layers = pattern is _LAYERS
            settings = folder / "mp_rank_00_model_states.pt" if of_layers else rows[0][0]
            return _Grid(folder, settings, rows, of_layers, n_expert_ranks)
    refuse_foreign(folder)
    raise CheckpointError(
        f"{folder} has neither mp_rank_00/model_optim_rng.pt nor mp_rank_00_model_states.pt",
        "name the folder that Megatron-LM or Megatron-DeepSpeed saved to",
    )


def _tell_expert_ranks(grid: _Grid, arguments: Mapping[str, Any]) -> _Grid:
    """Takes files for those of expert ranks, if not of stages: one number may mean either."""
    n_ranks = arguments.get("expert_model_parallel_size") or 1
    if n_ranks == grid.n_expert_ranks:
        return grid
    found = len(grid.files) if grid.n_expert_ranks == 1 else grid.n_expert_ranks
    if n_ranks != found:
        raise CheckpointError(
            f"{grid.folder} has files of {found} expert ranks or stages; "
            f"args.expert_model_parallel_size is {n_ranks!r:.200}",
            _WHOLE,
        )
    return replace(grid, files=[[path for row in grid.files for path in row]], n_expert_ranks=found)


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


def _find_rows(folder: Path, pattern: re.Pattern[str]) -> tuple[list[list[Path]], int]:
    """Finds files, in rows by piece of the model, and counts expert ranks; none if there are none.

    The files of a row are in order of expert ranks and then of tensor ranks.
    """
    found: dict[tuple[int, int, int], Path] = {}
    for path in sorted(folder.iterdir()):
        match = pattern.fullmatch(path.name)
        if match is None or path.is_dir() is not (pattern is _RANKS):
            continue
        numbers = match.groupdict()
        piece, expert, rank = (int(numbers.get(key) or 0) for key in ("piece", "expert", "rank"))
        key = (piece, expert, rank)
        if key in found:
            raise CheckpointError(f"{path} and {found[key]} are from the same rank", _WHOLE)
        if pattern is _RANKS:
            usual, without_optimizer = path / "model_optim_rng.pt", path / "model_rng.pt"
            is_other = without_optimizer.exists() and not usual.exists()
            path = without_optimizer if is_other else usual
        found[key] = path
    pieces = sorted({piece for piece, _, _ in found})
    experts = range(1 + max((expert for _, expert, _ in found), default=-1))
    ranks = range(1 + max((rank for _, _, rank in found), default=-1))
    for key in itertools.product(pieces, experts, ranks):
        if key not in found:
            of_expert = f", expert rank {key[1]}" if len(experts) > 1 else ""
            raise CheckpointError(
                f"{folder} has no file of tensor rank {key[2]}, pipeline stage or layer {key[0]}"
                f"{of_expert}, but of {len(found)} others",
                _WHOLE,
            )
    if pattern is not _LAYERS and pieces != [*range(len(pieces))]:
        problem = f"{folder} lacks some of its {len(pieces)} pipeline stages"
        raise CheckpointError(problem, _WHOLE)
    rows = [[found[piece, e, rank] for e in experts for rank in ranks] for piece in pieces]
    return rows, len(experts)


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


def _name_tensors(
    grid: _Grid, contents: Mapping[Path, Contents], fields: Mapping[str, Any]
) -> _Sources:
    """Maps every tensor to our name, with layers numbered through the whole model."""
    sources: _Sources = {}
    first_block = 0
    n_layers, n_experts = fields["model.n_layers"], fields.get("model.n_experts", 0)
    for paths, ranks in _pieces(grid, contents, n_experts // grid.n_expert_ranks):
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
    grid: _Grid, contents: Mapping[Path, Contents], n_experts: int
) -> list[tuple[list[Path], list[_Piece]]]:
    """Lists the pieces of the model, in order: the file and the tensors of each tensor rank.

    `n_experts` are those of each expert rank.
    """
    pieces: dict[tuple[int, int], list[_Piece]] = {}
    for index, row in enumerate(grid.files):
        for place, path in enumerate(row):
            expert_rank, rank = divmod(place, grid.tensor)
            for name, tensor in contents[path].tensors.items():
                if name.endswith(_NO_WEIGHTS):
                    continue
                chunk = re.match(r"model([0-9]+)\.", name)
                key = (int(chunk[1]) if chunk else 0, index)
                piece = pieces.setdefault(key, [{} for _ in range(grid.tensor)])[rank]
                ours = our_name(grid.full_name(name), expert_rank * n_experts)
                if expert_rank and ours in piece and ".experts." not in ours:
                    continue  # the same on all expert ranks
                if ours is None or ours in piece:
                    which = "which our GPT lacks" if ours is None else f"a second one for {ours}"
                    raise CheckpointError(
                        f"{tensor.file} has the tensor {name!r}, {which}",
                        "its model differs, or the kind of its experts: TEGroupedMLP is read",
                    )
                piece[ours] = tensor
    return [(grid.files[key[1]], pieces[key]) for key in sorted(pieces)]


def _check_tensors(sources: _Sources, model: Model, n_rows: int, grid: _Grid) -> None:
    """Checks names and shapes against the model before writing."""
    tensor = grid.tensor
    d_expert = model.d_expert if model.n_experts else model.d_ff
    if model.d_ff % tensor or d_expert % tensor or not model.shards_heads(tensor):
        raise CheckpointError(
            f"{grid.folder} has {tensor} tensor ranks, which cannot split its heads and features "
            "equally",
            _OTHER_MODEL,
        )
    known = {"head.weight"} if model.tied_embeddings else set()
    for name, shape in _shapes(model, n_rows, tensor):
        known.add(name)
        if name not in sources:
            raise CheckpointError(f"{grid.folder} has no tensor for {name}", _OTHER_MODEL)
        for source in sources[name]:
            if source.tensor.shape != shape:
                raise CheckpointError(
                    f"the part of {name} in {source.file} has shape {list(source.tensor.shape)}; "
                    f"its arguments say {list(shape)}",
                    _OTHER_MODEL,
                )
    if unknown := sorted(sources.keys() - known):
        raise CheckpointError(f"{grid.folder} has an extra {unknown[0]}", _OTHER_MODEL)


def _shapes(model: Model, n_rows: int, tensor: int) -> Iterator[tuple[str, Shape]]:
    """Lists names and shapes of what one of some tensor ranks has, each expert by itself."""
    layers = stage_layers(model, n_rows, tensor=tensor)
    for name, parameter in parameters_of(layers).items():
        n_experts, *of_one = parameter.shape
        if not parameter.of_experts:
            yield name, parameter.shape
        for number in range(n_experts if parameter.of_experts else 0):
            yield f"{name}.{number}", (math.prod(of_one[:-1]), of_one[-1])


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
        loss = flags.get("moe-aux-loss-coeff", ["0"])[0]
        has_both = "moe-router-enable-expert-bias" in flags and loss not in ("0", "0.0")
        flags |= {"moe-aux-loss-coeff": ["0"]} if has_both else {}
        flags["attention-dropout"] = flags.setdefault("hidden-dropout", ["0.1"])
        conversion = Conversion(flags, {})
        fields = conversion.read_model()
    except ConfigError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {error.problem}",
            error.hint or _OTHER_MODEL,
        ) from None
    if "model.positions" not in fields:
        fields.pop("model.rotary_base", None)
    if has_both:
        conversion.notes.append(f"moe_aux_loss_coeff is {loss}; model.balance is the bias alone")
    dropout, of_attention = fields["model.dropout"], given.get("attention_dropout")
    if of_attention not in (None, dropout):
        conversion.notes.append(
            f"attention_dropout is {of_attention}; model.dropout is hidden_dropout, {dropout}"
        )
    return fields, conversion.notes


def _words(name: str, value: Any) -> list[str] | None:
    """Returns the words after the flag of a saved argument; None if the flag is absent."""
    flag = flag_of(name)
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
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
    heads, tensor = given.get("num_attention_heads"), given.get("tensor_model_parallel_size")
    bases = [given[name] for name in ("rotary_base", "rope_theta") if given.get(name)]
    has_other_gelu = not given.get("bias_gelu_fusion", True) and not given.get("openai_gelu")
    key_heads = given.get("num_key_value_heads")
    of_experts = given.get("expert_tensor_parallel_size")
    problems = {
        "group_query_attention without num_query_groups": given.get("group_query_attention")
        and not given.get("num_query_groups"),
        "bias_gelu_fusion and openai_gelu are off, so its GELU is exact; ours is the tanh "
        "approximation, as with either option": has_other_gelu and not given.get("swiglu"),
        f"rotary_base and rope_theta are {bases}": bases[1:] not in ([], bases[:1]),
        f"num_key_value_heads={key_heads} are not {heads}": key_heads not in (None, heads),
        f"expert_tensor_parallel_size={of_experts} is not {tensor}, as of tensor ranks": (
            given.get("num_experts") and of_experts not in (None, tensor)
        ),
    }
    for problem, is_found in problems.items():
        if is_found:
            raise ConfigError(f"args.{problem}", "such a model cannot be imported")


def build_model(fields: Mapping[str, Any], vocabulary_size: int, place: str) -> Model:
    """Builds the model section of a run, or refuses the values with a CheckpointError."""
    tables = nest({**fields, "model.vocabulary_size": vocabulary_size})
    try:
        return Model(**tables["model"])
    except ValidationError as error:
        raise CheckpointError(
            f"{place} is not a GPT that can be imported: {first_problem(error)}", _OTHER_MODEL
        ) from None


def vocabulary_size_of(arguments: Mapping[str, Any], n_rows: int, tensor: int) -> int | None:
    """Finds how many of all embedding rows, padded for `tensor` ranks, have tokens, if known."""
    size, tokenizer = arguments.get("vocab_size"), arguments.get("tokenizer_type")
    multiple = arguments.get("make_vocab_size_divisible_by", 128)
    if size is None and tokenizer == "GPT2BPETokenizer":
        size = _GPT2_VOCABULARY_SIZE
    if not isinstance(size, int) or not isinstance(multiple, int):
        return None
    size += tokenizer == "NullTokenizer"  # that tokenizer adds an end-of-document token
    return size if n_rows - multiple * tensor < size <= n_rows else None


def our_name(name: str, first_expert: int = 0) -> str | None:
    """Translates a parameter's name, `layers.0.mlp.dense_h_to_4h.bias` is `blocks.0.mlp.up.bias`.

    Keeps the layer number; that of an expert, counted from `first_expert`, comes last. None if our
    models lack the parameter.
    """
    tables = name_tables()
    name = name[_WRAPPERS.match(name).end() :]  # type: ignore[union-attr]  # it matches ""
    if match := _LAYER.fullmatch(_LOCAL_EXPERT.sub(r".\2\1", name)):
        number, part, kind, expert = match.groups()
        ours = {**tables["block"], **tables["block_of_core"]}.get(part)
        kind = "balance" if kind == "expert_bias" else kind
        last = f".{int(expert) + first_expert}" if expert else ""
        return f"blocks.{int(number)}.{ours}.{kind}{last}" if ours else None
    match = _OTHER.fullmatch(name)
    ours = tables["outside"].get(match[1]) if match else None
    return f"{ours}.{match[2]}" if match and ours else None


def our_row_order(part: Tensor, layer: LayerSpec, version: float, tensor: int) -> Tensor:
    """Reorders rows of a fused layer, whole in `layer`, as ours are, from one of `tensor` ranks."""
    n_groups, rows = layer.fused
    sizes = n_groups // tensor, rows[0]
    if version == 0 or layer.name.endswith(".up"):
        return part.reshape(len(rows), *sizes, -1).transpose(0, 1).reshape(part.shape)
    if version == 1:
        return part.reshape(*sizes, len(rows), -1).transpose(1, 2).reshape(part.shape)
    return part
