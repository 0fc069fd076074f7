"""A fake world: fake tensors, a fake process group, and a CPU that acts like a GPU.

The real code runs in it. Tensors have shapes but no values, so a rank of 175B parameters fits in a
laptop; messages go nowhere, so one process can be any rank of 1,024.

Fake tensors could claim to be on a GPU, but without one their backward passes cannot run, and
attention falls back to its slowest form. So they are on "cpu", and GPU behavior is patched in:

    Tensor.is_cpu                   False: chunks of the loss, norms of gradients, as on a GPU
    F.scaled_dot_product_attention  saves what the flash kernel saves, with and without dropout
    attention.attention_kernel      that of a GPU: flash attention in bf16 and fp16
    attention._attend_packed        as scaled_dot_product_attention, one document per sequence
    block_scaled._CHUNK_BLOCKS      pieces as large as on a GPU

Fp8 matmuls need no patch: `torch._scaled_mm` has shapes on a CPU too. Only its GPU workspace is
missing. Fake tensors and fake ranks need these patches:

    wait_for                        counts of rows for experts: equal on all ranks and experts
    nn.Module.to                    would replace the memory of parameters, or swap tensors that
                                    have weak references: fake ones refuse both
    parallel.model.initialize       its threads are not in fake mode, and would draw the weights
    parallel.model.allocate         fake parameters need no memory, and their device cannot change
    DeviceMesh                      six methods compute with real numbers
    dist.new_group                  makes groups of the fake backend
    _warmup_p2p                     no neighbour answers; in torch 2.11 it is a stage's
                                    `_get_init_p2p_neighbors_ops`

`accounting.py` patches two methods to observe them: `UntypedStorage.resize_`, which no dispatcher
sees, and those by which DTensor infers shapes; `kernels.py` patches one by which Inductor would
write code. Nothing else in Trainyard replaces code of others (tested), but for a fault of torch
2.11 that `model/compiled.py` mends. Private names of PyTorch that differ between 2.11 and 2.14 are
in these four files and in `parallel/start.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor import _redistribute, debug
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainyard.model import attention as model_attention
from trainyard.model import experts as model_experts
from trainyard.model.attention import FLASH
from trainyard.parallel import experts as parallel_experts
from trainyard.parallel import model as parallel_model
from trainyard.precision import block_scaled
from trainyard.simulate.accounting import replaced

# Mesh functions that compute with real numbers even in fake mode.
_METHODS_OF_MESHES = (
    "_concatenate",
    "__init__",
    "__getitem__",
    "_flatten",
    "get_local_rank",
    "get_coordinate",
)


@contextmanager
def fake_world(rank: int, n_ranks: int) -> Iterator[None]:
    """Makes this process rank `rank` of `n_ranks` inside its block; meshes are built in it."""
    with ExitStack() as stack:
        if n_ranks > 1:
            stack.enter_context(_fake_group(rank, n_ranks))
        stack.enter_context(_real_meshes())
        stack.enter_context(_no_handshake())
        yield


@contextmanager
def fake_tensors(*, on_gpu: bool) -> Iterator[None]:
    """Makes all tensors created inside its block fake; `on_gpu` acts like a GPU."""
    with ExitStack() as stack:
        stack.enter_context(replaced(nn.Module, "to", _to))
        # Its threads are not in fake mode, and would draw billions of numbers.
        stack.enter_context(replaced(parallel_model, "initialize", lambda *_: None))
        stack.enter_context(replaced(parallel_model, "WITHOUT_MEMORY", "cpu"))
        stack.enter_context(replaced(parallel_model, "allocate", lambda *_: None))
        for module in (model_experts, parallel_experts):
            stack.enter_context(replaced(module, "wait_for", _balanced))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(_Values())  # type: ignore[no-untyped-call]
        if on_gpu:
            stack.enter_context(_acts_as_gpu())
        yield


@contextmanager
def _fake_group(rank: int, n_ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized(), "a process has one world"
    new_group = dist.new_group

    def fake_new_group(*args: Any, **kwargs: Any) -> Any:
        return new_group(*args, **{**kwargs, "backend": "fake"})

    dist.init_process_group("fake", rank=rank, world_size=n_ranks, store=FakeStore())
    try:
        with replaced(dist, "new_group", fake_new_group):
            yield
    finally:
        dist.destroy_process_group()
        _forget_layouts()


def _forget_layouts() -> None:
    """Clears DTensor's cache; a later world would get this one's meshes."""
    debug._clear_sharding_prop_cache()  # type: ignore[no-untyped-call]
    _redistribute._gen_transform_infos.cache_clear()


@contextmanager
def _real_meshes() -> Iterator[None]:
    def with_real_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in _METHODS_OF_MESHES:
            method = vars(DeviceMesh).get(name)
            if isinstance(method, staticmethod | classmethod):
                wrapped: Any = type(method)(with_real_numbers(method.__func__))
            elif method is not None:
                wrapped = with_real_numbers(method)
            else:
                continue
            stack.enter_context(replaced(DeviceMesh, name, wrapped))
        yield


@contextmanager
def _no_handshake() -> Iterator[None]:
    """Skips the messages with which pipeline stages set up connections."""
    schedule = schedules._PipelineSchedule
    if not hasattr(schedule, "_warmup_p2p"):  # torch 2.11: the ranks of a stage's neighbours
        from torch.distributed.pipelining.stage import PipelineStage

        with replaced(PipelineStage, "_get_init_p2p_neighbors_ops", lambda _: []):
            yield
        return
    from torch.distributed.pipelining.stage import InferenceMode  # type: ignore[attr-defined]

    def agree(_: Any, stages: list[Any], *_args: Any) -> None:
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

    with replaced(schedule, "_warmup_p2p", agree):
        yield


def _to(module: nn.Module, target: torch.device | torch.dtype) -> nn.Module:
    """Moves nothing, as all is on one device; a new precision creates new parameters.

    `nn.Module.to` would replace the memory of old ones, which fake tensors refuse.
    """
    if isinstance(target, torch.dtype):
        for each in module.modules():
            for name, parameter in each.named_parameters(recurse=False):
                each.register_parameter(name, nn.Parameter(parameter.detach().to(target)))
    return module


def _balanced(counts: Tensor, n_rows: int) -> list[Any]:
    """Shares rows out equally, along the last dimension of counts."""
    each, rest = divmod(n_rows, counts.shape[-1])
    sizes = [each + (number < rest) for number in range(counts.shape[-1])]
    return sizes if counts.ndim == 1 else [sizes] * len(counts)


class _Values(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns 1 when a program reads a tensor's value."""

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Lets TorchDynamo compile under this mode."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].dtype.is_floating_point else 1
        return function(*args, **(kwargs or {}))


@contextmanager
def _acts_as_gpu() -> Iterator[None]:
    # Not a function mode, as none is active while a backward pass recomputes a block.
    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        enable_gqa: bool = False,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        assert is_causal == (attn_mask is None), "training has no other mask"
        out, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=attn_mask
        )
        return cast(Tensor, out)

    def packed_attention(q: Tensor, k: Tensor, v: Tensor, _lengths: Tensor, rate: float) -> Tensor:
        return attention(q, k, v, rate, is_causal=True)

    def kernel(_d_head: int, dtype: torch.dtype, _device: torch.device) -> str:
        return FLASH if dtype.itemsize == 2 else "efficient_attention"

    with (
        replaced(Tensor, "is_cpu", property(lambda _: False)),
        replaced(F, "scaled_dot_product_attention", attention),
        replaced(model_attention, "attention_kernel", kernel),
        replaced(model_attention, "_attend_packed", packed_attention),
        replaced(block_scaled, "_CHUNK_BLOCKS", {"cpu": block_scaled._CHUNK_BLOCKS["cuda"]}),
    ):
        yield
