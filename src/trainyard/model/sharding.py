"""The table of cuts: which layers ranks may share, and along what; and parts of the stack.

    kind of cut    layer                  parameter              a rank holds
    vocabulary     embedding, head        weight (V, D)          (V/tp, D)
    columns        attention.qkv, mlp.up  weight (3D or F, D)    (3D/tp or F/tp, D)
                                          bias (3D or F)         (3D/tp or F/tp)
    rows           attention.out,         weight (D, D or F)     (D, D/tp or F/tp)
                   mlp.down               bias (D)               all of it
    none           positions, norms       all                    all of it

Outputs of a layer cut by columns are inputs of the next, which is cut by rows: between the two each
rank computes with what it has.
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
    """Which part of the model is built: a stage of a pipeline, or all of it."""

    blocks: range
    """Those of the model's blocks whose number is in this range."""
    takes_tokens: bool
    """Begins with the embedding; other parts take hidden states."""
    gives_loss: bool
    """Ends with the final norm and the head."""


WHOLE = Part(range(sys.maxsize), takes_tokens=True, gives_loss=True)


def kind_of_cut(module_name: str) -> Kind | None:
    """Returns how a layer, by its global name, is cut; None where every rank has all of it."""
    return next((kind for name, kind in CUTS.items() if fnmatchcase(module_name, name)), None)


def sharded_dimension(parameter_name: str) -> int | None:
    """Says along which dimension a parameter, by its global name, is cut; None where it is not."""
    module_name, _, name = parameter_name.rpartition(".")
    kind = kind_of_cut(module_name)
    if kind == "rows":
        return 1 if name == "weight" else None
    return None if kind is None else 0
