"""Which blocks of a stage are in fp8, and the rank that talks most."""

from __future__ import annotations

from typing import Any

from trainyard.config.load import load_run
from trainyard.config.precisions import Fp8
from trainyard.config.run import Run
from trainyard.layout.ranks import recomputed_blocks
from trainyard.planning.rank import kinds_of_blocks

SIX_BLOCKS = load_run("tiny", ["model.n_layers=6"]).run


def in_precision(run: Run, kind: str, **fp8: Any) -> Run:
    """Sets a precision that so small a matrix could not be multiplied in."""
    precision = run.precision.model_copy(update={"kind": kind, "fp8": Fp8(**fp8)})
    return run.model_copy(update={"precision": precision})


def test_fp8_blocks_of_a_stage_are_those_that_are_not_at_the_ends() -> None:
    run = in_precision(SIX_BLOCKS, "fp8", precise_blocks=2)
    stages = [(0, 2), (0, 3), (2, 4), (3, 6), (5, 6), (0, 6)]
    kinds = [dict(kinds_of_blocks(run, blocks)) for blocks in stages]
    assert [each.get(("none", True, False), 0) for each in kinds] == [0, 1, 2, 1, 0, 2]
    assert kinds_of_blocks(SIX_BLOCKS, (0, 6)) == ((("none", False, False), 6),)


def test_recomputed_blocks_are_an_even_share_of_a_stage() -> None:
    half = SIX_BLOCKS.parallel.model_copy(update={"recompute": "block", "recompute_share": 0.5})
    assert recomputed_blocks(half, (0, 6)) == {1, 3, 5}
    third = half.model_copy(update={"recompute_share": 0.333})
    assert recomputed_blocks(third, (3, 6)) == {5} and recomputed_blocks(third, (0, 1)) == {0}
    run = in_precision(SIX_BLOCKS.model_copy(update={"parallel": half}), "fp8", precise_blocks=2)
    assert dict(kinds_of_blocks(run, (0, 6))) == {
        **{("none", False, False): 2, ("none", True, False): 1},
        **{("block", False, False): 2, ("block", True, False): 1},
    }
