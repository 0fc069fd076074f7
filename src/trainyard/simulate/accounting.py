"""Counts memory, FLOP and messages of a training step, below PyTorch's dispatcher.

Tensors may be real or fake. Every operation is observed; each storage that it creates is recorded
when first seen, and released with its last tensor:

    operation              change                live
    mm            +        1,024  "mm"           1,024
    gelu          +        2,048  "gelu"         3,072    <- peak
    (freed)       -        1,024                 2,048

The records show afterwards what was live at the peak, by name and moment. They do not include
kernels' workspaces or an allocator's rounding.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
    "_allgather_base_": "all-gather",
    "all_gather_into_tensor_out": "all-gather",
    "all_gather_single": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "reduce_scatter_single": "reduce-scatter",
    "all_to_all_single": "all-to-all",
    "alltoall_base_": "all-to-all",
    "send": "send",
}
# The other end of a send; and operations that only wait or mark, without a message.
NO_MESSAGE = {"recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier"}
_INHERITED = object()
# torch's FLOP table lacks CPU attention.
ATTENTION: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": flop_counter.sdpa_flop_count,
    "_scaled_dot_product_flash_attention_for_cpu_backward": flop_counter.sdpa_backward_flop_count,
}


# Our own operations, and one that torch's FLOP table lacks.
_MATMULS = {"add_product": 1, "product": 0, "addmm_": 1}
"""Matmuls that sum gradients (model/linear.py, loss.py), and the place of their first factor."""


class Observer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observes operations, except while it is paused."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_paused = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ignores everything inside its block."""
        was_paused, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = was_paused


class Accounting(Observer):
    """Accounts of one rank; active as a context manager, which may be re-entered.

    Attributes:
        moment: the current phase, in words, set by callers.
        counts_all_reduces: whether to count them; off for single numbers.
        live_bytes: current memory.
        peak_bytes: peak memory since `start_over`.
        flops: of matmuls and attention, by operation.
        calls: messages by group name and kind.
        message_bytes: sum of the larger of input and output of each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moment = "start"
        self.counts_all_reduces = True
        self.live_bytes = 0
        self.peak_bytes = 0
        self.flops: Counter[str] = Counter()
        self.calls: Counter[tuple[str, str]] = Counter()
        self.message_bytes: Counter[tuple[str, str]] = Counter()
        self._live: dict[int, tuple[int, str]] = {0: (0, "copy of a message")}
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._initial: dict[int, tuple[int, str]] = {}
        self._changes: list[tuple[int, int, str]] = []
        self._peak_change = 0
        self.peak_moment = ""

    def start_over(self) -> None:
        """Resets counts and peak, but keeps live memory."""
        self.flops.clear()
        self.calls.clear()
        self.message_bytes.clear()
        self._changes.clear()
        self._initial = dict(self._live)
        self.peak_bytes, self._peak_change = self.live_bytes, 0
        self.peak_moment = self.moment

    def name(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Names live memory, for `largest_at_peak`."""
        for name, tensor in tensors:
            self._enter_tensor(tensor, name)
            key = _local(tensor).untyped_storage()._cdata
            self._live[key] = self._live[key][0], name

    def live_at_peak(self) -> Counter[str]:
        """Sums live memory at the peak by name; unnamed memory is under its operation."""
        live = dict(self._initial)
        live |= {key: (size, label) for key, size, label in self._changes[: self._peak_change]}
        by_name: Counter[str] = Counter()
        for size, label in live.values():
            by_name[label] += size
        return +by_name

    def __enter__(self) -> Accounting:
        self._undo = _watch(self)
        self._undo.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._undo.__exit__(None, None, None)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(_is_shell, types)):
            return NotImplemented  # called again with the inner tensors
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if self.is_paused:
            return out
        name = function._opname
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self._enter_tensor(leaf, name)
        if "c10d" in function.namespace and name not in NO_MESSAGE:
            self._count_message(name, tree_leaves((args, kwargs, out)))
        flops = count_flops(function, args, kwargs, out)
        if flops:
            self.flops[name] += flops
        return out

    def _count_message(self, name: str, leaves: list[Any]) -> None:
        kind = _group_of(leaves), COLLECTIVES.get(name, name)
        if kind[1] == "all-reduce" and not self.counts_all_reduces:
            return
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        n_bytes = max(x.nbytes for x in tensors)
        self.calls[kind] += 1
        self.message_bytes[kind] += n_bytes
        # Of these gloo has a copy until they have arrived (torch 2.11 to 2.14).
        if tensors[0].is_cpu and kind[1] in ("all-gather", "reduce-scatter"):
            self._resize(0, n_bytes)
            self._resize(0, 0)

    def _enter_tensor(self, tensor: Tensor, label: str) -> None:
        if tensor.device.type == "meta":
            return
        storage = _local(tensor).untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._references[key] = weakref.ref(storage, lambda _: self._remove(key))
            self._live[key] = 0, label
        self._resize(key, storage.size())

    def _remove(self, key: int) -> None:
        self._resize(key, 0)
        del self._live[key], self._references[key]

    def _resize(self, key: int, size: int) -> None:
        before, label = self._live[key]
        if size == before:
            return
        self.live_bytes += size - before
        self._changes.append((key, size, label))
        self._live[key] = size, label
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self._peak_change = self.live_bytes, len(self._changes)
            self.peak_moment = self.moment

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Records the new size of a known storage."""
        if storage._cdata in self._live:
            self._resize(storage._cdata, storage.size())


def count_flops(function: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Counts the FLOP of an operation: those of matmuls and attention, else 0.

    Attention counts as if every token saw all others.
    """
    name = function._opname
    if name in _MATMULS:
        a, b = args[_MATMULS[name] : _MATMULS[name] + 2]
        return int(flop_counter.mm_flop(a.shape, b.shape))
    if name == "_grouped_mm":  # by rows of experts, or their sums
        return int(2 * args[0].numel() * args[1].shape[-1])
    if name in ATTENTION:
        first = 1 if name.endswith("backward") else 0
        # Keys and values have as many heads as queries: torch 2.11 counts no shared ones.
        heads = args[0].shape[:2]
        return ATTENTION[name](*((*heads, *x.shape[2:]) for x in args[: 3 + first]))
    formula = flop_counter.flop_registry.get(function.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))


def _is_shell(kind: type) -> bool:
    """Whether tensors of this type wrap others: distributed ones, and torchao's fp8."""
    return issubclass(kind, DTensor) or kind.__name__ == "Float8TrainingTensor"


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, or the result of an asynchronous one."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    inner: Tensor = getattr(tensor, "elem", tensor)
    return inner


def _group_of(leaves: list[Any]) -> str:
    """Finds the group among the arguments: an object, or a name in functional calls."""
    for leaf in leaves:
        if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf._type()):
            name: str = dist.ProcessGroup.unbox(leaf).group_name
            return name
    return str([leaf for leaf in leaves if isinstance(leaf, str)][-1])


@contextmanager
def _watch(accounting: Accounting) -> Iterator[None]:
    """Shows the accounts what bypasses the dispatcher, and hides operations without memory.

    FSDP2 frees weights by resizing their storage, which is not an operation; and DTensor infers
    shapes with operations on global-size tensors, which no rank has.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    resize = torch.UntypedStorage.resize_

    def watched_resize(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        accounting.resized(storage)
        return result

    def paused(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with accounting.pause():
                return method(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", watched_resize))
        for name, method in list(vars(ShardingPropagator).items()):
            if "propagate" in name and callable(method):
                stack.enter_context(replaced(ShardingPropagator, name, paused(method)))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a class or module inside its block."""
    before = vars(owner).get(name, _INHERITED)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
