"""Kernels of a step against counts by hand, and their price."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from tests.circles import everyday
from tests.command import trainyard

from trainyard.architecture import head_layer, matmuls, parameter_count
from trainyard.bench.roofline import price
from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.flops import matmul_flops, model_flops_per_token, score_flops
from trainyard.layout.resolve import resolve
from trainyard.planning.clusters import find_machine
from trainyard.simulate.kernels import Kernel, count_kernels

# Blocks of one micro batch of 4 x 64 tokens, D 128, F 512, 2 heads.
SHAPE = [
    *("model.n_layers=2", "model.d_model=128", "model.n_heads=2", "model.d_ff=512"),
    *("model.sequence_length=64", "model.vocabulary_size=1000", "precision.kind=bf16"),
    *("train.batch_ramp=none", "train.micro_batch_size=4", "train.global_batch_size=20"),
]
TOKENS, D, F, N_MICRO_BATCHES = 4 * 64, 128, 512, 5


def tiny(*changes: str) -> Run:
    return load_run("tiny", [*SHAPE, *changes]).run


def count(*changes: str) -> Counter[Kernel]:
    # Not in this process, which must not run a backward pass before it forks.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(count_kernels, (tiny(*changes),))


@pytest.fixture(scope="module")
def compiled() -> Counter[Kernel]:
    return count()


def total_flops(kernels: Counter[Kernel], *, attention: bool) -> int:
    return sum(
        n * kernel.flops for kernel, n in kernels.items() if kernel.is_attention == attention
    )


COMPILED_OR_NOT = ["", "train.compile=never"]


@pytest.mark.parametrize(
    "changes", everyday([*COMPILED_OR_NOT, "parallel.recompute=block"], COMPILED_OR_NOT)
)
def test_flop_is_that_of_the_plan(changes: str, compiled: Counter[Kernel]) -> None:
    kernels = count(*changes.split()) if changes else compiled
    run = tiny(*changes.split())
    padded = resolve(run).padded_vocabulary_size
    n_tokens = N_MICRO_BATCHES * TOKENS
    blocks = run.model.n_layers * matmul_flops(matmuls(run.model))
    scores = run.model.n_layers * score_flops(run.model) / 2
    again = run.parallel.recompute == "block"
    head = matmul_flops([head_layer(run.model, padded)])
    # Nothing needs the last matmul of a recomputed block.
    unneeded = again * run.model.n_layers * 2 * F * D
    expected = n_tokens * ((3 + again) * blocks + 3 * head - unneeded)
    assert total_flops(kernels, attention=False) == expected
    # The backward kernel computes the scores again: five matmuls for two.
    assert total_flops(kernels, attention=True) == n_tokens * (3.5 + again) * scores
    model_flops = model_flops_per_token(run.model, padded)
    assert model_flops == 3 * (blocks + scores + head)


def bytes_of(kernels: Iterable[Kernel], place: str, name: str) -> list[int]:
    return sorted(k.n_bytes for k in kernels if (k.place, k.name) == (place, name))


def test_bytes_of_compiled_kernels(compiled: Counter[Kernel]) -> None:
    stream, wide = 2 * TOKENS * D, 2 * TOKENS * F
    forward = "blocks, forward"
    # GELU reads and writes the MLP's values.
    gelu = next(k for k in compiled if k.place == forward and "tanh" in k.name)
    assert gelu.n_bytes == 2 * wide
    assert compiled[gelu] == 2 * N_MICRO_BATCHES
    # Queries, keys, values and the result, and a number in fp32 for each row of scores.
    (attention,) = bytes_of(compiled, forward, "attention")
    assert attention == 4 * stream + 4 * TOKENS * 2
    # Input, weight, bias and output of qkv, out, up and down.
    layers = ((D, 3 * D), (D, D), (D, F), (F, D))
    by_hand = [2 * (TOKENS * (a + b) + a * b + b) for a, b in layers]
    assert bytes_of(compiled, forward, "addmm") == sorted(set(by_hand))


def test_bytes_of_the_rest(compiled: Counter[Kernel]) -> None:
    n = parameter_count(tiny().model, resolve(tiny()).padded_vocabulary_size)
    # Weight, gradient (divided in place) and both moments, read and written in fp32.
    update = sum(bytes_of(compiled, "update", "_fused_adamw_"))
    assert update == pytest.approx(8 * 4 * n, rel=1e-3)
    (norm,) = bytes_of(compiled, "update", "_foreach_norm")
    assert norm == pytest.approx(4 * n, rel=1e-3)
    # Ids; rows read and written.
    assert TOKENS * (8 + 2 * 4 * D) in bytes_of(compiled, "forward", "embedding")


def test_prices() -> None:
    machine = find_machine(gpu="h200")
    shares = machine.efficiencies
    matmul = Kernel("", "mm", 48 * 10**6, 989 * 10**9, torch.bfloat16)
    copy = Kernel("", "copy_", 48 * 10**6, n_launches=2)
    first, second = price(tiny(), Counter({matmul: 3, copy: 5}), machine)
    assert first.bound == "FLOP" and second.bound == "memory"
    assert first.limit_seconds == pytest.approx(3 * 1e-3)
    # Reading and writing add to multiplying, in small matrices most.
    multiplying = 1e-3 / (shares.matmul_share * shares.sustained_share)
    assert first.seconds == pytest.approx(3 * (multiplying + 1e-5 / shares.memory_share))
    assert second.limit_seconds == pytest.approx(5 * 1e-5)
    assert second.seconds == pytest.approx(5e-5 / shares.memory_share)
    assert (second.launches, second.bytes) == (10, 5 * 48 * 10**6)


def test_a_layout_of_many_ranks_is_refused(tmp_path: Path) -> None:
    words = ("bench", "gpt3-350m", "--roofline", "h200", "parallel.tensor=2")
    done = trainyard(*words, folder=tmp_path)
    assert done.returncode == 2
    assert "--roofline predicts one device; the layout of gpt3-350m has 2" in done.stderr


def test_the_table_says_that_it_is_a_prediction(tmp_path: Path) -> None:
    done = trainyard("bench", "tiny", "--roofline", "h100", *SHAPE, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on one H100: PREDICTED from the kernels of a step, not measured" in done.stdout
    assert "_fused_adamw_" in done.stdout
    assert "MFU" in done.stdout
