"""`--flop-formula`: the same as the override log.flop_formula=NAME."""

from __future__ import annotations

from typing import Annotated

import typer

FlopFormulaOption = Annotated[
    str | None,
    typer.Option(
        help="Show TFLOP/s by this formula too, with its share of the peak: megatron_deepspeed "
        "(what MS-AMP, LUMI and the 64-GPU benchmark print), megatron (ALCF's [LM]), "
        "deepspeed_2024 (ALCF's [DS]). MFU is always by megatron_causal."
    ),
]


def with_formula(overrides: list[str] | None, name: str | None) -> list[str]:
    """Returns the overrides, with the formula that was asked for."""
    return [*(overrides or ()), *([] if name is None else [f"log.flop_formula={name}"])]
