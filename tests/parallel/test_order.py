"""When ranks exchange: collectives of tensor parallelism run beside matmuls, compiled too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.model.gpt import GPT, compile_blocks
from trainyard.parallel.tensor import apply_tensor_parallel

LETTERS = {
    "all_gather": "g",
    "reduce_scatter": "r",
    "all_reduce": "r",
    "wait_tensor": "w",
    "mm": "m",
}


class _Watch(TorchDispatchMode):
    """Notes the start of gathers (g) and reductions (r), waits (w) and matmuls (m)."""

    def __init__(self) -> None:
        super().__init__()
        self.order = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.order += next((letter for name, letter in LETTERS.items() if name in str(func)), "")
        return func(*args, **(kwargs or {}))


def backward_order(run: Run, *, compiled: bool) -> str:
    """Runs the second backward pass of a block."""
    model = GPT(run.model, run.model.vocabulary_size, torch.bfloat16)
    assert dist.group.WORLD is not None
    apply_tensor_parallel(model, dist.group.WORLD, run.parallel)
    (block,) = model.blocks.values()
    if compiled:
        compile_blocks(model, in_order=True)
    n_tokens = len(model.residual_positions)
    x = torch.ones(1, n_tokens, run.model.d_model, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        out = block(x, None, model.residual_positions)
        with _Watch() as watch:
            out.sum().backward()
    assert not counters["graph_break"]
    return watch.order


# The matmuls of a row-parallel layer, then of the column-parallel one before it; MLP and attention.
WHOLE = 2 * "mm mrmw"
BY_TOKENS = 2 * "gw mm gmrwmw"


@pytest.mark.parametrize("compiled", everyday([False, True], [False]))
@pytest.mark.parametrize(("sequence", "order"), [("false", WHOLE), ("true", BY_TOKENS)])
def test_tensor_ranks_exchange_beside_matmuls_in_the_backward_pass(
    sequence: str, order: str, compiled: bool, run_ranks: Callable[..., list[str]]
) -> None:
    layout = ["parallel.tensor=2", f"parallel.sequence={sequence}"]
    run = load_run("tiny", [*layout, "model.n_layers=1", "model.dropout=0"]).run
    found = run_ranks(2, partial(backward_order, run, compiled=compiled))
    assert found == [order.replace(" ", "")] * 2
