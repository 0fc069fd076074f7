"""Layouts whose traffic tests/simulate compares with the formulas, and what a block keeps of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.layouts import Layout, Sections, read_layout
from torch import Tensor

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.model.gpt import GPT
from trainyard.model.positions import Positions
from trainyard.parallel.tensor import apply_tensor_parallel
from trainyard.planning.traffic import Collective, rank_traffic

BASE = """train.compile=never train.micro_batch_size=1 train.global_batch_size=8 precision.kind=fp32
    model.n_layers=4 model.sequence_length=32 model.dropout=0.0 parallel.zero_stage=0"""
EVERY_DAY = (
    *("tp2 sequence untied", "cp2 recompute-attention", "dp4 hsdp2 zero2"),
    *("dp2 pp2 zero3 bf16", "dp2 tp2 zero3 bf16 muon", "dp2 zero3 untied bf16"),
    "dp4 hsdp2 zero2 bf16 reduce-bf16",
    "dp4 ep2 zero3 recompute-block experts bf16",
    *("tp2 sequence untied micro2", "tp2 sequence zero3 micro2"),
    *("dp2 tp2 zero3 fp8 emulated gather", "dp3 zero2 fp8_lowbit emulated batch6"),
)
TABLE = (
    *EVERY_DAY,
    *("dp2", "dp2 zero1", "dp3 zero3 bf16 batch6", "pp4 gpipe", "cp4 ring bf16"),
    *(
        "dp4 hsdp2 pp2 zero2 bf16",
        "dp2 pp2 interleaved zero2",
        "dp2 pp2 interleaved chunks4 zero1",
        "dp2 pp2 zero1 bf16 reduce-bf16",
        "dp2 pp2 zero3 untied",
        "pp2 interleaved untied",
        "dp2 pp2 zero-bubble-chunks zero1",
    ),
    *("tp2 pp2 sequence zero2 micro2", "tp2 pp2 sequence zero3 micro2"),
    *("dp2 tp2 pp2 sequence zero3", "tp2 recompute-block dropout", "tp2 recompute-attention bf16"),
    *("tp2 modern", "dp2 tp2 sequence zero3 modern"),
    *("cp2 modern", "cp2 ring bf16 modern", "pp2 modern"),
    *(
        "tp2 bf16 olmo",
        "dp2 tp2 sequence zero3 olmo",
        "tp2 cp2 olmo",
        "tp2 recompute-attention olmo",
    ),
    *("tp2 recompute-block olmo dropout", "tp2 sequence recompute-block olmo"),
    *("tp2 recompute-block modern micro2", "tp2 recompute-attention olmo micro2"),
    *("tp2 multi-query", "tp2 cp2 ring multi-query"),
    *("tp2 pp2 sequence recompute-block half multi-query", "cp2 ring recompute-attention half"),
    *("cp2 recompute-block half", "tp2 sequence recompute-block half olmo"),
    *("tp2 pp2 zero-bubble olmo", "tp2 pp2 zero-bubble-chunks olmo"),
    *("dp2 zero1 fp8 emulated", "dp4 hsdp2 zero1 fp8 emulated gather"),
    *("dp2 pp2 zero3 fp8 emulated gather", "dp2 tp2 sequence zero1 fp8_lowbit emulated"),
    *("dp2 pp2 zero3 fp8_lowbit emulated gather", "dp2 pp2 muon", "dp4 hsdp2 zero2 muon"),
    *("dp2 zero1 deepseek", "dp4 ep2 zero0 experts", "dp2 ep2 zero0 experts"),
    *(
        "tp2 sequence experts",
        "tp2 recompute-block experts",
        "tp2 recompute-block deepseek dropout",
    ),
    "dp2 tp2 ep2 sequence zero3 deepseek recompute-block bf16 micro2",
    "dp2 ep2 tp2 zero1 muon experts",
    *("cp2 ep2 ring zero1 experts recompute-block", "dp4 hsdp2 ep2 zero2 deepseek"),
    *("dp2 ep2 pp2 zero1 deepseek", "dp4 ep2 zero1 experts norm-after recompute-block half"),
)


def layout_of(name: str) -> Layout:
    words: dict[str, Sections] = {
        f"batch{n}": {"train": {"global_batch_size": n}} for n in (6, 28, 128)
    }
    words["micro2"] = {"train": {"micro_batch_size": 2}}
    words["chunks4"] = {"parallel": {"chunks": 4}, "model": {"n_layers": 8}}
    return read_layout(name, words)


def build_run(name: str, *overrides: str) -> Run:
    run = load_run("tiny", [*BASE.split(), *layout_of(name).overrides, *overrides]).run
    return run


def count_kept(run: Run, *, compiled: bool) -> float:
    """Counts what a block keeps for its backward pass, in times the whole residual stream."""
    model = GPT(run.model, run.model.vocabulary_size, torch.bfloat16, run.parallel.recompute)
    apply_tensor_parallel(model, dist.group.WORLD, run.parallel, 1)
    (block,) = model.blocks.values()
    block.recompute = "none"
    if compiled:
        block.compile()
    weights = {parameter.shape.numel() for parameter in block.parameters()}
    kept: dict[int, tuple[Tensor, int]] = {}

    def keep(x: Tensor) -> Tensor:
        if x.numel() not in weights:
            kept[x.untyped_storage()._cdata] = x, x.untyped_storage().nbytes()
        return x

    n_tokens, D = run.model.sequence_length, run.model.d_model
    x = torch.zeros(1, n_tokens // 2, D, dtype=torch.bfloat16, requires_grad=True)
    tokens = model.position_table.residual
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        out = block(x, Positions(tokens, tokens))
    out.sum().backward()
    return sum(n_bytes for _, n_bytes in kept.values()) / (n_tokens * D * 2)


@pytest.mark.parametrize("compiled", everyday([False, True], [False]))
def test_gathered_tokens_are_gathered_again_instead_of_kept(
    compiled: bool, run_ranks: Callable[..., list[float]]
) -> None:
    sizes = ("model.n_layers=1", "model.sequence_length=160")
    # Only what ranks exchange follows from `recompute`: the model itself keeps everything.
    runs = [build_run(f"tp2 sequence{choice}", *sizes) for choice in (" recompute-block", "")]
    once, again = (run_ranks(2, partial(count_kept, run, compiled=compiled)) for run in runs)
    # Inputs of two products: whole, or as cut; a compiled block computes even those again.
    assert min(once) - max(again) >= 2 * (1 - 1 / 2)


def test_every_kind_of_call_of_every_axis_is_in_the_table() -> None:
    kinds = set()
    for name in TABLE:
        run = build_run(name)
        plan = resolve(run, layout_of(name).n_ranks)
        kinds |= {(t.axis, t.collective) for t in rank_traffic(run, plan, 0)}
    data = {("shard", kind) for kind in get_args(Collective) if kind != "send"}
    tensor = {("tensor", kind) for kind in get_args(Collective) if kind != "send"}
    assert kinds == data | tensor | {
        *(("context", "all-to-all"), ("context", "send"), ("replicate", "all-reduce")),
        *(("context", "all-reduce"), ("expert", "all-to-all"), ("same experts", "all-reduce")),
        *(("same experts", "all-gather"), ("same experts", "reduce-scatter")),
        *(("pipeline", "send"), ("pipeline", "all-reduce"), ("stage", "all-to-all")),
    }
