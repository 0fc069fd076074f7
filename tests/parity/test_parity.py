"""The parity table: every layout computes what the single device computes.

fp64 shows that the mathematics is the same (1e-10); fp32, fp16 and bf16 that nothing is lost in
the precision used. Bounds are derived in docs/decisions/013-parity.md; the differences that were
found are printed at the end of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tests.circles import everyday, skip_if_torch_is_old
from tests.precision.by_hand import build_product_by_hand

from trainyard.config.precisions import Fp8
from trainyard.precision import float8
from trainyard.training.parity import BOUNDS, Outcome, compare

from .layouts import Row, train_rank

UNTIED = {"tied_embeddings": False}
DROPOUT = {"dropout": 0.2}
LONG, WIDE = {"sequence_length": 32}, {"d_model": 64}
FP16 = {"kind": "fp16"}
PRODUCTS = {"kind": "fp8", "fp8": {"emulate": True, "precise_blocks": 0}}
SCALES_BOUND = 1e-5
GATHER, ROWWISE = {"fp8": {"all_gather": True}}, {"fp8": {"scaling": "rowwise"}}
EIGHT = {"global_batch_size": 8}
RAMP = EIGHT | {"batch_ramp": {"start": 4, "increment": 4, "length": "8 sequences"}}
MUON = "muon"
F32, F16, BF16, FP8, LOW_BIT = "fp32", "fp16", "bf16", "fp8", "fp8_lowbit"


def layout(**parallel: Any) -> dict[str, Any]:
    return parallel


TP2, TP4 = layout(tensor=2), layout(tensor=4)
SP2, SP4 = layout(tensor=2, sequence=True), layout(tensor=4, sequence=True)
PP2, PP4 = layout(pipeline=2), layout(pipeline=4)
INTERLEAVED = layout(pipeline=2, chunks=2, schedule="interleaved")
ZERO_BUBBLE = layout(pipeline=2, chunks=2, schedule="zero_bubble")
ZERO_BUBBLE_1 = layout(pipeline=2, schedule="zero_bubble")
GPIPE = layout(pipeline=2, schedule="gpipe")
ULYSSES2, ULYSSES4 = layout(context=2), layout(context=4)
RING2 = layout(context=2, context_method="ring")
RING4 = layout(context=4, context_method="ring")
Z1, Z2, Z3 = layout(zero_stage=1), layout(zero_stage=2), layout(zero_stage=3)
HYBRID = layout(data_replicate=2)
BLOCK, ATTENTION = layout(recompute="block"), layout(recompute="attention")

TABLE = {
    # One axis.
    "single, recompute block": Row(BLOCK, model=DROPOUT),
    "single, micro batch 4": Row(train=EIGHT | {"micro_batch_size": 4}, model=DROPOUT),
    "dp2": Row(data=2),
    "dp4": Row(data=4, model=DROPOUT),
    "dp2 zero 1": Row(Z1, data=2),
    "dp2 zero 2": Row(Z2, data=2),
    "dp2 zero 3": Row(Z3, data=2),
    "dp4 zero 1, dropout": Row(Z1, data=4, model=DROPOUT),
    "dp4 zero 2, untied": Row(Z2, data=4, model=UNTIED),
    "dp4 zero 3, recompute": Row(Z3 | BLOCK, data=4, model=DROPOUT),
    "dp3 uneven shards zero 1": Row(Z1, data=3, train={"global_batch_size": 6}),
    "dp3 uneven shards zero 3": Row(Z3, data=3, train={"global_batch_size": 6}),
    "hybrid 2x2 zero 1": Row(HYBRID | Z1, data=4),
    "hybrid 2x2 zero 2": Row(HYBRID | Z2, data=4),
    "hybrid 2x2 zero 3": Row(HYBRID | Z3, data=4, model=DROPOUT),
    "tp2": Row(TP2),
    "tp2, dropout": Row(TP2, model=DROPOUT),
    "tp4, untied": Row(TP4, model=UNTIED),
    "tp2 sequence": Row(SP2, model=DROPOUT),
    "tp4 sequence": Row(SP4, model=DROPOUT | UNTIED),
    "tp2 sequence, recompute block": Row(SP2 | BLOCK, model=DROPOUT),
    "tp2 sequence, recompute attention": Row(SP2 | ATTENTION, model=DROPOUT),
    "pp2 gpipe": Row(GPIPE, model=DROPOUT),
    "pp2 1f1b": Row(PP2, model=DROPOUT),
    "pp2 1f1b, untied": Row(PP2, model=UNTIED),
    "pp4 1f1b": Row(PP4),
    "pp2 uneven layers": Row(PP2, model={"n_layers": 5}),
    "pp2 interleaved": Row(INTERLEAVED, model=DROPOUT),
    "pp2 interleaved, uneven, untied": Row(INTERLEAVED, model=UNTIED | {"n_layers": 7}),
    "pp2 zero bubble": Row(ZERO_BUBBLE),
    "pp2 zero bubble, one chunk": Row(ZERO_BUBBLE_1, model=DROPOUT),
    "pp2 recompute block": Row(PP2 | BLOCK, model=DROPOUT),
    "cp2 ulysses": Row(ULYSSES2, model=DROPOUT),
    "cp4 ulysses": Row(ULYSSES4),
    "cp2 ring": Row(RING2),
    "cp4 ring, untied": Row(RING4, model=UNTIED),
    "cp2 ring, recompute attention": Row(RING2 | ATTENTION),
    # Two axes.
    "dp2 tp2": Row(TP2, data=2, model=DROPOUT),
    "dp2 tp2 zero 1": Row(TP2 | Z1, data=2),
    "dp2 tp2 sequence zero 3": Row(SP2 | Z3, data=2, model=DROPOUT),
    "dp2 tp4 sequence zero 2": Row(SP4 | Z2, data=2),
    "dp2 pp2": Row(PP2, data=2, model=DROPOUT),
    "dp2 pp2 zero 1": Row(PP2 | Z1, data=2),
    "dp2 pp2 zero 3": Row(PP2 | Z3, data=2),
    "dp2 pp2 interleaved zero 1": Row(INTERLEAVED | Z1, data=2),
    "dp2 pp2 zero bubble zero 1": Row(ZERO_BUBBLE | Z1, data=2),
    "dp4 pp2 hybrid zero 1": Row(PP2 | HYBRID | Z1, data=4),
    "dp2 cp2 ulysses": Row(ULYSSES2, data=2, model=DROPOUT),
    "dp2 cp2 ulysses zero 3": Row(ULYSSES2 | Z3, data=2),
    "dp2 cp2 ring zero 1": Row(RING2 | Z1, data=2),
    "dp2 cp2 hybrid zero 2": Row(ULYSSES2 | HYBRID | Z2, data=2),
    "tp2 pp2": Row(TP2 | PP2, model=DROPOUT),
    "tp2 pp2 sequence": Row(SP2 | PP2, model=DROPOUT),
    "tp2 pp2 sequence interleaved": Row(SP2 | INTERLEAVED),
    "tp2 pp4 zero bubble": Row(SP2 | layout(pipeline=4, schedule="zero_bubble")),
    "tp2 cp2 ulysses": Row(TP2 | ULYSSES2, model=DROPOUT),
    "tp2 cp2 sequence ulysses": Row(SP2 | ULYSSES2, model=DROPOUT),
    "tp2 cp2 sequence ring": Row(SP2 | RING2),
    "pp2 cp2 ulysses": Row(PP2 | ULYSSES2, model=DROPOUT),
    "pp2 cp2 ring interleaved": Row(INTERLEAVED | RING2),
    # Three axes and more, on eight processes.
    "dp2 tp2 pp2": Row(TP2 | PP2, data=2),
    "dp2 tp2 pp2 sequence zero 1": Row(SP2 | PP2 | Z1, data=2, model=DROPOUT),
    "dp2 tp2 pp2 sequence zero 3 recompute": Row(SP2 | PP2 | Z3 | BLOCK, data=2, model=DROPOUT),
    "dp2 tp2 pp2 zero bubble zero 1, untied": Row(SP2 | ZERO_BUBBLE | Z1, data=2, model=UNTIED),
    "dp2 tp2 cp2 ulysses sequence zero 1": Row(SP2 | ULYSSES2 | Z1, data=2, model=DROPOUT),
    "dp2 tp2 cp2 ring sequence zero 3": Row(SP2 | RING2 | Z3, data=2),
    "dp2 pp2 cp2 ulysses zero 1": Row(PP2 | ULYSSES2 | Z1, data=2, model=DROPOUT),
    "tp2 pp2 cp2 ulysses sequence": Row(SP2 | PP2 | ULYSSES2, model=DROPOUT),
    "tp2 pp2 cp2 ring sequence interleaved": Row(SP2 | INTERLEAVED | RING2),
    # A batch that grows, and larger micro batches.
    "dp2 tp2 batch ramp": Row(TP2, data=2, train=RAMP, model=DROPOUT),
    "pp2 batch ramp": Row(PP2, train=RAMP, model=DROPOUT),
    "dp2 pp2 micro batch 2": Row(PP2, data=2, train=EIGHT | {"micro_batch_size": 2}, model=DROPOUT),
    # Whole matrices are put together from all shards, and orthogonalized once.
    "muon dp2": Row(data=2, optimizer=MUON),
    "muon dp2 zero 1": Row(Z1, data=2, optimizer=MUON),
    "muon dp3 uneven shards zero 2": Row(
        Z2, data=3, train={"global_batch_size": 6}, optimizer=MUON
    ),
    "muon dp2 zero 3": Row(Z3, data=2, model=DROPOUT, optimizer=MUON),
    "muon hybrid 2x2 zero 2": Row(HYBRID | Z2, data=4, optimizer=MUON),
    "muon tp2": Row(TP2, optimizer=MUON),
    "muon tp4 sequence, untied": Row(SP4, model=DROPOUT | UNTIED, optimizer=MUON),
    "muon pp2 interleaved, uneven": Row(INTERLEAVED, model={"n_layers": 7}, optimizer=MUON),
    "muon cp2 ring zero 0": Row(RING2, optimizer=MUON),
    "muon cp4 ulysses zero 1": Row(ULYSSES4 | Z1, optimizer=MUON),
    "muon dp3 tp2 uneven shards zero 1": Row(
        TP2 | Z1, data=3, train={"global_batch_size": 6}, optimizer=MUON
    ),
    "muon dp2 tp2 pp2 sequence zero 3": Row(SP2 | PP2 | Z3, data=2, model=DROPOUT, optimizer=MUON),
    "muon dp2 tp2 cp2 ulysses sequence zero 1": Row(
        SP2 | ULYSSES2 | Z1, data=2, model=DROPOUT, optimizer=MUON
    ),
    "muon fp32 tp2 sequence": Row(SP2, computed_in=F32, optimizer=MUON),
    "muon bf16 tp2 sequence": Row(SP2, computed_in=BF16, optimizer=MUON),
    "muon dp4 tp2 hybrid zero 2": Row(TP2 | HYBRID | Z2, data=4, optimizer=MUON),
    # Compiled blocks; cut ones below.
    "dp2 zero 1 compiled": Row(Z1, data=2, train={"compile": "always"}, model=DROPOUT),
    # The precisions of training.
    "fp32 dp2 zero 3": Row(Z3, data=2, computed_in=F32, model=DROPOUT),
    "fp32 dp2 tp2 pp2 sequence zero 1": Row(SP2 | PP2 | Z1, data=2, computed_in=F32, model=DROPOUT),
    "fp32 cp2 ring": Row(RING2, computed_in=F32),
    "fp32 pp2 zero bubble": Row(ZERO_BUBBLE, computed_in=F32),
    "bf16 dp2 zero 3": Row(Z3, data=2, computed_in=BF16, model=DROPOUT),
    "bf16 tp2 sequence": Row(SP2, computed_in=BF16, model=DROPOUT),
    "bf16 cp2 ulysses": Row(ULYSSES2, computed_in=BF16, model=DROPOUT),
    "bf16 dp2 tp2 pp2 sequence zero 1": Row(
        SP2 | PP2 | Z1, data=2, computed_in=BF16, model=DROPOUT
    ),
    "fp16 dp2 zero 3, recompute": Row(Z3 | BLOCK, data=2, computed_in=F16, model=DROPOUT),
    "fp16 hybrid 2x2 zero 3": Row(HYBRID | Z3, data=4, computed_in=F16, model=DROPOUT),
    "fp16 tp2 sequence": Row(SP2, computed_in=F16, model=DROPOUT),
    "fp16 pp2 1f1b": Row(PP2, computed_in=F16, model=DROPOUT),
    "fp16 pp2 interleaved, untied": Row(INTERLEAVED, computed_in=F16, model=DROPOUT | UNTIED),
    "fp16 cp2 ring": Row(RING2, computed_in=F16),
    "fp16 dp2 tp2 pp2 sequence zero 1": Row(SP2 | PP2 | Z1, data=2, computed_in=F16, model=DROPOUT),
    # The product of fewer tokens or columns than 16 is refused.
    "fp8 dp2 zero 1": Row(Z1, data=2, computed_in=FP8, model=DROPOUT),
    "fp8 dp2 zero 3, gather, recompute": Row(
        Z3 | BLOCK, data=2, computed_in=FP8, precision=GATHER, model=DROPOUT
    ),
    "fp8 hybrid 2x2 zero 3": Row(HYBRID | Z3, data=4, computed_in=FP8, model=DROPOUT),
    "fp8 tp2 sequence, recompute attention": Row(SP2 | ATTENTION, computed_in=FP8, model=DROPOUT),
    "fp8 tp4, untied": Row(TP4, computed_in=FP8, model=UNTIED | WIDE),
    "fp8 pp2 interleaved, untied": Row(INTERLEAVED, computed_in=FP8, model=DROPOUT | UNTIED),
    "fp8 cp2 ulysses": Row(ULYSSES2, computed_in=FP8, model=DROPOUT | LONG),
    "fp8 dp2 tp2 pp2 sequence zero 1": Row(SP2 | PP2 | Z1, data=2, computed_in=FP8, model=DROPOUT),
    "fp8 dp2 tp2 cp2 sequence zero 3": Row(
        SP2 | ULYSSES2 | Z3, data=2, computed_in=FP8, model=DROPOUT | LONG
    ),
    "fp8 rowwise tp2 sequence": Row(SP2, computed_in=FP8, precision=ROWWISE, model=DROPOUT),
    "fp8 rowwise cp2 ulysses": Row(ULYSSES2, computed_in=FP8, precision=ROWWISE, model=LONG),
    # Gradients of ranks are rounded before they are added up, and a part has 32 columns at least.
    "low bit dp2 zero 3, gather, recompute": Row(
        Z3 | BLOCK, data=2, computed_in=LOW_BIT, precision=GATHER, model=DROPOUT
    ),
    "low bit dp3 uneven shards zero 2": Row(
        Z2, data=3, computed_in=LOW_BIT, train={"global_batch_size": 6}
    ),
    "low bit hybrid 2x2 zero 2": Row(HYBRID | Z2, data=4, computed_in=LOW_BIT, model=DROPOUT),
    "low bit tp2 sequence": Row(SP2, computed_in=LOW_BIT, model=DROPOUT | WIDE),
    "low bit pp2 interleaved, untied": Row(
        INTERLEAVED, computed_in=LOW_BIT, model=DROPOUT | UNTIED
    ),
    "low bit cp2 ring zero 3": Row(RING2 | Z3, computed_in=LOW_BIT, model=LONG),
    "low bit dp2 tp2 pp2 sequence zero 1": Row(
        SP2 | PP2 | Z1, data=2, computed_in=LOW_BIT, model=DROPOUT | WIDE
    ),
    # In fp64 but for numbers rounded to fp8. What other ranks have may change the scale by which
    # the smallest of them are rounded, where layers or sequences are cut.
    "products in fp8, dp2 zero 1": Row(Z1, data=2, precision=PRODUCTS, model=DROPOUT),
    "products in fp8, dp2 pp2 interleaved zero 3": Row(
        INTERLEAVED | Z3, data=2, precision=PRODUCTS, model=DROPOUT
    ),
    "products in fp8, tp2 sequence, recompute": Row(
        SP2 | ATTENTION, precision=PRODUCTS, bound="scales", model=DROPOUT
    ),
    "products in fp8, cp2 ring": Row(RING2, precision=PRODUCTS, bound="scales", model=LONG),
    "products in fp8, dp2 tp2 cp2 sequence zero 3": Row(
        SP2 | ULYSSES2 | Z3, data=2, precision=PRODUCTS, bound="scales", model=DROPOUT | LONG
    ),
    # In fp64 no scale overflows: it must cancel out.
    "loss scale, dp2 tp2 pp2 sequence zero 1": Row(
        SP2 | PP2 | Z1, data=2, precision=FP16, model=DROPOUT
    ),
    "loss scale, dp2 cp2 ring zero 3": Row(RING2 | Z3, data=2, precision=FP16),
}


# Each option of the model by itself on each axis, and all together on mixtures of axes too.
SHARED = {"n_heads": 8, "n_key_value_heads": 4}
SCALED = {"original_sequence_length": 8, "factor": 4.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "rotary": {"positions": "rotary", "rotary_scaling": SCALED},
    "rms": {"norm": "rms"},
    "swiglu": {"mlp": "swiglu"},
    "grouped queries": SHARED,
    "query-key norm": {"query_key_norm": "head"},
    "query-key norm of all heads": {"query_key_norm": "all"},
    "norm after": {"norm_place": "after"},
    "no bias": {"bias": False},
    "wide heads": {"d_head": 12},
}
OLMO: dict[str, Any] = {k: v for option in OPTIONS.values() for k, v in option.items()}
MODERN = OLMO | {"query_key_norm": "head", "norm_place": "before"}
ONE_AXIS = {
    "recompute attention": (ATTENTION, 1),
    "dp2 zero 0": (layout(), 2),
    "dp2 zero 1": (Z1, 2),
    "dp2 zero 2": (Z2, 2),
    "dp2 zero 3": (Z3, 2),
    "tp2": (TP2, 1),
    "tp2 sequence": (SP2, 1),
    "pp2": (PP2, 1),
    "pp2 interleaved": (INTERLEAVED, 1),
    "pp2 zero bubble": (ZERO_BUBBLE, 1),
    "cp2 ulysses": (ULYSSES2, 1),
    "cp2 ring": (RING2, 1),
    "cp4 ring": (RING4, 1),
}
MIXTURES = {
    "dp2 tp2 pp2 sequence zero 3 recompute": (SP2 | PP2 | Z3 | BLOCK, 2),
    "tp2 cp2 ulysses sequence interleaved": (SP2 | ULYSSES2 | INTERLEAVED, 1),
    "dp2 tp2 cp2 ring sequence zero 1": (SP2 | RING2 | Z1, 2),
}
# A sequence of 16 tokens has two or three documents; with more kinds of tokens, few would end.
DOCUMENTS = {"attention_within_documents": True, "end_of_document_id": 3, "vocabulary_size": 10}
Z_LOSS = {"z_loss": 0.1}
ALONE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{name: (model, {}) for name, model in OPTIONS.items()},
    "documents": (DOCUMENTS, {}),
    "z-loss": ({}, Z_LOSS),
}
TOGETHER = {
    "modern": (MODERN, {}),
    "olmo": (OLMO, {}),
    "modern, documents, z-loss": (MODERN | DOCUMENTS, Z_LOSS),
}
for name, (model, train) in (ALONE | TOGETHER).items():
    for axes, (cut, data) in (ONE_AXIS if name in ALONE else ONE_AXIS | MIXTURES).items():
        dropout = {} if cut.get("context_method") == "ring" else DROPOUT
        TABLE[f"{name}, {axes}"] = Row(cut, data=data, model=model | dropout, train=train)
# The gradient of a norm of heads is a few numbers, the small sums of many large ones: rounding
# shows in them far more than elsewhere; and it grows with depth, faster than in GPT-3. fp64 proves
# both.
ROUNDED = MODERN | {"query_key_norm": "none", "n_layers": 2}
ROUNDED_FP8 = ROUNDED | {"d_head": 8} | LONG  # sides in multiples of 16 or 32 on each rank
TABLE |= {
    "modern, tp4 sequence": Row(SP4, model=MODERN | DROPOUT),
    "modern, muon dp2 tp2 sequence zero 1": Row(SP2 | Z1, data=2, optimizer=MUON, model=MODERN),
    "olmo, muon dp2 tp2 sequence zero 1": Row(SP2 | Z1, data=2, optimizer=MUON, model=OLMO),
    "olmo, tp2 sequence compiled": Row(SP2, train={"compile": "always"}, model=OLMO | DROPOUT),
    "modern, fp32 tp2 pp2 sequence": Row(SP2 | PP2, computed_in=F32, model=ROUNDED | DROPOUT),
    "modern, bf16 tp2 sequence": Row(SP2, computed_in=BF16, model=ROUNDED | DROPOUT),
    "modern, fp16 cp2 ring": Row(RING2, computed_in=F16, model=ROUNDED),
    "modern, fp8 tp2 sequence": Row(SP2, computed_in=FP8, model=ROUNDED_FP8 | DROPOUT),
    "modern, fp8 dp2 zero 3, gather": Row(
        Z3, data=2, computed_in=FP8, precision=GATHER, model=ROUNDED_FP8
    ),
    "modern, low bit tp2 sequence": Row(SP2, computed_in=LOW_BIT, model=ROUNDED_FP8 | WIDE),
    "modern, low bit dp2 zero 2": Row(Z2, data=2, computed_in=LOW_BIT, model=ROUNDED_FP8),
}


# Each axis by itself and two triples in fp64, and each precision.
EVERY_DAY = (
    *("rotary, cp2 ring", "grouped queries, cp2 ulysses", "query-key norm, tp2"),
    *("query-key norm of all heads, tp2", "olmo, dp2 tp2 pp2 sequence zero 3 recompute"),
    *("modern, tp2 sequence", "modern, dp2 tp2 cp2 ring sequence zero 1"),
    *("documents, cp4 ring", "z-loss, tp2"),
    "modern, documents, z-loss, tp2 cp2 ulysses sequence interleaved",
    *("dp2 zero 1", "dp2 zero 3", "hybrid 2x2 zero 2", "tp2, dropout"),
    *("tp2 sequence, recompute block", "pp2 1f1b", "pp2 interleaved, uneven, untied"),
    *("pp2 zero bubble", "cp2 ulysses", "cp2 ring"),
    *("dp2 tp2 pp2 sequence zero 3 recompute", "dp2 tp2 cp2 ring sequence zero 3"),
    *("muon hybrid 2x2 zero 2", "muon dp3 tp2 uneven shards zero 1"),
    *("muon dp2 tp2 pp2 sequence zero 3", "muon cp2 ring zero 0"),
    *("fp32 cp2 ring", "bf16 tp2 sequence", "fp16 pp2 1f1b", "fp8 dp2 zero 1"),
    *("low bit hybrid 2x2 zero 2", "products in fp8, dp2 zero 1"),
)


@pytest.fixture(scope="module")
def references() -> dict[str, Outcome]:
    """Outcomes of the single device, by the run that made them."""
    return {}


@pytest.mark.parametrize("name", everyday(TABLE, EVERY_DAY))
def test_a_layout_computes_what_one_device_computes(
    name: str,
    run_ranks: Callable[..., list[Outcome]],
    references: dict[str, Outcome],
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = TABLE[name]
    if row.computed_in in (FP8, LOW_BIT):
        float8.build_product(Fp8())  # imports torchao before the ranks are forked
    if row.precision is PRODUCTS:
        monkeypatch.setattr(float8, "build_product", build_product_by_hand)
    alone, cut = row.build_run(cut=False), row.build_run()
    skip_if_torch_is_old(cut)
    key = f"{alone.model_dump_json()} {row.computed_in}"
    if key not in references:
        (references[key],) = run_ranks(1, partial(train_rank, alone, 1, row.computed_in))
    outcomes = run_ranks(row.n_ranks, partial(train_rank, cut, row.n_ranks, row.computed_in))
    difference = compare(references[key], outcomes)
    record_property("difference", f"{difference}")
    bound = SCALES_BOUND if row.bound == "scales" else BOUNDS[row.computed_in]
    assert difference.is_within(bound), difference
