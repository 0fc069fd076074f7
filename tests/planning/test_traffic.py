"""Which blocks of a stage are in fp8, and the rank that talks most."""

from __future__ import annotations

from typing import Any

from trainyard.config.load import load_run
from trainyard.config.precisions import Fp8
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.planning.rank import count_fp8_blocks
from trainyard.planning.traffic import busiest_rank, rank_traffic

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


def test_the_busiest_rank_has_most_bytes() -> None:
    batch = ["train.micro_batch_size=1", "train.global_batch_size=4"]
    run = load_run("tiny", [*batch, "parallel.pipeline=2", "parallel.zero_stage=0"]).run
    plan = resolve(run, 4)
    sums = [sum(each.n_bytes for each in rank_traffic(run, plan, rank)) for rank in (0, 1)]
    assert sum(each.n_bytes for each in busiest_rank(run, plan)) == max(sums)
    assert sums[0] > sums[1]  # positions are more than the final norm
