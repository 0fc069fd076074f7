"""Bytes and calls of a step, against counts by hand.

The model has 2 blocks, D 8, F 16, T 16, V 128; a step is 4 sequences, one in a micro batch, so that
the residual stream of a micro batch is 128 values.
"""

from __future__ import annotations

from typing import Any

import pytest

from trainyard.config.run import Fp8, Model, Parallel, Precision, Run, Train
from trainyard.model.cut import cut_dimension
from trainyard.plan.resolve import Plan, resolve
from trainyard.plan.size import is_cut, parameter_shapes
from trainyard.plan.traffic import busiest_rank, count_fp8_blocks, rank_traffic
from trainyard.units import Length

A = 16 * 8 * 2  # bytes of the residual stream in bf16
# qkv 192 + 24, out 64 + 8, up 128 + 16, down 128 + 8, norms 32
BLOCK = 600
REST = 128 * 8 + 16 * 8 + 16  # embedding, positions, final norm


MATRICES = 192 + 64 + 128 + 128


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


def count(
    n_ranks: int, pipeline_rank: int = 0, **options: Any
) -> dict[tuple[str, str], tuple[int, int]]:
    return count_run(build(**options), n_ranks, pipeline_rank)


def count_run(
    run: Run, n_ranks: int, pipeline_rank: int = 0
) -> dict[tuple[str, str], tuple[int, int]]:
    traffic = rank_traffic(run, resolve(run, n_ranks), pipeline_rank)
    return {(each.axis, each.collective): (each.calls, each.n_bytes) for each in traffic}


# Per micro batch: embedding in fp32 1, blocks 2 x 4, gradient of the loss 1; maximum and sum 2.
LOSS = 3 * 16 * 4


def test_one_rank_sends_nothing() -> None:
    assert count(1) == {}


def test_tensor() -> None:
    n_bytes = 4 * (2 * A + 8 * A + A + LOSS)
    assert count(2, tensor=2) == {("tensor", "all-reduce"): (4 * 12, n_bytes)}


@pytest.mark.parametrize(
    ("recompute", "dropout", "more"),
    [("attention", 0.0, 0), ("block", 0.0, 1), ("block", 0.1, 2), ("attention", 0.1, 0)],
)
def test_tensor_recomputing(recompute: str, dropout: float, more: int) -> None:
    n_bytes = 4 * (2 * A + 2 * (4 + more) * A + A + LOSS)
    assert count(2, tensor=2, recompute=recompute, dropout=dropout) == {
        ("tensor", "all-reduce"): (4 * (12 + 2 * more), n_bytes)
    }


@pytest.mark.parametrize(
    ("recompute", "gathers", "scatters"), [("none", 4, 4), ("attention", 5, 4), ("block", 6, 5)]
)
def test_tensor_with_sequence(recompute: str, gathers: int, scatters: int) -> None:
    # Whole on each rank: two norms and two biases in a block, positions, final norm.
    whole = 2 * (4 * 8 + 2 * 8) + 16 * 8 + 16
    assert count(2, tensor=2, sequence=True, recompute=recompute) == {
        ("tensor", "all-gather"): (4 * (2 * gathers + 2), 4 * (2 * gathers + 1 + 2) * A),
        ("tensor", "reduce-scatter"): (4 * (2 * scatters + 2), 4 * (2 * scatters + 1 + 2) * A),
        ("tensor", "all-reduce"): (4 * 2 + 1, 4 * LOSS + whole * 4),
    }


def test_ulysses_and_ring() -> None:
    weights = (3, (2 * BLOCK + REST) * 4)
    half = A // 2
    assert count(2, context=2) == {
        ("context", "all-to-all"): (4 * 2 * 4, 4 * 2 * 2 * 4 * half),
        ("shard", "all-reduce"): weights,
    }
    assert count(2, context=2, recompute="block")["context", "all-to-all"] == (
        4 * 2 * 6,
        4 * 2 * 3 * 4 * half,
    )
    quarter = A // 4
    assert count(4, context=4, context_method="ring") == {
        # forward 3 times keys and values; backward the same and 3 times their gradients in fp32
        ("context", "send"): (4 * 2 * 9, 4 * 2 * (6 * 2 * quarter + 3 * 2 * 2 * quarter)),
        ("shard", "all-reduce"): weights,
    }
    both = count(4, context=2, tensor=2)
    assert both["context", "all-to-all"] == (4 * 2 * 4, 4 * 2 * 2 * 4 * half // 2)


@pytest.mark.parametrize(("stage", "gathers", "scatters"), [(1, 1, 1), (2, 1, 2), (3, 4, 2)])
def test_zero_stages(stage: int, gathers: int, scatters: int) -> None:
    of_rest = 2 if stage == 3 else 1
    assert count(2, zero_stage=stage) == {
        ("shard", "all-gather"): (
            2 * gathers + of_rest,
            gathers * 2 * BLOCK * 2 + of_rest * REST * 4,
        ),
        ("shard", "reduce-scatter"): (3 * scatters, scatters * (2 * BLOCK + REST) * 4),
    }


def in_precision(run: Run, kind: str, **fp8: Any) -> Run:
    """Sets a precision that so small a matrix could not be multiplied in."""
    precision = run.precision.model_copy(update={"kind": kind, "fp8": Fp8(**fp8)})
    return run.model_copy(update={"precision": precision})


@pytest.mark.parametrize(("stage", "gathers"), [(1, 1), (3, 4)])
def test_weights_that_travel_as_fp8(stage: int, gathers: int) -> None:
    run = build(n_layers=5, zero_stage=stage)
    plain = count_run(in_precision(run, "fp8"), 2)
    assert plain == count_run(run, 2)
    counted = count_run(in_precision(run, "fp8", all_gather=True), 2)
    of_rest = 2 if stage == 3 else 1
    # Three of five blocks multiply in fp8, and send their four scales before.
    assert counted["shard", "all-gather"] == (
        5 * gathers + of_rest,
        gathers * (5 * BLOCK * 2 - 3 * MATRICES) + of_rest * REST * 4,
    )
    assert counted["shard", "all-reduce"] == (3 * gathers, 3 * gathers * 4 * 4)
    assert counted["shard", "reduce-scatter"] == plain["shard", "reduce-scatter"]


def test_fp8_blocks_of_a_stage_are_those_that_are_not_at_the_ends() -> None:
    run = in_precision(build(n_layers=6), "fp8", precise_blocks=2)
    stages = [(0, 2), (0, 3), (2, 4), (3, 6), (5, 6), (0, 6)]
    assert [count_fp8_blocks(run, blocks) for blocks in stages] == [0, 1, 2, 1, 0, 2]
    assert count_fp8_blocks(build(n_layers=6), (0, 6)) == 0


@pytest.mark.parametrize(("stage", "sums"), [(1, 1), (2, 2)])
def test_gradients_that_travel_as_codes(stage: int, sums: int) -> None:
    run = in_precision(build(n_layers=3, zero_stage=stage), "fp8_lowbit")
    counted = count_run(run, 2)
    # Half of a block is 300 values, or 10 times 32 with what fills them up.
    assert counted["shard", "all-to-all"] == (3 * sums, 3 * sums * 2 * 10 * 33)
    assert counted["shard", "reduce-scatter"] == (sums, sums * REST * 4)
    assert counted["shard", "all-gather"] == (4, 3 * BLOCK * 2 + REST * 4)


def test_replicas_add_up_what_each_shard_has() -> None:
    counted = count(4, zero_stage=2, replicas=2)
    assert counted["replica", "all-reduce"] == (3, (2 * BLOCK + REST) // 2 * 4)
    assert counted["shard", "reduce-scatter"] == (3, (2 * BLOCK + REST) * 4)


def test_parts_that_are_not_equal_are_filled_up() -> None:
    # 3 ranks: rows 24 -> 24, 8 -> 9, 16 -> 18, 128 -> 129
    run = build().model_copy(
        update={"train": Train(micro_batch_size=1, global_batch_size=3, length=Length(3, "steps"))}
    )
    run = run.model_copy(update={"parallel": Parallel(zero_stage=1)})
    traffic = {each.collective: each for each in rank_traffic(run, resolve(run, 3), 0)}
    block = 24 * 8 + 24 + 9 * 8 + 9 + 18 * 8 + 18 + 9 * 16 + 9 + 4 * 9
    rest = 129 * 8 + 18 * 8 + 2 * 9
    assert traffic["reduce-scatter"].n_bytes == (2 * block + rest) * 4
    assert traffic["all-gather"].n_bytes == 2 * block * 2 + rest * 4


def test_pipeline() -> None:
    embedding = 128 * 8 * 4
    assert count(2, pipeline=2) == {
        ("pipeline", "send"): (4, 4 * A),
        ("pipeline", "all-reduce"): (1, embedding),
    }
    counted = count(4, pipeline=2, zero_stage=3)  # 2 micro batches for each of 2 data ranks
    assert counted["pipeline", "send"] == (2, 2 * A)
    assert counted["pipeline", "all-reduce"] == (1, embedding // 2)
    first = 128 * 8 + 16 * 8
    assert counted["shard", "all-gather"] == (3 + 1, 3 * BLOCK * 2 + first * 4)
    assert counted["shard", "reduce-scatter"] == (2, (BLOCK + first) * 4)
    last = count(4, 1, pipeline=2, zero_stage=1)
    assert last["shard", "all-gather"] == (2, BLOCK * 2 + (128 * 8 + 16) * 4)
    with_sequence = count(4, pipeline=2, tensor=2, sequence=True)
    assert with_sequence["pipeline", "send"] == (4, 4 * A // 2)


def test_chunks_cross_more_borders() -> None:
    run = build(n_layers=4, pipeline=2, chunks=2, schedule="interleaved")
    traffic = {each.collective: each for each in rank_traffic(run, resolve(run, 2), 1)}
    assert (traffic["send"].calls, traffic["send"].n_bytes) == (3 * 4, 3 * 4 * A)


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
