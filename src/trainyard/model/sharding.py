"""Sharding table: how tensor parallelism shards each layer; and parts of the stack.

    kind           layer                  parameter              a rank holds
    vocabulary     embedding, head        weight (V, D)          (V/tp, D)
    columns        attention.qkv, mlp.up  weight (3D or F, D)    (3D/tp or F/tp, D)
                                          bias (3D or F)         (3D/tp or F/tp)
    rows           attention.out,         weight (D, D or F)     (D, D/tp or F/tp)
                   mlp.down               bias (D)               all of it
    none           positions, norms       all                    all of it

Outputs of a column-parallel layer are inputs of the next, row-parallel one: between the two, ranks
need no communication.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["vocabulary", "columns", "rows"]

CUTS: dict[str, Kind] = {
    "embedding": "vocabulary",
    "head": "vocabulary",
    "blocks.*.attention.qkv": "columns",
    "blocks.*.attention.out": "rows",
    "blocks.*.mlp.up": "columns",
    "blocks.*.mlp.down": "rows",
}


@dataclass(frozen=True)
class Part:
    """The part of the model to build: a pipeline stage, or all of it."""

    blocks: range
    """The range of block numbers."""
    takes_tokens: bool
    """Starts with the embedding; other parts take hidden states."""
    gives_loss: bool
    """Ends with the final norm and the head."""


WHOLE = Part(range(sys.maxsize), takes_tokens=True, gives_loss=True)


def kind_of_cut(module_name: str) -> Kind | None:
    """Returns how a layer, by global name, is sharded; None if replicated."""
    return next((kind for name, kind in CUTS.items() if fnmatchcase(module_name, name)), None)


def sharded_dimension(parameter_name: str) -> int | None:
    """Returns the sharded dimension of a parameter, by global name; None if replicated."""
    module_name, _, name = parameter_name.rpartition(".")
    kind = kind_of_cut(module_name)
    if kind == "rows":
        return 1 if name == "weight" else None
    return None if kind is None else 0
