"""Bytes and calls of a step, against counts by hand.

The model has 2 blocks, D 8, F 16, T 16, V 128; a step is 4 sequences, one in a micro batch, so that
the residual stream of a micro batch is 128 values.
"""

from __future__ import annotations

from typing import Any

from trainyard.config.run import Fp8, Model, Parallel, Precision, Run, Train
from trainyard.model.cut import cut_dimension
from trainyard.plan.resolve import Plan, resolve
from trainyard.plan.size import is_cut, parameter_shapes
from trainyard.plan.traffic import busiest_rank, count_fp8_blocks, rank_traffic
from trainyard.units import Length


def build(kind: str = "bf16", dropout: float = 0.0, n_layers: int = 2, **parallel: Any) -> Run:
    parallel = {"zero_stage": 0, **parallel}
    return Run(
        model=Model(
            n_layers=n_layers,
            d_model=8,
            n_heads=4,
            d_ff=16,
            sequence_length=16,
            vocabulary_size=100,
            vocabulary_multiple=32,
            dropout=dropout,
        ),
        train=Train(
            micro_batch_size=1,
            global_batch_size=4,
            compile="never",
            length=Length(4, "sequences"),
        ),
        parallel=Parallel(**parallel),
        precision=Precision(kind=kind),
    )


def in_precision(run: Run, kind: str, **fp8: Any) -> Run:
    """Sets a precision that so small a matrix could not be multiplied in."""
    precision = run.precision.model_copy(update={"kind": kind, "fp8": Fp8(**fp8)})
    return run.model_copy(update={"precision": precision})


def test_fp8_blocks_of_a_stage_are_those_that_are_not_at_the_ends() -> None:
    run = in_precision(build(n_layers=6), "fp8", precise_blocks=2)
    stages = [(0, 2), (0, 3), (2, 4), (3, 6), (5, 6), (0, 6)]
    assert [count_fp8_blocks(run, blocks) for blocks in stages] == [0, 1, 2, 1, 0, 2]
    assert count_fp8_blocks(build(n_layers=6), (0, 6)) == 0


def test_the_busiest_rank_has_most_bytes() -> None:
    run = build("fp32", pipeline=2)
    plan: Plan = resolve(run, 4)
    sums = [sum(each.n_bytes for each in rank_traffic(run, plan, rank)) for rank in (0, 1)]
    assert sum(each.n_bytes for each in busiest_rank(run, plan)) == max(sums)
    assert sums[0] > sums[1]  # positions are more than the final norm


def test_the_plan_cuts_what_the_model_cuts() -> None:
    for tied in (True, False):
        model = Model(n_layers=1, tied_embeddings=tied)
        for name in parameter_shapes(model, 128):
            assert is_cut(name) == (cut_dimension(name) is not None), name
