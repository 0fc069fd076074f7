"""The planned memory of large models against what PyTorch's CUDA allocator hands out in a step.

Each device has the memory that the plan asks for, and what it leaves free of a small one: so a run
that fits by the plan but not on the device fails here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.fake_cuda.device import build_on_device, in_forks

from trainyard.bench.measure import OurTraining
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.launch.environment import Process
from trainyard.layout.resolve import Plan, resolve
from trainyard.parallel import model as parallel_model
from trainyard.parallel.mesh import choose_device
from trainyard.parallel.start import start_ranks
from trainyard.planning.memory import rank_memory
from trainyard.planning.search import USABLE_SHARE

EAGER = "train.compile=never"
TWO_OF_4 = "train.micro_batch_size=4 train.global_batch_size=8"
EIGHT_OF_4 = "train.micro_batch_size=4 train.global_batch_size=64"
EIGHT_OF_2 = "train.micro_batch_size=2 train.global_batch_size=32"
N_STEPS = 3
"""The first makes the optimizer's state; in the second all is as in later ones."""
MOST_ABOVE = 0.05
SMALL_DEVICE = 24 * 10**9

ONE_DEVICE = {
    f"gpt3-350m {TWO_OF_4}": True,
    f"gpt3-1.3b {TWO_OF_4}": True,
    f"gpt3-2.7b {TWO_OF_4}": False,
    "gpt3-6.7b train.micro_batch_size=2 train.global_batch_size=4": False,
    "olmo-2-1b train.micro_batch_size=1 train.global_batch_size=2": True,
    f"olmo-2-1b precision.kind=fp8 {TWO_OF_4}": False,
    f"gpt3-350m precision.kind=fp32 {TWO_OF_4}": False,
    f"gpt3-350m precision.kind=fp16 {TWO_OF_4}": False,
    f"gpt3-350m precision.kind=fp8 {TWO_OF_4}": True,
    f"gpt3-350m precision.kind=fp8_lowbit {TWO_OF_4}": True,
    f"gpt3-350m parallel.recompute=attention {TWO_OF_4}": True,
    f"gpt3-350m parallel.recompute=block {TWO_OF_4}": True,
    f"gpt3-350m precision.kind=fp8 parallel.recompute=attention {TWO_OF_4}": False,
    f"gpt3-350m precision.kind=fp8 parallel.recompute=block {TWO_OF_4}": False,
    "gpt3-350m train.micro_batch_size=1 train.global_batch_size=4": False,
    "gpt3-350m train.global_batch_size=4": False,
    f"gpt3-350m model.dropout=0 {TWO_OF_4}": False,
    f"gpt3-350m model.tied_embeddings=false {TWO_OF_4}": False,
}
ON_EIGHT = {
    f"gpt3-350m parallel.zero_stage=0 {EIGHT_OF_4}": False,
    f"gpt3-350m parallel.zero_stage=1 {EIGHT_OF_4}": False,
    f"gpt3-350m parallel.zero_stage=2 {EIGHT_OF_4}": True,
    f"gpt3-350m parallel.zero_stage=3 {EIGHT_OF_4}": False,
    f"gpt3-350m parallel.zero_stage=3 parallel.recompute=block {EIGHT_OF_4}": False,
    f"gpt3-1.3b parallel.zero_stage=2 {EIGHT_OF_4}": False,
    f"gpt3-6.7b parallel.zero_stage=3 {EIGHT_OF_2}": False,
    f"gpt3-6.7b parallel.tensor=8 parallel.sequence=true {EIGHT_OF_2}": False,
    f"gpt3-2.7b parallel.pipeline=4 {EIGHT_OF_2}": False,
    f"gpt3-2.7b parallel.pipeline=4 parallel.tensor=2 parallel.sequence=true {EIGHT_OF_2}": True,
    f"gpt3-1.3b parallel.context=8 parallel.context_method=ring model.dropout=0 {TWO_OF_4}": False,
    f"gpt3-1.3b parallel.context=8 parallel.context_method=ulysses {TWO_OF_4}": False,
}
CELLS = {
    f"on {n}: {text}{how}": (n, f"{text}{how}")
    for n, texts in ((1, ONE_DEVICE), (8, ON_EIGHT))
    for text, is_compiled in texts.items()
    for how in (("", f" {EAGER}") if is_compiled else (f" {EAGER}",))
}
"""Eagerly all; compiled, which takes most of a minute, those where the table says so."""


def measure_rank(run: Run, plan: Plan, rank: int, store: Path) -> int:
    """Trains one rank; gives its peak in the last step, without cuBLAS's workspaces."""
    n = plan.n_ranks
    # Nothing computes with them, and to draw billions takes minutes and all memory of this machine.
    vars(parallel_model)["initialize"] = lambda *_: None
    process = Process(rank, n, rank, n, store_file=store)
    device = choose_device(process)
    with start_ranks(process, device, dict):
        training = OurTraining(build_on_device(run, device, rank, n))
        for _ in range(N_STEPS):
            torch.cuda.reset_peak_memory_stats()
            training.step()
        peak, now = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        return peak - (now - torch.cuda.memory_allocated())


@pytest.mark.table
@pytest.mark.parametrize("name", CELLS, ids=CELLS)
def test_the_plan_is_at_most_a_little_above_and_never_below(
    name: str,
    tmp_path: Path,
    stages_agree: None,
    record_property: Callable[[str, object], None],
) -> None:
    n_ranks, words = CELLS[name]
    preset, *changes = words.split()
    run = load_run(preset, ["train.batch_ramp=none", *changes]).run
    plan = resolve(run, n_ranks)
    memories = [rank_memory(run, plan, each) for each in range(plan.topology.pipeline)]
    # The fake device has neither context nor libraries.
    planned = [each.peak_bytes - each.items["context and libraries"] for each in memories]
    left = (1 - USABLE_SHARE) * max(max(planned) / USABLE_SHARE, SMALL_DEVICE)
    megabytes = int((max(planned) + left) / 10**6)
    device = {"FAKE_CUDA_DEVICES": str(n_ranks), "FAKE_CUDA_MB": str(megabytes)}
    peaks = in_forks(
        n_ranks, lambda rank: measure_rank(run, plan, rank, tmp_path / "store"), device
    )
    in_stage = n_ranks // len(planned)
    for stage, found in enumerate(planned):
        peak = max(peaks[stage * in_stage : (stage + 1) * in_stage])
        record_property(f"stage {stage}", f"{found / peak - 1:+.1%}")
        assert peak <= found <= (1 + MOST_ABOVE) * peak, f"{found:,} planned, {peak:,} allocated"
