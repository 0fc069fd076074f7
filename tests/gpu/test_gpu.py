"""What only a GPU can show: products in fp8, steps that wait for nobody, memory, baselines."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import pytest
import torch
from benchmarks.baselines import build_baseline
from tests.fake_cuda.device import build_on_device

from trainyard.bench.job import Steps, prepare_run
from trainyard.bench.measure import OurTraining, Timeline
from trainyard.config.load import load_run
from trainyard.config.precisions import Fp8
from trainyard.config.rules import takes_cudnn
from trainyard.errors import MachineError
from trainyard.launch.environment import Process, chooses_allocator
from trainyard.model.attention import CausalAttention, cudnn_can_attend
from trainyard.parallel.mesh import DeviceClock, choose_device
from trainyard.training.metrics import Metrics, peak_memory_bytes
from trainyard.training.run_folder import open_run, write_run_folder
from trainyard.training.state import State, TrainContext
from trainyard.training.step import train_step
from trainyard.training.worker import run_worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU on this machine"),
]
SHAPE = (
    *("model.n_layers=4", "model.d_model=256", "model.n_heads=4", "model.d_ff=1024"),
    *("train.micro_batch_size=4", "train.global_batch_size=8"),
)
WITHOUT, WITH = "model.dropout=0.0", "model.dropout=0.1"
with_and_without_dropout = pytest.mark.parametrize("dropout", [WITHOUT, WITH])


@pytest.fixture(autouse=True)
def _runs_are_the_tests_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def build(kind: str, *overrides: str) -> TrainContext:
    """Builds the context of a small run on the GPU."""
    choose_device(Process())
    run = load_run("tiny", [*SHAPE, f"precision.kind={kind}", *overrides]).run
    return build_on_device(run, torch.device("cuda", 0))


def needs_fp8() -> None:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no products in fp8 on this GPU")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_products_in_fp8_are_those_that_emulation_computes(scaling: str) -> None:
    needs_fp8()
    from trainyard.precision.float8 import build_product

    torch.manual_seed(1)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(1024, 256, device="cuda", dtype=torch.bfloat16) / 16
    upstream = torch.randn(512, 1024, device="cuda", dtype=torch.bfloat16)
    found = []
    for emulate in (False, True):
        inputs = [each.clone().requires_grad_() for each in (x, weight)]
        fp8 = Fp8.model_validate({"scaling": scaling, "emulate": emulate})
        out = build_product(fp8)(*inputs)
        found.append((out, *torch.autograd.grad(out, inputs, upstream)))
    exact = x.double() @ weight.double().t()
    for on_device, emulated in zip(*found, strict=True):
        difference = (on_device.double() - emulated.double()).norm() / emulated.double().norm()
        assert difference < 5e-3, "bf16 rounds by 2e-3"
    error = ((found[0][0].double() - exact).norm() / exact.norm()).item()
    assert 5e-3 < error < 6e-2, "e4m3 rounds, by 2^-4 at most"


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "overrides"),
    [
        ("fp8", ()),
        ("fp8", ("precision.fp8.scaling=rowwise",)),
        ("fp8_lowbit", ()),
    ],
)
@pytest.mark.parametrize("compiles", ["never", "gpu"])
@with_and_without_dropout
def test_low_precision_trains_as_bf16_does(
    kind: str, overrides: tuple[str, ...], compiles: str, dropout: str
) -> None:
    needs_fp8()
    same = (dropout, f"train.compile={compiles}")
    ours, reference = build(kind, *overrides, *same), build("bf16", *same)
    low, high = OurTraining(ours), OurTraining(reference)
    for _ in range(6):
        assert low.step().item() == pytest.approx(high.step().item(), abs=3e-2)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "fp8", "fp8_lowbit"])
@with_and_without_dropout
def test_a_step_does_not_wait_for_the_device(kind: str, dropout: str) -> None:
    if kind.startswith("fp8"):
        needs_fp8()
    training = OurTraining(build(kind, dropout))
    for _ in range(3):  # compiles, and makes the optimizer's state
        training.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [training.step() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.isfinite(loss) for loss in losses)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("rate", [0.0, 0.0625, 0.1])
def test_the_kernel_of_attention(kind: str, rate: float) -> None:
    context = build(kind, f"model.dropout={rate}", "train.compile=never")
    capability = torch.cuda.get_device_capability() if torch.version.hip is None else None
    kernel = "efficient" if kind == "fp32" else "flash"
    kernel = "cudnn" if takes_cudnn(context.run, capability) else kernel
    assert context.attention_kernel == context.versions["attention"] == f"{kernel}_attention"
    with torch.profiler.profile(acc_events=True) as profile:
        OurTraining(context).step()
    names = {event.key for event in profile.key_averages()}
    called = {name for name in names if re.fullmatch(r"aten::_scaled_dot_product_\w+", name)}
    assert f"aten::_scaled_dot_product_{kernel}_attention" in called
    assert all(kernel in name for name in called)


@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128)])
@pytest.mark.parametrize("n_tokens", [128, 1024])
def test_attention_of_cudnn_is_that_of_flash(heads: tuple[int, int, int], n_tokens: int) -> None:
    n_heads, n_shared, d_head = heads
    if not cudnn_can_attend(d_head, torch.bfloat16, torch.device("cuda")):
        pytest.skip("no attention of cuDNN here")
    torch.manual_seed(1)
    shape = (2, n_tokens, n_heads + 2 * n_shared, d_head)
    qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    upstream = torch.randn(2, n_heads, n_tokens, d_head, device="cuda")
    found = []
    for takes_it, dtype in (
        (True, torch.bfloat16),
        (False, torch.bfloat16),
        (False, torch.float32),
    ):
        core = CausalAttention(d_head, 0.0, 1)
        core.takes_cudnn = takes_it
        inputs = [
            x.to(dtype).detach().requires_grad_()
            for x in qkv.split([n_heads, n_shared, n_shared], 1)
        ]
        out = core(*inputs)
        found.append([out, *torch.autograd.grad(out, inputs, upstream.to(dtype))])
    for ours, flash, exact in zip(*found, strict=True):
        assert torch.dist(ours.float(), exact) <= 1.5 * torch.dist(flash.float(), exact)


def test_speed_is_the_devices() -> None:
    context = build("bf16", "train.compile=never", "log.tensorboard=false")
    state, metrics = State.at_start(context), Metrics(context)
    clock = DeviceClock()
    for _ in range(4):
        begun = clock.mark()
        with metrics.timing():
            torch.cuda._sleep(10**8)  # cycles, 0.05 s or more: far longer than to queue the step
            result = train_step(context, state)
        end = clock.mark()
        metrics.add(result, 8)
        metrics.write_steps(state, result)
        expected = 1000 * clock.seconds(begun, end)
        (*_, line) = (context.folder / "metrics.jsonl").read_text().splitlines()
        assert json.loads(line)["milliseconds_per_step"] == pytest.approx(expected, rel=0.01)
    metrics.close()


@pytest.mark.skipif(torch.version.hip is not None, reason="not set on ROCm")
def test_the_allocator_has_expandable_segments() -> None:
    if chooses_allocator():
        pytest.skip("the environment configures the allocator")
    build("bf16", "train.compile=never")
    assert any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())


def test_memory_is_that_of_the_device() -> None:
    context = build("bf16", WITH, "train.compile=never")
    torch.cuda.reset_peak_memory_stats()
    OurTraining(context).step()
    peak = peak_memory_bytes(context.device)
    state = 16 * context.plan.n_parameters
    assert state < peak < state + 2**30


def test_a_full_gpu_is_one_message(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    large = ("model.d_model=1024", "model.n_layers=12", "model.d_ff=4096", "train.compile=never")
    run = prepare_run(load_run("tiny", [*SHAPE, *large]).run, Steps(2, 8), tmp_path)
    write_run_folder(open_run(folder, run=run), "auto")
    share = 2**28 / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(share)
    try:
        with pytest.raises(MachineError, match="does not fit into the memory of") as found:
            run_worker(open_run(folder))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.value.hint.startswith("train.micro_batch_size=1, or ")


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("baseline", "recompute"),
    [
        ("transformers", "none"),
        ("plain-torch", "none"),
        ("megatron-core", "none"),
        ("megatron-core", "attention"),
        ("megatron-core", "block"),
    ],
)
@pytest.mark.parametrize("kind", ["fp32", "bf16"])
def test_a_baseline_trains_as_ours_does(baseline: str, recompute: str, kind: str) -> None:
    packages = {"transformers": "transformers", "megatron-core": "megatron.core"}
    pytest.importorskip(packages.get(baseline, "torch"))
    context = build(kind, WITHOUT, "train.compile=never", f"parallel.recompute={recompute}")
    ours = OurTraining(context)
    timeline = Timeline(DeviceClock())
    theirs = build_baseline(baseline, context.run, context.plan, context.device, timeline)
    bound = 1e-4 if kind == "fp32" else 3e-2
    try:
        for _ in range(6):
            assert theirs.step().item() == pytest.approx(ours.step().item(), abs=bound)
    finally:
        if baseline == "megatron-core":
            from benchmarks.megatron_core import leave_group

            leave_group()
