"""Rows of the parity table: small runs, each in a layout of its own and on a single device."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from tests.layouts import MODEL, Layout, Sections, merge, read_layout

from trainyard.config.load import build_run
from trainyard.config.run import Run
from trainyard.simulate.parity import Outcome, train_three_steps
from trainyard.simulate.shrink import N_STEPS

BASE: Sections = {
    "model": {
        "n_layers": 4,
        "d_model": 32,
        "n_heads": 4,
        "d_ff": 64,
        "sequence_length": 16,
        "vocabulary_size": 90,
        "vocabulary_multiple": 8,
        "dropout": 0.0,
        "init_std": 0.2,
    },
    "train": {"micro_batch_size": 1, "length": f"{N_STEPS} steps", "compile": "never"},
    # The gradient of the bias of keys is zero but for rounding: with a usual epsilon Adam would
    # make a full step in the direction of that noise.
    "optimizer": {"learning_rate": 1e-2, "clip_norm": 0.5, "epsilon": 1e-3},
    "schedule": {"warmup": "2 steps", "decay": "10 steps", "cooldown": "1 steps"},
    "precision": {"kind": "fp32"},
    "parallel": {"zero_stage": 0},
}
RAMP = {"start": 4, "increment": 4, "length": "8 sequences"}
# The gradient of a norm of heads is a few numbers, the small sums of many large ones: rounding
# shows in them far more than elsewhere; and it grows with depth, faster than in GPT-3. fp64 proves
# both.
SCALED = MODEL["scaled-rotary"]
ROUNDED = MODEL["modern"] | SCALED | {"query_key_norm": "none", "n_layers": 2}
# A large coefficient shows whether loads are those of whole sequences.
EXPERTS = MODEL["swiglu"] | {
    "bias": False,
    "n_experts": 8,
    "n_active_experts": 2,
    "d_expert": 16,
    "balance_coefficient": 0.3,
    "router_z_loss": 0.1,
}
DEEPSEEK = {
    "n_shared_experts": 2,
    "n_dense_blocks": 1,
    "router": "sigmoid",
    "router_scale": 2.5,
    "n_expert_groups": 4,
    "n_active_groups": 2,
}
WORDS: dict[str, Sections] = {
    "rotary": {"model": SCALED},
    "modern": {"model": MODEL["modern"] | SCALED},
    "olmo": {"model": MODEL["olmo"] | SCALED},
    "experts": {"model": EXPERTS},
    "bias": {"model": {"balance": "bias", "balance_coefficient": 0.05}},
    "deepseek": {"model": EXPERTS | DEEPSEEK},
    # A base half as wide and a third as deep, and experts that have not grown.
    "complete-p": {
        "model": {
            "parametrization": "complete_p",
            **{"base_d_model": 16, "base_n_layers": 1, "base_d_expert": 16},
        },
        "optimizer": {"weight_decay": 0.5},
    },
    "mlp-gelu": {"model": {"mlp": "gelu"}},
    "layers7": {"model": {"n_layers": 7}},
    # A sequence of 16 tokens has two or three documents; with more kinds of tokens, few would end.
    "documents": {
        "model": {
            "attention_within_documents": True,
            "end_of_document_id": 3,
            "vocabulary_size": 10,
            "vocabulary_multiple": 3,  # 12 rows with 1, 2 and 4 tensor ranks
        }
    },
    "reduce-bf16": {"parallel": {"reduce_format": "bf16"}, "precision": {"kind": "bf16"}},
    "z-loss": {"train": {"z_loss": 0.1}},
    "micro-batch-2": {"train": {"micro_batch_size": 2, "global_batch_size": 8}},
    "ramp": {"train": {"global_batch_size": 8, "batch_ramp": RAMP}},
    "micro-batch-4": {"train": {"micro_batch_size": 4, "global_batch_size": 8}},
    "compiled": {"train": {"compile": "always"}},
    "chunks4": {"parallel": {"chunks": 4}, "model": {"n_layers": 8}},
    "long": {"model": {"sequence_length": 32}},
    "wide": {"model": {"d_model": 64}},
    "rounded": {"model": ROUNDED},
    # Sides in multiples of 16 or 32 on each rank.
    "rounded-fp8": {"model": ROUNDED | {"d_head": 8, "sequence_length": 32}},
    # In fp64 but for numbers rounded to fp8, and for a loss scale, which must cancel out.
    "matmuls-in-fp8": {"precision": {"kind": "fp8", "fp8": {"emulate": True, "precise_blocks": 0}}},
    "scaled-loss": {"precision": {"kind": "fp16"}},
}
KINDS = ("fp32", "fp16", "bf16", "fp8", "fp8_lowbit")
# Each axis by itself and with others in fp64, and each precision; the faults of test_mutations.py
# show in these rows.
EVERY_DAY = (
    *("dp2 zero0, dropout", "dp2 zero1", "dp2 zero3, dropout", "dp4 hsdp2 zero2, muon"),
    *("dp2 zero3, untied", "bf16 dp2 zero2, untied"),
    *("bf16 dp4 hsdp2 zero1 reduce-bf16", "dp4 hsdp2 pp2 1f1b zero2, dropout"),
    "tp2, grouped swiglu head-norm norm-after z-loss",
    *("tp4 sequence, modern few-keys dropout", "tp2 recompute-attention, multi-query"),
    *("tp2, muon all-norm dropout", "tp2 sequence recompute-block, modern dropout"),
    *("pp2 1f1b, dropout", "pp2 interleaved, untied layers7", "pp2 zero-bubble-chunks"),
    "dp2 pp2 interleaved chunks4 zero1",
    *("cp2 ulysses zero0, documents rotary dropout", "cp2 ring zero0, muon rotary"),
    *("cp4 ring zero0, documents", "dp3 tp2 zero1, muon"),
    "dp2 tp2 pp2 sequence 1f1b zero3 recompute-block, olmo muon dropout",
    "dp2 tp2 cp2 sequence ring zero1, modern",
    # Mixtures of experts, on one rank and on several.
    *("dp4 hsdp2 ep2 zero2, experts bias", "cp2 ep2 ring zero3, rotary deepseek"),
    "dp2 ep2 tp2 pp2 zero1 1f1b, deepseek",
    "tp2 pp2 cp2 sequence interleaved ulysses zero1, modern documents z-loss dropout",
    *("fp32 cp2 ring", "bf16 tp2 sequence, dropout", "fp16 pp2, dropout", "fp8 dp2 zero1, dropout"),
    *("fp8_lowbit dp4 hsdp2 zero2, dropout", "matmuls-in-fp8 dp2 zero1, dropout"),
    # Multipliers of width and depth.
    *("dp2 zero3, complete-p untied", "tp2 pp2 sequence 1f1b, complete-p muon norm-after"),
    "dp2 ep2 zero1, complete-p experts",
)
# Every pair of words, as a random search has found with few rows.
PAIRS = (
    "zero0 pp2 zero-bubble cp4 ulysses, rotary ramp",
    "zero3 pp2 1f1b cp4 ulysses, muon dropout wide-heads z-loss ramp",
    "dp3 zero1 cp2 ulysses recompute-block, all-norm wide-heads documents",
    "dp3 zero1 cp2 ring recompute-block, muon rotary rms swiglu grouped no-bias z-loss",
    "dp3 zero2 tp2 sequence, muon rotary swiglu all-norm norm-after no-bias documents",
    "dp4 zero3 hsdp2 pp2 1f1b, untied swiglu all-norm no-bias documents z-loss layers7",
    "dp4 zero1 hsdp2 pp2 zero-bubble-chunks, muon untied rotary rms swiglu norm-after ramp",
    "tp4 pp2 gpipe, dropout rms swiglu grouped norm-after no-bias wide-heads documents z-loss",
    "zero0 tp4 cp2 ring recompute-attention, muon untied rotary rms grouped documents z-loss ramp",
    "dp3 zero1 pp2 zero-bubble, dropout untied rotary rms swiglu no-bias wide-heads z-loss layers7",
    "zero1 tp4 cp2 ring recompute-block, rotary rms swiglu head-norm norm-after no-bias wide-heads",
    "zero0 pp4 zero-bubble cp2 ring, muon untied rotary swiglu grouped norm-after no-bias "
    "z-loss ramp",
    "dp2 zero1 tp2 pp2 zero-bubble, untied rotary swiglu all-norm no-bias wide-heads z-loss "
    "layers7 ramp",
    "tp2 sequence pp2 zero-bubble-chunks, dropout untied rms swiglu norm-after no-bias "
    "documents z-loss",
    "zero1 pp4 zero-bubble cp2 ulysses, untied rotary rms swiglu head-norm wide-heads z-loss "
    "micro-batch-2",
    "dp4 zero3 hsdp2 pp2 gpipe, muon rms swiglu all-norm norm-after no-bias wide-heads "
    "documents z-loss ramp",
    "dp2 zero0 cp4 ring recompute-attention, rotary rms grouped head-norm norm-after z-loss "
    "micro-batch-2",
    "dp3 zero3 pp2 1f1b recompute-attention, muon dropout rotary swiglu head-norm no-bias "
    "wide-heads z-loss",
    "dp2 zero1 pp2 zero-bubble-chunks, dropout untied rms swiglu grouped all-norm wide-heads "
    "z-loss layers7",
    "dp4 zero2 hsdp2 cp2 ring, rotary swiglu grouped head-norm norm-after no-bias wide-heads "
    "documents z-loss",
    "dp4 zero1 hsdp2 pp2 zero-bubble, dropout rotary grouped all-norm wide-heads documents "
    "z-loss layers7 ramp",
    "dp3 zero1 pp2 gpipe recompute-attention, dropout untied rms swiglu head-norm norm-after "
    "documents z-loss",
    "zero3 tp4 cp2 ring recompute-attention, untied rotary grouped norm-after no-bias "
    "documents micro-batch-2",
    "zero3 pp4 gpipe cp2 ulysses, untied head-norm norm-after wide-heads documents z-loss "
    "layers7 micro-batch-2",
    "zero2 cp4 ring recompute-block, muon rotary rms swiglu all-norm norm-after wide-heads "
    "documents micro-batch-2",
    "zero1 pp2 zero-bubble-chunks cp2 ring, untied rotary rms swiglu grouped all-norm "
    "norm-after wide-heads layers7",
    "dp3 zero1 pp2 interleaved, muon dropout untied rotary rms grouped head-norm no-bias "
    "wide-heads documents z-loss",
    "pp4 gpipe recompute-block, muon dropout untied rms swiglu grouped all-norm norm-after "
    "wide-heads documents ramp",
    "zero0 pp4 1f1b cp2 ring recompute-block, untied rotary rms grouped head-norm norm-after "
    "wide-heads z-loss layers7",
    "dp3 zero0 pp2 zero-bubble-chunks, dropout untied rms swiglu grouped norm-after no-bias "
    "wide-heads z-loss layers7",
    "zero1 pp2 gpipe cp4 ring recompute-attention, muon untied rotary swiglu grouped "
    "all-norm documents z-loss layers7",
    "tp4 sequence pp2 zero-bubble, dropout untied swiglu grouped all-norm norm-after no-bias "
    "wide-heads z-loss layers7",
    "dp4 zero0 tp2 sequence recompute-block, dropout rotary rms swiglu grouped all-norm "
    "wide-heads documents z-loss ramp",
    "dp2 zero3 pp2 interleaved, muon dropout untied rotary swiglu grouped all-norm "
    "norm-after no-bias z-loss layers7 ramp",
    "zero0 pp2 interleaved cp4 ring recompute-block, muon rotary rms swiglu grouped "
    "head-norm norm-after z-loss layers7 ramp",
    "zero1 tp2 sequence cp4 ring, rms swiglu grouped head-norm norm-after no-bias wide-heads "
    "documents z-loss micro-batch-2",
    "tp4 pp2 zero-bubble-chunks, muon dropout rotary rms grouped head-norm norm-after "
    "no-bias wide-heads z-loss layers7 ramp",
    "dp2 zero0 pp2 gpipe cp2 ulysses recompute-attention, muon dropout untied rotary rms "
    "no-bias z-loss layers7 micro-batch-2",
    "dp4 zero1 hsdp2 pp2 interleaved, dropout untied swiglu grouped head-norm norm-after "
    "documents z-loss layers7 micro-batch-2",
    "tp4 pp2 interleaved recompute-attention, muon rotary swiglu grouped norm-after no-bias "
    "wide-heads documents micro-batch-2",
    "dp2 zero2 tp4 sequence recompute-block, dropout rms swiglu grouped all-norm no-bias "
    "wide-heads documents z-loss micro-batch-2",
    "dp4 zero2 hsdp2 tp2 sequence recompute-attention, dropout swiglu head-norm norm-after "
    "no-bias wide-heads documents z-loss ramp",
    "dp2 zero1 pp4 1f1b recompute-attention, untied rotary rms swiglu grouped head-norm "
    "norm-after wide-heads documents z-loss layers7",
    "dp4 zero2 hsdp2 cp2 ulysses recompute-block, untied rotary rms grouped head-norm "
    "norm-after no-bias documents z-loss micro-batch-2",
    "zero0 pp2 zero-bubble-chunks cp4 ulysses, untied rms all-norm norm-after no-bias "
    "wide-heads documents z-loss layers7 micro-batch-2",
    "tp4 pp2 1f1b recompute-attention, dropout untied rotary swiglu grouped norm-after "
    "no-bias wide-heads documents z-loss micro-batch-2",
    "tp2 sequence pp4 gpipe recompute-attention, dropout rotary rms grouped head-norm "
    "norm-after wide-heads documents layers7 micro-batch-2",
)
PRECISIONS = (
    *("fp32 dp2 zero3, dropout", "fp32 dp2 tp2 pp2 sequence zero1, dropout"),
    *("fp32 pp2 zero-bubble-chunks", "fp32 tp2 sequence, muon"),
    *("bf16 dp2 zero3, dropout", "bf16 dp2 tp2 pp2 sequence zero1, dropout"),
    *("bf16 dp4 zero2 reduce-bf16, untied", "bf16 dp2 pp2 1f1b zero3 reduce-bf16, dropout"),
    *("bf16 dp2 pp2 interleaved zero2, untied dropout", "fp32 dp2 pp2 gpipe zero2"),
    *("bf16 dp2 zero0, untied modern", "bf16 dp2 pp2 1f1b zero3, untied dropout"),
    *("bf16 cp2, dropout", "bf16 tp2 sequence, muon"),
    *("fp16 dp2 zero3 recompute-block, dropout", "fp16 dp4 hsdp2 zero3, dropout", "fp16 cp2 ring"),
    *("fp16 pp2 interleaved, untied dropout", "fp16 dp2 tp2 pp2 sequence zero1, dropout"),
    # A matmul of fewer tokens or columns than 16 is refused.
    *("fp8 dp2 zero3 gather recompute-block, dropout", "fp8 dp4 hsdp2 zero3, dropout"),
    *("fp8 tp2 sequence recompute-attention, dropout", "fp8 tp4, untied wide"),
    *("fp8 pp2 interleaved, untied dropout", "fp8 dp2 tp2 pp2 sequence zero1, dropout"),
    *("fp8 dp2 tp2 cp2 sequence zero3, long dropout", "fp8 rowwise tp2 sequence, dropout"),
    "fp8 rowwise cp2, long",
    # Gradients of ranks are rounded before they are added up, and a part has 32 columns at least.
    *("fp8_lowbit dp2 zero3 gather recompute-block, dropout", "fp8_lowbit dp3 zero2"),
    *("fp8_lowbit pp2 interleaved, untied dropout", "fp8_lowbit cp2 ring zero3, long"),
    "fp8_lowbit dp2 tp2 pp2 sequence zero1, wide dropout",
    # What other ranks have may change the scale by which the smallest numbers are rounded, where
    # layers or sequences are sharded.
    "matmuls-in-fp8 dp2 pp2 interleaved zero3, dropout",
    *("matmuls-in-fp8 tp2 sequence recompute-attention, dropout", "matmuls-in-fp8 cp2 ring, long"),
    "matmuls-in-fp8 dp2 tp2 cp2 sequence zero3, long dropout",
    *("scaled-loss dp2 tp2 pp2 sequence zero1, dropout", "scaled-loss dp2 cp2 ring zero3"),
    *("fp32 tp2 pp2 sequence, rounded dropout", "bf16 tp2 sequence, rounded dropout"),
    *("fp16 cp2 ring, rounded", "fp8 tp2 sequence, rounded-fp8 dropout"),
    *("fp8 dp2 zero3 gather, rounded-fp8", "fp8_lowbit tp2 sequence, rounded-fp8 wide"),
    "fp8_lowbit dp2 zero2, rounded-fp8",
)
OTHERS = (
    *("dp2 zero2 pp4 gpipe, layers7", "dp2 zero2 pp2 interleaved, untied"),
    *("recompute-block, dropout", "recompute-attention, modern dropout", "micro-batch-4, dropout"),
    *("dp2 zero1, compiled dropout", "tp2 sequence, compiled olmo dropout"),
    "cp2 ring zero3, compiled modern",
    *("tp2 sequence recompute-block, compiled dropout", "cp2 ulysses, compiled dropout"),
    *("tp2 recompute-attention, compiled dropout", "tp2 pp2 recompute-block, compiled dropout"),
    "dp2 zero3 recompute-block half, compiled dropout",
    "cp2 ulysses zero3 recompute-block, compiled dropout",
)
# Matmuls that add to gradients, now or later.
SUMS = (
    "pp2 zero-bubble-chunks, compiled modern dropout",
    "tp2 pp2 sequence zero-bubble-chunks, compiled modern dropout micro-batch-2",
    "bf16 tp2 pp2 sequence zero-bubble, compiled dropout",
    "bf16 pp2 zero-bubble-chunks, compiled",
    "dp2 tp2 pp2 zero1 zero-bubble recompute-block, olmo",
    "tp2 pp2 sequence zero-bubble recompute-attention, compiled modern dropout",
    "pp2 zero-bubble-chunks recompute-block, dropout",
    "pp2 zero-bubble-chunks recompute-attention, compiled dropout",
    "dp2 zero1 pp2 zero-bubble recompute-block, compiled dropout",
    *("bf16 pp2 zero-bubble-chunks, modern", "bf16 dp2 pp2 interleaved zero1, dropout"),
    # More tensor ranks than heads of keys and values.
    *("dp2 zero3 tp4 sequence, muon modern few-keys", "tp4 pp2 zero-bubble, multi-query dropout"),
    "tp4 cp2 ring recompute-block, rotary multi-query documents micro-batch-2",
    *("dp2 tp4 zero1, few-keys norm-after", "tp2 sequence recompute-block, compiled multi-query"),
    "matmuls-in-fp8 tp2 sequence, multi-query wide dropout",
    "bf16 tp4 sequence, few-keys dropout",
    # Some blocks recompute.
    *("pp2 interleaved recompute-attention half, layers7", "compiled recompute-block half"),
    *("tp2 sequence recompute-block half, dropout", "dp2 zero3 recompute-block half, dropout"),
    "tp2 sequence, micro-batch-4",
)
MIXTURES = (
    *("tp2, experts", "tp2 sequence recompute-block, modern deepseek bias dropout"),
    *("dp2 ep2 zero1, experts", "dp4 ep2 zero3 recompute-block, modern deepseek bias dropout"),
    *("dp2 ep2 zero0, deepseek micro-batch-2", "cp2 dp2 ep4 ulysses zero1, experts"),
    *("dp2 ep2 pp2 zero1 zero-bubble, experts bias", "pp2 interleaved, deepseek"),
    *("dp2 tp2 ep2 sequence zero3, experts dropout", "dp4 ep4 zero3, deepseek documents"),
    *("dp2 ep2 tp2 zero1, muon experts", "dp4 hsdp2 ep2 pp2 zero3, muon deepseek"),
    "tp4 sequence zero1 dp2, muon experts mlp-gelu",
    *("dp2 ep2 zero1, compiled deepseek", "tp2 sequence, compiled experts"),
    *("scaled-loss dp2 ep2 zero1, experts", "fp32 dp2 ep2 zero3, experts"),
    "dp2 ep2 pp2 interleaved zero3 recompute-attention, deepseek ramp",
)
"""Mixtures of experts."""
SCALED_SHAPES = (
    *("tp2, complete-p", "pp2 zero-bubble-chunks, complete-p", "pp2 interleaved, complete-p olmo"),
    *("dp2 zero1, complete-p compiled modern", "dp4 hsdp2 zero2, complete-p muon"),
    *("cp2 ring zero0, complete-p rotary", "cp2 ulysses zero3, complete-p untied recompute-block"),
    *(
        "dp2 tp2 ep2 sequence zero3, complete-p deepseek",
        "dp2 ep2 tp2 zero1, complete-p muon experts",
    ),
    *(
        "tp2 sequence recompute-block, complete-p compiled norm-after",
        "fp32 dp2 zero3, complete-p",
    ),
    *("bf16 tp2 sequence, complete-p", "fp8 dp2 zero1, complete-p dropout"),
    *(
        "fp16 pp2, complete-p",
        "fp8_lowbit dp2 zero2, complete-p",
        "dp2 zero0 tp2, complete-p z-loss",
    ),
)
"""CompleteP: multipliers of every parameter's updates, of residual branches and of logits."""


@dataclass(frozen=True)
class Row:
    """One line of the parity table."""

    name: str

    @property
    def words(self) -> list[str]:
        """What it is made of."""
        return self.name.replace(",", " ").split()

    @property
    def computed_in(self) -> str:
        """The precision of weights and computation."""
        return next((word for word in self.words if word in KINDS), "fp64")

    @property
    def layout(self) -> Layout:
        """What it changes, except for the kind of precision, which the training is told."""
        name = " ".join(word for word in self.words if word not in KINDS)
        return read_layout(name, WORDS)

    @property
    def n_ranks(self) -> int:
        """Processes it takes."""
        return self.layout.n_ranks

    @property
    def batch_size(self) -> int:
        """Sequences of a step: two for each stage on each rank, so that all there is to do is done.

        Low precisions have more, for which decision 013 derives the errors.
        """
        of, data = self.layout, self.layout.data
        is_exact = self.computed_in in ("fp64", "fp32") and "precision" not in of.sections
        return 2 * of.parallel.get("pipeline", 1) * data if is_exact else 8 // data * data

    def build_run(self, *, sharded: bool = True) -> Run:
        """Builds the run of this row, or the same run on a single device."""
        sections = merge(BASE, {"train": {"global_batch_size": self.batch_size}})
        sections = merge(sections, self.layout.sections)
        return build_run(sections | ({} if sharded else {"parallel": BASE["parallel"]}))


TABLE = {
    name: Row(name)
    for name in (*EVERY_DAY, *PAIRS, *PRECISIONS, *OTHERS, *SUMS, *MIXTURES, *SCALED_SHAPES)
}


def train_rank(run: Run, n_ranks: int, precision: str) -> Outcome:
    """Trains in this process, one of `n_ranks` that `run_ranks` has started."""
    return train_three_steps(run, dist.get_rank(), n_ranks, precision)
