"""The parity table: every layout computes what the single device computes.

fp64 shows that the mathematics is the same (1e-10); fp32, fp16 and bf16 that nothing is lost in
the precision used. Bounds are derived in docs/decisions/013-parity.md; the differences that were
found are printed at the end of a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations

import pytest
from tests.circles import everyday
from tests.precision.by_hand import ByHand

from trainyard.config.precisions import Fp8
from trainyard.precision import float8
from trainyard.simulate.parity import BOUNDS, Outcome, compare

from .rows import EVERY_DAY, TABLE, Row

SCALES_BOUND = 1e-5
"""Where other scales round the smallest numbers of matmuls in fp8."""


@pytest.mark.parametrize("name", everyday(TABLE, EVERY_DAY))
def test_a_layout_computes_what_one_device_computes(
    name: str,
    train_alone: Callable[[Row], Outcome],
    train_sharded: Callable[[Row], list[Outcome]],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = TABLE[name]
    parallel = row.build_run().parallel
    if row.computed_in.startswith("fp8"):
        float8.build_product(Fp8())  # imports torchao before the ranks are forked
    bound = BOUNDS[row.computed_in]
    if "matmuls-in-fp8" in row.words:
        monkeypatch.setattr(float8, "build_product", ByHand)
        if parallel.tensor * parallel.context > 1:
            bound = SCALES_BOUND
    difference = compare(train_alone(row), train_sharded(row))
    record_property("difference", f"{difference}")
    assert difference.is_within(bound), difference


@pytest.mark.parametrize("recompute", ["block", "attention"])
def test_recomputing_some_blocks_changes_no_bit(
    recompute: str,
    train_alone: Callable[[Row], Outcome],
    train_sharded: Callable[[Row], list[Outcome]],
) -> None:
    row = Row(f"recompute-{recompute} half, modern dropout")
    difference = compare(train_alone(row), train_sharded(row))
    assert difference.worst == 0, difference


SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zero-bubble-chunks")
AXES = (
    *(("dp2", "dp3", "dp4"), ("zero0", "zero1", "zero2", "zero3"), ("hsdp2",)),
    *(("tp2", "tp4"), ("sequence",), ("pp2", "pp4"), SCHEDULES),
    *(("cp2", "cp4"), ("ulysses", "ring"), ("recompute-block", "recompute-attention")),
    *(("muon",), ("dropout",), ("untied",), ("rotary",), ("rms",), ("swiglu",), ("grouped",)),
    *(("head-norm", "all-norm"), ("norm-after",), ("no-bias",), ("wide-heads",), ("documents",)),
    *(("z-loss",), ("layers7",), ("micro-batch-2", "ramp")),
)
"""Words of which a row has one."""
EXCLUDED: dict[str, tuple[str, ...]] = {
    "hsdp2": ("dp2", "dp3", "zero0", "tp4", "pp4", "cp4"),  # of 4 data ranks, and 8 in all
    "dp3": ("micro-batch-2", "ramp"),  # of 8 sequences
    "zero2": ("zero-bubble", "zero-bubble-chunks"),
    "zero3": ("zero-bubble", "zero-bubble-chunks"),
    "pp4": ("interleaved", "zero-bubble-chunks"),  # of 4 or 7 layers
    "ring": ("dropout",),
    "ulysses": ("tp4",),  # of 4 heads
}
"""What the rules of a run or the sizes of this one keep apart."""
MEANT = {"modern": "rotary rms swiglu grouped head-norm no-bias wide-heads"}
MEANT["olmo"] = "rotary rms swiglu grouped all-norm norm-after no-bias wide-heads"


def n_ranks(words: tuple[str, ...]) -> int:
    sizes = [re.fullmatch(r"(dp|tp|pp|cp|hsdp)(\d)", word) for word in words]
    n = 1
    for size in sizes:
        n *= int(size[2]) if size else 1
    return n


def test_every_pair_of_words_is_in_a_row() -> None:
    covered = set()
    for row in TABLE.values():
        if row.computed_in == "fp64" and "precision" not in row.layout.sections:
            words = " ".join(MEANT.get(word, word) for word in row.words).split()
            covered |= set(map(frozenset, combinations(words, 2)))
    missing = {
        (one, other)
        for these, those in combinations(AXES, 2)
        for one in these
        for other in those
        if frozenset((one, other)) not in covered
    }
    excluded = {
        pair
        for pair in missing
        if pair[1] in EXCLUDED.get(pair[0], ()) or pair[0] in EXCLUDED.get(pair[1], ())
    }
    assert not {pair for pair in missing - excluded if n_ranks(pair) <= 8}
