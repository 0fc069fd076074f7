from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.baselines import build_baseline, refuse_baseline
from benchmarks.megatron_core import leave_group
from tests.benchmarks.running import run

from trainyard.bench.measure import OurTraining, Timeline
from trainyard.config.load import load_run
from trainyard.errors import ConfigError, MachineError
from trainyard.training.state import TrainContext

Build = Callable[..., tuple[TrainContext, Timeline]]


DROPOUT_FREE = ("model.dropout=0.0", "model.vocabulary_size=512")


UNTIED = ("model.tied_embeddings=false", "model.d_ff=128")
LLAMA = (
    *("model.positions=rotary", "model.norm=rms", "model.mlp=swiglu", "model.bias=false"),
    *("model.n_heads=4", "model.n_key_value_heads=2"),
)
SCALED = (
    "model.rotary_scaling.factor=4.0",
    "model.rotary_scaling.original_sequence_length=16",
)
QWEN3 = ("model.query_key_norm=head", "model.layer_norm_epsilon=1e-6", "model.d_head=24")
OLMO2 = ("model.query_key_norm=all", "model.norm_place=after")


@pytest.mark.parametrize(
    ("baseline", "overrides"),
    [
        ("transformers", ()),
        ("transformers", UNTIED),
        ("transformers", ("model.positions=rotary",)),
        ("transformers", ("model.positions=rotary", *UNTIED)),
        ("transformers", LLAMA),
        ("transformers", (*LLAMA, *SCALED, *UNTIED)),
        ("transformers", (*LLAMA, *QWEN3)),
        ("transformers", (*LLAMA, *OLMO2)),
        ("litgpt", LLAMA),
        ("litgpt", (*LLAMA, *SCALED, *UNTIED)),
        ("plain-torch", ()),
        ("plain-torch", UNTIED),
    ],
)
def test_a_baseline_trains_as_ours_does(
    build: Build, baseline: str, overrides: tuple[str, ...]
) -> None:
    pytest.importorskip({"plain-torch": "torch"}.get(baseline, baseline))
    check_same_losses(baseline, *build(*DROPOUT_FREE, *overrides))


@pytest.mark.filterwarnings("default")  # it warns of what it misses
def test_megatron_core_trains_as_ours_does(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    bring_megatron_to_the_cpu(monkeypatch)
    try:  # its clipping and its recomputation insist on CUDA
        check_same_losses("megatron-core", *build(*DROPOUT_FREE, "optimizer.clip_norm=inf"))
    finally:
        leave_group()


def check_same_losses(baseline: str, context: TrainContext, timeline: Timeline) -> None:
    ours = OurTraining(context)
    theirs = build_baseline(baseline, context.run, context.plan, context.device, timeline)
    for _ in range(4):
        assert theirs.step().item() == pytest.approx(ours.step().item(), rel=2e-6)


@pytest.mark.parametrize("baseline", ["transformers", "plain-torch"])
def test_a_baseline_tells_the_same_parts(build: Build, baseline: str) -> None:
    pytest.importorskip({"plain-torch": "torch"}.get(baseline, baseline))
    context, timeline = build()
    theirs = build_baseline(baseline, context.run, context.plan, context.device, timeline)
    theirs.step()
    with timeline.recording(theirs.models) as marks:
        theirs.step()
    assert all(seconds > 0 for seconds in timeline.part_seconds(marks).values())


def test_transformers_knows_no_padding(build: Build) -> None:
    pytest.importorskip("transformers")
    context, timeline = build("model.dropout=0.0", "model.vocabulary_size=500")
    theirs = build_baseline("transformers", context.run, context.plan, context.device, timeline)
    ours = OurTraining(context)
    assert theirs.step().item() == pytest.approx(ours.step().item(), rel=2e-6)


def bring_megatron_to_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets it take memory on the CPU where it names CUDA; its mathematics stays as it is."""
    pytest.importorskip("megatron.core")
    from megatron.core import tensor_parallel

    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    for name in ("tensor", "zeros"):
        make = getattr(torch, name)

        def make_here(*arguments: Any, make: Any = make, **options: Any) -> Any:
            if options.get("device") == "cuda":
                options["device"] = "cpu"
            return make(*arguments, **options)

        monkeypatch.setattr(torch, name, make_here)
    monkeypatch.setattr(tensor_parallel, "model_parallel_cuda_manual_seed", lambda _seed: None)
    no_tracker = SimpleNamespace(fork=nullcontext)
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: no_tracker)


@pytest.mark.parametrize(
    ("baseline", "overrides", "kind", "problem"),
    [
        ("nanogpt", [], ConfigError, "'nanogpt' is not a baseline"),
        ("megatron-core", [], MachineError, "megatron-core"),
        (
            "transformers",
            ["precision.kind=fp16"],
            ConfigError,
            "precision.kind='fp16' is not available",
        ),
        (
            "plain-torch",
            ["optimizer.kind=muon"],
            ConfigError,
            "optimizer.kind='muon' is not available in plain-torch",
        ),
        ("plain-torch", ["train.z_loss=1e-4"], ConfigError, "train.z_loss=0.0001 is not avail"),
        (
            "plain-torch",
            ["model.attention_within_documents=true"],
            ConfigError,
            "model.attention_within_documents=true is not available in plain-torch",
        ),
        (
            "plain-torch",
            ["model.norm=rms"],
            ConfigError,
            "GPT2LMHeadModel has no model.norm='rms'",
        ),
    ],
)
def test_a_baseline_that_cannot_be(
    baseline: str, overrides: list[str], kind: type[Exception], problem: str
) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(kind, match=problem) as error:
        refuse_baseline(baseline, load_run("tiny", overrides).run)
    assert getattr(error.value, "hint", "")


@pytest.mark.exhaustive
def test_baselines_are_timed_beside_ours(tmp_path: Path) -> None:
    options = ["--baselines", "plain-torch", "--steps", "2", "--warm-up", "1", "--rounds", "2"]
    output = tmp_path / "record.json"
    words = ["tiny", "model.dropout=0", *options, "--output", str(output)]
    table = run("-m benchmarks.against", *words)
    ours, theirs = json.loads(output.read_text())["candidates"]
    assert [ours["name"], theirs["name"]] == ["fp32", "plain-torch"]
    assert theirs["first_loss"] == pytest.approx(ours["first_loss"], rel=2e-6)
    assert any(line.split() == ["fp32", "plain-torch"] for line in table.splitlines())
