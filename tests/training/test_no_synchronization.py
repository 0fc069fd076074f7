"""Between two log lines the host never waits for the GPU; shown without one.

Torch's device "meta" stands for the GPU: its tensors have shapes and types but no values, so
whatever needs a value on the host cannot go on. `Gpu` names it, and finds the copies that CUDA
would wait for. The step, the loop and all they are made of are the real ones; they tell a CPU from
everything else, and so do here what they do on a GPU. What torch itself refuses on CUDA, such as
`torch.tensor(.., device=..)`, tests/fake_cuda finds.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.small import build_small_context
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainyard.optim.clip import StepStats
from trainyard.optim.optimizer import build_optimizer
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.training.checkpoints import build_saver
from trainyard.training.loop import train
from trainyard.training.metrics import ExpertLoad, Metrics
from trainyard.training.state import State, TrainContext
from trainyard.training.step import train_step
from trainyard.training.stop import Stop

DEVICE = torch.device("meta")
N_STEPS = 4
MODEL = {"n_layers": 2, "d_model": 32, "sequence_length": 16, "dropout": 0.0}
TRAIN = {"global_batch_size": 2}
WITH_DROPOUT = {"model": {**MODEL, "dropout": 0.1}}
FP8 = {"emulate": True, "precise_blocks": 0}
RUNS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"kind": "bf16"}},
    "fp16": {"precision": {"kind": "fp16"}},
    "one micro batch": {"train": {**TRAIN, "micro_batch_size": 2}},
    "spikes skipped": {"guard": {"spikes": "skip"}},
    "spikes of no interest": {"guard": {"spikes": "off"}},
    "no clipping": {"optimizer": {"learning_rate": 1e-2, "clip_norm": float("inf")}},
    "dropout": WITH_DROPOUT,
    "dropout, fp16": {**WITH_DROPOUT, "precision": {"kind": "fp16"}},
    "blocks recomputed": {"parallel": {"recompute": "block"}},
    "attention recomputed": {"parallel": {"recompute": "attention"}, "precision": {"kind": "fp16"}},
    "fp8": {"precision": {"kind": "fp8", "fp8": FP8}},
    "fp8_lowbit": {
        "precision": {"kind": "fp8_lowbit", "fp8": FP8},
        "parallel": {"zero_stage": 1},
    },
    "muon": {"optimizer": {"kind": "muon"}, "precision": {"kind": "bf16"}},
    "head of its own": {"model": {**MODEL, "tied_embeddings": False}},
}


class HostWaitsError(Exception):
    """The host would wait for the device here."""


class Gpu(TorchDispatchMode):
    """Sees every operation on tensors, and refuses those that wait.

    Attributes:
        may_wait: lets the host send something and wait until it is there, as before training.
        n_done: operations on the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.may_wait = True
        self.n_done = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = {leaf.type for leaf in leaves if isinstance(leaf, torch.device)}
        if DEVICE.type not in places | {each.device.type for each in tensors}:
            return func(*args, **kwargs)
        self.n_done += 1
        has_mask = any(each.dtype in (torch.bool, torch.uint8) for each in tensors[1:])
        is_plain_index = func is torch.ops.aten.index.Tensor and not has_mask
        if torch.Tag.data_dependent_output in func.tags:
            raise HostWaitsError(f"{func} gives a value")
        if torch.Tag.dynamic_output_shape in func.tags and not is_plain_index:
            raise HostWaitsError(f"{func} gives as many elements as the values say")
        # One number from the host travels as an argument of a kernel.
        is_sent = any(each.is_cpu and each.ndim > 0 for each in tensors)
        if is_sent and not self.may_wait and not _is_non_blocking(func, args, kwargs):
            raise HostWaitsError(f"{func} sends a tensor and waits")
        if "cpu" in places or (func is torch.ops.aten.copy_.default and args[0].is_cpu):
            raise HostWaitsError(f"{func} brings a tensor to the host")
        return func(*args, **kwargs)


def _is_non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    if func is torch.ops.aten.copy_.default:
        return bool(kwargs.get("non_blocking") or args[2:] == (True,))
    return bool(func is torch.ops.aten._to_copy.default and kwargs.get("non_blocking"))


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    with Gpu() as made:
        yield made


def build_gpu_context(folder: Path = Path(), **sections: dict[str, Any]) -> TrainContext:
    """Builds the context of a small run as a worker does, with the model on the GPU."""
    context = build_small_context(**{"model": MODEL, "train": TRAIN, **sections})
    run, plan = context.run, context.plan
    mesh = build_mesh(plan.topology, 0, DEVICE)
    parallel_model = ParallelModel(run, plan, mesh)
    optimizer = build_optimizer(parallel_model, run)
    return replace(context, folder=folder, model=parallel_model, optimizer=optimizer)


@pytest.mark.parametrize("name", RUNS)
def test_steps_never_wait(gpu: Gpu, name: str) -> None:
    context = build_gpu_context(**RUNS[name])
    state = State.at_start(context)
    assert all(local.parameter.device == DEVICE for local in context.model.local_parameters)
    gpu.may_wait = False
    for _ in range(2):  # the moments of the optimizer are there from the second on
        before = gpu.n_done
        result = train_step(context, state)
        state.step += 1
        assert gpu.n_done > before + 100
    assert {result.loss.device, result.gradient_norm.device, result.skipped.device} == {DEVICE}


MISTAKES: dict[str, Callable[[StepStats], object]] = {
    "_local_scalar_dense": lambda stats: stats.loss.item(),
    "_to_copy.* to the host": lambda stats: stats.loss.cpu(),
    "copy_.* to the host": lambda stats: torch.zeros(()).copy_(stats.loss, non_blocking=True),
    "index.Tensor": lambda stats: stats.loss.view(1)[stats.norm.view(1) > 1],
    "equal": lambda stats: torch.equal(stats.loss, stats.norm),
    "_to_copy.* and waits": lambda stats: torch.arange(3).to(stats.loss.device),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_step_that_waits_is_found(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    context = build_gpu_context()
    state = State.at_start(context)
    right = StepStats.divisor

    def wrong(stats: StepStats, clip_norm: float) -> Tensor:
        MISTAKES[what](stats)
        return right(stats, clip_norm)

    monkeypatch.setattr(StepStats, "divisor", wrong)
    gpu.may_wait = False
    with pytest.raises(HostWaitsError, match=what):
        train_step(context, state)


def test_the_load_of_experts_is_added_up_without_waiting(gpu: Gpu) -> None:
    experts = {"n_experts": 4, "bias": False, "mlp": "swiglu"}
    counted = ExpertLoad(build_gpu_context(model={**MODEL, **experts}))
    gpu.may_wait, before = False, gpu.n_done
    counted.add()
    assert gpu.n_done > before
    counted.forget()
    with pytest.raises(HostWaitsError, match="to the host"):
        counted.read()


def test_the_loop_waits_where_it_logs(gpu: Gpu, tmp_path: Path) -> None:
    sections = {
        "log": {"interval": N_STEPS, "tensorboard": False},
        "checkpoint": {"interval": 0},
        "evaluate": {"interval": 0},
        "precision": {"kind": "fp16"},
    }
    context = build_gpu_context(tmp_path, **sections)
    state, metrics, saver = State.at_start(context), Metrics(context), build_saver(context)
    stop = Stop(tmp_path, 60.0, 3600.0)
    gpu.may_wait = False
    with pytest.raises(HostWaitsError) as found:
        train(context, state, metrics, stop, saver, lambda _step, _text: None)
    metrics.close()
    functions = [frame.name for frame in traceback.extract_tb(found.value.__traceback__)]
    assert state.step == N_STEPS
    assert functions[functions.index("train") + 1] == "write_steps"
