"""Which blocks of a stage are in fp8, and the rank that talks most."""

from __future__ import annotations

from typing import Any

from trainyard.config.load import load_run
from trainyard.config.precisions import Fp8
from trainyard.config.run import Run
from trainyard.planning.rank import count_fp8_blocks

SIX_BLOCKS = load_run("tiny", ["model.n_layers=6"]).run


def in_precision(run: Run, kind: str, **fp8: Any) -> Run:
    """Sets a precision that so small a matrix could not be multiplied in."""
    precision = run.precision.model_copy(update={"kind": kind, "fp8": Fp8(**fp8)})
    return run.model_copy(update={"precision": precision})


def test_fp8_blocks_of_a_stage_are_those_that_are_not_at_the_ends() -> None:
    run = in_precision(SIX_BLOCKS, "fp8", precise_blocks=2)
    stages = [(0, 2), (0, 3), (2, 4), (3, 6), (5, 6), (0, 6)]
    assert [count_fp8_blocks(run, blocks) for blocks in stages] == [0, 1, 2, 1, 0, 2]
    assert count_fp8_blocks(SIX_BLOCKS, (0, 6)) == 0
