"""Rates of devices and of communication, to isolate a slow device or node.

Devices: matmuls by format, fused attention, memory copies. Values are random: zeros take less
power, and so look faster than training ever is. Matmuls are 8192 x 8192 x 8192 on a GPU, where only
the device limits them, and smaller on a CPU. Formats that the device does not support are skipped.

An all-reduce is only as fast as its slowest rank, and does not show which one that is. So every
node runs one inside itself, all at the same time. Then nodes communicate in pairs, each rank with
the same local rank of the other node, along a ring of nodes, in rounds in which no node has two
partners:

    nodes 0 1 2 3      round 1: 0-1, 2-3      round 2: 1-2, 3-0

A node is rated by the better of its two pairs: a bad cable affects both pairs of its node, but only
one pair of each neighbour. Two nodes form only one pair, so they cannot be told apart.

Rates are bytes sent per rank and second, one direction: for an all-reduce of b bytes by n ranks,
2 (n - 1) / n x b / seconds ("bus bandwidth").
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from trainyard.config.devices import GIGA, TERA
from trainyard.doctor.diagnosis import (
    ATTENTION,
    BETWEEN_NODES,
    IN_NODE,
    LATENCY,
    MATMULS,
    MEMORY,
    OF_ALL,
)
from trainyard.model.attention import attention_kernel
from trainyard.units import format_bytes

ROUNDS, MOST_CALLS = 5, 1000
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
HEAD_WIDTH = 128
SMALL_BYTES = 1024
HOST_BYTES = 64

Measured = tuple[str, float, str, str]
"""Name, value, unit, and the timed operations."""
Agree = Callable[[float], float]
"""Returns the maximum over all calling ranks."""


@dataclass(frozen=True)
class Size:
    """Sizes of the measured operations."""

    side: int
    """Side of the matrices."""
    sequence: int
    heads: int
    copied_bytes: int
    """Larger than any cache."""
    reduced_bytes: int
    """Size of an all-reduce."""
    sent_bytes: int
    """Size of a message between two nodes, one direction."""


SIZES = {
    "cuda": Size(8192, 4096, 64, 2**30, 2**30, 2**28),
    "cpu": Size(1024, 512, 8, 2**28, 2**24, 2**23),
}


def time_call(
    work: Callable[[], object],
    device: torch.device,
    budget_seconds: float,
    agree: Agree = lambda seconds: seconds,
) -> tuple[float, int]:
    """Times a call, after two warm-up calls: the median of rounds, each long enough for the clock.

    Args:
        work: the call; it may return before the device is done.
        device: where it computes.
        budget_seconds: for all rounds together; a longer call is timed once.
        agree: for collective calls, so that all ranks make the same number of calls.

    Returns:
        the median, and the number of timed calls.
    """

    def time_calls(n_calls: int) -> float:
        start = time.perf_counter()
        for _ in range(n_calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    time_calls(1)
    once = max(1e-9, agree(time_calls(1)))
    n_rounds = min(ROUNDS, max(1, int(budget_seconds / once)))
    n_calls = min(MOST_CALLS, max(1, int(budget_seconds / n_rounds / once)))
    seconds = [time_calls(n_calls) / n_calls for _ in range(n_rounds)]
    return statistics.median(seconds), n_rounds * n_calls


def measure_device(
    device: torch.device, budget_seconds: float, size: Size | None = None
) -> Iterator[Measured]:
    """Measures one device, operation by operation.

    Args:
        device: of this rank.
        budget_seconds: for each measurement.
        size: absent: that of the kind of device.
    """
    size = size or SIZES[device.type]
    flops = 2 * size.side**3
    rates: dict[str, float] = {}
    for kind in (*DTYPES, "fp8"):
        with suppress(RuntimeError, NotImplementedError):  # unsupported format
            seconds, n_calls = time_call(_matmul(kind, size.side, device), device, budget_seconds)
            rates[kind] = flops / seconds / TERA
            how = f"{size.side}^3, median of {n_calls}"
            yield f"{MATMULS} {kind}", rates[kind], "TFLOP/s", how
    fastest = max((kind for kind in rates if kind != "fp8"), key=rates.__getitem__)
    shape = (1, size.heads, size.sequence, HEAD_WIDTH)
    with suppress(RuntimeError):
        q, k, v = (torch.randn(shape, device=device, dtype=DTYPES[fastest]) for _ in range(3))
        attend = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
        seconds, n_calls = time_call(attend, device, budget_seconds)
        # A causal model needs half of the scores, and two matmuls.
        flops = 2 * size.sequence**2 * size.heads * HEAD_WIDTH
        kernel = attention_kernel(HEAD_WIDTH, DTYPES[fastest], device).replace("_", " ")
        how = f"{size.heads} heads of {HEAD_WIDTH}, sequence {size.sequence}, median of {n_calls}"
        how += f", {kernel}" if device.type == "cuda" else ""
        yield f"{ATTENTION} {fastest}", flops / seconds / TERA, "TFLOP/s", how
    source = torch.ones(size.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    seconds, n_calls = time_call(lambda: target.copy_(source), device, budget_seconds)
    how = f"{format_bytes(size.copied_bytes)}, read and written, median of {n_calls}"
    yield MEMORY, 2 * size.copied_bytes / seconds / GIGA, "GB/s", how


def _matmul(kind: str, side: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(side, side, device=device) for _ in range(2))
    if kind != "fp8":
        a, b = a.to(DTYPES[kind]), b.to(DTYPES[kind])
        return partial(torch.mm, a, b.t(), out=torch.empty_like(a))
    if device.type != "cuda":
        raise NotImplementedError("fp8 on a CPU is emulated")
    fp8 = torch.float8_e4m3fn
    if torch.version.hip and "gfx94" in torch.cuda.get_device_properties(device).gcnArchName:
        fp8 = torch.float8_e4m3fnuz  # the MI300's own
    a, b, one = a.to(fp8), b.to(fp8), torch.ones((), device=device)
    return lambda: torch._scaled_mm(
        a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def measure_collectives(
    device: torch.device, budget_seconds: float, size: Size | None = None
) -> Iterator[Measured]:
    """Measures communication; all ranks must consume all of it.

    Args:
        device: of this rank.
        budget_seconds: for each measurement.
        size: absent: that of the kind of device.
    """
    size = size or SIZES[device.type]
    hosts = gather_hosts()
    nodes = [
        [rank for rank, host in enumerate(hosts) if host == name] for name in dict.fromkeys(hosts)
    ]
    node = next(ranks for ranks in nodes if dist.get_rank() in ranks)
    # Only member ranks create a group: thousands of nodes do not wait for each other.
    group = dist.new_group(node, use_local_synchronization=True)
    groups = [(IN_NODE, len(node), group)] if len(node) > 1 else []
    groups += [(OF_ALL, len(hosts), None)] if len(nodes) > 1 else []
    for name, n_ranks, group in groups:
        agree = partial(_largest, group=group)
        values = torch.zeros(size.reduced_bytes // 4, device=device)
        reduce = partial(dist.all_reduce, values, group=group)
        seconds, n_calls = time_call(reduce, device, budget_seconds, agree)
        rate = 2 * (n_ranks - 1) / n_ranks * size.reduced_bytes / seconds / GIGA
        how = f"{n_ranks} ranks, {format_bytes(size.reduced_bytes)}, median of {n_calls}"
        yield name, rate, "GB/s", how
        reduce = partial(dist.all_reduce, values[: SMALL_BYTES // 4], group=group)
        seconds, n_calls = time_call(reduce, device, budget_seconds, agree)
        how = f"{n_ranks} ranks, {SMALL_BYTES} bytes, median of {n_calls}"
        yield LATENCY + name, seconds * 1e6, "us", how
    sent, received = (torch.zeros(size.sent_bytes // 4, device=device) for _ in range(2))
    rates = []
    for pairs in pair_rounds(len(nodes)):
        partner = find_partner(dist.get_rank(), nodes, pairs)
        exchange = partial(_exchange, sent, received, partner)
        seconds, _ = time_call(exchange, device, budget_seconds, _largest)
        rates += [size.sent_bytes / seconds / GIGA] if partner is not None else []
    if rates:
        how = f"{format_bytes(size.sent_bytes)} both ways, the better neighbour"
        yield BETWEEN_NODES, max(rates), "GB/s", how


def _exchange(sent: torch.Tensor, received: torch.Tensor, partner: int | None) -> None:
    if partner is not None:
        sending = dist.P2POp(dist.isend, sent, partner)
        receiving = dist.P2POp(dist.irecv, received, partner)
        for operation in dist.batch_isend_irecv([sending, receiving]):
            operation.wait()


def pair_rounds(n_nodes: int) -> list[list[tuple[int, int]]]:
    """Splits the pairs of neighbours on a ring into rounds in which no node has two partners."""
    ring = [(node, (node + 1) % n_nodes) for node in range(n_nodes if n_nodes > 2 else n_nodes - 1)]
    n_paired = len(ring) - len(ring) % 2 if n_nodes > 2 else len(ring)
    rounds = [ring[0:n_paired:2], ring[1:n_paired:2], ring[n_paired:]]
    return [pairs for pairs in rounds if pairs]


def find_partner(
    rank: int, nodes: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]]
) -> int | None:
    """Returns the same local rank on the node paired with this one's."""
    for a, b in (*pairs, *(pair[::-1] for pair in pairs)):
        if rank in nodes[a]:
            local_rank = nodes[a].index(rank)
            return nodes[b][local_rank] if local_rank < len(nodes[b]) else None
    return None


def gather_hosts() -> list[str]:
    """Returns the host of each rank."""
    name = socket.gethostname().encode()[:HOST_BYTES]
    own = torch.tensor(list(name.ljust(HOST_BYTES, b"\0")), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [bytes(host.tolist()).rstrip(b"\0").decode(errors="replace") for host in every]


def _largest(seconds: float, group: dist.ProcessGroup | None = None) -> float:
    largest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    return largest.item()
