"""Collectives of tensor and context parallelism, and what tensor ranks exchange around matmuls.

    forward           backward          where
    identity          all-reduce        into a column-parallel layer: all ranks read the whole input
    all-reduce        identity          out of a row-parallel layer: every rank holds a partial sum
    all-gather        reduce-scatter    into a column-parallel layer, with sequence parallelism
    reduce-scatter    all-gather        out of a row-parallel layer, with sequence parallelism
    all-to-all        all-to-all        heads for tokens, in attention over a sharded sequence

Tensor ranks exchange one piece of tokens while they compute with another. A piece is a sequence,
half of one or several short ones, and a rank holds an equal part of each piece, so messages of one
sequence need no copy. Of one sequence, in two pieces:

    tokens       0  1  2  3  4  5  6  7
    piece        0  0  0  0  1  1  1  1
    rank         0  0  1  1  0  0  1  1     of two, holds them in the residual stream

A started collective runs beside computation until it is finished.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, library

from trainyard.model.linear import as_output, compute_beside_exchange, join

Collective = Callable[[Tensor], Tensor]
Ranges = list[tuple[int, int]]
"""Ranges of features: the first, and one past the last."""

# torch.distributed's functional collectives wait at once where they are compiled; these never do.
_started = torch.ops._c10d_functional


# An operation of its own: compiled code computes what waits for an exchange; torch 2.11 does not
# compile the gather inside.
_LIBRARY: Any = library.Library("trainyard", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(
    "start(Tensor x, str kind, int size, str group, bool is_last, Tensor? after) -> Tensor"
)


@library.impl(_LIBRARY, "start", "CompositeExplicitAutograd")
def _start(
    x: Tensor, kind: str, size: int, group: str, is_last: bool, after: Tensor | None
) -> Tensor:
    if kind == "gather":
        # gloo corrupts memory when two run at once of the form that makes its own output.
        out: Tensor = x.new_empty(size * len(x), *x.shape[1:])
        out = _started.all_gather_into_tensor_out(x, size, group, out=out)
    elif kind == "scatter":
        out = _started.reduce_scatter_tensor(x, "sum", size, group)
    else:
        out = _started.all_reduce(x, "sum", group)
    if is_last:
        compute_beside_exchange()
    return out


@library.impl(_LIBRARY, "start", "Meta")
def _shape_of_started(x: Tensor, kind: str, size: int, *_: Any) -> Tensor:
    n_rows = {"gather": size * len(x), "scatter": len(x) // size}.get(kind, len(x))
    return x.new_empty(n_rows, *x.shape[1:])


def start_exchange(
    x: Tensor,
    kind: str,
    group: dist.ProcessGroup,
    *,
    is_last: bool = True,
    after: Tensor | None = None,
) -> Tensor:
    """Starts what tensor ranks exchange, of rows in order of rank; `finish` returns it.

    Args:
        x: gathered from all ranks, or summed over them.
        kind: "gather", "scatter" (each rank gets its rows of the sum) or "sum" (each gets all).
        group: the ranks.
        is_last: of its kind for now: what waits for an exchange is computed beside it.
        after: what a backward pass has when it sends `x` again. Without it a compiler would take
            this message for that of the forward pass, and keep what arrived then.
    """
    start = torch.ops.trainyard.start if torch.compiler.is_compiling() else _start
    out: Tensor = start(x.contiguous(), kind, group.size(), group.group_name, is_last, after)
    return out


def start_all_to_all(
    x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    """Starts to send `sent[i]` rows to rank i; `finish` returns `received[i]` rows of each rank."""
    out: Tensor = _started.all_to_all_single(x.contiguous(), received, sent, group.group_name)
    return out


def finish(started: Tensor) -> Tensor:
    """Waits for a collective: on a GPU, only its stream waits."""
    out: Tensor = _started.wait_tensor(started)
    return out


def all_reduce(x: Tensor, group: dist.ProcessGroup, operation: str = "sum") -> Tensor:
    """Reduces a tensor over all ranks into a new tensor; not differentiable."""
    return finish(_started.all_reduce(x.contiguous(), operation, group.group_name))


def all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; not differentiable."""
    rows = [1] * group.size()
    return finish(start_all_to_all(x, rows, rows, group))


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Collective, backward: Collective) -> Tensor:
        ctx.backward_collective = backward
        return as_output(forward(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.backward_collective(gradient), None, None


def _differentiable(x: Tensor, forward: Collective, backward: Collective) -> Tensor:
    out: Tensor = _Collective.apply(x, forward, backward)  # type: ignore[no-untyped-call]
    return out


def exchange_parts(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sends `x[i]` to rank i, for every rank; `[i]` of the result came from rank i."""
    exchange = partial(all_to_all, group=group)
    return _differentiable(x, exchange, exchange)


@dataclass(frozen=True)
class TensorRanks:
    """What tensor ranks exchange of the residual stream (`Exchange`).

    Attributes:
        group: the ranks.
        by_tokens: each has its tokens of the stream, (B, T/n, D); otherwise all have all of it.
        in_piece: sequences in a piece.
        n_pieces: of a sequence, if there is one in a piece.
        gathers_again: see `Exchange`.
    """

    group: dist.ProcessGroup
    by_tokens: bool
    in_piece: int
    n_pieces: int
    gathers_again: bool

    def split(self, x: Tensor, *, is_whole: bool = False) -> Sequence[Tensor]:
        """Splits (B, T, ...) into pieces, (b, t, ...) each; if `is_whole`, sequences together."""
        n_pieces = 1 if x.shape[1] % self.n_pieces else self.n_pieces  # of a shorter text
        in_piece = len(x) if is_whole or len(x) % self.in_piece else self.in_piece
        pieces = x.reshape(-1, in_piece, x.shape[1] // n_pieces, *x.shape[2:])
        return pieces.unbind()

    def gather_and_multiply(
        self, x: Tensor, multiply: Callable[..., Tensor], *factors: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Multiplies each piece as soon as it is gathered; returns the products and the pieces."""
        pieces, products = [], []
        for each in self.start_gather(x, is_whole=False):
            pieces += [self._finish_gather(each)]
            products += [multiply(pieces[-1], *factors)]
        return products, pieces

    def start_gather(
        self, x: Tensor, gradient: Tensor | None = None, *, is_whole: bool = True
    ) -> Sequence[Tensor]:
        """Starts to gather all tokens, of all sequences at once if `is_whole`."""
        if not self.by_tokens:
            return [x]
        pieces = self.split(x, is_whole=is_whole)
        last = None if gradient is not None else len(pieces)  # a matmul hides it
        return [
            start_exchange(each, "gather", self.group, is_last=number == last, after=gradient)
            for number, each in enumerate(pieces, 1)
        ]

    def finish_gather(self, started: Sequence[Tensor], n_sequences: int) -> Tensor:
        """Returns all tokens, (B, T, ...)."""
        return join([self._finish_gather(each) for each in started], n_sequences)

    def _finish_gather(self, started: Tensor) -> Tensor:
        if not self.by_tokens:
            return started
        by_rank = finish(started).unflatten(0, (self.group.size(), -1))  # type: ignore[no-untyped-call]
        out: Tensor = by_rank.transpose(0, 1).flatten(1, 2)  # of one sequence: a view
        return out

    def start_sum(
        self, x: Tensor, multiply: Callable[..., Tensor], *factors: Any
    ) -> Sequence[Tensor]:
        """Starts to sum the product of each piece over ranks."""
        pieces = self.split(x)
        started: list[Tensor] = []  # a call of `list[Tensor]` would break the compiled graph
        for piece in pieces:
            product, kind = multiply(piece, *factors), "sum"
            if self.by_tokens:
                by_rank = product.unflatten(1, (self.group.size(), -1))  # type: ignore[no-untyped-call]
                product, kind = by_rank.transpose(0, 1).flatten(0, 1), "scatter"
            is_last = len(started) == len(pieces) - 1
            started += [start_exchange(product, kind, self.group, is_last=is_last)]
        return started

    def finish_sum(self, started: Sequence[Tensor], n_sequences: int) -> Tensor:
        """Returns this rank's part of the sum."""
        return join([finish(each) for each in started], n_sequences)

    def gather(self, x: Tensor) -> Tensor:
        """Gathers all tokens, (B, T, ...); not differentiable."""
        return self.finish_gather(self.start_gather(x), len(x))

    def sum(self, x: Tensor) -> Tensor:
        """Sums (B, T, ...) over ranks, and keeps this rank's tokens; not differentiable."""
        return self.finish_sum(self.start_sum(x, lambda piece: piece), len(x))

    def spread(self, x: Tensor) -> Tensor:
        """Gives every rank all tokens; sums their gradients."""
        return _differentiable(x, self.gather, self.sum)

    def collect(self, x: Tensor) -> Tensor:
        """Sums what every rank has a part of, and keeps this rank's tokens."""
        return _differentiable(x, self.sum, self.gather)


class SharedHeads:
    """Gives a tensor rank the features that it attends with, where ranks share keys and values.

    Each of m ranks computes an m-th of the features of a key, its value and their queries. The
    gradients of those that it attends with go back, and are added up. Of two ranks:

        computed by     q0 q1 q2   | q3 k v
        attended with   q0 q1 k v  | q2 q3 k v

    Args:
        group: all tensor ranks.
        n_sharing: ranks that share a key, m.
        n_computed: features that each computes.
        n_shared: features of a key and a value.
    """

    def __init__(
        self, group: dist.ProcessGroup, n_sharing: int, n_computed: int, n_shared: int
    ) -> None:
        self._group, self._n_computed = group, n_computed
        n_queries = n_sharing * n_computed - n_shared
        n_own = n_queries // n_sharing
        self._n_attended = n_own + n_shared

        def common(owner: int, reader: int) -> Iterator[tuple[int, int, int]]:
            """Yields where features that one computes and another wants begin, and their number."""
            for first, n, place in ((reader * n_own, n_own, 0), (n_queries, n_shared, n_own)):
                start = max(first, owner * n_computed)
                end = min(first + n, (owner + 1) * n_computed)
                if start < end:
                    yield start - owner * n_computed, start - first + place, end - start

        near, rank = group.rank() // n_sharing * n_sharing, group.rank() % n_sharing
        self._sent, self._received = ([Ranges()] * group.size() for _ in range(2))
        for other in range(n_sharing):
            self._sent[near + other] = [(a, a + n) for a, _, n in common(rank, other)]
            self._received[near + other] = [(b, b + n) for _, b, n in common(other, rank)]

    def __call__(self, x: Tensor) -> Tensor:
        """Maps computed features, (B, T, ..), to those of its queries, the key and the value."""
        there = self._sent, self._received, self._n_attended
        back = self._received, self._sent, self._n_computed
        return _differentiable(x, partial(self._move, there), partial(self._move, back))

    def _move(self, how: tuple[list[Ranges], list[Ranges], int], x: Tensor) -> Tensor:
        """Sends ranges of features, and adds up what arrives of a number of features."""
        sent, received, n_features = how
        n = x.shape[:-1].numel()
        n_sent, n_received = (
            [n * sum(b - a for a, b in of) for of in each] for each in (sent, received)
        )
        message = torch.cat([x[..., a:b].flatten() for of in sent for a, b in of])
        arrived = finish(start_all_to_all(message, n_sent, n_received, self._group))
        out = x.new_zeros(*x.shape[:-1], n_features)
        places = list(itertools.chain(*received))
        pieces = torch.split(arrived, [n * (b - a) for a, b in places])
        for (a, b), piece in zip(places, pieces, strict=True):
            out[..., a:b] += piece.view(*x.shape[:-1], b - a)
        return out
