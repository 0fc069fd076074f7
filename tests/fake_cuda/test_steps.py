"""Every precision, with and without dropout, recomputed or not, compiled or not, on one device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import product

import pytest
import torch
from tests.fake_cuda.device import in_fork
from tests.fake_cuda.steps import (
    count_calls,
    judge_rows,
    measure_run,
    train_baseline,
    train_once,
)

KINDS = ("fp32", "bf16", "fp16", "fp8", "fp8_lowbit")
DROPOUT = {"dropout": "model.dropout=0.1", "no dropout": "model.dropout=0"}
RECOMPUTE = {
    "nothing recomputed": "parallel.recompute=none",
    "attention recomputed": "parallel.recompute=attention",
    "blocks recomputed": "parallel.recompute=block",
}
COMPILE = {"compiled": "train.compile=gpu", "eager": "train.compile=never"}
AXES = (DROPOUT, RECOMPUTE, COMPILE)
COMPILED_IN_FULL = "bf16 on sm_90"
"""Compiled rows take most of the time: here dropout or recomputation may differ from the first of
its axis, elsewhere neither."""
ATTENTION = re.compile(r"aten::_(?:scaled_dot_product_)?(cudnn|flash|efficient)_attention")
DOCUMENTS = (
    *("model.attention_within_documents=true", "model.end_of_document_id=3"),
    *("model.vocabulary_size=10", "model.dropout=0.1", "train.z_loss=1e-4"),
)
EXPERTS = (
    *("model.positions=rotary", "model.norm=rms", "model.mlp=swiglu", "model.bias=false"),
    *("model.n_experts=16", "model.d_expert=512", "model.n_shared_experts=1"),
    *("model.router_z_loss=1e-3", "model.dropout=0"),
)
OTHERS = {
    "untied embeddings, eager": ("model.tied_embeddings=false", "train.compile=never"),
    "deterministic, compiled": ("train.deterministic=true",),
    "deterministic, eager": ("train.deterministic=true", "train.compile=never"),
    "rowwise, compiled": ("precision.fp8.scaling=rowwise",),
    "rowwise, eager": ("precision.fp8.scaling=rowwise", "train.compile=never"),
    "documents, compiled": DOCUMENTS,
    "documents, eager": (*DOCUMENTS, "train.compile=never"),
    "experts, compiled": EXPERTS,
    "experts, eager": (*EXPERTS, "train.compile=never"),
}
ONLY_FOR = {
    "experts": ("bf16",),
    "rowwise": ("fp8", "fp8_lowbit"),
    "documents": ("fp32", "bf16"),  # what takes a mask, and what takes lengths of documents
    "rowwise, compiled": ("fp8",),
    "deterministic, compiled": ("bf16",),
}


def rows() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Gives for each row its name, the capability of the device, and the settings of its run."""
    for kind, capability in product(KINDS, ("90", "80")):
        is_fp8 = kind.startswith("fp8")
        if is_fp8 and capability == "80":
            continue
        for names in product(*AXES):
            dropout, recompute, compiles = names
            device = f"{kind} on sm_{capability}"
            n_others = (dropout != next(iter(DROPOUT))) + (recompute != next(iter(RECOMPUTE)))
            if compiles == "eager" or n_others <= (device == COMPILED_IN_FULL):
                settings = tuple(axis[name] for axis, name in zip(AXES, names, strict=True))
                name = ", ".join([device, *names])
                yield name, capability, (f"precision.kind={kind}", *settings)
        for other, settings in OTHERS.items():
            kinds = ONLY_FOR.get(other, ONLY_FOR.get(other.partition(",")[0], KINDS))
            if capability == "90" and kind in kinds:
                yield f"{kind} on sm_90, {other}", "90", (f"precision.kind={kind}", *settings)


ROWS = {name: (capability, settings) for name, capability, settings in rows()}


def test_each_step_has_a_budget_of_launches() -> None:
    judge_rows(ROWS)


@pytest.mark.table
@pytest.mark.parametrize("name", ROWS)
def test_a_step_is_as_it_must_be(name: str, note_launches: Callable[[int], None]) -> None:
    capability, settings = ROWS[name]
    device = {"FAKE_CUDA_CAPABILITY": capability}
    measured = in_fork(lambda: measure_run(settings), device)
    measured.judge()
    note_launches(measured.counts.launches)


BLOCKS = {
    "host calls a block, gpt3": ("model.dropout=0",),
    "host calls a block, modern": (
        *("model.positions=rotary", "model.norm=rms", "model.mlp=swiglu", "model.bias=false"),
        "model.n_key_value_heads=2",
    ),
    "host calls a block, experts": EXPERTS,
}


@pytest.mark.parametrize("name", BLOCKS)
def test_calls_of_the_host(name: str, note_launches: Callable[[int], None]) -> None:
    run = (*BLOCKS[name], "precision.kind=bf16", "train.compile=gpu")
    few, many = (
        in_fork(lambda n=n: count_calls((*run, f"model.n_layers={n}")), {})  # type: ignore[misc]
        for n in (4, 8)
    )
    # Of 4 more blocks on 2 micro batches.
    note_launches(round((many - few) / 8))


def find_attention(settings: Sequence[str]) -> tuple[str, set[str]]:
    """Gives the kernel of attention that a run names, and those that a step and a loss call."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        context = train_once(settings)
    names = {event.key for event in profile.key_averages()}
    found = {match[1] for name in names if (match := ATTENTION.match(name))}
    return context.attention_kernel, found


@pytest.mark.parametrize(
    ("settings", "device", "kernel"),
    [
        ((), {}, "cudnn"),
        (("train.compile=gpu",), {}, "cudnn"),
        (("model.n_key_value_heads=2",), {"FAKE_CUDA_CAPABILITY": "100"}, "cudnn"),
        (("kernels.attention=cudnn",), {"FAKE_CUDA_CAPABILITY": "80"}, "cudnn"),
        (("kernels.attention=flash",), {}, "flash"),
        (("model.dropout=0.1",), {}, "flash"),
        (("train.deterministic=true",), {}, "flash"),
        (("model.sequence_length=192",), {}, "flash"),
        ((), {"FAKE_CUDA_CAPABILITY": "80"}, "flash"),
    ],
)
def test_the_kernel_of_attention(
    settings: tuple[str, ...], device: dict[str, str], kernel: str
) -> None:
    run = ("train.compile=never", "model.dropout=0", "precision.kind=bf16", *settings)
    named, called = in_fork(lambda: find_attention(run), device)
    assert (named, called) == (f"{kernel}_attention", {kernel})


def test_attention_within_documents_is_flash() -> None:
    run = (*DOCUMENTS, "model.dropout=0", "train.compile=never", "precision.kind=bf16")
    assert in_fork(lambda: find_attention(run), {}) == ("flash_attention", {"flash"})


def test_cudnn_that_is_not_there_is_refused() -> None:
    run = ("kernels.attention=cudnn", "model.dropout=0", "precision.kind=bf16")
    with pytest.raises(RuntimeError, match=r"kernels.attention='cudnn': torch .* on NVIDIA H200"):
        in_fork(lambda: train_once(run), {"FAKE_CUDA_CAPABILITY": "75"})


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
def test_a_step_in_the_code_for_rocm(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    settings = (f"precision.kind={kind}", "model.dropout=0.1", "train.compile=never")
    in_fork(lambda: measure_run(settings), {}).judge()


@pytest.mark.parametrize("name", ["plain-torch", "transformers"])
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_baseline_trains(name: str, kind: str) -> None:
    settings = [f"precision.kind={kind}", "train.compile=never"]
    in_fork(lambda: train_baseline(name, settings), {})
