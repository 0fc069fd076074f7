"""Layers that keep weights in one precision and compute in that of their input.

Master weights stay fp32. The cast to the compute precision is part of the graph, so their gradients
accumulate in fp32. Casts are explicit, without autocast: the forward pass shows what runs in which
precision.

Casts and sums of gradients move up to 26 bytes per weight and micro batch. `cast_once` casts once
for all micro batches; `add_to_gradients` makes backward passes add to the gradients of earlier
ones, and the matmul of a weight's gradient do it itself:

    autograd      matmul -> bf16 -> fp32 -> added to the sum      2 + (2 + 4) + (4 + 4 + 4) bytes
    here          matmul, which adds to the sum                   4 + 4 bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, library, nn

from trainyard.architecture import LayerSpec
from trainyard.config.run import Model


class MatmulFunction(Protocol):
    """A matmul of (..., in) with a weight (out, in), plus a bias, like `F.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Returns (..., out), in the precision of `x` and of the weight."""

    def input_gradient(self, gradient: Tensor, weight: Tensor, /) -> Tensor:
        """Returns the gradient of the input, given that of the output."""

    def weight_gradient(self, gradient: Tensor, x: Tensor, /) -> Tensor:
        """Returns the gradient of the weight, given that of the output."""


class PlainProduct:
    """`F.linear`."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, /) -> Tensor:
        """Multiplies."""
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, weight: Tensor, /) -> Tensor:
        """Multiplies."""
        return gradient @ weight

    def weight_gradient(self, gradient: Tensor, x: Tensor, /) -> Tensor:
        """Multiplies."""
        return gradient.flatten(0, -2).T @ x.flatten(0, -2)


class Exchange(Protocol):
    """What ranks that shard a weight exchange around its matmul, in pieces of tokens.

    Of a weight sharded by outputs (column-parallel), every rank needs all tokens of the input; of
    one sharded by inputs (row-parallel), outputs are summed over ranks.

    What is started runs beside computation until it is finished; in a backward pass, beside the
    sums of gradients that wait for it (`defer_sums`).
    """

    @property
    def gathers_again(self) -> bool:
        """Whether the backward pass gathers an input again instead of keeping it."""

    def gather_and_multiply(
        self, x: Tensor, multiply: Callable[..., Tensor], *factors: Any
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Multiplies each piece of all tokens once it is here; returns products and pieces."""

    def start_gather(self, x: Tensor, gradient: Tensor | None = None) -> Sequence[Tensor]:
        """Starts to gather all tokens; again, for the backward pass of `gradient`."""

    def finish_gather(self, started: Sequence[Tensor], n_sequences: int) -> Tensor:
        """Returns all tokens."""

    def start_sum(
        self, x: Tensor, multiply: Callable[..., Tensor], *factors: Any
    ) -> Sequence[Tensor]:
        """Multiplies each piece of all tokens, and starts to sum the product over ranks."""

    def finish_sum(self, started: Sequence[Tensor], n_sequences: int) -> Tensor:
        """Returns this rank's part of the sum."""


def join(pieces: Sequence[Tensor], n_sequences: int) -> Tensor:
    """Puts pieces, (b, t, N) each, together as (B, T, N)."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(list(pieces))
    return whole.view(n_sequences, -1, *whole.shape[-1:])


class Layer(nn.Module):
    """A weight and perhaps a bias, kept in one precision and used in another.

    Attributes:
        casts: of both, while passes share them (`cast_once`).
        sums: of both gradients, for backward passes to add to (`add_to_gradients`); None inside:
            there is none yet.
        n_parts: matrices whose rows alternate in the weight; in casts they follow each other.
        is_cast: whether passes use a cast of it.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    n_parts: int = 1
    is_cast: bool = True

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__()
        # Not of the class: compiled code would notice when they become the layer's own.
        self.casts: tuple[Tensor, Tensor | None] | None = None
        self.sums: tuple[Tensor | None, Tensor | None] | None = None
        self.allocate(spec)

    def allocate(self, spec: LayerSpec) -> None:
        """Makes uninitialized parameters, of the whole layer or of a rank's shard."""
        self.weight = nn.Parameter(torch.empty(spec.weight))
        self.bias = nn.Parameter(torch.empty(spec.weight[:1])) if spec.has_bias else None

    def cast(self, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Returns weight and bias in a precision, as part of the graph."""
        if self.casts is None:
            return self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        weight, bias = self.casts
        of_weight, of_bias = self.sums or (None, None)
        share: Callable[..., Tensor] = _KnownCast.apply
        return share(self.weight, weight, of_weight, self.n_parts), (
            None if bias is None else share(self.bias, bias, of_bias, self.n_parts)
        )


class Linear(Layer):
    """A matmul, plus a bias, in the precision of the input.

    If a weight alternates the rows of two matrices, outputs alternate too. On a CPU, and where
    passes share casts, those of the first matrix come first: reading every other number is slow.

    Attributes:
        product: computes the matmul; replaceable.
        exchange: gives every rank the whole input of a weight that ranks shard by outputs, or sums
            outputs, beside matmuls; None if nothing is exchanged.
        sums_outputs: whether ranks shard the weight by inputs, so that `exchange` sums outputs.
    """

    def __init__(self, spec: LayerSpec) -> None:
        super().__init__(spec)
        self.is_paired = spec.fused[1] == (1, 1)
        self.n_parts = 2 if self.is_paired else 1
        self.product: MatmulFunction = PlainProduct()
        self.exchange: Exchange | None = None
        self.sums_outputs = False

    def forward(self, x: Tensor) -> Tensor:
        """Maps (..., inputs) to (..., outputs)."""
        weight, bias = self.cast(x.dtype)
        if not self.sums_outputs:
            return self._multiply(x, weight, bias)
        out = self._multiply(x, weight, None)  # a bias comes after the sum
        return out if bias is None else out + bias

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        values = total = None
        is_mixed = self.is_paired and x.is_cpu and self.casts is None
        if is_mixed:
            is_small = x.shape[:-1].numel() < x.shape[-1]
            if is_small and self.exchange is None and not torch.is_grad_enabled():
                paired = self.product(x, weight, bias)  # of few tokens: smaller than the weight
                return torch.cat(paired.view(*x.shape[:-1], -1, 2).unbind(-1), -1)
            weight = _parts(weight, 2).reshape(weight.shape)
            bias = None if bias is None else _parts(bias, 2).reshape(bias.shape)
        if self.sums and isinstance(self.product, PlainProduct):
            values = self.casts[0] if self.casts else weight.detach()
            weight, total = self.weight, self.sums[0]
        if values is None and self.exchange is None:
            return self.product(x, weight, bias)
        n_parts = self.n_parts if is_mixed or self.casts else 1
        how = self.product, self.exchange, self.sums_outputs, n_parts
        out: Tensor = _Product.apply(x, weight, values, total, bias, how)  # type: ignore[no-untyped-call]
        return out

    def split(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Splits the outputs, (..., 2F), of a weight that alternates the rows of two matrices."""
        if self.weight.is_cpu or (self.casts is not None and self.n_parts == 2):
            first, second = outputs.chunk(2, -1)
        else:
            first, second = outputs.view(*outputs.shape[:-1], -1, 2).unbind(-1)
        return first, second


def _parts(rows: Tensor, n_parts: int) -> Tensor:
    """Views rows that alternate between matrices, (n F, ...), as these, (n, F, ...)."""
    return rows.view(-1, n_parts, *rows.shape[1:]).transpose(0, 1)


def as_output(x: Tensor) -> Tensor:
    """Returns `x` for an autograd function to return; compiled, as a new tensor of the same data.

    An operation in place, or a `.to` without effect, returns the tensor it was given. A function
    that returns that one too has no gradient when compiled by torch 2.11: zeros, without an error.
    """
    return x.view_as(x) if torch.compiler.is_compiling() else x


class _Forgetful:
    """Stands for the context of an autograd function that has no backward pass."""

    def save_for_backward(self, *_: Tensor) -> None:
        """Saves nothing."""


def apply(function: type[torch.autograd.Function], *arguments: Any) -> Tensor:
    """Applies a function; where no gradient is wanted, without the graph's work on each call."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
    out: Tensor = function.forward(_Forgetful(), *arguments)
    return out


class Embedding(Layer):
    """A matrix whose rows are read by number; a head multiplies by its cast.

    Attributes:
        first_row: number of its first row, where ranks shard the rows.
        collect: sums over ranks what each has a part of; None if each has all.
    """

    is_cast = False
    first_row: int = 0
    collect: Callable[[Tensor], Tensor] | None = None

    def forward(self, rows: Tensor) -> Tensor:
        """Maps (B, T), int64, to (B, T, D)."""
        total = self.sums[0] if self.sums else None
        if self.collect is None:
            return apply(_Rows, rows, self.weight, total)
        rows = rows - self.first_row
        elsewhere = (rows < 0) | (rows >= len(self.weight))
        found = apply(_Rows, rows.masked_fill(elsewhere, 0), self.weight, total)
        return self.collect(found.masked_fill(elsewhere[..., None], 0.0))


class _Rows(torch.autograd.Function):
    """`F.embedding`, whose backward pass may add to the sum, for want of a gradient of all rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.n_rows, ctx.dtype = len(weight), weight.dtype
        ctx.total = total  # not saved, which would forbid the head to add to it before
        return F.embedding(rows, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None]:
        (rows,) = ctx.saved_tensors
        # Many tokens share a row: they are summed in fp32.
        gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
        if ctx.total is not None:
            ctx.total.index_add_(0, rows.flatten(), gradient.flatten(0, -2))
            return None, None, None
        dense = torch.ops.aten.embedding_dense_backward
        of_rows = dense(gradient, rows, ctx.n_rows, -1, scale_grad_by_freq=False)
        return None, of_rows.to(ctx.dtype), None


class Norm(Layer):
    """LayerNorm or RMSNorm over the last dimension, in the precision of the input.

    Attributes:
        average: of the means of all ranks that shard the features of an RMSNorm; replaceable.
    """

    def __init__(self, spec: LayerSpec, model: Model) -> None:
        super().__init__(spec)
        self.kind = "rms" if spec.sharding == "features" else model.norm
        assert self.kind in ("layer", "rms"), f"model.norm={self.kind!r} has no computation"
        self.epsilon, self.average = model.layer_norm_epsilon, _of_one_rank

    def forward(self, x: Tensor) -> Tensor:
        """Normalizes (..., D)."""
        weight, bias = self.cast(x.dtype)
        if self.kind == "layer":
            return F.layer_norm(x, weight.shape, weight, bias, self.epsilon)
        return apply(_RMSNorm, x, weight, self.epsilon, self.average)


def _of_one_rank(mean: Tensor) -> Tensor:
    """The average of one mean."""
    return mean


class _RMSNorm(torch.autograd.Function):
    """Keeps its input only; `F.rms_norm` keeps copies in fp32 as well (CPU, torch 2.13).

    With s = 1 / sqrt(mean(x^2) + epsilon), the output is w s x, and the gradient of x is
    s (g w - s x mean(g w s x)) for that of the output, g.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, epsilon: float, average: Callable[[Tensor], Tensor]
    ) -> Tensor:
        precise = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(average(precise.square().mean(-1, keepdim=True)) + epsilon)
        ctx.save_for_backward(x, scale, weight)
        ctx.average = average
        return as_output((precise * scale * weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, scale, weight = ctx.saved_tensors
        normal, precise = x * scale, gradient.to(scale.dtype)
        product = precise * normal
        of_weight = product.flatten(0, -2).sum(0)
        mean = ctx.average((product @ weight.to(scale.dtype)).unsqueeze(-1) / len(weight))
        of_x = (precise * weight).addcmul_(normal, mean, value=-1).mul_(scale)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None, None


def _cast_all(layers: list[Layer], dtype: torch.dtype) -> list[Tensor]:
    """Casts weight and bias of each layer."""
    known = [(p.detach(), e.n_parts) for e in layers for p in (e.weight, e.bias) if p is not None]
    casts = [torch.empty_like(parameter, dtype=dtype) for parameter, _ in known]
    in_order = [number for number, (_, n_parts) in enumerate(known) if n_parts == 1]
    if in_order:  # one kernel for many
        torch._foreach_copy_([casts[n] for n in in_order], [known[n][0] for n in in_order])
    for values, (parameter, n_parts) in zip(casts, known, strict=True):
        if n_parts > 1:
            parts = _parts(parameter, n_parts)
            values.view(parts.shape).copy_(parts)
    return casts


@contextmanager
def cast_once(layers: Iterable[Layer], dtype: torch.dtype) -> Iterator[None]:
    """Shares one cast of each parameter among all passes inside its block.

    Otherwise each micro batch in flight would keep its own until its backward pass.

    Args:
        layers: their parameters must not change inside the block.
        dtype: of their inputs.
    """
    layers = list(layers)
    cast = [each for each in layers if each.is_cast and each.weight.dtype != dtype]
    unused = iter(_cast_all(cast, dtype))
    for each in cast:
        each.casts = next(unused), None if each.bias is None else next(unused)
    del unused
    try:
        yield
    finally:
        for each in layers:
            each.casts = each.sums = None


def add_to_gradients(layers: Iterable[Layer], *, is_ahead: bool = False) -> None:
    """Makes the next backward pass add to the gradients of layers under `cast_once`.

    Their parameters then get no gradient from autograd. Call it before each forward pass, which
    gets tensors of its own: autograd checks that nothing has changed those it saved. An
    embedding's gradient is made here, since a tied one has two parts.

    Args:
        layers: those of the pass.
        is_ahead: other backward passes may come before that of the next forward pass, so that all
            gradients are made here, of layers without casts too.
    """
    adding: list[Layer] = []
    missing: list[nn.Parameter] = []
    for each in layers:  # without generators: their steps are calls, and this is done every pass
        is_made = is_ahead or isinstance(each, Embedding)
        if is_made or each.casts is not None:
            adding.append(each)
        if is_made:
            missing += [p for p in (each.weight, each.bias) if p is not None and p.grad is None]
    zeros = [torch.empty_like(parameter) for parameter in missing]
    if zeros:  # one kernel for many
        torch._foreach_zero_(zeros)
    for parameter, gradient in zip(missing, zeros, strict=True):
        parameter.grad = gradient
    for each in adding:
        total, of_bias = each.weight.grad, None if each.bias is None else each.bias.grad
        each.sums = None if total is None else total.data, None if of_bias is None else of_bias.data


class _KnownCast(torch.autograd.Function):
    """A cast whose values already exist: only adds the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, parameter: Tensor, cast: Tensor, total: Tensor | None, n_parts: int
    ) -> Tensor:
        ctx.dtype, ctx.n_parts = parameter.dtype, n_parts
        ctx.save_for_backward(total)
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        (total,) = ctx.saved_tensors
        if total is not None:
            parts = _parts(total, ctx.n_parts)
            parts.add_(gradient.view(parts.shape))
            return None, None, None, None
        if ctx.n_parts > 1:
            rows = gradient.view(ctx.n_parts, -1, *gradient.shape[1:])
            gradient = rows.transpose(0, 1).reshape(gradient.shape)
        return gradient.to(ctx.dtype), None, None, None


def multiply_by(product: MatmulFunction, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies, with the gradients that `product` computes."""
    out: Tensor = _Product.apply(x, weight, None, None, bias, (product, None, False, 1))  # type: ignore[no-untyped-call]
    return out


class _Product(torch.autograd.Function):
    """A matmul whose backward pass sums in fp32, and computes while ranks exchange.

    `weight` receives the gradient, and has the values to multiply by. With others in `values`, the
    gradient is summed in fp32 by the matmul.

    Pieces of tokens overlap: g gathers or s sums one, m multiplies it; w is the weight's gradient,
    and v that of the layer that was before in the backward pass, if it could wait (`defer_sums`).

                       forward                   backward
        column         g0 g1 .  .                g  s0 s1
                       .  m0 m1 .                m0 m1 v
        row            .  s0 s1                  g  .
                       m0 m1 .                   v  m     or, if none waits, pieces as forward
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        values: Tensor | None,
        total: Tensor | None,
        bias: Tensor | None,
        how: tuple[MatmulFunction, Exchange | None, bool, int],
    ) -> Tensor:
        product, exchange, sums_outputs, _ = how
        factor = weight if values is None else values
        kept: Sequence[Tensor] = [x]
        if exchange is None:
            out = product(x, factor, bias)
        elif sums_outputs:
            out = exchange.finish_sum(exchange.start_sum(x, product, factor), len(x))
        else:
            products, whole = exchange.gather_and_multiply(x, product, factor, bias)
            out = join(products, len(x))
            kept = kept if exchange.gathers_again else whole
        ctx.save_for_backward(factor, total, *kept)
        ctx.how = how
        ctx.sums, ctx.has_bias = values is not None, bias is not None
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        factor, total, *kept = ctx.saved_tensors
        product, exchange, sums_outputs, n_parts = ctx.how
        n_sequences = len(gradient)
        sums: Sequence[Tensor] = []
        if exchange is None or sums_outputs:
            (whole,) = kept
            if exchange is not None and total is None:  # no matmul waits for the exchange
                both = exchange.gather_and_multiply(gradient, product.input_gradient, factor)
                of_x, gradient = (join(pieces, n_sequences) for pieces in both)
            else:
                if exchange is not None:
                    gradient = exchange.finish_gather(exchange.start_gather(gradient), n_sequences)
                of_x = product.input_gradient(gradient, factor)
        else:
            again = exchange.gathers_again
            started = exchange.start_gather(kept[0], gradient) if again else []
            sums = exchange.start_sum(gradient, product.input_gradient, factor)
            join_all = exchange.finish_gather if again else join
            whole = join_all(started if again else kept, n_sequences)
        rows = gradient.flatten(0, -2)
        if ctx.sums:
            of_weight = sum_product(total, rows.t(), whole.flatten(0, -2), n_parts=n_parts)
        else:
            of_weight = product.weight_gradient(gradient, whole)
        of_bias = rows.sum(0) if ctx.has_bias else None
        if sums:
            of_x = exchange.finish_sum(sums, n_sequences)
        return of_x, of_weight if total is None else None, None, None, of_bias, None


def sum_product(
    total: Tensor | None, a: Tensor, b: Tensor, scale: float = 1.0, n_parts: int = 1
) -> Tensor:
    """Adds scale x a @ b to `total` in place, or to zero without one; returns the sum, fp32.

    The rows of `total` alternate between `n_parts` matrices, which follow each other in `a`.
    """
    if total is None:
        product: Tensor = torch.ops.trainyard.product(a, b, scale, n_parts)
        return product
    if torch.compiler.is_compiling() or not _defer(total, a, b, scale, n_parts):
        torch.ops.trainyard.add_product(total, a, b, scale, n_parts)
    return total


Sums = list[Callable[[], None]]
_WAITING: list[tuple[Sums, bool]] = []
"""The last one gets the sums of `defer_sums`; whether they wait for an exchange only."""


@contextmanager
def defer_sums(*, for_exchange: bool = False) -> Iterator[Sums]:
    """Yields a list, which gets what backward passes inside would have added to gradients.

    Args:
        for_exchange: the next exchange that is started inside computes them, or else the end.
    """
    sums = Sums()
    _WAITING.append((sums, for_exchange))
    try:
        yield sums
    finally:
        _WAITING.pop()
    if for_exchange:
        compute_sums(sums)


def compute_beside_exchange() -> None:
    """Computes the sums that waited for an exchange, which has been started."""
    if _WAITING and _WAITING[-1][1]:
        compute_sums(_WAITING[-1][0])


def _defer(*arguments: Any) -> bool:
    if _WAITING:
        _WAITING[-1][0].append(partial(torch.ops.trainyard.add_product, *arguments))
    return bool(_WAITING)


@torch.no_grad()
def compute_sums(sums: Sums) -> None:
    """Adds what was deferred, and frees what each sum needs after it; defers nothing meanwhile."""
    waiting, _WAITING[:] = _WAITING[:], []
    try:
        while sums:
            sums.pop()()
    finally:
        _WAITING[:] = waiting


# Operations of their own, because Inductor would add in a kernel after the matmul.
_LIBRARY: Any = library.Library("trainyard", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("add_product(Tensor(a!) total, Tensor a, Tensor b, float scale, int parts) -> ()")
_LIBRARY.define("product(Tensor a, Tensor b, float scale, int parts) -> Tensor")


@library.impl(_LIBRARY, "add_product", "CompositeExplicitAutograd")
def _add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, n_parts: int) -> None:
    if not _defer(total, a, b, scale, n_parts):  # the call of a compiled block
        _multiply_into(total, a, b, scale, n_parts)


def _multiply_into(
    total: Tensor, a: Tensor, b: Tensor, scale: float, n_parts: int, beta: float = 1.0
) -> None:
    parts = _parts(total, n_parts)
    if _has_mixed_matmuls(a):
        for rows, factor in zip(parts, a.chunk(n_parts), strict=True):
            torch.addmm(rows, factor, b, out_dtype=total.dtype, beta=beta, alpha=scale, out=rows)
    else:
        parts.add_((a @ b).view(parts.shape), alpha=scale)


@library.impl(_LIBRARY, "product", "CompositeExplicitAutograd")
def _product(a: Tensor, b: Tensor, scale: float, n_parts: int) -> Tensor:
    make = torch.empty if _has_mixed_matmuls(a) else torch.zeros
    total = make(len(a), b.shape[1], dtype=torch.float32, device=a.device)
    _multiply_into(total, a, b, scale, n_parts, beta=0.0)
    return total


@library.impl(_LIBRARY, "add_product", "Meta")
def _shape_of_added(total: Tensor, a: Tensor, b: Tensor, scale: float, n_parts: int) -> None:
    assert total.shape == (len(a), b.shape[1]), (total.shape, a.shape, b.shape)


@library.impl(_LIBRARY, "product", "Meta")
def _shape_of_product(a: Tensor, b: Tensor, scale: float, n_parts: int) -> Tensor:
    return a.new_empty(len(a), b.shape[1], dtype=torch.float32)


def _has_mixed_matmuls(x: Tensor) -> bool:
    """Whether matmuls of 16-bit values can give and add fp32: on NVIDIA GPUs."""
    return x.is_cuda and x.element_size() == 2 and torch.version.hip is None
