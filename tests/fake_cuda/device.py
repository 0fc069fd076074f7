"""The fake device as the cases use it: counters, contexts on it, and forks that may use it."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import torch
from tests.ranks import call_in_forks

from trainyard.bench.job import Steps, prepare_run
from trainyard.bench.measure import Timeline
from trainyard.config.run import Run
from trainyard.parallel.mesh import DeviceClock, build_mesh
from trainyard.training.context import build_context
from trainyard.training.run_folder import open_run
from trainyard.training.state import TrainContext

Found = TypeVar("Found")


@dataclass(frozen=True)
class Counts:
    """What the device was asked for; stubs/fake.h says what each is."""

    kernels: int
    triton_kernels: int
    matmuls: int
    collectives: int
    waits: int
    pageable_copies: int

    @classmethod
    def now(cls) -> Counts:
        """Reads the counters of this process."""
        function = ctypes.CDLL(None).fake_cuda_count
        function.restype = ctypes.c_long
        return cls(**{name: function(name.encode()) for name in cls.__dataclass_fields__})

    def since(self, before: Counts) -> Counts:
        """Gives what came after `before`."""
        earlier = asdict(before)
        return Counts(**{name: n - earlier[name] for name, n in asdict(self).items()})

    @property
    def launches(self) -> int:
        """All that the host starts on the device, but for copies."""
        return self.kernels + self.triton_kernels + self.matmuls + self.collectives


def build_on_device(
    run: Run, device: torch.device, rank: int = 0, n_ranks: int = 1
) -> TrainContext:
    """Builds the context of a run as `bench` does, with random tokens to read."""
    folder = Path(mkdtemp())
    run = prepare_run(run, Steps(2, 8), folder)
    opened = open_run(folder, n_ranks, run)
    mesh = build_mesh(opened.plan.topology, rank, device)
    return build_context(opened, mesh, Timeline(DeviceClock()))


def in_fork(function: Callable[[], Found], settings: Mapping[str, str]) -> Found:
    """Calls a function in a fork of this process, like `in_forks`."""
    (found,) = in_forks(1, lambda _: function(), settings)
    return found


def in_forks(
    n_forks: int, function: Callable[[int], Found], settings: Mapping[str, str]
) -> list[Found]:
    """Calls a function in forks of this process, which has imported everything.

    Args:
        n_forks: how many.
        function: uses the device, which this process must never have; gets the number of its fork.
        settings: of the fake device, as environment variables.

    Raises:
        RuntimeError: the first error of any fork, as text, or the death of one.
    """

    def call(number: int) -> Found:
        os.environ.update(settings)
        warnings.simplefilter("default")  # compilers warn of themselves
        return function(number)

    try:
        return call_in_forks(n_forks, call, must_end=False)
    except Exception as error:
        raise RuntimeError(f"{error}\n{error.__cause__}") from None
