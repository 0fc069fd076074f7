"""Communication rates inside nodes, over all ranks and between nodes, to isolate a slow node.

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

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from trainyard.doctor.timing import seconds_of
from trainyard.doctor.verdict import BETWEEN_NODES, IN_NODE, LATENCY, OF_ALL
from trainyard.planning.hardware import GIGA
from trainyard.units import format_bytes

REDUCED_BYTES = {"cuda": 2**30, "cpu": 2**24}
SENT_BYTES = {"cuda": 2**28, "cpu": 2**23}
SMALL_BYTES = 1024
HOST_BYTES = 64
MICRO = 1e-6


class Talk:
    """The process groups of this rank, and their measurements.

    Args:
        device: the device of this rank.
        budget_seconds: time per measurement.
        n_bytes: size of an all-reduce; absent: a default for the device.
    """

    def __init__(
        self, device: torch.device, budget_seconds: float, n_bytes: int | None = None
    ) -> None:
        self._device, self._budget = device, budget_seconds
        kind = "cuda" if device.type == "cuda" else "cpu"
        self._reduced_bytes = n_bytes or REDUCED_BYTES[kind]
        self._sent_bytes = n_bytes or SENT_BYTES[kind]
        self.hosts = gather_hosts()
        self._rank = dist.get_rank()
        own = self.hosts[self._rank]
        self._node = [rank for rank, host in enumerate(self.hosts) if host == own]
        # Only member ranks create a group: thousands of nodes do not wait for each other.
        self._group = dist.new_group(self._node, use_local_synchronization=True)

    def measure(self) -> Iterator[tuple[str, float, str, str]]:
        """Yields name, value, unit, and the timed operations; all ranks must consume all of it."""
        if len(self._node) > 1:
            yield from self._reduce(IN_NODE, self._group)
        n_nodes = len(set(self.hosts))
        if n_nodes > 1:
            yield from self._reduce(OF_ALL, None)
            rate = self._talk_to_nodes()
            if rate:
                how = f"{format_bytes(self._sent_bytes)} both ways, the better neighbour"
                yield BETWEEN_NODES, rate / GIGA, "GB/s", how

    def _reduce(
        self, name: str, group: dist.ProcessGroup | None
    ) -> Iterator[tuple[str, float, str, str]]:
        n = dist.get_world_size(group)
        values = torch.zeros(self._reduced_bytes // 4, device=self._device)
        seconds, n_calls = self._time(values, group)
        rate = 2 * (n - 1) / n * self._reduced_bytes / seconds
        how = f"{n} ranks, {format_bytes(self._reduced_bytes)}, median of {n_calls}"
        yield name, rate / GIGA, "GB/s", how
        seconds, n_calls = self._time(values[: SMALL_BYTES // 4], group)
        how = f"{n} ranks, {SMALL_BYTES} bytes, median of {n_calls}"
        yield LATENCY + name, seconds / MICRO, "us", how

    def _time(self, values: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[float, int]:
        def largest(seconds: float) -> float:
            return _largest(seconds, group)

        def work() -> None:
            dist.all_reduce(values, group=group)

        return seconds_of(work, self._device, self._budget, largest)

    def _talk_to_nodes(self) -> float:
        """Exchanges data with both neighbours in turn; returns the better rate, 0 without one."""
        first_ranks = list(dict.fromkeys(self.hosts.index(host) for host in self.hosts))
        nodes = [
            [rank for rank, host in enumerate(self.hosts) if host == self.hosts[first]]
            for first in first_ranks
        ]
        sent, received = (torch.zeros(self._sent_bytes // 4, device=self._device) for _ in range(2))
        best = 0.0
        for pairs in pair_rounds(len(nodes)):
            partner = find_partner(self._rank, nodes, pairs)

            def exchange(partner: int | None = partner) -> None:
                if partner is None:
                    return
                sending = dist.P2POp(dist.isend, sent, partner)
                receiving = dist.P2POp(dist.irecv, received, partner)
                for each in dist.batch_isend_irecv([sending, receiving]):
                    each.wait()

            seconds, _ = seconds_of(exchange, self._device, self._budget, _largest)
            if partner is not None:
                best = max(best, self._sent_bytes / seconds)
        return best


def pair_rounds(n_nodes: int) -> list[list[tuple[int, int]]]:
    """Splits the pairs of neighbours on a ring into rounds in which no node has two partners."""
    ring = list(pairwise(range(n_nodes)))
    rounds = [ring[0::2], ring[1::2]]
    if n_nodes > 2:
        closing = (n_nodes - 1, 0)
        if n_nodes % 2:
            rounds.append([closing])
        else:
            rounds[1].append(closing)
    return [pairs for pairs in rounds if pairs]


def find_partner(
    rank: int, nodes: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]]
) -> int | None:
    """Returns the same local rank on the node paired with this one's."""
    for a, b in pairs:
        for mine, theirs in ((nodes[a], nodes[b]), (nodes[b], nodes[a])):
            if rank in mine:
                number = mine.index(rank)
                return theirs[number] if number < len(theirs) else None
    return None


def gather_hosts() -> list[str]:
    """Returns the host of each rank."""
    import socket

    name = socket.gethostname().encode()[:HOST_BYTES]
    own = torch.zeros(HOST_BYTES, dtype=torch.uint8)
    own[: len(name)] = torch.frombuffer(bytearray(name), dtype=torch.uint8)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    return [bytes(each.tolist()).rstrip(b"\0").decode(errors="replace") for each in every]


def _largest(seconds: float, group: dist.ProcessGroup | None = None) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.item()
