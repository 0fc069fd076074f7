"""What a step on the fake device sends is what the plan counts, axis by axis, by NCCL's own log."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from benchmarks.timeline import Job, read_messages, record

from trainyard.layout.resolve import resolve
from trainyard.planning.traffic import rank_traffic

SMALL = (
    *("precision.kind=bf16", "train.micro_batch_size=2", "train.global_batch_size=16"),
    *("train.batch_ramp=none", "train.compile=never", "model.n_layers=4"),
    "model.dropout=0",
)
LAYOUTS = {
    "tensor 2, ZeRO 3": (4, "parallel.tensor=2", "parallel.zero_stage=3"),
    "tensor 2, sequence, ZeRO 1": (
        *(4, "parallel.tensor=2", "parallel.sequence=true", "parallel.zero_stage=1"),
    ),
    "pipeline 2, interleaved": (
        *(4, "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=2"),
        "parallel.zero_stage=1",
    ),
    "ring of 2, replicated": (
        *(8, "parallel.context=2", "parallel.context_method=ring", "parallel.data_replicate=2"),
        "parallel.zero_stage=2",
    ),
}


@pytest.mark.table
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_sends_what_the_plan_counts(name: str, tmp_path: Path) -> None:
    n_ranks, *overrides = LAYOUTS[name]
    job = Job("tiny", "h100-80g", int(n_ranks), (*SMALL, *map(str, overrides)))
    logs = record(job, tmp_path)
    run = job.load()
    plan = resolve(run, job.n_gpus)
    for stage, log in enumerate(logs):
        planned: Counter[tuple[str, str]] = Counter()
        for kind in rank_traffic(run, plan, stage):
            planned[kind.axis, kind.collective] += kind.n_bytes
        sent: Counter[tuple[str, str]] = Counter()
        for axis, collective, n_bytes in read_messages(log):
            if axis != "all" and collective != "recv" and n_bytes > 64:
                sent[axis, collective] += n_bytes
        assert sent == planned, f"stage {stage}"
