"""Each check can fail: a fault is planted, and the check that must see it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from tests.fake_cuda.device import in_fork
from tests.fake_cuda.steps import DEVICE, Measured, judge_launches, measure_run
from torch import Tensor
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.errors import PTXASError

from trainyard.checkpoint.background import _allocate
from trainyard.model.gpt import MLP
from trainyard.optim.adamw import AdamW
from trainyard.optim.clip import StepStats

EAGER, COMPILED = "train.compile=never", "train.compile=gpu"
ROW = "bf16 on sm_90, dropout, nothing recomputed, eager"


@dataclass(frozen=True)
class Fault:
    """A method to which harm is added, and the words of the check that sees it.

    What the harm returns, if anything, the method then returns.
    """

    where: type
    method: str
    harm: Callable[..., object]
    seen: str
    compile: str = EAGER

    def plant(self) -> None:
        """Does the harm in each call."""
        original, harm = getattr(self.where, self.method), self.harm

        def harmed(*arguments: Any) -> Any:
            found = harm(*arguments)
            return original(*arguments) if found is None else found

        setattr(self.where, self.method, harmed)


def keep_on_the_host(*_: object) -> dict[str, Tensor]:
    return {"moment": torch.zeros(1)}


def use_the_host(_module: MLP, x: Tensor) -> Tensor:
    return x + torch.ones(x.shape[-1])


def read_a_number(stats: StepStats, _: float) -> None:
    stats.loss.item()


def break_the_graph(*_: object) -> None:
    torch._dynamo.graph_break()


def launch_much(*_: object) -> None:
    for _n in range(40):
        torch.zeros(1, device=DEVICE)


def refuse_a_kernel(*_: object) -> None:
    if not refused:
        refused.append(True)
        raise PTXASError("no such instruction")


refused: list[bool] = []
FAULTS = {
    "state on the host": Fault(
        AdamW, "state_of", keep_on_the_host, r"tensors are on \['cpu', 'cuda'\]"
    ),
    "a tensor of the host": Fault(MLP, "forward", use_the_host, "same device.*cuda:0.*cpu"),
    "a tensor of the host, compiled": Fault(
        MLP, "forward", use_the_host, "same device|two devices|nhandled FakeTensor Device", COMPILED
    ),
    "a number read": Fault(
        StepStats, "divisor", read_a_number, "called a synchronizing CUDA operation"
    ),
    "a wait that torch does not see": Fault(
        *(StepStats, "divisor", lambda *_: torch.cuda.synchronize()),
        "the host waits 1 times in a step",
    ),
    "many launches": Fault(MLP, "forward", launch_much, "launches a step, not "),
    "a graph break": Fault(MLP, "forward", break_the_graph, "graph break", COMPILED),
    "blocks compiled again": Fault(
        *(StepStats, "divisor", lambda *_: torch._dynamo.reset()),
        "graphs compiled after the warm-up",
        COMPILED,
    ),
    "a kernel that ptxas refuses": Fault(
        *(CUDABackend, "make_cubin", refuse_a_kernel), "no such instruction", COMPILED
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_a_step_is_seen(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]

    def train() -> Measured:
        fault.plant()
        return measure_run(["precision.kind=bf16", "model.dropout=0.1", fault.compile])

    caches = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
    caches |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with pytest.raises((AssertionError, RuntimeError), match=f"(?s){fault.seen}"):
        measured = in_fork(train, caches if "ptxas" in name else {})
        measured.judge()
        judge_launches(ROW, measured.counts.launches)


@triton.jit  # type: ignore[untyped-decorator]
def store_zero(x_pointer) -> None:  # type: ignore[no-untyped-def]
    triton.language.store(x_pointer, 0.0)


def register(n_bytes: int, times: int) -> None:
    """Page-locks memory of the host."""
    room = torch.empty(4096, dtype=torch.uint8)
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    for _ in range(times):
        error = runtime.cudaHostRegister(room.data_ptr() if n_bytes else 0, n_bytes, 0)
        torch.cuda.check_error(error)


def multiply_fp8(offset: int) -> None:
    """Multiplies matrices of fp8, of which the first begins some bytes after its memory."""
    memory = torch.zeros(32 * 32 + offset, device=DEVICE).to(torch.float8_e4m3fn)
    a, b = memory[offset:].view(32, 32), memory[: 32 * 32].view(32, 32)
    one = torch.ones((), device=DEVICE)
    torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "no bytes page-locked": (lambda: register(0, 1), "invalid argument"),
    "bytes page-locked twice": (lambda: register(4096, 2), "already registered"),
    "more memory than there is": (
        lambda: torch.empty(200 * 10**9, dtype=torch.uint8, device=DEVICE),
        "out of memory",
    ),
    "fp8 at an odd address": (lambda: multiply_fp8(8), "CUBLAS_STATUS_NOT_SUPPORTED"),
    "a grid of too many rows": (
        lambda: store_zero[(1, 70_000)](torch.zeros(1, device=DEVICE)),
        "invalid argument",
    ),
    "a tensor of the host for a kernel": (
        lambda: store_zero[(1,)](torch.zeros(1)),
        "cannot be accessed from Triton",
    ),
    "a function without a stub": (lambda: torch.eye(3, device=DEVICE).inverse(), "cusolver"),
}


@pytest.mark.parametrize(("call", "why"), CALLS.values(), ids=CALLS)
def test_what_a_device_would_refuse_is_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(RuntimeError, match=why):
        in_fork(call, {})


def test_the_same_calls_in_order_are_not_refused() -> None:
    def call() -> None:
        register(4096, 1)
        multiply_fp8(0)
        store_zero[(1, 60_000)](torch.zeros(1, device=DEVICE))
        assert _allocate(0, page_locked=True).numel() == 0
        assert _allocate(4096, page_locked=True).is_pinned()

    in_fork(call, {})
