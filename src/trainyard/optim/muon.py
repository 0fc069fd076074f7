"""Muon: orthogonalized momentum for matrices of blocks, AdamW for everything else.

    momentum    m = mu m + (1 - mu) g                          g: the clipped gradient
    update      u = mu m + (1 - mu) g                          Nesterov
                o = u with singular values near 1              5 Newton-Schulz iterations
    weight      w = w - rate (0.2 sqrt(max(rows, columns)) o + decay w)

The scale gives updates the size of AdamW's, so that its learning rate and weight decay carry over
(Moonlight, arXiv:2502.16982); `model.parametrization` may multiply it. Queries, keys and values are
orthogonalized apart, as three matrices, as there and in Megatron-Core; their fused weight
alternates their rows head by head.

Only a whole matrix can be orthogonalized. The ranks at a pipeline rank share this work: in rounds
of as many matrices as ranks, largest first, each rank computes one of them.

    4 ranks, round 1          a         b         c         d      matrices of 4 blocks
    all-to-all                parts of a to rank 0, of b to rank 1, ..
    Newton-Schulz             rank 0    rank 1    rank 2    rank 3
    all-to-all                each rank gets its parts of o of a, b, c, d

Experts are many matrices of one shape: the ranks that hold them orthogonalize them in one batch,
and tensor ranks, which hold a part of each, deal them out among themselves.

Ranks that hold the same part of a weight each send a piece of it, and all get the same numbers
back. So every layout computes what one device computes, and no matrix is computed twice. Messages
and iterations are in the run's compute precision; bf16 if that has 16 bits, as published.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from trainyard.architecture import Fused, LayerSpec, Shape, find_layer, in_rounds
from trainyard.config.precisions import MOMENTUM
from trainyard.config.run import Run
from trainyard.optim.adamw import AdamW
from trainyard.parallel.collectives import all_to_all, finish, start_all_to_all
from trainyard.parallel.mesh import Mesh
from trainyard.parallel.model import LocalParameter, ParallelModel
from trainyard.parallel.placement import Placement, local_part, whole

# The quintic iteration of https://kellerjordan.github.io/posts/muon.
N_ITERATIONS, COEFFICIENTS = 5, (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7
ADAMW_SIZE = 0.2
"""Root mean square of AdamW's updates in practice (arXiv:2502.16982)."""


def orthogonalize(update: Tensor, fused: Fused = (1, ())) -> Tensor:
    """Returns a matrix with the same singular vectors, and singular values near 1.

    Args:
        update: (rows, columns), in the precision to compute in; or a batch of such matrices.
        fused: of its `LayerSpec`; each of the matrices is orthogonalized apart, and smaller ones
            are scaled down, as AdamW's size needs.
    """
    n_groups, n_rows = fused
    if n_rows:
        n_columns = update.shape[1]
        largest = max(_size(n_groups * n, n_columns) for n in n_rows)
        parts = []
        for part in torch.split(update.view(n_groups, -1, n_columns), list(n_rows), 1):
            matrix = part.flatten(0, 1)
            share = _size(*matrix.shape) / largest
            alone = orthogonalize(matrix)
            parts.append((alone if share == 1 else alone * share).view_as(part))
        return torch.cat(parts, 1).view(update.shape)
    rows, columns = update.shape[-2:]
    x = update.mT if rows > columns else update
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST_NORM)
    multiply = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = COEFFICIENTS
    for _ in range(N_ITERATIONS):
        gram = x @ x.mT
        x = multiply(x, multiply(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if rows > columns else x


def _size(rows: int, columns: int) -> float:
    """Returns what an orthogonalized matrix is multiplied by to have AdamW's size."""
    return ADAMW_SIZE * math.sqrt(max(rows, columns))


class _Exchange:
    """How the ranks of a stage take matrices of one shape apart, and put them together.

    A row of a matrix consists of equal segments, one for each tensor rank that shards its columns.

    Args:
        mesh: of this rank.
        shape: of the whole matrix.
        dimension: that tensor ranks shard.
        sharded: whether data ranks shard it (ZeRO 1 to 3).

    Attributes:
        sent: values that each rank sends to the one that computes.
        held: values that each rank gets back: those of its part.
        first: index, in this rank's part, of the first value that it sends.
    """

    def __init__(self, mesh: Mesh, shape: Shape, dimension: int | None, *, sharded: bool) -> None:
        topology = mesh.topology
        n_shards = topology.shard * topology.context
        held, sent = [], []
        for rank in range(topology.n_ranks // topology.pipeline):
            at = topology.coordinates(rank)
            part = whole(shape)
            if dimension is not None:
                part = part.cut(dimension, at.tensor, topology.tensor)
            shard = at.shard * topology.context + at.context
            held.append(part.cut(0, shard, n_shards) if sharded else part)
            n_copies = topology.replicate if sharded else n_shards
            copy = at.replicate if sharded else shard
            if dimension is None:
                n_copies, copy = n_copies * topology.tensor, copy * topology.tensor + at.tensor
            sent.append(held[-1].cut(0, copy, n_copies))
        self.sent, self.held = ([math.prod(p.local_shape) for p in ps] for ps in (sent, held))
        rank = mesh.rank % len(held)
        self.first = (sent[rank].offsets[0] - held[rank].offsets[0]) * held[rank].local_shape[1]
        # The position of each segment of the matrix among those sent, and the segments of all
        # parts; both rank by rank.
        order = [segment for part in sent for segment in _segments(part)]
        numbers = sorted(range(len(order)), key=order.__getitem__)
        parts = [segment for part in held for segment in _segments(part)]
        self._order = torch.tensor(numbers, device=mesh.device)
        self._parts = torch.tensor(parts, device=mesh.device)

    def put_together(self, received: Tensor, shape: Shape) -> Tensor:
        """Returns the whole matrix from what all ranks have sent, rank by rank."""
        return received.view(len(self._order), -1)[self._order].view(shape)

    def take_apart(self, matrix: Tensor) -> Tensor:
        """Returns the parts of all ranks, rank by rank."""
        return matrix.reshape(len(self._order), -1)[self._parts].flatten()


def _segments(part: Placement) -> list[int]:
    """Numbers the segments of a part as in the whole matrix."""
    width = part.local_shape[1]
    n = part.shape[1] // width
    rows = range(part.offsets[0], part.offsets[0] + part.local_shape[0])
    return [row * n + part.offsets[1] // width for row in rows]


@dataclass(frozen=True)
class _Matrix:
    """A matrix of a block, or this rank's part, with its state."""

    local: LocalParameter
    layer: LayerSpec
    momentum: Tensor
    exchange: _Exchange

    @property
    def scale(self) -> float:
        """What gives an orthogonalized update the size of AdamW's."""
        largest = max(_size(*shape) for shape in self.layer.matrices)
        return largest * self.local.multipliers.muon_rate


@dataclass(frozen=True)
class _Experts:
    """Matrices of the experts that this rank holds, or its part of each, with their state."""

    local: LocalParameter
    momentum: Tensor
    tensor: dist.ProcessGroup | None

    @property
    def scale(self) -> float:
        """What gives an orthogonalized update the size of AdamW's."""
        return _size(*self.local.placement.shape[-2:]) * self.local.multipliers.muon_rate

    def orthogonalize(self, update: Tensor) -> Tensor:
        """Maps (experts, .., rows, columns), this rank's part, to that of the orthogonalized."""
        group, dimension = self.tensor, self.local.dimension
        if group is None or dimension is None:
            return orthogonalize(update.flatten(0, -3)).view_as(update)
        n, n_ranks = len(update), group.size()
        sent = update if n % n_ranks == 0 else F.pad(update.flatten(1), (0, 0, 0, -n % n_ranks))
        # Each rank gets the parts of its experts, and sends them back.
        sent = sent.view(n_ranks, -1, *update.shape[1:])
        experts = torch.cat(all_to_all(sent, group).unbind(), dimension)
        experts = orthogonalize(experts.flatten(0, -3)).view_as(experts)
        parts = torch.stack(experts.chunk(n_ranks, dimension))
        return all_to_all(parts, group).flatten(0, 1)[:n]


class Muon:
    """Muon and AdamW as an `optim.optimizer.LocalOptimizer`.

    Args:
        parallel_model: this rank's part of the model.
        run: the run.
    """

    def __init__(self, parallel_model: ParallelModel, run: Run) -> None:
        mesh, locals_ = parallel_model.mesh, parallel_model.local_parameters
        rest = [local for local in locals_ if MOMENTUM not in local.stored.states]
        multipliers = [local.multipliers for local in rest]
        self.rest = AdamW([local.parameter for local in rest], run.optimizer, multipliers)
        self._settings, self._group = run.optimizer, mesh.stage
        dtype = next(iter(parallel_model.stages.values())).compute_dtype
        self._dtype = dtype if dtype.itemsize > torch.bfloat16.itemsize else torch.bfloat16
        exchanges: dict[tuple[Shape, int | None], _Exchange] = {}
        self.matrices: dict[str, _Matrix | _Experts] = {}
        for local in locals_:
            if MOMENTUM in local.stored.states:
                layer = find_layer(run.model, local.name)
                if layer.kind == "experts":
                    momentum = torch.zeros_like(local_part(local.parameter))
                    self.matrices[local.name] = _Experts(local, momentum, mesh.tensor)
                    continue
                kind = layer.weight, local.dimension
                if kind not in exchanges:
                    sharded = run.parallel.shards_state
                    exchanges[kind] = _Exchange(mesh, *kind, sharded=sharded)
                momentum = torch.zeros_like(local_part(local.parameter))
                self.matrices[local.name] = _Matrix(local, layer, momentum, exchanges[kind])
        matrices = [each for each in self.matrices.values() if isinstance(each, _Matrix)]
        self._experts = [each for each in self.matrices.values() if isinstance(each, _Experts)]
        n_ranks = 1 if self._group is None else self._group.size()
        rounds = in_rounds([matrix.layer.weight for matrix in matrices], n_ranks)
        self._rounds = [[matrices[number] for number in numbers] for numbers in rounds]

    @torch.no_grad()
    def step(self, learning_rate: float, divisor: Tensor, skip: Tensor) -> None:
        """Updates all weights."""
        self.rest.step(learning_rate, divisor, skip)
        # Where an update is skipped, gradients count as 0 and all else is multiplied by 0 or 1.
        done = (skip == 0).double()
        decay = 1 - done * (learning_rate * self._settings.weight_decay)
        for each in self._experts:
            part = each.orthogonalize(self._advance(each, divisor, done))
            weight = local_part(each.local.parameter).mul_(decay)
            weight.addcmul_(part.view_as(weight), done * (-learning_rate * each.scale))
        for matrices in self._rounds:
            updates = (self._advance(matrix, divisor, done) for matrix in matrices)
            for matrix, part in zip(matrices, self._orthogonalize(matrices, updates), strict=True):
                weight = local_part(matrix.local.parameter).mul_(decay)
                weight.addcmul_(part.view_as(weight), done * (-learning_rate * matrix.scale))

    def _advance(self, matrix: _Matrix | _Experts, divisor: Tensor, done: Tensor) -> Tensor:
        """Updates the momentum; returns the update before it is orthogonalized."""
        gradient, momentum = matrix.local.gradient, matrix.momentum
        assert isinstance(gradient, Tensor), matrix.local.name
        decay = self._settings.momentum
        gradient = torch.where(done == 0, 0.0, gradient / divisor)
        momentum.lerp_(gradient, (done * (1 - decay)).to(momentum.dtype))
        return gradient.lerp_(momentum, decay).to(self._dtype)

    def _orthogonalize(
        self, matrices: Sequence[_Matrix], updates: Iterable[Tensor]
    ) -> list[Tensor]:
        """Returns this rank's part of each orthogonalized update of a round, flat."""
        group = self._group
        if group is None:
            return [orthogonalize(u, m.layer.fused) for m, u in zip(matrices, updates, strict=True)]
        rank, n_idle = group.rank(), group.size() - len(matrices)
        sent = [m.exchange.sent[rank] for m in matrices]
        values = torch.cat(
            [
                update.flatten()[m.exchange.first :][:n]
                for m, update, n in zip(matrices, updates, sent, strict=True)
            ]
        )
        own = matrices[rank] if rank < len(matrices) else None
        nothing = [0] * group.size()
        from_all = own.exchange.sent if own else nothing
        values = finish(start_all_to_all(values, sent + [0] * n_idle, from_all, group))
        if own:
            values = own.exchange.put_together(values, own.layer.weight)
            values = own.exchange.take_apart(orthogonalize(values, own.layer.fused))
        held = [m.exchange.held[rank] for m in matrices]
        to_all = own.exchange.held if own else nothing
        values = finish(start_all_to_all(values, to_all, held + [0] * n_idle, group))
        return list(torch.split(values, held))

    def state_of(self, local: LocalParameter) -> dict[str, Tensor]:
        """Returns this rank's momentum, or moments, of a parameter."""
        matrix = self.matrices.get(local.name)
        return self.rest.state_of(local) if matrix is None else {MOMENTUM: matrix.momentum}

    def prepare_state(self, n_updates: int | None) -> None:
        """Makes zero states for a checkpoint to fill, or for the start."""
        self.rest.prepare_state(n_updates)
        for matrix in self.matrices.values():
            matrix.momentum.zero_()
