"""When ranks exchange: collectives of tensor parallelism run beside matmuls, compiled too."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.circles import everyday
from tests.layouts import read_layout
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from trainyard.config.load import load_run
from trainyard.config.run import Run
from trainyard.layout.resolve import resolve
from trainyard.model.positions import Positions
from trainyard.parallel.mesh import build_mesh
from trainyard.parallel.model import ParallelModel

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


def backward_order(run: Run, n_ranks: int) -> str:
    """Runs the second backward pass of a block."""
    plan = resolve(run, n_ranks)
    mesh = build_mesh(plan.topology, dist.get_rank(), torch.device("cpu"))
    model = ParallelModel(run, plan, mesh, torch.bfloat16).stages[0]
    (block,) = model.blocks.values()
    tokens = model.position_table.residual
    counters.clear()  # of what this process compiled before
    x = torch.ones(1, len(tokens), run.model.d_model, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        out = block(x, Positions(tokens, tokens))
        with _Watch() as watch:
            out.sum().backward()
    assert not counters["graph_break"]
    return watch.order


# The matmuls of a row-parallel layer, then of the column-parallel one before it; MLP and attention.
WHOLE = 2 * "mm mrmw"
BY_TOKENS = 2 * "gw mm gmrwmw"


@pytest.mark.parametrize("compiled", everyday(["never", "always"], ["never"]))
@pytest.mark.parametrize(("name", "order"), [("tp2", WHOLE), ("tp2 sequence", BY_TOKENS)])
def test_tensor_ranks_exchange_beside_matmuls_in_the_backward_pass(
    name: str, order: str, compiled: str, run_ranks: Callable[..., list[str]]
) -> None:
    small = ["precision.kind=bf16", "model.n_layers=1", "model.dropout=0"]
    run = load_run("tiny", [*read_layout(name).overrides, *small, f"train.compile={compiled}"]).run
    found = run_ranks(2, partial(backward_order, run, 2))
    assert found == [order.replace(" ", "")] * 2
