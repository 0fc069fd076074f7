"""Counts a model's parameters from its shape, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trainyard.config.run import Model

Shape = tuple[int, ...]


def padded_vocabulary_size(model: Model, tensor: int = 1) -> int:
    """Rounds the vocabulary up so that `tensor` ranks get equal, aligned shards.

    50257 becomes 50304, 50432, 50688 and 51200 for 1, 2, 4 and 8 ranks, as in Megatron-LM.
    """
    multiple = model.vocabulary_multiple * tensor
    return math.ceil(model.vocabulary_size / multiple) * multiple


def parameter_shapes(model: Model, padded_vocabulary_size: int) -> dict[str, Shape]:
    """Maps every parameter's global name, as in `GPT.state_dict()`, to its shape."""
    return stage_shapes(model, padded_vocabulary_size, (0, model.n_layers))


def stage_shapes(
    model: Model, padded_vocabulary_size: int, blocks: tuple[int, int], tensor: int = 1
) -> dict[str, Shape]:
    """Maps the parameters of a pipeline stage to their shapes on one of its tensor ranks.

    Args:
        model: the shape.
        padded_vocabulary_size: rows of the embedding.
        blocks: the first of the stage and one past its last.
        tensor: ranks that shard each layer.
    """
    before, after = _ends(model, padded_vocabulary_size, blocks, tensor)
    block = block_shapes(model, tensor).items()
    inside = {f"blocks.{index}.{name}": shape for index in range(*blocks) for name, shape in block}
    return before | inside | after


def rest_shapes(
    model: Model, padded_vocabulary_size: int, blocks: tuple[int, int], tensor: int = 1
) -> dict[str, Shape]:
    """Maps a stage's parameters outside its blocks, like `stage_shapes`."""
    before, after = _ends(model, padded_vocabulary_size, blocks, tensor)
    return before | after


def _ends(
    model: Model, padded_vocabulary_size: int, blocks: tuple[int, int], tensor: int
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Maps the parameters before the first and after the last block of a stage."""
    V, D = padded_vocabulary_size, model.d_model
    before: dict[str, Shape] = {}
    after: dict[str, Shape] = {}
    if blocks[0] == 0:
        before = {"embedding.weight": (V, D), "positions.weight": (model.sequence_length, D)}
    if blocks[1] == model.n_layers:
        head = "embedding.weight" if model.tied_embeddings else "head.weight"
        after = {**_layer("final_norm", (D,)), head: (V, D)}
    return _cut_all(before, tensor), _cut_all(after, tensor)


def is_cut(name: str) -> bool:
    """Returns whether tensor ranks shard a parameter."""
    return name.endswith((*_ROWS_ARE_CUT, *_COLUMNS_ARE_CUT))


# The table of model/sharding.py, for the names of parameters.
_ROWS_ARE_CUT = (
    "embedding.weight",
    "head.weight",
    "qkv.weight",
    "qkv.bias",
    "up.weight",
    "up.bias",
)
_COLUMNS_ARE_CUT = ("out.weight", "down.weight")


def _cut_all(shapes: dict[str, Shape], tensor: int) -> dict[str, Shape]:
    return {name: _cut(name, shape, tensor) for name, shape in shapes.items()}


def _cut(name: str, shape: Shape, tensor: int) -> Shape:
    if name.endswith(_ROWS_ARE_CUT):
        return (shape[0] // tensor, *shape[1:])
    if name.endswith(_COLUMNS_ARE_CUT):
        return (shape[0], shape[1] // tensor)
    return shape


def block_shapes(model: Model, tensor: int = 1) -> dict[str, Shape]:
    """Maps the parameters of one block, named inside it, to their shapes on a tensor rank."""
    D, F = model.d_model, model.d_ff
    return _cut_all(
        _layer("attention_norm", (D,))
        | _layer("attention.qkv", (3 * D, D))
        | _layer("attention.out", (D, D))
        | _layer("mlp_norm", (D,))
        | _layer("mlp.up", (F, D))
        | _layer("mlp.down", (D, F)),
        tensor,
    )


@dataclass(frozen=True)
class ParameterCount:
    """Parameter counts by part of the model."""

    embedding: int
    positions: int
    blocks: int
    """Of all blocks, with their norms."""
    final_norm: int
    head: int
    """Zero when the embedding serves as head."""

    @property
    def total(self) -> int:
        """All parameters; a tied matrix counts once."""
        return self.embedding + self.positions + self.blocks + self.final_norm + self.head


def parameter_count(model: Model, padded_vocabulary_size: int) -> ParameterCount:
    """Counts a model's parameters, including padding rows.

    For GPT-3 shapes the total is L(12 D^2 + 13 D) + V D + T D + 2 D.
    """
    embedding = padded_vocabulary_size * model.d_model
    block = sum(math.prod(shape) for shape in block_shapes(model).values())
    return ParameterCount(
        embedding=embedding,
        positions=model.sequence_length * model.d_model,
        blocks=model.n_layers * block,
        final_norm=2 * model.d_model,
        head=0 if model.tied_embeddings else embedding,
    )


def _layer(name: str, weight: Shape) -> dict[str, Shape]:
    """A weight and its bias, with one entry per row of the weight."""
    return {f"{name}.weight": weight, f"{name}.bias": weight[:1]}
