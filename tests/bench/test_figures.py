from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainyard.bench.figures import compute_figures, recomputed_flops_per_token
from trainyard.config.load import load_run
from trainyard.model.gpt import GPT
from trainyard.model.init import initialize
from trainyard.planning.resolve import resolve

H200 = "NVIDIA H200"


def test_throughput_is_the_batch_over_the_time() -> None:
    run = load_run("gpt3-350m", ["train.global_batch_size=64", "train.batch_ramp=none"]).run
    plan = resolve(run, 4)
    figures = compute_figures(run, plan, [1.0, 3.0], H200)
    assert figures.samples_per_second == 32.0
    assert figures.tokens_per_second_per_device == 32 * 2048 / 4
    per_second = 32 * 2048 / 4 * plan.model_flops_per_token
    assert figures.tflops_per_second_per_device == pytest.approx(per_second / 1e12)
    assert figures.model_flops_utilization == pytest.approx(per_second / 989e12)
    assert figures.hardware_flops_utilization == figures.model_flops_utilization
    assert figures.milliseconds_per_step.mean == 2000.0


def test_the_peak_is_that_of_the_precision_and_none_where_it_is_unknown() -> None:
    seconds = [0.1, 0.1]
    shares = []
    for kind in ("bf16", "fp8"):
        run = load_run("gpt3-350m", ["train.batch_ramp=none", f"precision.kind={kind}"]).run
        shares.append(compute_figures(run, resolve(run, 1), seconds, H200).model_flops_utilization)
    assert shares[0] is not None and shares[1] is not None
    assert shares[0] / shares[1] == pytest.approx(1979 / 989)
    on_cpu = compute_figures(run, resolve(run, 1), seconds, "cpu")
    assert on_cpu.model_flops_utilization is None
    assert on_cpu.hardware_flops_utilization is None


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("recompute", ["attention", "block"])
def test_recomputed_products_are_those_that_torch_counts(
    recompute: Literal["attention", "block"], dropout: float
) -> None:
    run = load_run("tiny", [f"parallel.recompute={recompute}", f"model.dropout={dropout}"]).run
    tokens = torch.randint(run.model.vocabulary_size, (2, run.model.sequence_length))
    counted = []
    for kind in ("none", recompute):
        model = GPT(run.model, run.model.vocabulary_size, recompute=kind)  # type: ignore[arg-type]
        initialize(model, seed=1)
        keys = torch.tensor([3, 4]) if dropout else None
        with FlopCounterMode(display=False) as counter:
            model.summed_loss(model(tokens, keys), tokens).backward()  # type: ignore[no-untyped-call]
        products = counter.get_flop_counts()["Global"]
        counted.append(sum(n for op, n in products.items() if str(op) in ("aten.mm", "aten.addmm")))
    # Attention itself is told apart: its kernels count what no causal model needs.
    scores_and_values = 2.0 * run.model.n_layers * run.model.sequence_length * run.model.d_model
    expected = (recomputed_flops_per_token(run) - scores_and_values) * tokens.numel()
    assert counted[1] - counted[0] == expected
