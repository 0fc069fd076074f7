from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tests.waiting import WATCHDOG_SECONDS
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.config.load import build_run
from trainyard.errors import ConfigError
from trainyard.model.attention import CausalAttention
from trainyard.parallel import context
from trainyard.parallel.context import (
    Method,
    RingAttention,
    UlyssesAttention,
    refuse_ring,
    take_shard,
)

RunRanks = Callable[..., list[Any]]
METHODS: tuple[Method, ...] = ("ulysses", "ring")
B, T, K = 3, 32, 8  # the batch does not divide by the ranks


def whole_inputs(n_heads: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values, and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    shape = (B, n_heads, T, K)
    inputs = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    return [x.to(dtype) for x in inputs]


def results_of(core: Any, q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output, and the gradients of queries, keys and values."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = core(*leaves)
    out.backward(gradient)
    return [out.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def cut_core(method: Method) -> nn.Module:
    if method == "ring":
        return RingAttention(all_ranks())
    return UlyssesAttention(CausalAttention(K, 0.0, 1), all_ranks())


def share_of(x: Tensor, method: Method, dimension: int = 2) -> Tensor:
    return take_shard(x, dist.get_rank(), dist.get_world_size(), method, dimension)


def worst_difference(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(((a.double() - b.double()).norm() / b.double().norm()).item() for a, b in pairs)


def differences(method: Method, n_heads: int, dtype: torch.dtype) -> tuple[float, bool]:
    """This rank's worst difference from fp64; are all bits those of plain attention?"""
    inputs = whole_inputs(n_heads, dtype)
    core = cut_core(method)
    found = results_of(core, *(share_of(x, method) for x in inputs))
    exact = results_of(plain, *(x.double() for x in inputs))
    same = results_of(plain, *inputs)
    is_same = all(torch.equal(a, share_of(b, method)) for a, b in zip(found, same, strict=True))
    return worst_difference(found, [share_of(x, method) for x in exact]), is_same


# fp64 has no slack. In fp32, sums of 32 products in another order: a few units of 2^-24. In bf16 an
# output is rounded, by 2^-9 of its size at most, after each set of keys and after the merge; the
# kernels' backward rounds scores and their gradients besides.
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2**-7}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("n_ranks", "n_heads"), [(2, 4), (2, 2), (4, 4)])
def test_ranks_compute_what_one_device_does(
    run_ranks: RunRanks, method: Method, n_ranks: int, n_heads: int, dtype: torch.dtype
) -> None:
    results = run_ranks(n_ranks, differences, method, n_heads, dtype)
    assert max(difference for difference, _ in results) < BOUNDS[dtype]
    if method == "ulysses":
        assert all(is_same for _, is_same in results)


class _Watch(TorchDispatchMode):
    """Notes sends (s), computations (c) and waits (w), and how many received keys there were."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ""
        self.most_received = 0
        self._received: list[StorageWeakRef] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        names = {"all_to_all_single": "s", "flash_attention": "c", "wait_tensor": "w"}
        self.order += "".join(letter for name, letter in names.items() if name in str(func))
        # Gradients of bf16 keys travel in fp32.
        if "all_to_all_single" in str(func) and out.dtype == torch.bfloat16:
            self._received.append(StorageWeakRef(out.untyped_storage()))
        # gloo's thread lets go of what it sent a moment after the send is waited for.
        end = time.monotonic() + WATCHDOG_SECONDS
        while (n_held := sum(not each.expired() for each in self._received)) > 2:
            if self.most_received > 2 or time.monotonic() > end:
                break
        self.most_received = max(self.most_received, n_held)
        return out


def watched_ring() -> tuple[str, str, int]:
    q, k, v, gradient = (share_of(x, "ring") for x in whole_inputs(2, torch.bfloat16))
    core = cut_core("ring")
    with _Watch() as forward:
        out = core(q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    with _Watch() as backward:
        out.backward(gradient)
    return forward.order, backward.order, max(forward.most_received, backward.most_received)


def test_ring_computes_on_keys_while_the_next_arrive(run_ranks: RunRanks) -> None:
    for forward, backward, most_received in run_ranks(4, watched_ring):
        assert forward == "sc wsc wsc wc".replace(" ", "")
        # Each rank's part of the gradients of the keys is sent after its computation.
        # The last message goes while second halves see first ones.
        assert backward == "scc wsc s wsc ws wc ws c w".replace(" ", "")
        assert most_received == 2


def test_shares() -> None:
    tokens = torch.arange(16).view(2, 8)
    assert take_shard(tokens, 1, 2, "ulysses", 1)[0].tolist() == [4, 5, 6, 7]
    assert take_shard(tokens, 0, 2, "ring", 1)[0].tolist() == [0, 1, 6, 7]
    assert take_shard(tokens, 1, 2, "ring", 1)[1].tolist() == [10, 11, 12, 13]


def test_kernels_of_a_gpu_take_what_the_ring_gives_them() -> None:
    """Shapes and signatures alone; computing needs a GPU."""
    q = torch.empty((B, 4, 16, K), dtype=torch.bfloat16, device="meta")
    for queries, is_causal in ((q, True), (q[:, :, 8:], False)):
        kv = torch.stack((q, q))
        out, lse, random = context._attend(queries, kv, causal=is_causal)
        rows = (out, queries, out, lse)
        q_part, kv_part = context._attend_backward(rows, kv, random, causal=is_causal)
        assert out.shape == q_part.shape == queries.shape
        assert lse.shape == queries.shape[:3]
        assert kv_part.shape == kv.shape


@pytest.mark.parametrize(
    ("kind", "n_heads", "documents", "problem"),
    [
        ("fp32", 4, False, "precision.kind='fp32': flash attention"),
        ("bf16", 6, False, "heads of 10 values: flash attention"),
        ("fp32", 6, True, "model.attention_within_documents=true and precision.kind='fp32' and"),
        ("bf16", 4, True, "model.attention_within_documents=true: flash attention"),
        ("bf16", 4, False, ""),
    ],
)
def test_a_ring_without_a_kernel_on_a_gpu_is_refused(
    kind: str, n_heads: int, documents: bool, problem: str
) -> None:
    model = {"d_model": 60 if n_heads == 6 else 64, "n_heads": n_heads, "dropout": 0.0}
    model["attention_within_documents"] = documents
    parallel = {"context": 2, "context_method": "ring"}
    run = build_run({"model": model, "parallel": parallel, "precision": {"kind": kind}})
    refuse_ring(run, torch.device("cpu"))
    expected = pytest.raises(ConfigError, match=f"'ring' on a GPU is incompatible with {problem}")
    with expected if problem else nullcontext():
        refuse_ring(run, torch.device("cuda"))
