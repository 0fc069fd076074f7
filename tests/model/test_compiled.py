"""Compiled equals eager: every autograd function and operation, and a block of each family.

A function that returns a tensor which it changed in place, or which `.to` returned unchanged, has a
zero gradient when compiled by torch 2.11, and no error (`as_output`).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from torch import Tensor
from torch.overrides import TorchFunctionMode

from trainyard.config.load import load_run, preset_names
from trainyard.config.run import Run
from trainyard.model.attention import _Rotation
from trainyard.model.compiled import compile_block
from trainyard.model.dropout import _Dropout, sequence_seeds
from trainyard.model.gpt import GPT, initialize
from trainyard.model.linear import (
    PlainProduct,
    _KnownCast,
    _of_one_rank,
    _Product,
    _RMSNorm,
    _Rows,
    add_to_gradients,
    as_output,
    cast_once,
    sum_product,
)
from trainyard.model.loss import LossOptions, _SummedCrossEntropy
from trainyard.parallel import collectives
from trainyard.parallel.context import _Ring

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own, not ours

Call = tuple[Callable[..., Tensor], list[Tensor]]
"""A function, and inputs whose gradients to compare."""
PACKAGES = ("model", "parallel", "precision", "optim", "training")
BACKENDS = ["aot_eager", "inductor"]


def functions() -> Iterator[type[torch.autograd.Function]]:
    """Finds every autograd function that is compiled: `compile_block` leaves experts out."""
    for package in PACKAGES:
        folder = import_module(f"trainyard.{package}").__path__
        for module in pkgutil.iter_modules(folder, f"trainyard.{package}."):
            if module.name.endswith(".experts"):
                continue
            found = vars(import_module(module.name)).values()
            for each in found:
                is_function = isinstance(each, type) and issubclass(each, torch.autograd.Function)
                if is_function and each.__module__ == module.name:
                    yield each


def calls_on_one_rank(dtype: torch.dtype) -> dict[str, Call]:
    """Gives a call of each function that needs no other rank."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype)

    bits = torch.randint(-(2**62), 2**62, (8, 1))
    factors = torch.randint(-(2**31), 2**31 - 1, (16,), dtype=torch.int32)
    rotation = torch.rand(2, 3, 1, 16)
    plain, halves = ((PlainProduct(), None, False, n_parts) for n_parts in (1, 2))
    cast, labels = torch.randn(12, 16).to(torch.bfloat16), torch.randint(0, 20, (8,))
    options = LossOptions(20)
    return {
        "_RMSNorm": (
            lambda x, w: _RMSNorm.apply(x, w, 1e-5, _of_one_rank),
            [draw(8, 16), torch.rand(16) + 0.5],
        ),
        "_Rows": (lambda w: _Rows.apply(labels.abs(), w, None), [torch.randn(20, 16)]),
        "_Dropout": (lambda x: _Dropout.apply(x, 0.1, bits, factors), [draw(8, 16)]),
        "_Rotation": (lambda x: _Rotation.apply(x, rotation), [draw(2, 3, 4, 16)]),
        "_KnownCast": (lambda w: _KnownCast.apply(w, cast, None, 1), [torch.randn(12, 16)]),
        "_KnownCast of halves": (
            lambda w: _KnownCast.apply(w, cast, None, 2),
            [torch.randn(12, 16)],
        ),
        "_Product": (
            lambda x, w: _Product.apply(x, w, None, None, None, plain),
            [draw(8, 16), draw(12, 16)],
        ),
        "_Product that sums in fp32": (
            lambda x, w: _Product.apply(x.bfloat16(), w, cast, None, None, plain),
            [draw(8, 16), torch.randn(12, 16)],
        ),
        "_Product that sums halves in fp32": (
            lambda x, w: _Product.apply(x.bfloat16(), w, cast, None, None, halves),
            [draw(8, 16), torch.randn(12, 16)],
        ),
        "_SummedCrossEntropy": (
            lambda x, w: _SummedCrossEntropy.apply(x, w, labels, 0.5, options),
            [draw(8, 16), torch.randn(20, 16)],
        ),
    }


def calls_on_two_ranks(dtype: torch.dtype) -> dict[str, Call]:
    """Gives a call of each function that exchanges tensors."""
    group, x = dist.group.WORLD, torch.randn(2, 4, 6, dtype=dtype)
    q, k, v = torch.randn(3, 2, 4, 8, 16, dtype=dtype)
    exchanges = {
        f"{'by tokens' if by_tokens else 'whole'}, {in_piece} in a piece": collectives.TensorRanks(
            group, by_tokens, in_piece, 1, gathers_again=False
        )
        for by_tokens in (False, True)
        for in_piece in (1, 2)
    }
    calls: dict[str, Call] = {
        f"_Collective: {name}, {name_of_call}": (getattr(ranks, name_of_call), [x])
        for name, ranks in exchanges.items()
        for name_of_call in ("spread", "collect")
    }
    parts = partial(collectives.exchange_parts, group=group)
    calls["_Collective: exchange_parts"] = parts, [x]
    return calls | {"_Ring": (lambda *qkv: _Ring.apply(*qkv, None, group), [q, k, v])}


class NoteReturned(TorchFunctionMode):
    """Notes what an operation returned and was given: tensors changed in place, or unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        if isinstance(out, Tensor) and any(out is each for each in given):
            self.found.append(out)
        return out


def returns_what_it_was_given(call: Call) -> bool:
    """Whether a function returns a tensor that an operation inside it returned and was given."""
    function, inputs = call
    with NoteReturned() as noted, mock.patch("torch.compiler.is_compiling", lambda: True):
        out = function(*inputs)
    return any(out is each for each in noted.found)


def worst_difference(call: Call, backend: str) -> float:
    """Compares output and gradients, compiled and eager, by their norms."""
    function, inputs = call
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        given = [each.detach().clone().requires_grad_() for each in inputs]

        # Neighbours, so that the function is neither first nor last in its graph.
        def around(*tensors: Tensor) -> Tensor:
            return function(*(each * 1.0 for each in tensors)) + 1

        run = torch.compile(around, backend=backend) if compiled else around
        out = run(*given)
        torch.manual_seed(1)
        # Not `randn_like`: it draws in the order of strides, which a compiler chooses.
        out.backward(torch.randn(out.shape, dtype=out.dtype) if out.ndim else None)
        found.append([out, *(each.grad for each in given)])
    return max(difference(a, b) for a, b in zip(*found, strict=True))


def difference(expected: Tensor | None, found: Tensor | None) -> float:
    """Gives the norm of the difference of two tensors, of the first one's."""
    assert expected is not None and found is not None, "a gradient is missing"
    assert expected.norm() > 0
    return float((found.double() - expected.double()).norm() / expected.double().norm())


BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def judge(call: Call, dtype: torch.dtype, backend: str) -> None:
    assert not returns_what_it_was_given(call), "return as_output(...)"
    assert worst_difference(call, backend) < BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("backend", everyday(BACKENDS, ["aot_eager"]))
@pytest.mark.parametrize("name", calls_on_one_rank(torch.float32))
def test_a_function_is_the_same_compiled(name: str, backend: str, dtype: torch.dtype) -> None:
    judge(calls_on_one_rank(dtype)[name], dtype, backend)


def judge_on_two_ranks(dtype: torch.dtype, backend: str) -> list[str]:
    torch.manual_seed(dist.get_rank())
    calls = calls_on_two_ranks(dtype)
    for call in calls.values():
        judge(call, dtype, backend)
    return list(calls)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("backend", everyday(BACKENDS, ["aot_eager"]))
def test_functions_that_exchange_are_the_same_compiled(
    backend: str, dtype: torch.dtype, run_ranks: Callable[..., list[list[str]]]
) -> None:
    tried = [*run_ranks(2, judge_on_two_ranks, dtype, backend)[0], *calls_on_one_rank(dtype)]
    names = {each.__name__ for each in functions()}
    assert {name.split()[0].rstrip(":") for name in tried} == names, "each function has a call"


def test_a_function_that_returns_what_it_changed_in_place_is_found() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return (x + 1).mul_(2)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return 2 * gradient

    call: Call = (Doubled.apply, [torch.ones(3)])
    assert returns_what_it_was_given(call)
    assert not returns_what_it_was_given((lambda x: as_output(Doubled.apply(x)), [torch.ones(3)]))
    if torch.__version__.startswith("2.11."):
        assert worst_difference(call, "aot_eager") == 1, "its gradient is zero"


@pytest.mark.parametrize("backend", everyday(BACKENDS, ["aot_eager"]))
def test_operations_of_our_own_are_the_same_compiled(backend: str) -> None:
    a, b = torch.randn(4, 8).bfloat16(), torch.randn(8, 6).bfloat16()
    found = []
    for run in (sum_product, torch.compile(sum_product, backend=backend, fullgraph=True)):
        total = torch.ones(4, 6)
        run(total, a, b, 0.5)
        found.append([total, run(None, a, b, 0.5), run(None, a, b, 0.5, 2)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


FAMILIES = {
    "gpt3": ("gpt3-125m", "model.dropout=0"),
    "gpt3 with dropout": ("gpt3-125m", "model.dropout=0.1"),
    "llama": ("llama-3.2-1b",),
    "modern": ("modern-350m",),
    "qwen": ("qwen3-0.6b",),
    "smollm": ("smollm2-135m",),
    "olmo": ("olmo-2-1b",),
    # Experts are outside of what is compiled.
    "olmoe": ("olmoe-1b-7b", "model.n_experts=0"),
    "deepseek": ("deepseek-moe-16b", "model.n_experts=0"),
    "rotary gpt3": ("demo",),
    "experts": (
        *("modern-350m", "model.n_experts=4", "model.n_shared_experts=1", "model.d_expert=32"),
        *("model.balance_coefficient=0.1", "model.router_z_loss=0.1"),
    ),
    "within documents": (
        *("llama-3.2-1b", "model.attention_within_documents=true", "model.end_of_document_id=3"),
    ),
}
SMALL = (
    *("model.n_layers=1", "model.d_model=64", "model.n_heads=4", "model.n_key_value_heads=2"),
    *("model.d_head=16", "model.d_ff=96", "model.sequence_length=32"),
    *("model.vocabulary_size=120", "model.rotary_scaling=none", "model.init_std=0.2"),
)


def small_run(words: tuple[str, ...]) -> Run:
    preset, *changes = words
    small = [each for each in SMALL if not ("key_value" in each and preset.startswith("gpt3"))]
    return load_run(preset, [*small, *changes]).run


def gradients(
    words: tuple[str, ...], dtype: torch.dtype, recompute: Any, backend: str | None
) -> dict[str, Tensor]:
    """Sums the gradients of two micro batches, as a step does, in the rows' order of a GPU."""
    run = small_run(words)
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = GPT(run.model, 128, dtype, recompute)
    initialize(model, 1)
    if backend:
        for block in model.blocks.values():
            compile_block(block, backend=backend, fullgraph=recompute == "none")
    layers = [each for each in model.modules() if hasattr(each, "casts")]
    found = {}
    with cast_once(layers, dtype):
        for number in range(2):
            tokens = torch.randint(0, 120, (2, 33))
            add_to_gradients(layers)
            seeds = sequence_seeds(1, number, 0, 2) if run.model.dropout else None
            hidden = model(tokens[:, :-1], seeds)
            model.summed_loss(hidden, tokens[:, 1:], 1 / 64).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    assert all(each is not None for each in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("recompute", everyday(["none", "attention", "block"], ["none"]))
@pytest.mark.parametrize("backend", everyday(BACKENDS, ["aot_eager"]))
@pytest.mark.parametrize("dtype", everyday(BOUNDS, [torch.bfloat16]), ids=str)
@pytest.mark.parametrize("name", everyday(FAMILIES, ["gpt3 with dropout", "qwen", "olmo"]))
def test_a_block_has_the_same_gradients_compiled(
    name: str, dtype: torch.dtype, backend: str, recompute: str
) -> None:
    expected = gradients(FAMILIES[name], dtype, recompute, None)
    found = gradients(FAMILIES[name], dtype, recompute, backend)
    # Compiled, vectors are not rounded to bf16 before they are added.
    bound = 10 * BOUNDS[dtype] if backend == "inductor" else BOUNDS[dtype]
    assert expected.keys() == found.keys()
    for parameter, gradient in expected.items():
        assert difference(gradient, found[parameter]) < bound, parameter


def stored(words: tuple[str, ...], backend: str | None) -> int:
    """Counts what a pass of a recomputed block stores, as large as its input or larger."""
    run = small_run(words)
    torch._dynamo.reset()
    model = GPT(run.model, 128, torch.float32, "block")
    initialize(model, 1)
    if backend:
        for block in model.blocks.values():
            compile_block(block, backend=backend)
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    seeds = sequence_seeds(1, 0, 0, 2) if run.model.dropout else None
    tensors: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: tensors.append(x) or x, lambda x: x):
        model(tokens, seeds)
    weights = {each.untyped_storage().data_ptr() for each in model.parameters()}
    large = {e.untyped_storage().data_ptr() for e in tensors if e.numel() >= 2 * 32 * 64}
    return len(large - weights)


@pytest.mark.parametrize("name", everyday(FAMILIES, ["gpt3 with dropout", "llama"]))
def test_a_recomputed_block_stores_its_input_alone_compiled(name: str) -> None:
    # Not compiled, it holds its input without the graph.
    assert stored(FAMILIES[name], "aot_eager") <= stored(FAMILIES[name], None) + 1


def architecture(words: tuple[str, ...]) -> tuple[object, ...]:
    model = load_run(words[0], list(words[1:])).run.model
    parts = (model.mlp, model.norm, model.norm_place, model.bias, model.positions)
    return (*parts, model.query_key_norm, model.n_heads > model.n_key_value_heads)


def test_every_architecture_of_the_presets_has_a_block_here() -> None:
    tried = {architecture(words) for words in FAMILIES.values()}
    assert {architecture((name,)) for name in preset_names()} <= tried
