"""Mixture of experts: many MLPs in a block, a few of them active for each token (arXiv:1701.06538).

    x (N, D)  ->  router: scores of E experts, the highest A of each token and their gates
        |  tokens sorted by expert, once for each of their experts     (N A, D)
        |  parallel/experts.py: to the ranks that have the experts
        |  up, activation, down: one matmul of each expert              (rows, F)
        |  back to the tokens
        v
    sum over the A of gate x output, plus the shared expert

No token is dropped and nothing is padded: an expert multiplies as many rows as chose it. Rows are
moved by permutations, whose gradients are permutations too, so that no sum depends on an order that
a device chooses. The router computes in fp32; of equal scores the expert with the lower number
wins, on every device.

Shapes: N tokens, E experts, A active ones, D d_model, F d_expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainyard.architecture import LayerSpec, block_layers
from trainyard.config.run import Model
from trainyard.model.linear import Layer, apply


@dataclass(frozen=True)
class Groups:
    """Rows sorted by expert: the first `counts[0]` are those of expert 0, and so on."""

    counts: Tensor
    """Rows of each expert, (E,), int64."""
    n_rows: int
    """All of them."""

    @cached_property
    def ends(self) -> Tensor:
        """One past the last row of each expert, (E,), int32."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def sizes(self) -> list[int]:
        """The counts on the host, which waits for them."""
        sizes: list[int] = wait_for(self.counts, self.n_rows)
        return sizes


def wait_for(counts: Tensor, n_rows: int) -> list[Any]:
    """Returns counts of groups, `n_rows` in all, on the host, which waits for them."""
    return counts.tolist()


def _split(rows: Tensor, groups: Groups) -> tuple[Tensor, ...]:
    return torch.split(rows, groups.sizes)


GROUPED_MULTIPLE = 8
"""Sides of matrices that torch's grouped matmul takes are a multiple of it, of bf16: 16 bytes."""


class GroupedProduct(Protocol):
    """A matmul of rows sorted by expert with the weight of each, (E, out, in)."""

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups, /) -> Tensor:
        """Maps (rows, in) to (rows, out)."""

    def weight_gradient(self, gradient: Tensor, x: Tensor, groups: Groups, /) -> Tensor:
        """Returns that of every weight, (E, out, in), given that of the output."""


class LoopProduct:
    """One matmul after another: the reference, and as fast on a CPU."""

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups, /) -> Tensor:
        """Multiplies."""
        out = x.new_empty(len(x), weight.shape[1])
        rows = zip(_split(x, groups), _split(out, groups), weight, strict=True)
        for own, product, matrix in rows:
            torch.mm(own, matrix.t(), out=product)
        return out

    def weight_gradient(self, gradient: Tensor, x: Tensor, groups: Groups, /) -> Tensor:
        """Multiplies; an expert without rows gets zeros."""
        out = x.new_empty(len(groups.sizes), gradient.shape[1], x.shape[1])
        rows = zip(_split(gradient, groups), _split(x, groups), out, strict=True)
        for own, inputs, product in rows:
            torch.mm(own.t(), inputs, out=product)
        return out


class TorchProduct:
    """torch's grouped matmul on a GPU, for which the host need not know the sizes.

    In bf16 only: of other formats torch reads the sizes, and loops (2.13).
    """

    def __call__(self, x: Tensor, weight: Tensor, groups: Groups, /) -> Tensor:
        """Multiplies."""
        return F.grouped_mm(x, weight.transpose(1, 2), offs=groups.ends)

    def weight_gradient(self, gradient: Tensor, x: Tensor, groups: Groups, /) -> Tensor:
        """Multiplies."""
        return F.grouped_mm(gradient.t(), x, offs=groups.ends)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, product: GroupedProduct, groups: Groups
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.product, ctx.groups = product, groups
        return product(x, weight, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight = ctx.saved_tensors
        product, groups, gradient = ctx.product, ctx.groups, gradient.contiguous()
        of_x = product(gradient, weight.transpose(1, 2), groups)
        return of_x, product.weight_gradient(gradient, x, groups), None, None


class ExpertLinear(Layer):
    """A matmul of each expert, in the precision of the input."""

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Maps (rows, in) to (rows, out), or to (rows, 2 out) if there are two matrices."""
        weight, _ = self.cast(x.dtype)
        weight = weight.flatten(1, -2)
        is_even = not any(n % GROUPED_MULTIPLE for n in weight.shape[1:])
        grouped = not x.is_cpu and x.dtype == torch.bfloat16 and is_even
        product = TorchProduct() if grouped else LoopProduct()
        return apply(_Multiply, x, weight, product, groups)


class _Move(torch.autograd.Function):
    """Moves rows: row i of the result is `x[order[i] // n_copies]`; `inverse` undoes `order`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, n_copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.n_copies = n_copies
        return x[order if n_copies == 1 else order // n_copies]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        rows = gradient[inverse]
        if ctx.n_copies > 1:
            rows = rows.view(-1, ctx.n_copies, gradient.shape[1]).sum(1)
        return rows, None, None, None


def move(x: Tensor, order: Tensor, inverse: Tensor, n_copies: int = 1) -> Tensor:
    """Moves the rows of `n_copies` copies of each row of `x`; `order` is a permutation of them."""
    return apply(_Move, x, order, inverse, n_copies)


def invert(order: Tensor) -> Tensor:
    """Returns the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


class _Logits(torch.autograd.Function):
    """A matmul in fp32 of factors in the compute precision, in which it keeps them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        precise = torch.promote_types(x.dtype, torch.float32)
        return F.linear(x.to(precise), weight.to(precise))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight.to(gradient.dtype)
        of_weight = gradient.flatten(0, -2).t() @ x.flatten(0, -2).to(gradient.dtype)
        return of_x.to(x.dtype), of_weight.to(weight.dtype)


class _Watch(torch.autograd.Function):
    """Returns the gates; the backward pass adds the gradient of `penalty`, and counts the load.

    There, because a recomputed block has two forward passes.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, penalty: Tensor, scale: Tensor, load: Tensor, counts: Tensor
    ) -> Tensor:
        ctx.save_for_backward(scale, counts)
        ctx.load, ctx.dtype = load, penalty.dtype
        return gates.view_as(gates)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        scale, counts = ctx.saved_tensors
        ctx.load.add_(counts)
        return gradient, scale.to(ctx.dtype), None, None, None


class Router(Layer):
    """Chooses the experts of each token.

    Attributes:
        balance: added to scores, not to gates, where it keeps the load equal; fp32, (E,).
        load: tokens of each expert in the backward passes since it was cleared, fp32, (E,).
        scale: of the loss: of a token's share in it, in gradients.
        add_up: of the counts of ranks that have parts of the same sequences; replaceable.
        n_alike: ranks that have the same tokens.
    """

    balance: Tensor | None
    load: Tensor
    scale: Tensor

    def __init__(self, spec: LayerSpec, model: Model) -> None:
        super().__init__(spec)
        self.model = model
        self.register_buffer("load", torch.zeros(len(self.weight)), persistent=False)
        self.register_buffer("scale", torch.ones(()), persistent=False)
        self.add_up: Callable[[Tensor], Tensor] = _alone
        self.n_alike = 1

    def allocate(self, spec: LayerSpec) -> None:
        """Makes the weight, and the balance, which has no gradient."""
        super().allocate(replace(spec, has_bias=False))
        self.register_buffer("balance", torch.zeros(len(self.weight)) if spec.has_bias else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Maps (B, T, D) to gates and numbers of experts, (B, T, A), and the load, (B, E)."""
        weight, _ = self.cast(x.dtype)
        logits = apply(_Logits, x, weight)
        scores = logits.softmax(-1) if self.model.router == "softmax" else logits.sigmoid()
        chosen = self._choose(scores.detach())
        gates = scores.gather(-1, chosen)
        if self.model.router_normalized:
            gates = gates / (gates.sum(-1, keepdim=True) + 1e-20)
        gates = gates * self.model.router_scale
        # Counted by comparing: other ways wait for the device, or add in any order.
        numbers = torch.arange(scores.shape[-1], device=x.device)
        counts = (chosen.flatten(1)[..., None] == numbers).sum(1)
        if torch.is_grad_enabled() and self.training:
            gates = self._watch(gates, logits, scores, counts)
        return gates, chosen, counts

    def _choose(self, scores: Tensor) -> Tensor:
        """Returns the experts with the highest scores, the first of equal ones."""
        model, E = self.model, scores.shape[-1]
        if self.balance is not None:
            scores = scores + self.balance
        if model.n_active_groups < model.n_expert_groups:
            groups = scores.view(*scores.shape[:-1], model.n_expert_groups, -1)
            best = groups.topk(min(2, groups.shape[-1]), -1).values.sum(-1)
            allowed = _highest(best, model.n_active_groups)
            mask = torch.ones_like(best, dtype=torch.bool).scatter(-1, allowed, False)
            mask = mask.repeat_interleave(E // model.n_expert_groups, -1)
            scores = scores.masked_fill(mask, -torch.inf)
        return _highest(scores, model.n_active_experts)

    def _watch(self, gates: Tensor, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor:
        """Adds the gradients of balance and z-loss to those of the gates."""
        model, E = self.model, scores.shape[-1]
        penalty = torch.zeros((), dtype=scores.dtype, device=scores.device)
        if model.balance == "loss" and model.balance_coefficient:
            whole = self.add_up(counts.to(scores.dtype))
            share = E * whole / whole.sum(-1, keepdim=True)  # 1 for a uniform load
            shares = scores if model.router == "softmax" else scores / scores.sum(-1, keepdim=True)
            penalty = penalty + model.balance_coefficient * (share[:, None] * shares).sum()
        if model.router_z_loss:
            penalty = penalty + model.router_z_loss * logits.logsumexp(-1).square().sum()
        scale = self.scale / self.n_alike
        return apply(_Watch, gates, penalty, scale, self.load, counts.sum(0))


def _alone(counts: Tensor) -> Tensor:
    return counts


def _highest(scores: Tensor, n: int) -> Tensor:
    """Returns the positions of the `n` highest along the last dimension, the first of equals."""
    order: Tensor = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :n].contiguous()  # of which autograd would keep all


class Experts(nn.Module):
    """The experts of a block, or those that a rank has.

    Args:
        model: their shape.
        activate: maps the outputs of the input matrices, one or two, to inputs of the last.
    """

    def __init__(self, model: Model, activate: Callable[..., Tensor]) -> None:
        super().__init__()
        layers = block_layers(model)
        self.up = ExpertLinear(layers["mlp.experts.up"])
        self.down = ExpertLinear(layers["mlp.experts.down"])
        self.n_parts, self.activate = self.up.weight.ndim - 2, activate

    def forward(self, x: Tensor, groups: Groups) -> Tensor:
        """Maps rows sorted by expert, (rows, D), to outputs."""
        inner = self.activate(*self.up(x, groups).chunk(self.n_parts, -1))
        out: Tensor = self.down(inner, groups)
        return out


class ExpertExchange(Protocol):
    """Moves rows to the ranks that have their experts, and outputs back."""

    def start(self, rows: Tensor, groups: Groups) -> Any:
        """Starts to send rows sorted by expert of all."""

    def finish(self, started: Any) -> tuple[Tensor, Groups]:
        """Returns the rows of this rank's experts, sorted."""

    def send_back(self, outputs: Tensor, started: Any) -> Tensor:
        """Returns the outputs of the rows that were sent, in their order."""


class ExpertMLP(nn.Module):
    """Router, experts and, if any, the shared expert.

    Attributes:
        exchange: with ranks that share the experts; None if this rank has all.
        spread: gives every tensor rank all tokens; replaceable.
        collect: sums outputs over tensor ranks; replaceable.
    """

    def __init__(
        self, model: Model, activate: Callable[..., Tensor], shared: nn.Module | None
    ) -> None:
        super().__init__()
        self.router = Router(block_layers(model)["mlp.router"], model)
        self.experts = Experts(model, activate)
        self.shared = shared
        self.exchange: ExpertExchange | None = None
        self.spread: Callable[[Tensor], Tensor] = _alone
        self.collect: Callable[[Tensor], Tensor] = _alone

    def forward(self, x: Tensor) -> Tensor:
        """Maps (B, T, D) to (B, T, D)."""
        tokens = self.spread(x)
        gates, chosen, counts = self.router(tokens)
        n_active = chosen.shape[-1]
        of_slots = chosen.flatten()
        order = of_slots.argsort(stable=True)
        inverse = invert(order)
        groups = Groups(counts.sum(0), len(of_slots))
        rows = move(tokens.flatten(0, -2), order, inverse, n_active)
        exchange = self.exchange
        started = None if exchange is None else exchange.start(rows, groups)
        shared = None if self.shared is None else self.shared(x)  # beside the exchange
        if exchange is None:
            outputs = self.experts(rows, groups)
        else:
            outputs = exchange.send_back(self.experts(*exchange.finish(started)), started)
        outputs = move(outputs, inverse, order).view(*chosen.shape, -1)
        routed = (gates[..., None].to(outputs.dtype) * outputs).sum(-2)
        out = self.collect(routed)
        return out if shared is None else out + shared
