"""Layouts of the parity table, their ranks on fake devices of their own.

Nothing is exchanged, so this shows no number: it shows that groups, buffers, streams and the logic
of the host get through a step, and that no rank waits in it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fake_cuda.device import in_forks
from tests.fake_cuda.steps import Measured, judge_rows, measure_rank
from tests.parity.rows import MIXTURES, OTHERS, PRECISIONS, Row

from trainyard.config.run import Run
from trainyard.model.experts import GROUPED_MULTIPLE

LAYOUTS = (
    "recompute-attention, olmo dropout",
    "bf16 tp2 sequence, dropout",
    "cp2 ring recompute-attention",
    "cp2 ring, muon",
    "dp2 zero1",
    "dp2 zero2, modern dropout",
    "dp2 zero2, olmo dropout",
    "dp2 zero3, muon dropout",
    "fp16 pp2, dropout",
    "fp32 cp2 ring",
    "fp8 dp2 zero1, dropout",
    "pp2 1f1b, dropout",
    "pp2 gpipe, dropout",
    "pp2 interleaved, muon layers7",
    "pp2 interleaved, untied layers7",
    "pp2 zero-bubble, dropout",
    "pp2 zero-bubble-chunks",
    "pp2 zero-bubble-chunks, modern dropout",
    "pp2 zero-bubble-chunks, olmo dropout",
    "pp2, dropout ramp",
    "dp3 zero3",
    "cp4 ring zero0, documents",
    "cp4 ring, untied",
    "cp4 zero1, muon",
    "dp2 cp2 ring zero1",
    "dp2 hsdp2 cp2 zero2",
    "dp2 pp2 interleaved zero1",
    "dp2 pp2, dropout micro-batch-2",
    "dp2 tp2 sequence zero1, muon modern",
    "dp2 tp2 sequence zero1, muon olmo",
    "dp2 tp2, dropout ramp",
    "dp4 hsdp2 zero2, muon",
    "dp4 zero2, untied",
    "dp4 zero3 recompute-block, dropout",
    "fp8_lowbit dp4 hsdp2 zero2, dropout",
    "tp4 sequence, modern dropout",
    "tp4 sequence, muon untied dropout",
    "dp3 tp2 zero1, muon",
    "dp2 tp2 pp2 sequence zero-bubble-chunks zero1, untied",
    "dp2 tp2 pp2 sequence zero3 recompute-block, modern documents z-loss dropout",
    "dp2 tp2 pp2 sequence zero3 recompute-block, olmo dropout",
    "dp2 tp4 sequence zero2",
    "dp4 hsdp2 pp2 zero1",
    "dp4 hsdp2 tp2 zero2, muon",
    "tp2 pp2 cp2 sequence interleaved ring",
    "tp2 pp2 cp2 sequence interleaved, modern documents z-loss dropout",
    "tp2 pp2 cp2 sequence interleaved, olmo dropout",
    "tp2 pp4 sequence zero-bubble",
)
"""Every pair of words with which the steps of a GPU differ; budgets are by these names."""
ROWS = {name: Row(name) for name in (*LAYOUTS, *PRECISIONS, *OTHERS, *MIXTURES)}
KIND_FOR = {"fp64": "bf16"}
"""fp64 is no precision of training."""


def build_run(row: Row) -> Run:
    """Builds the run of a row in a precision of training, without emulation."""
    run = row.build_run()
    kind = run.precision.kind if run.precision.kind != "fp32" else row.computed_in
    fp8 = run.precision.fp8.model_copy(update={"emulate": False, "precise_blocks": 0})
    changes = {"kind": KIND_FOR.get(kind, kind), "fp8": fp8}
    return run.model_copy(update={"precision": run.precision.model_copy(update=changes)})


def find_refused() -> dict[str, str]:
    """Maps rows that a GPU cannot compute, for lack of a kernel, to the reason."""
    refused = {}
    for name, row in ROWS.items():
        run = build_run(row)
        if run.parallel.context > 1 and run.parallel.context_method == "ring":
            if run.model.attention_within_documents:
                refused[name] = "incompatible with model.attention_within_documents=true"
            elif run.precision.kind == "fp32":
                refused[name] = "on a GPU is incompatible with precision.kind='fp32'"
            elif run.model.d_head % 8:
                refused[name] = f"on a GPU is incompatible with heads of {run.model.d_head} values"
    return refused


REFUSED = find_refused()


def measure_ranks(row: Row, folder: Path) -> list[Measured]:
    """Trains all ranks of a row."""
    run, n_ranks, store = build_run(row), row.n_ranks, folder / "store"

    def work(rank: int) -> Measured:
        return measure_rank(run, rank, n_ranks, store)

    return in_forks(n_ranks, work, {"FAKE_CUDA_DEVICES": str(n_ranks)})


def count_waits(row: Row, found: list[int]) -> list[int]:
    """Gives the waits of each rank, of blocks with experts: none, if each rank has all of them.

    One a pass if other ranks have some, for the size of the message, and one where matmuls loop.
    """
    run = build_run(row)
    is_uneven = run.model.d_expert // run.parallel.tensor % GROUPED_MULTIPLE > 0
    loops = is_uneven or run.precision.kind != "bf16"
    n_waits = (run.parallel.expert > 1) + loops
    if not run.model.n_experts or not n_waits:
        return [0] * len(found)
    n_blocks = run.model.n_layers - run.model.n_dense_blocks
    n_passes = 1 + (run.parallel.recompute == "block")
    n_micro_batches = run.train.global_batch_size // row.layout.data // run.train.micro_batch_size
    n_replicas = row.n_ranks // run.parallel.pipeline  # of all blocks
    assert sum(found) == n_replicas * n_blocks * n_passes * n_micro_batches * n_waits
    return found


def test_each_layout_has_a_budget_of_launches() -> None:
    judge_rows(ROWS.keys() - REFUSED.keys())


@pytest.mark.table
@pytest.mark.parametrize("name", [name for name in ROWS if name not in REFUSED])
def test_all_ranks_get_through_a_step(
    name: str,
    tmp_path: Path,
    stages_agree: None,
    note_launches: Callable[[int], None],
) -> None:
    ranks = measure_ranks(ROWS[name], tmp_path)
    waits = count_waits(ROWS[name], [measured.counts.waits for measured in ranks])
    for measured, n_waits in zip(ranks, waits, strict=True):
        measured.judge(n_waits)
    note_launches(max(measured.counts.launches for measured in ranks))


@pytest.mark.parametrize(("name", "why"), REFUSED.items())
def test_what_a_gpu_cannot_do_is_refused(name: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=why):
        measure_ranks(ROWS[name], tmp_path)
