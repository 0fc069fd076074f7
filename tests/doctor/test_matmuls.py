from __future__ import annotations

import pytest
import torch

from trainyard.doctor import timing
from trainyard.doctor.matmuls import Size, measure_device
from trainyard.doctor.timing import ROUNDS, seconds_of

CPU = torch.device("cpu")
TINY = Size(side=64, sequence=32, heads=2, copied_bytes=2**16)


def test_what_is_measured_of_a_processor() -> None:
    found = {name: (value, unit) for name, value, unit, _ in measure_device(CPU, 0.005, TINY)}
    matmuls = ["matmuls fp32", "matmuls fp16", "matmuls bf16"]
    assert list(found)[:3] == matmuls
    assert list(found)[3].startswith("attention ")
    assert list(found)[4] == "memory copies"
    assert len(found) == 5  # no fp8, which a processor emulates
    assert all(value > 0 for value, _ in found.values())
    assert [unit for _, unit in found.values()] == ["TFLOP/s"] * 4 + ["GB/s"]


def test_attention_is_measured_in_the_fastest_format() -> None:
    found = {name: value for name, value, _, _ in measure_device(CPU, 0.005, TINY)}
    matmuls = {name: value for name, value in found.items() if name.startswith("matmuls")}
    fastest = max(matmuls, key=matmuls.__getitem__).removeprefix("matmuls ")
    assert f"attention {fastest}" in found


class Clock:
    """Stands still, but for what is said to take time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def take(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(timing, "time", made)
    return made


def test_a_call_is_timed_as_long_as_it_takes(clock: Clock) -> None:
    seconds, n_calls = seconds_of(lambda: clock.take(0.004), CPU, 0.0121 * ROUNDS)
    assert (seconds, n_calls) == (pytest.approx(0.004), 3 * ROUNDS)


def test_a_call_that_takes_longer_than_there_is_time_is_timed_once(clock: Clock) -> None:
    seconds, n_calls = seconds_of(lambda: clock.take(0.02), CPU, 0.001)
    assert (seconds, n_calls) == (pytest.approx(0.02), 1)


def test_ranks_agree_how_often_they_call(clock: Clock) -> None:
    calls: list[int] = []
    seconds, n_calls = seconds_of(lambda: calls.append(1), CPU, 0.05, agree=lambda mine: 0.005)
    assert n_calls == 2 * ROUNDS  # as the slowest needs 5 ms a call
    assert len(calls) == 2 + n_calls
    assert seconds == 0


@pytest.mark.gpu
def test_what_is_measured_of_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("this machine has no GPU")
    device = torch.device("cuda", 0)
    found = {name: value for name, value, _, _ in measure_device(device, 0.2)}
    assert {"matmuls fp32", "matmuls fp16", "matmuls bf16", "memory copies"} <= set(found)
    assert found["matmuls bf16"] > found["matmuls fp32"]
