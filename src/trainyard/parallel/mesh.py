"""The device, its clock and memory of a rank, and its process groups, axis by axis."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from trainyard.config.run import Run
from trainyard.errors import ConfigError, MachineError
from trainyard.launch.environment import Process, chooses_allocator, make_libraries_deterministic
from trainyard.layout.ranks import memory_hint
from trainyard.layout.resolve import Plan
from trainyard.parallel.start import COLLECTIVE_TIMEOUT
from trainyard.topology import AXES, Coordinates, Topology


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


def keep_freed_memory(n_ranks: int) -> bool:
    """Tells glibc what to keep of freed memory; call it before the large tensors are made.

    glibc maps each large tensor anew and unmaps it when freed, so the kernel zeroes the same
    gigabytes every step. One rank keeps them, at a price: aligned allocations leave gaps, so the
    process grows by up to a third before it settles, and never shrinks. Messages of several ranks
    have many sizes, and gaps would double the process: they keep what is below 2 MiB, and
    `rank_environment` has the kernel map the rest in huge pages. Without glibc, this does nothing.

    Returns:
        whether it took effect.
    """
    # Parameters of mallopt(3), from glibc's malloc.h.
    M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mapped = (M_MMAP_MAX, 0) if n_ranks == 1 else (M_MMAP_THRESHOLD, 2**21)
    wanted = (mapped, (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    return all(mallopt(*each) == 1 for each in wanted)


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
    saving: dist.ProcessGroup | None = None
    """All ranks again, for the save thread."""
    data: DeviceMesh | None = None
    """Ranks with the same part of the model: the last dimension shards it, a first one before it
    replicates it (hybrid sharding)."""
    expert: dist.ProcessGroup | None = None
    """Ranks that share experts."""
    same_experts: DeviceMesh | None = None
    """Those of `data` with the same experts; None without `expert`."""

    @cached_property
    def stage(self) -> dist.ProcessGroup | None:
        """All ranks at this pipeline rank, which together hold its stages; all of them ask first.

        Few optimizers need it, and a group costs a communicator or a thread.
        """
        ranks = self.topology.group(self.rank, AXES[1:])
        return _new_group(ranks, self.device) if len(ranks) > 1 else None

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

    def agree(self, text: str | None, group: dist.ProcessGroup | None = None) -> str | None:
        """Broadcasts the message of the lowest rank that has one; None if no rank has.

        Args:
            text: of this rank.
            group: of all ranks; absent: that of the main thread.
        """
        n_ranks = self.topology.n_ranks
        if n_ranks == 1:
            return text
        encoded = (text or "").encode(errors="surrogatepass")
        # The lowest rank with a message, and its length, in one number.
        speaker = torch.tensor((n_ranks if text is None else self.rank) << 32 | len(encoded))
        dist.all_reduce(speaker, dist.ReduceOp.MIN, group)
        rank, n_bytes = divmod(int(speaker), 1 << 32)
        if rank == n_ranks:
            return None
        own = encoded if rank == self.rank else bytes(n_bytes)
        said = torch.tensor(list(own), dtype=torch.uint8)
        dist.broadcast(said, rank, group)
        return bytes(said.tolist()).decode(errors="surrogatepass")

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
    """Creates this rank's groups along the axes longer than 1; every rank must call this."""
    if topology.n_ranks == 1:
        return Mesh(topology, rank, device)

    def own(*axes: str, always: bool = False) -> dist.ProcessGroup | None:
        ranks = topology.group(rank, axes)
        return _new_group(ranks, device) if always or len(ranks) > 1 else None

    # Context-parallel ranks are data-parallel ones too, and adjacent.
    share = topology.shard * topology.context
    data, replicas, names = None, own("replicate"), ("replicate", "shard")
    shards = own("shard", "context", always=replicas is not None)
    if replicas is not None and shards is not None:
        ranks = topology.group(rank, ("replicate", "shard", "context"))
        table = torch.tensor(ranks).view(topology.replicate, share)
        data = DeviceMesh.from_group([replicas, shards], device.type, table, mesh_dim_names=names)
    elif shards is not None:
        data = DeviceMesh.from_group(shards, device.type, mesh_dim_names=("shard",))
    expert, same_experts = None, None
    if topology.expert > 1:
        expert = _new_group(topology.expert_group(rank), device)
        copies = topology.same_experts(rank)
        own_copies = next(each for each in copies if rank in each)
        same = _new_group(own_copies, device)
        if replicas is None:
            same_experts = DeviceMesh.from_group(same, device.type, mesh_dim_names=("shard",))
        else:
            same_experts = DeviceMesh.from_group(
                [replicas, same], device.type, torch.tensor(copies), mesh_dim_names=names
            )
    mesh = Mesh(
        topology,
        rank,
        device,
        pipeline=own("pipeline"),
        tensor=own("tensor"),
        context=own("context"),
        saving=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT),
        data=data,
        expert=expert,
        same_experts=same_experts,
    )
    if topology.pipeline <= 2:  # the group of the ends, which use it once no message is under way
        return replace(mesh, first_and_last_stage=mesh.pipeline)
    # Last, as not all ranks have it: names of groups count those before.
    pipeline = topology.group(rank, ["pipeline"])
    ends = [pipeline[0], pipeline[-1]]
    return replace(mesh, first_and_last_stage=_new_group(ends, device) if rank in ends else None)


def _new_group(ranks: list[int], device: torch.device) -> dist.ProcessGroup:
    """Creates a group in which only its members take part, so that a rank creates few."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    group: dist.ProcessGroup = dist.new_group(
        ranks, timeout=COLLECTIVE_TIMEOUT, backend=backend, use_local_synchronization=True
    )
    return group
