"""Counts the kernels of a training step, with the bytes and FLOP of each, without a device.

The real step runs on fake tensors (`simulation.py`). Outside compiled blocks each operation is a
kernel. Compiled ones run through TorchDynamo, AOTAutograd and Inductor as on a GPU, up to the point
where Inductor would write code; its scheduler then has the kernels:

    counted     each fused Triton kernel: inputs it reads and outputs it writes, once each
                each library call: the same, and its FLOP; causal attention half of the square
    not known   memory that a kernel reads twice because a cache is too small; time inside kernels

Only torch is needed, also one without CUDA: Inductor schedules its "triton" backend for a CPU. It
differs there in details, such as reductions in two kernels.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from trainyard.config.rules import change
from trainyard.config.run import Run
from trainyard.launch.heartbeat import Heartbeat, Phase
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel
from trainyard.simulate.accounting import ATTENTION, Observer, count_flops, replaced
from trainyard.simulate.fake_world import fake_tensors, fake_world
from trainyard.simulate.simulation import (
    FEWEST_MICRO_BATCHES,
    FakeSteps,
    prepare_simulation,
)

# Without a kernel, though their schema does not say that they return a view.
_NO_KERNEL = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"} | {
    "_unsafe_view",
    "_local_scalar_dense",
}
# They fill their first argument without reading it.
_OVERWRITING = {"copy_", "fill_", "zero_", "_foreach_copy_", "_foreach_zero_"}
# They read or change only as much of their first argument as the others name.
_INDEXED = {"embedding", "gather", "index_select", "scatter_", "index_add_", "index_put_"}
# Operations on lists of tensors take at most so many, by the number of lists, and so many chunks of
# so many values in a launch (ATen/native/cuda/MultiTensorApply.cuh).
_MOST_TENSORS, _MOST_CHUNKS, _CHUNK_VALUES = {1: 110, 2: 64, 3: 48, 4: 36}, 320, 65_536
_FEWEST_OF_MANY_LISTS = 30
COMPILED_FORWARD = "blocks, forward"
"""Place of kernels in forward passes of compiled blocks."""


@dataclass(frozen=True)
class Kernel:
    """One kernel, or the equal launches of one operation on lists."""

    place: str
    """In the step."""
    name: str
    """The operation, or those fused into it."""
    n_bytes: int
    """Read and written."""
    flops: int = 0
    """FLOP of a matmul, or of causal attention."""
    dtype: torch.dtype | None = None
    """Format of a matmul's inputs."""
    is_attention: bool = False
    n_launches: int = 1


def count_kernels(run: Run) -> Counter[Kernel]:
    """Counts the kernels of a step of a run on one device.

    Args:
        run: the run; a step has train.global_batch_size sequences.

    Raises:
        ConfigError: the run cannot be trained on one device.
    """
    plan = prepare_simulation(run, 1)
    n_micro_batches = run.train.global_batch_size // run.train.micro_batch_size
    more = min(n_micro_batches, FEWEST_MICRO_BATCHES)
    fewer = more if more == n_micro_batches else more - 1
    # The fake device is a CPU.
    compiled = "never" if run.train.compile == "never" else "always"
    run = change(run, {"train.compile": compiled})
    counter = _KernelCounter()
    torch.compiler.reset()  # what was compiled for other sizes would make sizes dynamic
    with fake_world(0, 1), ExitStack() as stack:
        mesh = build_mesh(plan.topology, 0, torch.device("cpu"))
        stack.enter_context(fake_tensors(on_gpu=True))
        stack.enter_context(_lowered_only(counter))
        parallel_model = ParallelModel(run, plan, mesh)
        counter.watch_loss(parallel_model)
        steps = FakeSteps(run, plan, parallel_model, _Phases(counter))
        found = []
        for n in (fewer, more):
            counter.kernels.clear()
            with counter:
                steps.take(n)
            found.append(counter.kernels.copy())
    n_beyond = n_micro_batches - more
    return Counter(
        {kernel: n + n_beyond * (n - found[0][kernel]) for kernel, n in found[1].items()}
    )


class _Phases(Heartbeat):
    """Passes the phases of a step to the counter."""

    def __init__(self, counter: _KernelCounter) -> None:
        super().__init__()
        self._counter = counter

    def enter(self, phase: Phase, step: int) -> None:
        super().enter(phase, step)
        self._counter.phase = phase


class _KernelCounter(Observer):  # type: ignore[no-untyped-call]
    """Observes operations outside compiled blocks; `_lowered_only` adds those inside.

    Attributes:
        kernels: found so far.
        phase: of the step.
        is_in_loss: whether the forward pass of the loss runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[Kernel] = Counter()
        self.phase = ""
        self.is_in_loss = False

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets TorchDynamo compile under this mode."""
        return True

    def watch_loss(self, parallel_model: ParallelModel) -> None:
        """Tells the operations of the loss from others."""

        def mark(is_inside: bool) -> None:
            self.is_in_loss = is_inside

        for model in parallel_model.stages.values():
            if model.cross_entropy is not None:
                model.cross_entropy.register_forward_pre_hook(lambda *_: mark(True))
                model.cross_entropy.register_forward_hook(lambda *_: mark(False))

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        is_counted = not self.is_paused and self.phase != "data"  # which the host prepares
        if is_counted and _launches(function):
            place = self.phase
            if self.is_in_loss:
                place = "head and loss"
            elif self.phase == "forward and backward":
                is_backward = torch._C._current_graph_task_id() != -1
                place = "backward" if is_backward else "forward"
            self.kernels[_of_operation(place, function, args, kwargs, out)] += 1
        return out


def _launches(function: Any) -> bool:
    """Whether an operation computes anything, unlike views."""
    if function.namespace == "prim" or function._opname in _NO_KERNEL:
        return False
    aliases = [each.alias_info for each in function._schema.returns]
    is_view = bool(aliases) and all(each is not None and not each.is_write for each in aliases)
    return not is_view


def _of_operation(place: str, function: Any, args: Any, kwargs: Any, out: Any) -> Kernel:
    name: str = function._opname
    inputs: list[Tensor] = []
    n_bytes, lists = 0, []
    schema = function._schema.arguments
    values = [*zip(schema, args, strict=False)]
    values += [(each, kwargs[each.name]) for each in schema if each.name in kwargs]
    for number, (argument, value) in enumerate(values):
        tensors = [each for each in tree_leaves(value) if isinstance(each, Tensor)]
        inputs += tensors
        if isinstance(value, list | tuple) and tensors:
            lists.append(tensors)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (argument.is_out or (number == 0 and name in _OVERWRITING))
        n_passes = is_written + is_read
        if number == 0 and name in _INDEXED:
            continue
        n_bytes += n_passes * sum(map(_size, tensors))
    known = {id(each) for each in inputs}
    fresh = [e for e in tree_leaves(out) if isinstance(e, Tensor) and id(e) not in known]
    n_bytes += sum(map(_size, fresh))
    if name in _INDEXED:
        n_bytes *= 2 if not fresh else 1
        n_bytes += sum(map(_size, fresh))
    flops = count_flops(function, args, kwargs, out)
    found = _with_flops(place, name, n_bytes, flops, _narrowest(inputs) if flops else None)
    if lists and name.startswith(("_foreach", "_fused")):
        return replace(found, n_launches=_launches_of_lists(lists))
    return found


def _with_flops(
    place: str, name: str, n_bytes: int, flops: int, dtype: torch.dtype | None
) -> Kernel:
    if name in ATTENTION:  # of a CPU; causal
        name = "attention_backward" if name.endswith("backward") else "attention"
        return Kernel(place, name, n_bytes, flops // 2, dtype, is_attention=True)
    return Kernel(place, name, n_bytes, flops, dtype if flops else None)


def _size(x: Tensor) -> int:
    """Returns the bytes of a tensor's values; those of an expanded one once."""
    sizes = [n for n, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return math.prod(sizes) * x.element_size()


def _launches_of_lists(lists: Sequence[Sequence[Tensor]]) -> int:
    most = _MOST_TENSORS.get(len(lists), _FEWEST_OF_MANY_LISTS)
    n_chunks = sum(math.ceil(each.numel() / _CHUNK_VALUES) for each in lists[0])
    return max(math.ceil(len(lists[0]) / most), math.ceil(n_chunks / _MOST_CHUNKS))


@contextmanager
def _lowered_only(counter: _KernelCounter) -> Iterator[None]:
    """Makes Inductor stop after scheduling; compiled graphs then only count their kernels."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def compile_to_module(graph: Any) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        place = "blocks, backward" if graph.is_backward else COMPILED_FORWARD
        if counter.is_in_loss:
            place = "head and loss"
        kernels = [each for node in graph.scheduler.nodes for each in _of_node(place, node)]

        def call(arguments: list[Any]) -> list[Any]:
            counter.kernels.update(kernels)
            with counter.pause():
                outputs = _empty_outputs(graph.orig_gm.graph, arguments)
            arguments.clear()  # as compiled code does, to free them early
            return outputs

        return SimpleNamespace(call=call)

    with (
        config.patch(cpu_backend="triton", fx_graph_cache=False),
        replaced(GraphLowering, "compile_to_module", compile_to_module),
    ):
        yield


def _empty_outputs(graph: Any, arguments: Sequence[Any]) -> list[Any]:
    """Makes outputs of the shapes of a compiled graph; an input that it returns is that one."""
    inputs = dict(zip(graph.find_nodes(op="placeholder"), arguments, strict=True))
    outputs = []
    for node in graph.output_node().args[0]:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
        if node in inputs:
            value = inputs[node]
        elif isinstance(value, Tensor):
            value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        outputs.append(value)
    return outputs


def _of_node(place: str, node: Any) -> Iterator[Kernel]:
    """Yields the kernel of a node of Inductor's schedule, if it has one."""
    n_bytes = node.get_read_write_buffers_sizes()
    if n_bytes == 0:  # parts of another node's output
        return
    origins = [
        origin
        for each in node.get_nodes()
        for origin in each.node.origins
        if origin.op == "call_function"
    ]
    if not node.is_extern():
        names = dict.fromkeys(getattr(origin.target, "_opname", "") for origin in origins)
        parts = [name for name in names if name not in ("", "convert_element_type")]
        yield Kernel(place, "+".join(parts) or "cast", n_bytes)
        return
    calls = [call for origin in origins for call in _library_calls(origin)]
    if not calls:  # such as a state of the random generator
        return
    flops, name, dtype = max(calls, key=lambda call: call[0])
    yield _with_flops(place, name, n_bytes, flops, dtype)


def _library_calls(origin: Any) -> Iterator[tuple[int, str, torch.dtype]]:
    """Yields FLOP, name and format of the operation that a node of a graph calls."""
    args, kwargs = tree_map(
        lambda x: x.meta["val"] if isinstance(x, torch.fx.Node) else x, (origin.args, origin.kwargs)
    )
    # With a generator's state, a node calls its first argument that is an operation.
    for number, function in enumerate((origin.target, *args)):
        if isinstance(function, torch._ops.OpOverload):
            inputs = args[number:]
            tensors = [each for each in tree_leaves(inputs) if isinstance(each, Tensor)]
            # In torch 2.11 an operation that returns nothing has no value.
            flops = count_flops(function, inputs, kwargs, origin.meta.get("val"))
            if tensors:
                yield flops, function._opname, _narrowest(tensors)
            return


def _narrowest(tensors: Sequence[Tensor]) -> torch.dtype:
    """Returns the format of a matmul's factors, to which it may add wider values."""
    return min((each.dtype for each in tensors), key=lambda dtype: dtype.itemsize)
