"""The device, its clock and memory of a rank, and its process groups, axis by axis."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainyard.config.run import Run
from trainyard.errors import ConfigError, MachineError
from trainyard.launch.environment import Process, chooses_allocator, make_libraries_deterministic
from trainyard.layout.ranks import memory_hint
from trainyard.layout.resolve import Plan
from trainyard.parallel.start import COLLECTIVE_TIMEOUT, lengthen_timeout
from trainyard.topology import AXES, Coordinates, Topology

TEXT_BYTES = 256


def choose_device(process: Process, run: Run | None = None) -> torch.device:
    """Chooses the GPU of this rank, or the CPU where there is none, and how torch computes there.

    Args:
        process: this rank.
        run: says which kernels it takes; absent: of inference.

    Raises:
        MachineError: the machine has fewer GPUs than ranks.
    """
    deterministic = run is not None and run.train.deterministic
    # Sums inside a matmul stay in fp32, where cuBLAS would add up parts of them in its format.
    reduced = run is not None and run.kernels.reduced_precision
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = reduced
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = reduced
    # Where torch chooses attention, flash attention: cuDNN's takes few dropout rates, is not
    # deterministic, and gave NaN for some lengths. `CausalAttention` calls it where it is safe.
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    if deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(deterministic)  # which imports torch's compiler
    # Nothing here reads uninitialized memory.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic:
        inductor: Any = import_module("torch._inductor.config")  # here, as it takes long
        inductor.deterministic = True  # else it times kernels to choose from
        make_libraries_deterministic()
    if not torch.cuda.is_available():
        return torch.device("cpu")
    n_devices = torch.cuda.device_count()
    # Some launchers expose one GPU per process; ours exposes all.
    has_own = n_devices == 1 and process.store_file is None
    index = 0 if has_own else process.local_rank
    if index >= n_devices:
        raise MachineError(
            f"rank {process.rank} is number {index} on its machine, which has {n_devices} GPU"
            f"{'s' if n_devices > 1 else ''}",
            "start one rank per GPU on each machine",
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    # Memory that one stream freed serves all of its later sizes. On ROCm it crashes or hangs
    # (torch 2.13; pytorch/pytorch#187343, #192259).
    if torch.version.hip is None and not chooses_allocator():
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return device


def device_name(device: torch.device) -> str:
    """Returns the name of a GPU, or the type of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory in the process; call it before the large tensors are made.

    glibc maps each large tensor anew and unmaps it when freed, so the kernel zeroes the same
    gigabytes every step. The price of keeping them: aligned allocations leave gaps, so the process
    grows by up to a third before it settles, and never shrinks. Without glibc, this does nothing.

    Returns:
        whether it took effect.
    """
    # Parameters of mallopt(3), from glibc's malloc.h.
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    largest = 2**31 - 1
    wanted = {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: largest, M_TOP_PAD: 64 * 2**20}
    return all(mallopt(parameter, value) == 1 for parameter, value in wanted.items())


@contextmanager
def explain_device_errors(run: Run, plan: Plan, device: torch.device) -> Iterator[None]:
    """Turns what a device cannot do into one message, with a change of the run that helps.

    Raises:
        MachineError: the run does not fit into the memory.
        ConfigError: a deterministic run needs a kernel that adds up in any order.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        found = str(error).splitlines()[0].partition(" Of the allocated")[0]
        raise MachineError(
            f"{run.name} does not fit into the memory of {device_name(device)}: {found}",
            memory_hint(run),
        ) from None
    except RuntimeError as error:
        name, found, _ = str(error).partition(" does not have a deterministic implementation")
        if not (found and run.train.deterministic):
            raise
        raise ConfigError(
            f"train.deterministic=true, but {name} has no deterministic kernel for "
            f"{device_name(device)}",
            "train.deterministic=false; a resumed run then differs by rounding",
        ) from error


class HostClock:
    """The clock of a CPU."""

    def mark(self) -> Any:
        """Notes the time."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the time between two marks that have passed."""
        return float(end - start)

    def wait(self) -> None:
        """Returns when all marks have passed: at once."""


class DeviceClock(HostClock):
    """Events between the kernels of a GPU's current stream."""

    def mark(self) -> Any:
        """Records the time at which the kernels queued so far are done."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Returns the time between two events that have passed."""
        return float(start.elapsed_time(end)) / 1000

    def wait(self) -> None:
        """Returns when the device has nothing left to do."""
        torch.cuda.synchronize()


Clock = HostClock


def build_clock(device: torch.device) -> Clock:
    """Returns the clock of a device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Mesh:
    """The groups of this rank; None if it is alone on an axis."""

    topology: Topology
    rank: int
    device: torch.device
    pipeline: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    context: dist.ProcessGroup | None = None
    first_and_last_stage: dist.ProcessGroup | None = None
    """First and last rank of this pipeline, on those two ranks."""
    stage: dist.ProcessGroup | None = None
    """All ranks at this pipeline rank: together they hold its stages."""
    saving: dist.ProcessGroup | None = None
    """All ranks again, for the save thread."""
    data: DeviceMesh | None = None
    """Ranks with the same part of the model: the last dimension shards it, a first one before it
    replicates it (hybrid sharding)."""

    @property
    def coordinates(self) -> Coordinates:
        """This rank's position."""
        return self.topology.coordinates(self.rank)

    def barrier(self) -> None:
        """Waits until every rank has called it."""
        if self.topology.n_ranks > 1:
            self.agree(None)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """Gathers equally many numbers from every rank, by rank."""
        rows = torch.zeros(self.topology.n_ranks, len(numbers), dtype=torch.int64)
        rows[self.rank] = torch.tensor(numbers)
        self.all_reduce(rows)
        return cast(list[list[int]], rows.tolist())

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sums a tensor over all ranks, in place."""
        if self.topology.n_ranks > 1:
            dist.all_reduce(values)

    def saving_barrier(self) -> None:
        """Waits until every rank has called it, from its save thread."""
        if self.saving is not None:
            dist.all_reduce(torch.zeros(1), group=self.saving)

    def agree(self, text: str | None) -> str | None:
        """Broadcasts the message of the lowest rank that has one; None if no rank has."""
        n_ranks = self.topology.n_ranks
        if n_ranks == 1:
            return text
        speaker = torch.tensor(n_ranks if text is None else self.rank)
        dist.all_reduce(speaker, dist.ReduceOp.MIN)
        if speaker == n_ranks:
            return None
        said = torch.zeros(TEXT_BYTES, dtype=torch.uint8)
        if speaker == self.rank and text is not None:
            encoded = text.encode()[:TEXT_BYTES]
            said[: len(encoded)] = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        dist.broadcast(said, int(speaker))
        return bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")

    @property
    def data_rank_and_size(self) -> tuple[int, int]:
        """Rank and size in data parallelism, which splits batches equally."""
        here = self.coordinates
        return here.replicate * self.topology.shard + here.shard, self.topology.data


class StopVote:
    """Agrees at the end of each step on what ranks request, by one number between the devices.

    Hosts exchange texts (`Mesh.agree`) only after a step in which a rank had one. The number of a
    GPU is read a step later, when it has long arrived: so its host is at most a step ahead, and
    waits only while the device has the next step to do.

        step       1    2    3
        number     0    1    1
        is read         0    1: texts are exchanged

    Args:
        mesh: of this rank.
        n_late: steps until a number is read; absent: 1 on a GPU, else 0.
    """

    def __init__(self, mesh: Mesh, n_late: int | None = None) -> None:
        self._mesh = mesh
        self._n_late = int(mesh.device.type == "cuda") if n_late is None else n_late
        self._text: str | None = None
        self._sent: deque[tuple[torch.Tensor, torch.cuda.Event | None]] = deque()

    def cast(self, text: str | None) -> str | None:
        """Casts this rank's request, if any; returns the one that all ranks agree on, or None."""
        if self._mesh.topology.n_ranks == 1:
            return text
        self._text = self._text or text
        number = torch.full((), int(self._text is not None), device=self._mesh.device)
        dist.all_reduce(number, dist.ReduceOp.MAX)
        arrival = None
        number = number.to("cpu", non_blocking=True)
        if self._mesh.device.type == "cuda":
            arrival = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrival.record()
        self._sent.append((number, arrival))
        if len(self._sent) <= self._n_late:
            return None
        number, arrival = self._sent.popleft()
        if arrival is not None:
            arrival.synchronize()
        if not number:
            return None
        found, self._text = self._mesh.agree(self._text), None
        return found


def build_mesh(topology: Topology, rank: int, device: torch.device) -> Mesh:
    """Creates the groups of every axis longer than 1; every rank must call this."""
    if topology.n_ranks == 1:
        return Mesh(topology, rank, device)
    # Context-parallel ranks are data-parallel ones too, and adjacent.
    share = topology.shard * topology.context
    sizes = (topology.pipeline, topology.replicate, share, topology.tensor)
    names = ("pipeline", "replicate", "shard", "tensor")
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
    for name in names:
        lengthen_timeout(mesh.get_group(name))
    data = None
    if topology.replicate > 1:
        data = mesh["replicate", "shard"]
    elif share > 1:
        data = mesh["shard"]
    return Mesh(
        topology,
        rank,
        device,
        pipeline=mesh.get_group("pipeline") if topology.pipeline > 1 else None,
        tensor=mesh.get_group("tensor") if topology.tensor > 1 else None,
        context=_own_group(topology.groups(["context"]), rank) if topology.context > 1 else None,
        first_and_last_stage=_own_group(_ends(topology), rank) if topology.pipeline > 1 else None,
        stage=_own_group(topology.groups(AXES[1:]), rank)
        if topology.pipeline < topology.n_ranks
        else None,
        saving=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT),
        data=data,
    )


def _ends(topology: Topology) -> list[list[int]]:
    return [[group[0], group[-1]] for group in topology.groups(["pipeline"])]


def _own_group(groups: list[list[int]], rank: int) -> dist.ProcessGroup | None:
    """Creates all groups, as every rank must, and keeps the one of this rank."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=COLLECTIVE_TIMEOUT)
        if rank in ranks:
            own = group
    return own
